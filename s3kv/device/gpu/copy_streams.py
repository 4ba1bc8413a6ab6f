"""The two directions of a GPU's copies, each with two streams and two paths
(`s3kv.device.copier`).

                pages stream                                  bus stream

    save        gather:  wait(mark) → pages → staging ──────▶ staging → slot        → finished
                batch:                                        wait(mark) → pages → slot → finished

    load        gather:  wait(mark) → staging → pages ◀────── slot → staging
                            → finished
                batch:   wait(mark) → slot → pages → finished

Each direction ends on one stream whatever the path, so its copies end in the order they were
started. With two streams and two staging buffers the gather of a chunk overlaps the DMA of the one
before. A load's DMA does not wait for the engine: the slot was filled before the load was ordered,
and only the pages may still be in use.

Streams wait for each other, and for a staging buffer to be free, by events; the host never waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle

import numpy as np
import torch
from numpy.typing import NDArray

from s3kv.device.gpu.gather import row_numbers, stacks
from s3kv.device.gpu.interface import Copies, Event, Gpu, Stream
from s3kv.device.layout import PageLayout
from s3kv.messages import LoadPart

_BUFFERS = 2
"""Staging buffers per direction: a kernel uses one while the bus uses the other."""


class EventTicket:
    """The ticket of a copy on a GPU.

    source_read: passes once the copy's source may be overwritten; often the same as `finished`.
    finished: passes at the copy's end. events: the pool to which both go back, because making and
        destroying one costs more than recording it; streams that wait for one still do.
    """

    __slots__ = ("_done", "_events", "_finished", "_gpu", "_source_read", "nbytes")

    def __init__(
        self, gpu: Gpu, events: list[Event], source_read: Event, finished: Event, nbytes: int
    ) -> None:
        self._gpu = gpu
        self._events = events
        self._source_read = source_read
        self._finished = finished
        self._done = False
        self.nbytes = nbytes

    def done(self) -> bool:
        if not self._done and self._finished.query():
            self._done = True
            self._events.append(self._finished)
            if self._source_read is not self._finished:
                self._events.append(self._source_read)
        return self._done

    def fence(self) -> None:
        if not self._done:
            self._gpu.current_stream().wait(self._source_read)


class StagingBuffer:
    """Device memory as long as the longest payload, and a place for the row numbers of its chunk.

    stacks: by group, over `memory`. free: passes when the buffer may be written to again. full:
    passes when it may be read.
    """

    def __init__(self, gpu: Gpu, layouts: Mapping[int, PageLayout]) -> None:
        self.memory = gpu.empty(max(layout.payload_bytes for layout in layouts.values()))
        self.stacks = {number: stacks(layout, self.memory) for number, layout in layouts.items()}
        most_rows = max(
            layout.blocks_per_chunk * sum(stack.rows_per_block for stack in self.stacks[number])
            for number, layout in layouts.items()
        )
        self.rows = gpu.empty(8 * most_rows).view(torch.int64)
        self.free, self.full = gpu.new_event(), gpu.new_event()


class Staging:
    """The staging buffers of one direction, used in turn."""

    def __init__(self, gpu: Gpu, layouts: Mapping[int, PageLayout]) -> None:
        self._buffers = [StagingBuffer(gpu, layouts) for _ in range(_BUFFERS)]
        self._turn = cycle(self._buffers)

    def next(self) -> StagingBuffer:
        return next(self._turn)


class Lane:
    """One direction of copies. Used on the copy thread."""

    urgent: bool

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._events: list[Event] = []
        """Events for later use."""
        self.staging: Staging | None = None
        """The buffers of `gather`. May be set to None when no gather is under way."""
        self._pages = gpu.new_stream(urgent=self.urgent)
        self._bus = gpu.new_stream(urgent=self.urgent)

    def allocate_staging(self, layouts: Mapping[int, PageLayout]) -> None:
        """Make `gather` possible. Raises `torch.OutOfMemoryError` if there is no room."""
        self.staging = Staging(self._gpu, layouts)
        # The current stream may have used the memory before.
        mark = self._gpu.new_event()
        self._gpu.current_stream().record(mark)
        self._pages.wait(mark)
        self._bus.wait(mark)

    def settle(self) -> None:
        self._pages.synchronize()
        self._bus.synchronize()

    def _next_buffer(self, part: LoadPart) -> tuple[StagingBuffer, NDArray[np.int64], torch.Tensor]:
        """The next buffer, the row numbers of the part's blocks, and their place on the device."""
        assert self.staging is not None, "gather was not chosen"
        buffer = self.staging.next()
        numbers = row_numbers(buffer.stacks[part.group], part.block_ids)
        return buffer, numbers, buffer.rows[: len(numbers)]

    def _ended(self, stream: Stream) -> Event:
        """An event of the pool behind everything launched on the stream so far."""
        event = self._events.pop() if self._events else self._gpu.new_event()
        stream.record(event)
        return event

    def _ticket(
        self, layout: PageLayout, part: LoadPart, source_read: Event, finished: Event
    ) -> EventTicket:
        nbytes = layout.block_bytes * len(part.block_ids)
        return EventTicket(self._gpu, self._events, source_read, finished, nbytes)


class SaveLane(Lane):
    urgent = False

    def batch(self, layout: PageLayout, part: LoadPart, payload: int, mark: Event) -> EventTicket:
        """Copy blocks to the payload at this address, after `mark`."""
        addresses, offsets, sizes = layout.runs(part.block_ids, part.first_block)
        self._bus.wait(mark)
        # The source may not be read ahead of the stream: the pages are written until `mark`.
        copies = Copies(payload + offsets, addresses, sizes)
        self._bus.copy_batch(copies, source_is_stable=False)
        finished = self._ended(self._bus)
        return self._ticket(layout, part, finished, finished)

    def gather(
        self, layout: PageLayout, part: LoadPart, payload: torch.Tensor, mark: Event
    ) -> EventTicket:
        """Copy as `batch` does. The blocks may be overwritten long before the bus moved them."""
        buffer, numbers, rows = self._next_buffer(part)
        self._pages.wait(buffer.free)
        self._pages.upload(rows, numbers)
        self._pages.wait(mark)
        self._pages.gather(buffer.stacks[part.group], rows)
        source_read = self._ended(self._pages)
        self._bus.wait(source_read)
        self._bus.copy(payload, buffer.memory[: layout.payload_bytes])
        self._bus.record(buffer.free)
        return self._ticket(layout, part, source_read, self._ended(self._bus))


class LoadLane(Lane):
    urgent = True

    def batch(self, layout: PageLayout, part: LoadPart, payload: int, mark: Event) -> EventTicket:
        """Copy the payload at this address, or part of it, to blocks, after `mark`."""
        addresses, offsets, sizes = layout.runs(part.block_ids, part.first_block)
        self._pages.wait(mark)
        # Nothing writes to a slot from before a load is ordered until its end is reported, so it
        # may be read ahead, which helps where host memory is coherent with the GPU's.
        copies = Copies(addresses, payload + offsets, sizes)
        self._pages.copy_batch(copies, source_is_stable=True)
        finished = self._ended(self._pages)
        return self._ticket(layout, part, finished, finished)

    def gather(
        self, layout: PageLayout, part: LoadPart, payload: torch.Tensor, mark: Event
    ) -> EventTicket:
        """Copy as `batch` does. The whole payload crosses the bus even for a part of it: that is
        one copy instead of one per layer, and parts are rare.
        """
        buffer, numbers, rows = self._next_buffer(part)
        self._bus.wait(buffer.free)
        # Ahead of the payload: behind it, the copy engine may already be at the next chunk's.
        self._bus.upload(rows, numbers)
        self._bus.copy(buffer.memory[: layout.payload_bytes], payload)
        self._bus.record(buffer.full)
        self._pages.wait(buffer.full)
        self._pages.wait(mark)
        self._pages.scatter(buffer.stacks[part.group], rows, part.first_block)
        self._pages.record(buffer.free)
        finished = self._ended(self._pages)
        return self._ticket(layout, part, finished, finished)
