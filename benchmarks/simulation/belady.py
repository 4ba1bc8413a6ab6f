"""Belady's MIN: how many references a cache could at most have served, had it known the future.

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems
Journal 5(2), 1966; with bypass: what is not worth its place is not kept at all, which no policy
of ours may do, so this bounds them all. It also ignores that slots are reserved before they are
filled, pinned while they are read and dirty until they are uploaded, and that a chunk is of use
only if those before it are found too.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence


def hits(references: Sequence[Hashable], slots: int) -> int:
    """O(n log n) for n references."""
    next_use: dict[Hashable, float] = {}
    uses = [math.inf] * len(references)
    for place in range(len(references) - 1, -1, -1):
        uses[place] = next_use.get(references[place], math.inf)
        next_use[references[place]] = place
    held: dict[Hashable, float] = {}
    farthest: list[tuple[float, int]] = []  # place of the last reference; stale entries stay
    found = 0
    for place, chunk in enumerate(references):
        found += held.pop(chunk, None) is not None
        if uses[place] == math.inf:
            continue
        held[chunk] = uses[place]
        heapq.heappush(farthest, (-uses[place], place))
        while len(held) > slots:
            use, last = heapq.heappop(farthest)
            if held.get(references[last]) == -use:
                del held[references[last]]
    return found
