"""Eviction by age, to keep a bucket within a budget: the least recently written objects go first.

A bucket of millions of objects is listed twice, so that the listing need not be held in memory. The
first pass counts bytes per second of last write, which determines the cut; the second finds the
objects before the cut. A refresh is a write, so the order is least recently used first, as exact as
refreshes are frequent. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass


@dataclass(slots=True)
class Cut:
    """The objects to evict: all that were last written before `second` (whole seconds since the
    epoch), and `nbytes` of those written within it."""

    second: int
    nbytes: int = 0

    def takes(self, modified_s: float, nbytes: int) -> bool:
        """Whether to evict this object. Ask once per object, because objects within the cut's
        second are counted."""
        at = math.floor(modified_s)
        if at != self.second:
            return at < self.second
        if self.nbytes <= 0:
            return False
        self.nbytes -= nbytes
        return True


class Ages:
    """The bytes of a bucket by the second of their last write."""

    def __init__(self) -> None:
        self._bytes: Counter[int] = Counter()

    def add(self, modified_s: float, nbytes: int) -> None:
        """Count one object. modified_s: last write, seconds since the epoch."""
        self._bytes[math.floor(modified_s)] += nbytes

    @property
    def nbytes(self) -> int:
        return self._bytes.total()

    def cut(self, *, max_bytes: int | None = None, before_s: float = 0.0) -> Cut:
        """The cut that evicts objects last written before `before_s` (seconds since the epoch), and
        then the oldest of the rest until at most `max_bytes` are left (None: no limit)."""
        second = math.floor(before_s)
        if max_bytes is None:
            return Cut(second)
        kept = sorted(at for at in self._bytes if at >= second)
        excess = sum(self._bytes[at] for at in kept) - max_bytes
        for at in kept:
            if excess <= 0:
                break
            if self._bytes[at] > excess:
                return Cut(at, excess)
            excess -= self._bytes[at]
            second = at + 1
        return Cut(second)

    def taken(self, cut: Cut) -> int:
        """Bytes that the cut evicts, about: it may take one object more of its own second."""
        before = sum(nbytes for at, nbytes in self._bytes.items() if at < cut.second)
        return before + min(max(cut.nbytes, 0), self._bytes.get(cut.second, 0))

    def oldest_s(self, cut: Cut) -> float | None:
        """Second of the oldest object that the cut leaves; None if it leaves none."""
        left = [at for at in self._bytes if at > cut.second]
        if self._bytes.get(cut.second, 0) > cut.nbytes:
            left.append(cut.second)
        return min(left, default=None)
