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

Streams wait for each other, and for a staging buffer to be free, by events. The host waits only if
all places for row numbers are taken (`Staging`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle

import torch

from s3kv.device.copier import CopyDirection
from s3kv.device.gpu.gather import row_numbers, stacks
from s3kv.device.gpu.interface import Copies, Event, Gpu, Stream
from s3kv.device.layout import PageLayout
from s3kv.messages import CopyPart

_BUFFERS = 2
"""Staging buffers per direction: a kernel uses one while the bus uses the other."""
MOST_PLACES = 256
_PLACES_BYTES = 4 * 2**20
"""Limits of the pinned memory for row numbers, per direction; several times a full window."""


@dataclass(slots=True)
class EventTicket:
    """The ticket of a copy on a GPU. The same event may stand for several points.

    begun_at, moved: the bus has come to the copy, and has moved it. source_read: the source may be
    overwritten. finished: the copy's end. events: the pool to which all go back, because making and
    destroying one costs more than recording it; streams that wait for one still do.
    """

    gpu: Gpu
    events: list[Event]
    begun_at: Event
    moved: Event
    source_read: Event
    finished: Event
    nbytes: int
    piece_bytes: int
    seconds: float = 0.0
    _done: bool = False

    def begun(self) -> bool:
        return self._done or self.begun_at.query()

    def done(self) -> bool:
        if not self._done and self.finished.query():
            self.seconds = self.begun_at.elapsed_time(self.moved) / 1e3
            self._done = True
            self.events.extend({self.begun_at, self.moved, self.source_read, self.finished})
        return self._done

    def fence(self) -> None:
        if not self._done:
            self.gpu.current_stream().wait(self.source_read)


class StagingBuffer:
    """Device memory as long as the longest payload. stacks: by group, over `memory`. free: passes
    when the buffer may be written to again."""

    def __init__(self, gpu: Gpu, layouts: Mapping[int, PageLayout]) -> None:
        self.memory = gpu.empty(max(layout.payload_bytes for layout in layouts.values()))
        self.stacks = {number: stacks(layout, self.memory) for number, layout in layouts.items()}
        self.free = gpu.new_event()


class Staging:
    """The buffers of one direction, used in turn.

    rows: device memory for the row numbers of a copy. places: pinned memory from which a kernel
    fetches them, one for each copy under way, and the event that passes when it is free.
    """

    def __init__(self, gpu: Gpu, layouts: Mapping[int, PageLayout]) -> None:
        buffers = [StagingBuffer(gpu, layouts) for _ in range(_BUFFERS)]
        self.buffers = cycle(buffers)
        most_rows = max(
            layouts[number].blocks_per_chunk * sum(stack.rows_per_block for stack in parts)
            for number, parts in buffers[0].stacks.items()
        )
        self.rows = gpu.empty(8 * most_rows).view(torch.int64)
        count = max(2, min(MOST_PLACES, _PLACES_BYTES // (8 * most_rows)))
        host, device = gpu.host_numbers(count * most_rows)
        places = zip(host.reshape(count, -1), device.view(count, -1), strict=True)
        self.places = cycle([(*place, gpu.new_event()) for place in places])


class Lane:
    """One direction of copies. Used on the copy thread."""

    urgent: bool
    direction: CopyDirection

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._events: list[Event] = []
        """Events for later use."""
        self.staging: Staging | None = None
        """The buffers of `gather`. May be set to None when no gather is under way."""
        self._pages = gpu.new_stream(urgent=self.urgent)
        self._bus = gpu.new_stream(urgent=self.urgent)

    def allocate_staging(self, layouts: Mapping[int, PageLayout]) -> None:
        """Make `gather` possible. Raises `RuntimeError` if there is no room."""
        self.staging = Staging(self._gpu, layouts)
        # The current stream may have used the memory before.
        mark = self._gpu.new_event()
        self._gpu.current_stream().record(mark)
        self._pages.wait(mark)
        self._bus.wait(mark)

    def settle(self) -> None:
        self._pages.synchronize()
        self._bus.synchronize()

    def _next_buffer(self, part: CopyPart) -> tuple[StagingBuffer, torch.Tensor]:
        """The next buffer, and the row numbers of the part's blocks for the work launched next on
        the pages stream. The host waits for that stream if all places are taken."""
        assert self.staging is not None, "gather was not chosen"
        buffer, (host, device, free) = next(self.staging.buffers), next(self.staging.places)
        numbers = row_numbers(buffer.stacks[part.group], part.block_ids)
        if not free.query():
            self._pages.synchronize()
        host[: len(numbers)] = numbers
        rows = self.staging.rows[: len(numbers)]
        self._pages.fetch(rows, device[: len(numbers)])
        self._pages.record(free)
        return buffer, rows

    def _reached(self, stream: Stream) -> Event:
        """An event of the pool behind everything launched on the stream so far."""
        event = self._events.pop() if self._events else self._gpu.new_event(timed=True)
        stream.record(event)
        return event

    def batch(self, layout: PageLayout, part: CopyPart, payload: int, mark: Event) -> EventTicket:
        """Copy between blocks and the payload at this address, after `mark`."""
        addresses, offsets, sizes = layout.runs(part.block_ids, part.first_block)
        # Nothing writes to a slot from before a load is ordered until its end is reported, so it
        # may be read ahead of the stream, which helps where host memory is coherent with the GPU's.
        # Pages may not: they are written until `mark`.
        if self.urgent:
            stream, copies = self._pages, Copies(addresses, payload + offsets, sizes)
        else:
            stream, copies = self._bus, Copies(payload + offsets, addresses, sizes)
        stream.wait(mark)
        begun = self._reached(stream)
        stream.copy_batch(copies, source_is_stable=self.urgent)
        end = self._reached(stream)
        nbytes = layout.block_bytes * len(part.block_ids)
        pool, piece_bytes = self._events, nbytes // len(sizes)
        return EventTicket(self._gpu, pool, begun, end, end, end, nbytes, piece_bytes)


class SaveLane(Lane):
    urgent, direction = False, CopyDirection.OUT

    def gather(
        self, layout: PageLayout, part: CopyPart, payload: torch.Tensor, mark: Event
    ) -> EventTicket:
        """Copy as `batch` does. The blocks may be overwritten long before the bus moved them."""
        buffer, rows = self._next_buffer(part)
        self._pages.wait(buffer.free)
        self._pages.wait(mark)
        self._pages.gather(buffer.stacks[part.group], rows)
        source_read = self._reached(self._pages)
        self._bus.wait(source_read)
        begun = self._reached(self._bus)
        self._bus.copy(payload, buffer.memory[: layout.payload_bytes])
        self._bus.record(buffer.free)
        end = self._reached(self._bus)
        size = layout.payload_bytes
        return EventTicket(self._gpu, self._events, begun, end, source_read, end, size, size)


class LoadLane(Lane):
    urgent, direction = True, CopyDirection.IN

    def gather(
        self, layout: PageLayout, part: CopyPart, payload: torch.Tensor, mark: Event
    ) -> EventTicket:
        """Copy as `batch` does. The whole payload crosses the bus even for a part of it: that is
        one copy instead of one per layer, and parts are rare."""
        buffer, rows = self._next_buffer(part)
        self._bus.wait(buffer.free)
        begun = self._reached(self._bus)
        self._bus.copy(buffer.memory[: layout.payload_bytes], payload)
        arrived = self._reached(self._bus)
        self._pages.wait(arrived)
        self._pages.wait(mark)
        self._pages.scatter(buffer.stacks[part.group], rows, part.first_block)
        self._pages.record(buffer.free)
        finished = self._reached(self._pages)
        size, read = layout.payload_bytes, arrived
        return EventTicket(self._gpu, self._events, begun, arrived, read, finished, size, size)
