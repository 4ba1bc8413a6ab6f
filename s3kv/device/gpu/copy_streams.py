"""The two directions of a GPU's copies, each with two streams.

                pages stream                            bus stream

    save        wait(mark) → pages → staging ─────────▶ staging → slot → finished
    load        wait(mark) → staging → pages ◀───────── slot → staging
                    → finished

A kernel gathers the pages of a chunk in a staging buffer, and the copy engine moves the buffer in
one piece; a load does the same in reverse. With two streams and two buffers, the gather of a chunk
overlaps the DMA of the previous chunk. A load's DMA does not wait for the engine: the slot was
filled before the load was ordered, and only the pages may still be in use.

Streams wait for each other, and for a staging buffer to be free, by events. The host waits only if
all places for row numbers are taken (`Staging`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle

import torch

from s3kv.device.gpu.gather import row_numbers, stacks
from s3kv.device.gpu.interface import Event, Gpu, Stream
from s3kv.device.layout import PageLayout
from s3kv.messages import CopyPart

BUFFERS = 2
"""Staging buffers per direction: a kernel uses one while the bus uses the other."""
MOST_PLACES = 256
_PLACES_BYTES = 4 * 2**20
"""Limits of the pinned memory for row numbers, per direction; several times a full window."""


@dataclass(slots=True)
class EventTicket:
    """The ticket of a copy on a GPU. The same event may stand for several points.

    begun_at, moved: the bus has reached the copy, and has moved it. source_read: the source may be
    overwritten. finished: the copy's end. events: the pool to which all return, because creating
    and destroying one costs more than recording it; streams that wait for one still do.
    """

    gpu: Gpu
    events: list[Event]
    begun_at: Event
    moved: Event
    source_read: Event
    finished: Event
    nbytes: int
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
    """The buffers of one direction, used in turn. Raises `RuntimeError` if there is no memory.

    rows: device memory for the row numbers of a copy. places: pinned memory from which a kernel
    fetches them, one for each copy under way, each with an event that passes when it is free.
    """

    def __init__(self, gpu: Gpu, layouts: Mapping[int, PageLayout]) -> None:
        buffers = [StagingBuffer(gpu, layouts) for _ in range(BUFFERS)]
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

    def __init__(self, gpu: Gpu, staging: Staging) -> None:
        self._gpu = gpu
        self._staging = staging
        self._events: list[Event] = []
        """Events for later use."""
        self._pages = gpu.new_stream(urgent=self.urgent)
        self._bus = gpu.new_stream(urgent=self.urgent)
        # The current stream may have used the memory of the staging before.
        mark = gpu.new_event()
        gpu.current_stream().record(mark)
        self._pages.wait(mark)
        if self.urgent:  # the bus of saves waits for their pages stream
            self._bus.wait(mark)

    def settle(self) -> None:
        self._pages.synchronize()
        self._bus.synchronize()

    def _next_buffer(self, part: CopyPart) -> tuple[StagingBuffer, torch.Tensor]:
        """The next buffer, and the row numbers of the part's blocks for the work launched next on
        the pages stream. The host waits for that stream if all places are taken."""
        buffer, (host, device, free) = next(self._staging.buffers), next(self._staging.places)
        numbers = row_numbers(buffer.stacks[part.group], part.block_ids)
        if not free.query():
            self._pages.synchronize()
        host[: len(numbers)] = numbers
        rows = self._staging.rows[: len(numbers)]
        self._pages.fetch(rows, device[: len(numbers)])
        self._pages.record(free)
        return buffer, rows

    def _reached(self, stream: Stream) -> Event:
        """An event of the pool behind everything launched on the stream so far."""
        event = self._events.pop() if self._events else self._gpu.new_event(timed=True)
        stream.record(event)
        return event


class SaveLane(Lane):
    urgent = False

    def copy(self, part: CopyPart, payload: torch.Tensor, mark: Event) -> EventTicket:
        """Copy blocks to the payload, after `mark`. The blocks may be overwritten long before the
        bus has moved them."""
        buffer, rows = self._next_buffer(part)
        self._pages.wait(buffer.free)
        self._pages.wait(mark)
        self._pages.gather(buffer.stacks[part.group], rows)
        source_read = self._reached(self._pages)
        self._bus.wait(source_read)
        begun = self._reached(self._bus)
        self._bus.copy(payload, buffer.memory[: len(payload)])
        self._bus.record(buffer.free)
        end = self._reached(self._bus)
        return EventTicket(self._gpu, self._events, begun, end, source_read, end, len(payload))


class LoadLane(Lane):
    urgent = True

    def copy(self, part: CopyPart, payload: torch.Tensor, mark: Event) -> EventTicket:
        """Copy from the payload to blocks, after `mark`. The whole payload crosses the bus even for
        a part of it: that is one copy instead of one per layer, and parts are rare."""
        buffer, rows = self._next_buffer(part)
        self._bus.wait(buffer.free)
        begun = self._reached(self._bus)
        self._bus.copy(buffer.memory[: len(payload)], payload)
        arrived = self._reached(self._bus)
        self._pages.wait(arrived)
        self._pages.wait(mark)
        self._pages.scatter(buffer.stacks[part.group], rows, part.first_block)
        self._pages.record(buffer.free)
        end = self._reached(self._pages)
        return EventTicket(self._gpu, self._events, begun, arrived, arrived, end, len(payload))
