"""A request's wait: its state and clock. `deadline.decide` says how long it may last."""

from __future__ import annotations

import math
from dataclasses import dataclass

from s3kv.planning.states import IdentityEnum, Transitions


class WaitState(IdentityEnum):
    IDLE = "idle"
    """It has waited for nothing since it arrived or was preempted."""
    AWAKE = "awake"
    """It has to be evaluated: a fetch has ended since the last time, or `until_s` has passed."""
    ASLEEP = "asleep"
    """It need not be evaluated before `until_s`."""


class WaitEvent(IdentityEnum):
    BEGIN = "begin"
    SLEEP = "sleep"
    WAKE = "wake"
    START_OVER = "start over"


_IDLE, _AWAKE, _ASLEEP = WaitState

WAIT_TRANSITIONS: Transitions[WaitState, WaitEvent] = Transitions(
    {
        (_IDLE, WaitEvent.BEGIN): _AWAKE,
        (_IDLE, WaitEvent.WAKE): _IDLE,
        (_IDLE, WaitEvent.START_OVER): _IDLE,
        # The wait goes on; its clock keeps running.
        (_AWAKE, WaitEvent.BEGIN): _AWAKE,
        (_AWAKE, WaitEvent.SLEEP): _ASLEEP,
        (_AWAKE, WaitEvent.WAKE): _AWAKE,
        (_AWAKE, WaitEvent.START_OVER): _IDLE,
        (_ASLEEP, WaitEvent.WAKE): _AWAKE,
    }
)


@dataclass(slots=True, eq=False)
class Wait:
    """A request's wait for chunks or items. Times are seconds of the planner's monotonic clock."""

    state: WaitState = _IDLE
    started_s: float = 0.0
    """Time at which the engine was first told to wait."""
    asked_s: float = 0.0
    """Time at which the request last ordered or joined a fetch."""
    arrived_s: float = 0.0
    """Time of the last arrival for it, or of the start of the wait."""
    until_s: float = -math.inf
    """The end of its sleep; in the past unless it is ASLEEP."""
    wanted: int = 0
    """What it might get from the bucket, as of `started_s`: chunks, or rows of encoder outputs."""

    def begin(self, now_s: float, wanted: int) -> None:
        """Tell the engine to wait. Only the first call since `start_over` sets the clock."""
        if self.state is _IDLE:
            self.started_s = self.arrived_s = now_s
            self.wanted = wanted
        self._step(WaitEvent.BEGIN)

    def asked(self, now_s: float) -> None:
        self.asked_s = now_s

    def arrived(self, now_s: float) -> None:
        self.arrived_s = now_s
        self.wake()

    def sleep(self, until_s: float) -> None:
        """Answer "wait" until `until_s`, unless `wake` is called before."""
        self._step(WaitEvent.SLEEP)
        self.until_s = until_s

    def wake(self) -> None:
        if self.state is _ASLEEP:  # saves a transition in most lookups
            self._step(WaitEvent.WAKE)
            self.until_s = -math.inf

    def start_over(self) -> None:
        """Forget the wait. The next `begin` starts another one."""
        self._step(WaitEvent.START_OVER)

    def _step(self, event: WaitEvent) -> None:
        self.state = WAIT_TRANSITIONS.after(self.state, event)
