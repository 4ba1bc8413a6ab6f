"""The two directions of a GPU's copies, each with two streams and two ways to go (`paths.py`).

                pages stream                                  bus stream

    save        gather:  wait(mark) → pages → staging ──────▶ staging → slot        → finished
                batch:                                        wait(mark) → pages → slot → finished

    load        gather:  wait(mark) → staging → pages ◀────── slot → staging
                            → finished
                batch:   wait(mark) → slot → pages → finished

Each direction ends on one stream whatever the path, so its copies end in the order they were
started. With two streams and two staging buffers the gather of a chunk overlaps the DMA of the one
before. A load's DMA does not wait for the engine: what is in the slot has been there since before
the load was ordered, and only the pages may still be in use.

Between the streams, and before a staging buffer is used again, only events wait; never the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np
import torch
from numpy.typing import NDArray

from s3kv.device.events import EventPool, EventTicket
from s3kv.device.gpu import Copies, Event, Gpu
from s3kv.device.layout import PageLayout
from s3kv.device.runs import RunTable
from s3kv.device.stacks import Stack, row_numbers, stacks
from s3kv.messages import LoadPart

_BUFFERS = 2
"""One is gathered into, or scattered from, while the bus works on the other."""


class Group:
    """A group's layout and what is computed from it once."""

    def __init__(self, layout: PageLayout) -> None:
        self.layout = layout
        self.runs = RunTable(layout)


@dataclass(slots=True)
class _Buffer:
    """memory: as long as the longest payload. rows: the row numbers of the chunk, which go with
    it. stacks: by group, over `memory`.

    free: passes when both may be written to again. full: when both may be read.
    """

    memory: torch.Tensor
    rows: torch.Tensor
    stacks: dict[int, tuple[Stack, ...]]
    free: Event
    full: Event


@dataclass(slots=True)
class Staging:
    """The staging buffers of one direction, used in turn."""

    gpu: Gpu
    groups: Mapping[int, Group]
    _buffers: list[_Buffer] = field(init=False)
    _turn: cycle[_Buffer] = field(init=False)

    def __post_init__(self) -> None:
        self._buffers = [self._buffer() for _ in range(_BUFFERS)]
        self._turn = cycle(self._buffers)

    def next(self) -> _Buffer:
        return next(self._turn)

    def _buffer(self) -> _Buffer:
        layouts = {number: group.layout for number, group in self.groups.items()}
        memory = self.gpu.empty(max(layout.payload_bytes for layout in layouts.values()))
        views = {number: stacks(layout, memory) for number, layout in layouts.items()}
        rows = self.gpu.empty(
            8
            * max(
                layout.blocks_per_chunk * sum(stack.rows_per_block for stack in views[number])
                for number, layout in layouts.items()
            )
        )
        free, full = self.gpu.new_event(), self.gpu.new_event()
        return _Buffer(memory, rows.view(torch.int64), views, free, full)


class Lane:
    """One direction. For the copy thread."""

    urgent: bool

    def __init__(self, gpu: Gpu, events: EventPool, staging: Staging | None) -> None:
        self._gpu = gpu
        self._events = events
        self.staging = staging
        """For `gather`. May be taken away when nothing that used it is under way."""
        self._pages = gpu.new_stream(urgent=self.urgent)
        self._bus = gpu.new_stream(urgent=self.urgent)
        # Staging is memory that the current stream may have used before.
        mark = events.take()
        gpu.current_stream().record(mark)
        self._pages.wait(mark)
        self._bus.wait(mark)
        events.give(mark)

    def settle(self) -> None:
        self._pages.synchronize()
        self._bus.synchronize()

    def _next_buffer(self, part: LoadPart) -> tuple[_Buffer, NDArray[np.int64], torch.Tensor]:
        """With the rows of the part's blocks, and the place for them on the device."""
        assert self.staging is not None, "a path that was not chosen"
        buffer = self.staging.next()
        numbers = row_numbers(buffer.stacks[part.group], part.block_ids)
        return buffer, numbers, buffer.rows[: len(numbers)]


class SaveLane(Lane):
    urgent = False

    def batch(
        self, group: Group, part: LoadPart, payload: torch.Tensor, mark: Event
    ) -> EventTicket:
        """Copy blocks to `payload`, host bytes, after `mark`, which is given back."""
        addresses, offsets, sizes = group.runs.runs(part.block_ids, part.first_block)
        self._bus.wait(mark)
        self._events.give(mark)
        # Not ahead of the stream: the pages are written until `mark`.
        copies = Copies(payload.data_ptr() + offsets, addresses, sizes)
        self._bus.copy_batch(copies, source_is_stable=False)
        finished = self._events.take()
        self._bus.record(finished)
        return EventTicket(self._gpu, self._events, finished, finished)

    def gather(
        self, group: Group, part: LoadPart, payload: torch.Tensor, mark: Event
    ) -> EventTicket:
        """As `batch`; the blocks may be overwritten long before the bus is done with them."""
        buffer, numbers, rows = self._next_buffer(part)
        self._pages.wait(buffer.free)
        self._pages.upload(rows, numbers)
        self._pages.wait(mark)
        self._events.give(mark)
        self._pages.gather(buffer.stacks[part.group], rows)
        source_read = self._events.take()
        self._pages.record(source_read)
        self._bus.wait(source_read)
        self._bus.copy(payload, buffer.memory[: group.layout.payload_bytes])
        self._bus.record(buffer.free)
        finished = self._events.take()
        self._bus.record(finished)
        return EventTicket(self._gpu, self._events, source_read, finished)


class LoadLane(Lane):
    urgent = True

    def batch(self, group: Group, part: LoadPart, payload: torch.Tensor, mark: Event) -> None:
        """Copy `payload`, or the part of it that is asked for, to blocks, after `mark`."""
        addresses, offsets, sizes = group.runs.runs(part.block_ids, part.first_block)
        self._pages.wait(mark)
        # A slot is left alone from before a load is ordered until its end is told, so it may be
        # read ahead, which helps where the host's memory is coherent with the GPU's.
        copies = Copies(addresses, payload.data_ptr() + offsets, sizes)
        self._pages.copy_batch(copies, source_is_stable=True)

    def gather(self, group: Group, part: LoadPart, payload: torch.Tensor, mark: Event) -> None:
        """As `batch`. The whole payload crosses the bus even for a part of it: one copy instead of
        one per layer, and parts are rare.
        """
        buffer, numbers, rows = self._next_buffer(part)
        self._bus.wait(buffer.free)
        # Ahead of the payload: behind it, the copy engine may be at the next chunk's already.
        self._bus.upload(rows, numbers)
        self._bus.copy(buffer.memory[: group.layout.payload_bytes], payload)
        self._bus.record(buffer.full)
        self._pages.wait(buffer.full)
        self._pages.wait(mark)
        self._pages.scatter(buffer.stacks[part.group], rows, part.first_block, len(part.block_ids))
        self._pages.record(buffer.free)

    def end(self, mark: Event) -> EventTicket:
        """For all parts started since the last call, which had this mark; it is given back."""
        self._events.give(mark)
        finished = self._events.take()
        self._pages.record(finished)
        return EventTicket(self._gpu, self._events, finished, finished)
