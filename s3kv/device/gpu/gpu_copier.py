"""Copies for a KV cache in GPU memory: chooses the path of each group and direction by measuring.

The copy thread launches everything. The engine's thread records marks, fences and queries events.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import product

from s3kv.device.copier import BatchRefused, CopyDirection, Path, PathChoice
from s3kv.device.gpu.copy_streams import EventTicket, LoadLane, SaveLane
from s3kv.device.gpu.interface import Event, Gpu
from s3kv.device.layout import PageLayout
from s3kv.device.slot_payloads import ChunkPlaces
from s3kv.messages import CopyPart
from s3kv.types import once_a_minute

logger = logging.getLogger(__name__)

_WORTH_ITS_PRICE = 1.1
"""Gather must be this much faster to be chosen, because it costs the engine a kernel per chunk."""

_ROUNDS = 3
_CHUNKS = 16
"""Chunks in a round, back to back: so many that its begin and end, and a hiccup, do not decide.
With chunks of 32 MiB all rounds of a path and direction take 45 ms on a bus of 50 GB/s."""
_MOST_REFUSALS = 3
"""Batches that the driver refuses in a row before all copies are gathered."""


class GpuCopier:
    """The `Copier` for GPUs. Pins the slab, and takes over `places` even if the constructor raises.

    path: the path of all copies; None measures both, for each group and direction, before the first
    copy. Measuring blocks the host for some tenths of a second, overwrites slots, and rewrites
    pages with their content; so the slab must be empty, and those pages unused. idle: blocks of
    every group to measure with; None stands for all. If it is empty, all copies are batches.

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
        self._layouts = dict(places.layouts)
        self._slab_address = places.memory.data_ptr()
        self.refused = 0
        self._refused_in_a_row = 0
        self._is_due = once_a_minute(clock)
        with ExitStack() as undo:
            undo.callback(places.close)
            if path is Path.BATCH and gpu.no_batch:
                raise ValueError(f"copies in batches are not possible here: {gpu.no_batch}")
            self.pinned = gpu.pin(places.memory, places.pinned_bytes)
            undo.callback(gpu.unpin)
            if path is None and gpu.no_batch:
                logger.info("s3kv: gathers KV blocks before copying them: %s", gpu.no_batch)
                path = Path.GATHER
            self._out, self._in = SaveLane(gpu), LoadLane(gpu)
            undo.callback(self.settle)
            if not self._may_gather(path) or (idle is not None and not idle):
                path = path or Path.BATCH
            self.choices = tuple(
                PathChoice(*end, path, None, None) if path else self._measure(*end, idle, clock)
                for end in product(self._layouts, CopyDirection)
            )
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

    def copy_out(self, part: CopyPart, mark: Event, path: Path | None = None) -> EventTicket:
        """Copy as `Copier` says. path: another than the one chosen."""
        return self._copy(self._out, self._places.locate_whole(part), part, mark, path)

    def copy_in(self, part: CopyPart, mark: Event, path: Path | None = None) -> EventTicket:
        """Copy as `Copier` says. path: another than the one chosen."""
        return self._copy(self._in, self._places.locate(part), part, mark, path)

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

    def _copy(
        self,
        lane: SaveLane | LoadLane,
        place: tuple[PageLayout, int],
        part: CopyPart,
        mark: Event,
        path: Path | None,
    ) -> EventTicket:
        layout, begin = place
        if (path or self._paths[part.group, lane.direction]) is Path.GATHER:
            payload = self._places.memory[begin : begin + layout.payload_bytes]
            return lane.gather(layout, part, payload, mark)
        try:
            ticket = lane.batch(layout, part, self._slab_address + begin, mark)
        except BatchRefused as error:
            self.refused += 1
            self._refused_in_a_row += 1
            # Once a minute: torch empties its cache before it gives up an allocation.
            if self._refused_in_a_row >= _MOST_REFUSALS and self._is_due("staging"):
                self._stop_batches(error)
            raise
        self._refused_in_a_row = 0
        return ticket

    def _stop_batches(self, error: BatchRefused) -> None:
        """Gather from now on, because a driver that refuses one batch after another will go on."""
        if not self._may_gather(None):
            return self._drop_staging()
        self._refused_in_a_row = 0
        self.choices = tuple(choice._replace(path=Path.GATHER) for choice in self.choices)
        self._paths = dict.fromkeys(self._paths, Path.GATHER)
        logger.warning(
            "s3kv: gathers KV blocks now; the driver refused %d batches in a row: %s",
            _MOST_REFUSALS,
            error,
        )

    def _drop_staging(self) -> None:
        """Free the GPU memory that no chosen path uses."""
        for lane in (self._out, self._in):
            if all(self._paths[group, lane.direction] is Path.BATCH for group in self._layouts):
                lane.staging = None

    # --- which path ---------------------------------------------------------------------------

    def _may_gather(self, path: Path | None) -> bool:
        """Allocate missing staging. False if `path` needs none, or allows batches without room."""
        if path is Path.BATCH:
            return False
        try:
            for lane in (self._out, self._in):
                if lane.staging is None:
                    lane.allocate_staging(self._layouts)
        except RuntimeError as error:  # also of memory that cannot be pinned
            if path is Path.GATHER:
                raise
            logger.warning("s3kv: copies KV blocks in batches; no memory to gather: %s", error)
            return False
        return True

    def _measure(
        self,
        group: int,
        direction: CopyDirection,
        idle: Sequence[int] | None,
        clock: Callable[[], float],
    ) -> PathChoice:
        """Measure both paths. Loads bring back what saves have just taken to the same slots."""
        layout = self._layouts[group]
        blocks = range(layout.num_blocks) if idle is None else idle
        # An object may take several slots, and be as long as the slab.
        distance = self._places.pinned_bytes // self._places.slot_bytes
        places = max(1, self._places.num_slots // distance)

        def part(chunk: int) -> CopyPart:
            place = chunk % places
            spread = spread_blocks(place, layout.blocks_per_chunk, blocks)
            return CopyPart(group, place * distance, 0, spread)

        def start(path: Path, chunk: int) -> None:
            copy = self.copy_out if direction is CopyDirection.OUT else self.copy_in
            copy(part(chunk), self.mark(), path)

        try:
            seconds = seconds_per_chunk((Path.GATHER, Path.BATCH), start, self.settle, clock)
        except BatchRefused as error:
            self.settle()
            self._refused_in_a_row = 0
            logger.warning("s3kv: gathers KV blocks; the driver refused a batch: %s", error)
            # This fills the slots, too.
            seconds = seconds_per_chunk((Path.GATHER,), start, self.settle, clock)
            return PathChoice(group, direction, Path.GATHER, None, seconds[Path.GATHER])
        batch_s, gather_s = seconds[Path.BATCH], seconds[Path.GATHER]
        path = faster(batch_s, gather_s)
        text = (
            "s3kv: KV blocks of group %d go %s by %s: a chunk takes %.2f ms by batch, %.2f ms by "
        )
        taken = direction.value, path.value, 1e3 * batch_s, 1e3 * gather_s
        logger.info(text + "gather", group, *taken)
        return PathChoice(group, direction, path, batch_s, gather_s)


def faster(batch_s: float, gather_s: float) -> Path:
    """The path to take, given the seconds per chunk on each."""
    return Path.GATHER if batch_s > gather_s * _WORTH_ITS_PRICE else Path.BATCH


def seconds_per_chunk(
    paths: Sequence[Path],
    start: Callable[[Path, int], None],
    settle: Callable[[], None],
    clock: Callable[[], float],
) -> dict[Path, float]:
    """Seconds per chunk on each path in the best of `_ROUNDS` rounds, from the first launch to the
    last byte. Blocks the host.

    start: launches the copy of chunk `i` of a round. settle: blocks until all have ended. The first
    round is not counted: it loads kernels, fills pools and wakes up the bus. The paths take turns,
    so that what disturbs one for a while disturbs the other, too.
    """
    best = dict.fromkeys(paths, float("inf"))
    for number in range(1 + _ROUNDS):
        for path in paths:
            begin = clock()
            for i in range(_CHUNKS):
                start(path, i)
            settle()
            if number:
                best[path] = min(best[path], (clock() - begin) / _CHUNKS)
    return best


def spread_blocks(chunk: int, blocks_per_chunk: int, idle: Sequence[int]) -> tuple[int, ...]:
    """Blocks to measure with, far apart if there are enough, as in an engine that has served for a
    while. idle: the blocks that may be used, in ascending order."""
    distance = max(1, len(idle) // blocks_per_chunk)
    places = (i * distance + chunk % distance for i in range(blocks_per_chunk))
    return tuple(idle[place % len(idle)] for place in places)
