"""Quarantine: keys whose objects failed verification."""

from __future__ import annotations

import math

CAPACITY_KEYS = 10_000
"""Most keys remembered, about 3 MB. A bucket with more bad objects has another problem. The oldest
keys are forgotten; each costs one more request when it is fetched."""
SUSPECT_S = 120.0
"""Time until the second reading: longer than most causes of damaged answers last, and short enough
that a chunk in use is not computed again for long."""


class Quarantine:
    """Keys of objects that did not verify, which are read again only later, or never. Pure: times
    are seconds of one monotonic clock.

    A bad reading may be a fault of the reading, so two are needed:

        state of a key   bad reading       good or none   upload EXISTS       upload OK, deleted
        ───────────────  ────────────────  ─────────────  ──────────────────  ──────────────────
        (none)           SUSPECT for ttl   (none)         (none)              (none)
        SUSPECT          BAD               (none)         looked at at once   (none)
        BAD              BAD               (none)         BAD                 (none)

    A SUSPECT is not read until its time is up; the next fetch then reads it again. This process
    never again reads a BAD object. An upload that finds the object there shows that the object is
    in use, so it is read again early, once.
    """

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}

    def bars(self, key: str, now_s: float) -> bool:
        """Whether the object must not be read now."""
        return now_s < self._until_s.get(key, -math.inf)

    def suspects(self, key: str) -> bool:
        """Whether an earlier reading of the object was bad."""
        return key in self._until_s

    def bad(self, key: str, now_s: float, *, certain: bool = False) -> None:
        """Note a reading that did not verify. certain: it is the second one in a row."""
        again = self._until_s.pop(key, None) is not None
        self._until_s[key] = math.inf if certain or again else now_s + SUSPECT_S
        if len(self._until_s) > CAPACITY_KEYS:
            del self._until_s[next(iter(self._until_s))]

    def exists(self, key: str) -> None:
        """Note that an upload found an object under this key."""
        if self._until_s.get(key, math.inf) < math.inf:
            self._until_s[key] = -math.inf

    def lift(self, key: str) -> None:
        """Forget this key: its object is good, has been replaced, or is gone."""
        self._until_s.pop(key, None)
