"""Eviction by age, to keep a bucket within a budget: the least recently written objects go first.

A bucket of millions of objects is listed twice, so the listing need not be held in memory. The
first pass counts bytes per second of last write (in an old bucket per 2, 4, … seconds), which
determines the cut; the second finds the objects before the cut. A refresh is a write, so the order
is least recently used first, and more exact the more often objects are refreshed. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

_MOST_TIMES = 2**14
"""Most distinct times kept; they are sorted on the loop that also serves fetches."""


@dataclass(slots=True)
class Cut:
    """The objects to evict: all that were last written before `second` (whole seconds since the
    epoch), and `nbytes` of those written in the `width` seconds that start there."""

    second: int
    nbytes: int = 0
    width: int = 0

    def takes(self, modified_s: float, nbytes: int) -> bool:
        """Whether to evict this object. Call it once per object, because it counts the objects
        within the cut's `width`."""
        after = math.floor(modified_s) - self.second
        if self.nbytes <= 0 or not 0 <= after < self.width:
            return after < 0
        self.nbytes -= nbytes
        return True


class Ages:
    """The bytes of a bucket by the time of their last write, to `_width` seconds."""

    def __init__(self) -> None:
        self._bytes: Counter[int] = Counter()
        self._width = 1

    def add(self, modified_s: float, nbytes: int) -> None:
        """Count one object. modified_s: last write, seconds since the epoch."""
        second = math.floor(modified_s)
        self._bytes[second - second % self._width] += nbytes
        if len(self._bytes) > _MOST_TIMES:
            self._width *= 2
            finer, self._bytes = self._bytes, Counter()
            for at, held in finer.items():
                self.add(at, held)

    @property
    def nbytes(self) -> int:
        return self._bytes.total()

    def cut(self, *, max_bytes: int | None = None, before_s: float = 0.0) -> Cut:
        """The cut that evicts objects last written before `before_s` (seconds since the epoch), and
        then the oldest of the rest until at most `max_bytes` are left (None: no limit)."""
        second = math.floor(before_s)
        if max_bytes is None:
            return Cut(second)
        kept = sorted(at for at in self._bytes if at + self._width > second)
        excess = sum(self._bytes[at] for at in kept) - max_bytes
        for at in kept:
            if excess <= 0:
                break
            if self._bytes[at] > excess:
                second = max(at, second)
                return Cut(second, excess, at + self._width - second)
            excess -= self._bytes[at]
            second = at + self._width
        return Cut(second)

    def taken(self, cut: Cut) -> int:
        """Approximate bytes that the cut evicts: within its `width` it may take more."""
        before = sum(nbytes for at, nbytes in self._bytes.items() if at < cut.second)
        return before + min(max(cut.nbytes, 0), self._bytes.get(cut.second, 0))

    def oldest_s(self, cut: Cut) -> float | None:
        """Approximate time of the oldest object that the cut leaves; None if it leaves none."""
        left = (max(at, cut.second) for at in self._bytes if at + self._width > cut.second)
        return min(left, default=None)
