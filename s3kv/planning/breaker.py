"""Stop asking a store that keeps failing, and find out by itself when it is back.

    CLOSED ──`threshold` failures in a row──▶ OPEN ──pause over──▶ HALF_OPEN
       ▲                                       ▲                      │
       └──────────────success─────────────────┼──────success─────────┤
                                               └──failure, pause × 2──┘

Half-open lets one call through per pause; its answer decides.
"""

from __future__ import annotations

import enum

from s3kv.types import Outcome

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class BreakerState(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """One thread; the clock is the caller's. Answers (also "no such object") are successes."""

    __slots__ = ("_failures", "_open_until_s", "_pause_s", "_threshold", "state")

    def __init__(self, *, threshold: int) -> None:
        self.state = BreakerState.CLOSED
        self._threshold = threshold
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._open_until_s = 0.0

    def allows(self, now_s: float) -> bool:
        """May a call be made now? In an open breaker whose pause is over, yes to one caller."""
        if self.state is BreakerState.CLOSED:
            return True
        if now_s < self._open_until_s:
            return False
        self.state = BreakerState.HALF_OPEN
        self._open_until_s = now_s + self._pause_s
        return True

    def saw(self, outcome: Outcome, now_s: float) -> None:
        """A call has ended. One that was given up says nothing about the store."""
        if outcome in (Outcome.FAILED, Outcome.DENIED):
            self.failed(now_s)
        elif outcome is not Outcome.CANCELLED:
            self.succeeded()

    def succeeded(self) -> None:
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S

    def failed(self, now_s: float) -> None:
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        elif self.state is BreakerState.OPEN or self._failures < self._threshold:
            return
        self.state = BreakerState.OPEN
        self._open_until_s = now_s + self._pause_s
