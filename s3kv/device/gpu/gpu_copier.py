"""Copies for a KV cache in GPU memory: chooses the path of each group and direction by measuring.

The copy thread launches everything. The engine's thread records marks, makes its stream wait, and
queries events.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from s3kv.device.copier import CopyDirection, Path, PathChoice
from s3kv.device.gpu.copy_streams import EventPool, EventTicket, LoadLane, SaveLane, Staging
from s3kv.device.gpu.interface import Event, Gpu
from s3kv.device.layout import PageLayout
from s3kv.device.slot_payloads import ChunkPlaces
from s3kv.messages import LoadPart

logger = logging.getLogger(__name__)

_WORTH_ITS_PRICE = 1.1
"""Gather must be this much faster to be chosen, because it costs the engine a kernel per chunk."""

_ROUNDS = 3
_CHUNKS = 4
"""Chunks in a round, back to back: enough to keep the bus busy while the next one is launched.
With chunks of 32 MiB all rounds of a direction take 50 ms on a bus of 50 GB/s."""


class GpuCopier:
    """The `Copier` for GPUs. Pins the slab, and takes over `places` even if the constructor raises.

    Unpinned memory works too: such a copy goes through the driver's bounce buffer, at a third of
    the speed or less, and blocks the copy thread, not the engine's, until it has ended.

    path: the path of all copies; None measures both, for each group and direction, before the first
    copy. Measuring blocks the host for some tens of ms, overwrites slots, and rewrites pages with
    their content; so the slab must be empty, and those pages unused. idle: blocks of every group to
    measure with; None stands for all. If it is empty, all copies are batches.

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
        self._layouts = dict(places.layouts)
        with ExitStack() as undo:
            undo.callback(places.close)
            if path is Path.BATCH and gpu.no_batch:
                raise ValueError(f"copies in batches are not possible here: {gpu.no_batch}")
            self.pinned = gpu.pin(places.memory, places.slot_bytes)
            undo.callback(gpu.unpin)
            forced = self._only_path(path)
            staging = [self._staging(forced) for _ in CopyDirection]
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
        # Not of the pool: it has passed its last use when the last copy that has it is launched.
        event = self._gpu.new_event()
        self._gpu.current_stream().record(event)
        return event

    def enter_thread(self) -> None:
        self._gpu.enter_thread()

    def copy_out(self, part: LoadPart, mark: Event, path: Path | None = None) -> EventTicket:
        """Copy as `Copier` says. path: another than the one chosen."""
        layout, begin = self._places.locate_whole(part)
        path = path or self._paths[part.group, CopyDirection.OUT]
        copy = self._out.batch if path is Path.BATCH else self._out.gather
        return copy(layout, part, self._payload(layout, begin), mark)

    def copy_in(self, part: LoadPart, mark: Event, path: Path | None = None) -> EventTicket:
        """Copy as `Copier` says. path: another than the one chosen."""
        layout, begin = self._places.locate(part)
        path = path or self._paths[part.group, CopyDirection.IN]
        copy = self._in.batch if path is Path.BATCH else self._in.gather
        return copy(layout, part, self._payload(layout, begin), mark)

    def settle(self) -> None:
        try:
            self._out.settle()
        finally:
            self._in.settle()

    def close(self) -> None:
        if not self._layouts:
            return
        try:
            self.settle()
        finally:
            self._gpu.unpin()
            # Staging and layouts would keep the engine's cache alive.
            self._out.staging = self._in.staging = None
            self._layouts.clear()
            self._places.close()

    def _payload(self, layout: PageLayout, begin: int) -> torch.Tensor:
        return self._places.memory[begin : begin + layout.payload_bytes]

    def _drop_staging(self) -> None:
        """Free the GPU memory that no chosen path uses."""
        for lane, direction in ((self._out, CopyDirection.OUT), (self._in, CopyDirection.IN)):
            if all(self._paths[group, direction] is Path.BATCH for group in self._layouts):
                lane.staging = None

    # --- which path ---------------------------------------------------------------------------

    def _only_path(self, path: Path | None) -> Path | None:
        """The requested path, or the only possible one; None when there is a choice."""
        if path is None and self._gpu.no_batch:
            logger.info("s3kv: gathers KV blocks before copying them: %s", self._gpu.no_batch)
            return Path.GATHER
        return path

    def _staging(self, path: Path | None) -> Staging | None:
        """Staging buffers; None when `path` needs none, or when there is no room for them and
        `path` allows batches.
        """
        if path is Path.BATCH:
            return None
        try:
            return Staging(self._gpu, self._layouts)
        except torch.OutOfMemoryError as error:
            if path is Path.GATHER:
                raise
            logger.info("s3kv: copies KV blocks in batches; no GPU memory to gather: %s", error)
            return None

    def _choose(
        self, forced: Path | None, idle: Sequence[int] | None, clock: Callable[[], float]
    ) -> tuple[PathChoice, ...]:
        ends = [(group, direction) for group in self._layouts for direction in CopyDirection]
        if forced is None:
            return tuple(self._measure(*end, idle, clock) for end in ends)
        return tuple(PathChoice(*end, forced, None, None) for end in ends)

    def _measure(
        self,
        group: int,
        direction: CopyDirection,
        idle: Sequence[int] | None,
        clock: Callable[[], float],
    ) -> PathChoice:
        """Measure both paths. `CopyDirection.IN` brings back what `CopyDirection.OUT` has just
        taken to the same slots.
        """
        layout = self._layouts[group]
        blocks = range(layout.num_blocks) if idle is None else idle

        def part(chunk: int) -> LoadPart:
            slot = chunk % self._places.num_slots
            return LoadPart(group, slot, 0, spread_blocks(slot, layout.blocks_per_chunk, blocks))

        def seconds(path: Path) -> float:
            def start(chunk: int) -> None:
                if direction is CopyDirection.OUT:
                    self.copy_out(part(chunk), self.mark(), path)
                else:
                    self.copy_in(part(chunk), self.mark(), path)

            return seconds_per_chunk(start, self.settle, clock)

        # Gather first: then all slots are filled even if the driver refuses a batch halfway.
        gather_s = seconds(Path.GATHER)
        try:
            batch_s = seconds(Path.BATCH)
        except RuntimeError as error:
            self.settle()
            logger.warning("s3kv: gathers KV blocks; the driver refused a batch: %s", error)
            return PathChoice(group, direction, Path.GATHER, None, gather_s)
        path = faster(batch_s, gather_s)
        logger.info(
            "s3kv: KV blocks of group %d go %s by %s: a chunk takes %.2f ms by batch, %.2f ms by "
            "gather",
            group,
            direction.value,
            path.value,
            1e3 * batch_s,
            1e3 * gather_s,
        )
        return PathChoice(group, direction, path, batch_s, gather_s)


def faster(batch_s: float, gather_s: float) -> Path:
    """The path to take, given the seconds per chunk on each."""
    return Path.GATHER if batch_s > gather_s * _WORTH_ITS_PRICE else Path.BATCH


def seconds_per_chunk(
    start: Callable[[int], None], settle: Callable[[], None], clock: Callable[[], float]
) -> float:
    """Seconds per chunk in the best of `_ROUNDS` rounds, from the first launch to the last byte.
    Blocks the host.

    start: launches the copy of chunk `i` of a round. settle: blocks until all have ended. The first
    copy is not counted: it loads kernels and fills pools.
    """
    start(0)
    settle()
    best = float("inf")
    for _ in range(_ROUNDS):
        begin = clock()
        for i in range(_CHUNKS):
            start(i)
        settle()
        best = min(best, clock() - begin)
    return best / _CHUNKS


def spread_blocks(chunk: int, blocks_per_chunk: int, idle: Sequence[int]) -> tuple[int, ...]:
    """Blocks to measure with, far apart if there are enough, as in an engine that has served for a
    while. idle: the blocks that may be used, in ascending order.
    """
    distance = max(1, len(idle) // blocks_per_chunk)
    places = (i * distance + chunk % distance for i in range(blocks_per_chunk))
    return tuple(idle[place % len(idle)] for place in places)
