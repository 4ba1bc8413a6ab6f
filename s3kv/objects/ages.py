"""Which objects have to go so that a bucket keeps to a budget: those last written longest ago.

A bucket of millions of objects is listed twice, because nobody wants to hold its listing: once to
count bytes by the second in which they were last written, which says where to cut, and once to
find what lies before the cut. A refresh is a write, so this is least recently used first, as
exact as refreshes are frequent. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass


@dataclass(slots=True)
class Cut:
    """What goes: everything last written before `second` (whole seconds since the epoch), and of
    what was written within it as much as makes up `nbytes`."""

    second: int
    nbytes: int = 0

    def takes(self, modified_s: float, nbytes: int) -> bool:
        """Whether this object goes. Ask once for each: those within the second are counted."""
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
        """Let go what was last written before `before_s`, and the oldest of the rest until no more
        than `max_bytes` are left."""
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
