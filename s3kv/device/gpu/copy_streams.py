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
from typing import NamedTuple

import torch

from s3kv.device.copier import CopyDirection
from s3kv.device.gpu.gather import row_numbers, stacks
from s3kv.device.gpu.interface import Copies, Event, Gpu, HostNumbers, Stream
from s3kv.device.layout import PageLayout
from s3kv.messages import LoadPart

_BUFFERS = 2
"""Staging buffers per direction: a kernel uses one while the bus uses the other."""
MOST_PLACES = 256
_PLACES_BYTES = 4 * 2**20
"""Limits of the pinned memory for row numbers, per direction; several times a full window."""


class Points(NamedTuple):
    """The events of a copy; the same one may stand for several points.

    begun, moved: pass when the bus comes to the copy, and when it has moved it. source_read: passes
    once the copy's source may be overwritten. finished: passes at the copy's end.
    """

    begun: Event
    moved: Event
    source_read: Event
    finished: Event


@dataclass(slots=True)
class EventTicket:
    """The ticket of a copy on a GPU.

    events: the pool to which the points go back, because making and destroying an event costs more
        than recording it; streams that wait for one still do.
    """

    gpu: Gpu
    events: list[Event]
    points: Points
    nbytes: int
    piece_bytes: int
    seconds: float = 0.0
    _done: bool = False

    def begun(self) -> bool:
        return self._done or self.points.begun.query()

    def done(self) -> bool:
        if not self._done and self.points.finished.query():
            self.seconds = self.points.begun.elapsed_time(self.points.moved) / 1e3
            self._done = True
            self.events.extend(set(self.points))
        return self._done

    def fence(self) -> None:
        if not self._done:
            self.gpu.current_stream().wait(self.points.source_read)


class StagingBuffer:
    """Device memory as long as the longest payload. stacks: by group, over `memory`. free: passes
    when the buffer may be written to again.
    """

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
        self.places = cycle([(HostNumbers(*place), gpu.new_event()) for place in places])


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

    def _next_buffer(self, part: LoadPart) -> tuple[StagingBuffer, torch.Tensor]:
        """The next buffer, and the row numbers of the part's blocks for the work launched next on
        the pages stream. The host waits for that stream if all places are taken.
        """
        assert self.staging is not None, "gather was not chosen"
        buffer, (place, free) = next(self.staging.buffers), next(self.staging.places)
        numbers = row_numbers(buffer.stacks[part.group], part.block_ids)
        if not free.query():
            self._pages.synchronize()
        place.host[: len(numbers)] = numbers
        rows = self.staging.rows[: len(numbers)]
        self._pages.fetch(rows, place.device[: len(numbers)])
        self._pages.record(free)
        return buffer, rows

    def _reached(self, stream: Stream) -> Event:
        """An event of the pool behind everything launched on the stream so far."""
        event = self._events.pop() if self._events else self._gpu.new_event(timed=True)
        stream.record(event)
        return event

    def _ticket(self, points: Points, nbytes: int, pieces: int = 1) -> EventTicket:
        return EventTicket(self._gpu, self._events, points, nbytes, nbytes // pieces)

    def _batch(
        self, stream: Stream, mark: Event, copies: Copies, nbytes: int, *, stable: bool
    ) -> EventTicket:
        stream.wait(mark)
        begun = self._reached(stream)
        stream.copy_batch(copies, source_is_stable=stable)
        end = self._reached(stream)
        return self._ticket(Points(begun, end, end, end), nbytes, len(copies.sizes))


class SaveLane(Lane):
    urgent, direction = False, CopyDirection.OUT

    def batch(self, layout: PageLayout, part: LoadPart, payload: int, mark: Event) -> EventTicket:
        """Copy blocks to the payload at this address, after `mark`."""
        addresses, offsets, sizes = layout.runs(part.block_ids, part.first_block)
        # The source may not be read ahead of the stream: the pages are written until `mark`.
        copies = Copies(payload + offsets, addresses, sizes)
        return self._batch(self._bus, mark, copies, layout.payload_bytes, stable=False)

    def gather(
        self, layout: PageLayout, part: LoadPart, payload: torch.Tensor, mark: Event
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
        return self._ticket(Points(begun, end, source_read, end), layout.payload_bytes)


class LoadLane(Lane):
    urgent, direction = True, CopyDirection.IN

    def batch(self, layout: PageLayout, part: LoadPart, payload: int, mark: Event) -> EventTicket:
        """Copy the payload at this address, or part of it, to blocks, after `mark`."""
        addresses, offsets, sizes = layout.runs(part.block_ids, part.first_block)
        # Nothing writes to a slot from before a load is ordered until its end is reported, so it
        # may be read ahead, which helps where host memory is coherent with the GPU's.
        copies = Copies(addresses, payload + offsets, sizes)
        nbytes = layout.block_bytes * len(part.block_ids)
        return self._batch(self._pages, mark, copies, nbytes, stable=True)

    def gather(
        self, layout: PageLayout, part: LoadPart, payload: torch.Tensor, mark: Event
    ) -> EventTicket:
        """Copy as `batch` does. The whole payload crosses the bus even for a part of it: that is
        one copy instead of one per layer, and parts are rare.
        """
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
        return self._ticket(Points(begun, arrived, arrived, finished), layout.payload_bytes)
