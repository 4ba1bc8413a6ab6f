"""Circuit breaker: blocks calls to a store that keeps failing, and detects its recovery.

    CLOSED ──`threshold` failures in a row──▶ OPEN ──pause over──▶ HALF_OPEN
       ▲                                       ▲                      │
       └──────────────success─────────────────┼──────success─────────┤
                                               └──failure, pause × 2──┘

HALF_OPEN lets one call through per pause; its outcome decides. If that call ends without the
store, the next call is let through at once.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from s3kv.types import Outcome


class BreakerState(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(slots=True, eq=False, kw_only=True)
class Breaker:
    """Breaker of one store. Used from one thread; the caller passes the time. Any answer is a
    success, even "no such object". threshold: failures in a row that open it. has_disk: whether a
    fetch that may not call the store is near (reads only this host's disk) instead of refused."""

    threshold: int = 5
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0
    has_disk: bool = False
    state: BreakerState = BreakerState.CLOSED
    _failures: int = 0
    _pause_s: float = 0.0
    _open_until_s: float = 0.0

    def allows(self, now_s: float) -> bool:
        """Whether a call may be made now. An open breaker whose pause is over allows one call."""
        if self.state is BreakerState.CLOSED:
            return True
        if now_s < self._open_until_s:
            return False
        self.state = BreakerState.HALF_OPEN
        self._open_until_s = now_s + self._pause_s
        return True

    def is_near(self, now_s: float) -> bool:
        """Whether a fetch made now must be near. Calls `allows` if there is a disk."""
        return self.has_disk and not self.allows(now_s)

    def is_open(self, now_s: float) -> bool:
        """Whether `allows` would return False. This call changes nothing."""
        return self.state is not BreakerState.CLOSED and now_s < self._open_until_s

    def saw(self, outcome: Outcome, now_s: float, *, near: bool = False) -> None:
        """Record the outcome of a call. Calls that were cancelled, that no store would accept, or
        that ended without this store (`near`) carry no information about it."""
        if near:
            if self.state is BreakerState.HALF_OPEN:
                self._open_until_s = now_s
        elif outcome in (Outcome.FAILED, Outcome.DENIED):
            self.failed(now_s)
        elif outcome not in (Outcome.CANCELLED, Outcome.INVALID):
            self.succeeded()

    def succeeded(self) -> None:
        self.state = BreakerState.CLOSED
        self._failures = 0

    def failed(self, now_s: float) -> None:
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self._pause_s = min(2 * self._pause_s, self.longest_pause_s)
        elif self.state is BreakerState.OPEN or self._failures < self.threshold:
            return
        else:
            self._pause_s = self.first_pause_s
        self.state = BreakerState.OPEN
        self._open_until_s = now_s + self._pause_s
