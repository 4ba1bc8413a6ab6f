"""Quarantine: keys whose objects failed verification."""

from __future__ import annotations

import math

CAPACITY_KEYS = 10_000
"""Maximum number of keys, about 3 MB. A bucket with more bad objects has another problem. The
oldest keys are forgotten; each costs one more request when it is fetched."""
BARRED_S = 120.0
"""Time until the next read: longer than most causes of damaged answers last, and short enough that
a chunk in use is not recomputed for long."""


class Quarantine:
    """Keys of objects whose last read did not verify. Pure. Times: seconds, monotonic."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def bars(self, key: str, now_s: float) -> bool:
        """Whether the object must not be read now."""
        return now_s < self._until_s.get(key, -math.inf)

    def holds(self, key: str) -> bool:
        """Whether the last read of the object was bad."""
        return key in self._until_s

    def bad(self, key: str, now_s: float) -> None:
        """Record a read that did not verify."""
        self._until_s.pop(key, None)
        self._until_s[key] = now_s + BARRED_S
        if len(self._until_s) > CAPACITY_KEYS:
            del self._until_s[next(iter(self._until_s))]

    def lift(self, key: str) -> None:
        """Forget this key: its object is good, has been replaced, or is gone."""
        self._until_s.pop(key, None)
