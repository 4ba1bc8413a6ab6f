"""Life of a worker's I/O processes, each of which replaces the one before.

    NEW ──start──▶ UP ─hung up, bad message, silence─▶ DYING ──confirmed dead──▶ DOWN
                   ▲ └──close──▶ CLOSED (from any)                               │
                   └────────────────────────pause over───────────────────────────┘

Pure: `io.client` reports the events with the time, and carries out the actions that are due.
"""

from __future__ import annotations

import math
from typing import Literal

from s3kv.states import IdentityEnum, Transitions

_PAUSE_FIRST_S = 0.1
_PAUSE_MAX_S = 30.0
CHECK_S = 1.0
_SILENCE_MAX_S = 30.0
"""Time after which an unanswered ping means that the process hangs; its loop never blocks."""
_START_S = 60.0
"""Further time for the first answer: a busy machine takes up to a minute to start a process."""


class State(IdentityEnum):
    NEW = "new"
    UP = "up"
    DYING = "dying"
    DOWN = "down"
    CLOSED = "closed"


class LifeEvent(IdentityEnum):
    START = "start"
    REFUSE = "the system does not start it"
    FAIL = "hung up, bad message, silence"
    DIE = "confirmed dead"
    CLOSE = "close"


LIFE_TRANSITIONS: Transitions[State, LifeEvent] = Transitions(
    {
        (State.NEW, LifeEvent.START): State.UP,
        (State.UP, LifeEvent.FAIL): State.DYING,
        (State.DYING, LifeEvent.FAIL): State.DYING,
        (State.DYING, LifeEvent.DIE): State.DOWN,
        (State.DOWN, LifeEvent.START): State.UP,
        (State.DOWN, LifeEvent.REFUSE): State.DOWN,
        **{(state, LifeEvent.CLOSE): State.CLOSED for state in State},
    }
)


class ProcessLife:
    """State of the current process. reason: why it is or was DYING. broke_protocol: whether a
    violation of the protocol is the reason. starts, deaths: counts of processes."""

    def __init__(self) -> None:
        self.state = State.NEW
        self.reason = ""
        self.broke_protocol = False
        self.starts = self.deaths = 0
        self._started_s = self._due_s = self._pause_s = 0.0

    def started(self, now_s: float) -> None:
        self._step(LifeEvent.START)
        self._started_s = now_s
        self.starts += 1
        self.reason, self.broke_protocol = "", False

    def refused(self, now_s: float) -> None:
        """Note that the system did not start the next process."""
        self._step(LifeEvent.REFUSE)
        self._started_s = now_s
        self._pause(now_s)

    def failed(self, reason: str, kill_s: float, *, broke_protocol: bool = False) -> None:
        """Record that the process is no longer usable. kill_s: when to kill it, if it still runs.
        Only a process's first failure counts. reason: empty if the exit status will give it."""
        if self.state is State.UP:
            self.reason, self.broke_protocol, self._due_s = reason, broke_protocol, kill_s
        self._step(LifeEvent.FAIL)

    def died(self, last_words: str, now_s: float) -> None:
        """Note that the kernel has confirmed the death."""
        self._step(LifeEvent.DIE)
        self.deaths += 1
        self.reason = self.reason or last_words
        self._pause(now_s)

    def closed(self) -> None:
        self._step(LifeEvent.CLOSE)

    def is_due(self, state: State, now_s: float) -> bool:
        """Whether it is time to kill a process that is DYING, or to replace one that is DOWN."""
        return self.state is state and now_s >= self._due_s

    def _pause(self, now_s: float) -> None:
        lived_long = now_s - self._started_s > _PAUSE_MAX_S
        self._pause_s = 0.0 if lived_long else min(_PAUSE_MAX_S, 2 * self._pause_s)
        self._pause_s = max(_PAUSE_FIRST_S, self._pause_s)
        self._due_s = now_s + self._pause_s

    def _step(self, event: LifeEvent) -> None:
        self.state = LIFE_TRANSITIONS.after(self.state, event)


class Heartbeat:
    """Checks of a process, a second apart. Each pings, unless the start or a ping is unanswered."""

    def __init__(self, now_s: float) -> None:
        self._checked_s, self._pinged_s = now_s, now_s + _START_S

    def is_idle(self, now_s: float) -> bool:
        """Whether no answer is under way and no check is due."""
        return self._pinged_s == math.inf and now_s - self._checked_s < CHECK_S

    def check(self, now_s: float) -> Literal["ping", "waits", "hangs"] | None:
        """The check that is due, or None. The caller sends the ping."""
        if now_s - self._checked_s < CHECK_S:
            return None
        self._checked_s = now_s
        if now_s - self._pinged_s > _SILENCE_MAX_S:
            return "hangs"
        if self._pinged_s < math.inf:
            return "waits"
        self._pinged_s = now_s
        return "ping"

    def answered(self) -> None:
        self._pinged_s = math.inf
