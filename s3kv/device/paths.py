"""By which of two ways the bytes of a chunk go, decided from what each was measured to take.

    batch    the copy engine moves every contiguous piece straight between pages and slot
    gather   a kernel collects the pages in a staging buffer, the copy engine moves that in one

Batch leaves the multiprocessors and the GPU's memory to the model; gather does not care how short
the pieces are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

_WORTH_ITS_PRICE = 1.1
"""Gather has to be this much faster to be taken: it costs the engine a kernel per chunk."""

_ROUNDS = 3
_CHUNKS = 4
"""A round is this many chunks back to back, as many as keep the bus busy while the next one is
launched. With chunks of 32 MiB all rounds of a direction are 50 ms of a bus of 50 GB/s."""


class Path(str, Enum):
    BATCH = "batch"
    GATHER = "gather"


class Direction(str, Enum):
    OUT = "out"
    """From pages to a slot."""
    IN = "in"


class Choice(NamedTuple):
    """batch_s, gather_s: what a chunk took by either way; None for one that was not measured."""

    group: int
    direction: Direction
    path: Path
    batch_s: float | None
    gather_s: float | None


def faster(batch_s: float, gather_s: float) -> Path:
    """The path to take, given the seconds of a chunk by either."""
    return Path.GATHER if batch_s > gather_s * _WORTH_ITS_PRICE else Path.BATCH


def seconds_per_chunk(
    start: Callable[[int], None], settle: Callable[[], None], clock: Callable[[], float]
) -> float:
    """The best round of a few, from the first launch to the last byte. Waits on the host.

    start: launch the copy of chunk `i` of a round. settle: wait until all have ended. The first
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
    """Blocks to measure with, far from each other where there are enough: so they are in an engine
    that has served for a while. `idle` are those that may be used, in ascending order.
    """
    distance = max(1, len(idle) // blocks_per_chunk)
    places = (i * distance + chunk % distance for i in range(blocks_per_chunk))
    return tuple(idle[place % len(idle)] for place in places)
