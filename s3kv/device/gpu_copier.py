"""Copies where the KV cache is in GPU memory: which lane, which path, and what each costs here.

Everything is launched from the copy thread. The engine's thread records marks, lets its stream
wait, and asks events.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from s3kv.device.events import EventPool, EventTicket
from s3kv.device.gpu import Event, Gpu
from s3kv.device.lanes import Group, LoadLane, SaveLane, Staging
from s3kv.device.layout import PageLayout
from s3kv.device.paths import (
    Choice,
    Direction,
    Path,
    faster,
    seconds_per_chunk,
    spread_blocks,
)
from s3kv.device.places import ChunkPlaces
from s3kv.messages import LoadPart

logger = logging.getLogger(__name__)


class GpuCopier:
    """Pins the slab. Unpinned memory is right too: such a copy goes through the driver's bounce
    buffer, at a third of the speed or less, and holds the copy thread, not the engine's, until it
    is done.

    path: the one for all copies; None measures both, for each group and direction, before anything
    else is copied. Measuring waits on the host for some tens of ms, overwrites slots, and writes to
    pages what they hold; so nothing may be in the slab yet, and no forward may run.

    Raises `ValueError` for a path that this driver does not have.
    """

    def __init__(
        self,
        places: ChunkPlaces,
        gpu: Gpu,
        path: Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if path is Path.BATCH and gpu.no_batch:
            raise ValueError(f"copies in batches are not possible here: {gpu.no_batch}")
        self._places = places
        self._gpu = gpu
        self._events = EventPool(gpu)
        self._groups = {number: Group(layout) for number, layout in places.layouts.items()}
        self.pinned = gpu.pin(places.memory, places.slot_bytes)
        self._out = SaveLane(gpu, self._events, Staging(gpu, self._groups))
        self._in = LoadLane(gpu, self._events, Staging(gpu, self._groups))
        if path is None:
            self.choices = self._choose(clock)
        else:
            self.choices = tuple(Choice(*at, path, None, None) for at in self._group_directions())
        self._paths = {(choice.group, choice.direction): choice.path for choice in self.choices}
        self._drop_staging()

    def mark(self) -> Event:
        event = self._events.take()
        self._gpu.current_stream().record(event)
        return event

    def enter_thread(self) -> None:
        self._gpu.enter_thread()

    def copy_out(self, part: LoadPart, mark: Event) -> EventTicket:
        return self._copy_out(part, mark, self._paths.get((part.group, Direction.OUT)))

    def copy_in(self, part: LoadPart, mark: Event, *, is_last: bool) -> EventTicket | None:
        self._copy_in(part, mark, self._paths.get((part.group, Direction.IN)))
        return self._in.end(mark) if is_last else None

    def settle(self) -> None:
        try:
            self._out.settle()
        finally:
            self._in.settle()

    def close(self) -> None:
        if not self._groups:
            return
        try:
            self.settle()
        finally:
            self._gpu.unpin()
            # Staging and layouts would keep the engine's cache alive.
            self._out.staging = self._in.staging = None
            self._groups.clear()
            self._places.close()

    def _copy_out(self, part: LoadPart, mark: Event, path: Path | None) -> EventTicket:
        layout, begin = self._places.locate_whole(part)
        copy = self._out.batch if path is Path.BATCH else self._out.gather
        return copy(self._groups[part.group], part, self._payload(layout, begin), mark)

    def _copy_in(self, part: LoadPart, mark: Event, path: Path | None) -> None:
        layout, begin = self._places.locate(part)
        copy = self._in.batch if path is Path.BATCH else self._in.gather
        copy(self._groups[part.group], part, self._payload(layout, begin), mark)

    def _payload(self, layout: PageLayout, begin: int) -> torch.Tensor:
        return self._places.memory[begin : begin + layout.payload_bytes]

    def _drop_staging(self) -> None:
        """Memory of the GPU that no path uses."""
        for lane, direction in ((self._out, Direction.OUT), (self._in, Direction.IN)):
            if all(self._paths[group, direction] is Path.BATCH for group in self._groups):
                lane.staging = None

    # --- which path ---------------------------------------------------------------------------

    def _group_directions(self) -> list[tuple[int, Direction]]:
        return [(group, direction) for group in self._groups for direction in Direction]

    def _choose(self, clock: Callable[[], float]) -> tuple[Choice, ...]:
        if self._gpu.no_batch:
            logger.info("KV blocks are gathered before they are copied: %s", self._gpu.no_batch)
            return tuple(Choice(*at, Path.GATHER, None, None) for at in self._group_directions())
        choices = tuple(self._measure(*at, clock) for at in self._group_directions())
        for choice in choices:
            logger.info(
                "KV blocks of group %d go %s by %s: a chunk takes %.2f ms in a batch, %.2f ms "
                "gathered",
                choice.group,
                choice.direction.value,
                choice.path.value,
                1e3 * (choice.batch_s or 0.0),
                1e3 * (choice.gather_s or 0.0),
            )
        return choices

    def _measure(self, group: int, direction: Direction, clock: Callable[[], float]) -> Choice:
        """`Direction.IN` brings back what `Direction.OUT` has just taken to the same slots."""
        layout = self._groups[group].layout

        def part(chunk: int) -> LoadPart:
            slot = chunk % self._places.num_slots
            ids = spread_blocks(slot, layout.blocks_per_chunk, layout.num_blocks)
            return LoadPart(group, slot, 0, ids)

        def seconds(path: Path) -> float:
            def start(chunk: int) -> None:
                if direction is Direction.OUT:
                    self._copy_out(part(chunk), self.mark(), path)
                else:
                    mark = self.mark()
                    self._copy_in(part(chunk), mark, path)
                    self._in.end(mark)

            return seconds_per_chunk(start, self.settle, clock)

        batch_s, gather_s = seconds(Path.BATCH), seconds(Path.GATHER)
        return Choice(group, direction, faster(batch_s, gather_s), batch_s, gather_s)
