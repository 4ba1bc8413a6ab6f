"""Circuit breaker: stops asking a store that keeps failing, and finds out when it is back.

    CLOSED ──`threshold` failures in a row──▶ OPEN ──pause over──▶ HALF_OPEN
       ▲                                       ▲                      │
       └──────────────success─────────────────┼──────success─────────┤
                                               └──failure, pause × 2──┘

Half-open lets one call through per pause; its outcome decides.
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
    """The breaker of one store. Used from one thread; the caller passes the time. Any answer is a
    success, "no such object" included. threshold: failures in a row that open it."""

    __slots__ = (
        "_failures",
        "_first_pause_s",
        "_longest_pause_s",
        "_open_until_s",
        "_pause_s",
        "_threshold",
        "state",
    )

    def __init__(
        self,
        *,
        threshold: int = 5,
        first_pause_s: float = _FIRST_PAUSE_S,
        longest_pause_s: float = _LONGEST_PAUSE_S,
    ) -> None:
        self.state = BreakerState.CLOSED
        self._threshold = threshold
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._failures = 0
        self._pause_s = first_pause_s
        self._open_until_s = 0.0

    def allows(self, now_s: float) -> bool:
        """Whether a call may be made now. An open breaker whose pause is over allows one call."""
        if self.state is BreakerState.CLOSED:
            return True
        if now_s < self._open_until_s:
            return False
        self.state = BreakerState.HALF_OPEN
        self._open_until_s = now_s + self._pause_s
        return True

    def is_open(self, now_s: float) -> bool:
        """Whether `allows` would return False. This call changes nothing."""
        return self.state is not BreakerState.CLOSED and now_s < self._open_until_s

    def saw(self, outcome: Outcome, now_s: float) -> None:
        """Note the outcome of a call. A cancelled call, and one that no store would take, say
        nothing about this store.
        """
        if outcome in (Outcome.FAILED, Outcome.DENIED):
            self.failed(now_s)
        elif outcome not in (Outcome.CANCELLED, Outcome.INVALID):
            self.succeeded()

    def succeeded(self) -> None:
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._pause_s = self._first_pause_s

    def failed(self, now_s: float) -> None:
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
        elif self.state is BreakerState.OPEN or self._failures < self._threshold:
            return
        self.state = BreakerState.OPEN
        self._open_until_s = now_s + self._pause_s
