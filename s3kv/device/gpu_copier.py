"""Copies where the KV cache is in GPU memory: which lane, which path, and what each costs here.

Everything is launched from the copy thread. The engine's thread records marks, lets its stream
wait, and asks events.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

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
    """Takes over `places`, also when it cannot be made, and pins the slab. Unpinned memory is right
    too: such a copy goes through the driver's bounce buffer, at a third of the speed or less, and
    holds the copy thread, not the engine's, until it is done.

    path: the one for all copies; None measures both, for each group and direction, before anything
    else is copied. Measuring waits on the host for some tens of ms, overwrites slots, and writes to
    pages what they hold; so nothing may be in the slab yet, and nobody may use those pages.
    idle: the blocks to measure with, of every group; None stands for all. Without any, all is
    copied in batches.

    Raises `ValueError` for a path that this driver does not have, and `RuntimeError` when there is
    no memory on the GPU for gathering and no other path.
    """

    def __init__(
        self,
        places: ChunkPlaces,
        gpu: Gpu,
        path: Path | None = None,
        idle: Sequence[int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._places = places
        self._gpu = gpu
        self._events = EventPool(gpu)
        self._groups = {number: Group(layout) for number, layout in places.layouts.items()}
        with ExitStack() as undo:
            undo.callback(places.close)
            if path is Path.BATCH and gpu.no_batch:
                raise ValueError(f"copies in batches are not possible here: {gpu.no_batch}")
            self.pinned = gpu.pin(places.memory, places.slot_bytes)
            undo.callback(gpu.unpin)
            forced = self._only_path(path)
            staging = [self._staging(forced) for _ in Direction]
            self._out = SaveLane(gpu, self._events, staging[0])
            self._in = LoadLane(gpu, self._events, staging[1])
            undo.callback(self.settle)
            if None in staging or (idle is not None and not idle):
                forced = forced or Path.BATCH
            self.choices = self._choose(forced, idle, clock)
            undo.pop_all()
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

    def _only_path(self, path: Path | None) -> Path | None:
        """The one asked for, or the only one there is; None when there is a choice."""
        if path is None and self._gpu.no_batch:
            logger.info("KV blocks are gathered before they are copied: %s", self._gpu.no_batch)
            return Path.GATHER
        return path

    def _staging(self, path: Path | None) -> Staging | None:
        """None when it is not needed, or when it could be done without and there is no room."""
        if path is Path.BATCH:
            return None
        try:
            return Staging(self._gpu, self._groups)
        except torch.OutOfMemoryError as error:
            if path is Path.GATHER:
                raise
            logger.info("KV blocks are copied in batches, there is no room to gather: %s", error)
            return None

    def _choose(
        self, forced: Path | None, idle: Sequence[int] | None, clock: Callable[[], float]
    ) -> tuple[Choice, ...]:
        ends = [(group, direction) for group in self._groups for direction in Direction]
        if forced is None:
            return tuple(self._measure(*end, idle, clock) for end in ends)
        return tuple(Choice(*end, forced, None, None) for end in ends)

    def _measure(
        self,
        group: int,
        direction: Direction,
        idle: Sequence[int] | None,
        clock: Callable[[], float],
    ) -> Choice:
        """`Direction.IN` brings back what `Direction.OUT` has just taken to the same slots."""
        layout = self._groups[group].layout
        blocks = range(layout.num_blocks) if idle is None else idle

        def part(chunk: int) -> LoadPart:
            slot = chunk % self._places.num_slots
            return LoadPart(group, slot, 0, spread_blocks(slot, layout.blocks_per_chunk, blocks))

        def seconds(path: Path) -> float:
            def start(chunk: int) -> None:
                if direction is Direction.OUT:
                    self._copy_out(part(chunk), self.mark(), path)
                else:
                    mark = self.mark()
                    self._copy_in(part(chunk), mark, path)
                    self._in.end(mark)

            return seconds_per_chunk(start, self.settle, clock)

        # Gathering first: then all slots are filled, also when a batch is refused halfway.
        gather_s = seconds(Path.GATHER)
        try:
            batch_s = seconds(Path.BATCH)
        except RuntimeError as error:
            self.settle()
            logger.warning("KV blocks are gathered, the driver copies no batch of them: %s", error)
            return Choice(group, direction, Path.GATHER, None, gather_s)
        path = faster(batch_s, gather_s)
        logger.info(
            "KV blocks of group %d go %s by %s: a chunk takes %.2f ms in a batch, %.2f ms gathered",
            group,
            direction.value,
            path.value,
            1e3 * batch_s,
            1e3 * gather_s,
        )
        return Choice(group, direction, path, batch_s, gather_s)
