"""A request's wait: its clock, and its sleep between two decisions (`deadline.decide`)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Wait:
    """A request's wait for chunks or items. Times are seconds of the planner's monotonic clock."""

    is_begun: bool = False
    """Whether the engine was told to wait since the last `start_over`."""
    started_s: float = 0.0
    """Time at which the engine was first told to wait."""
    asked_s: float = 0.0
    """Time at which the request last ordered or joined a fetch."""
    arrived_s: float = 0.0
    """Time of the last arrival for it, or of the start of the wait."""
    until_s: float = -math.inf
    """Time until which the answer stays "wait", unless `wake` is called before."""
    wanted: int = 0
    """What it might get from the bucket, as of `started_s`: chunks, or rows of encoder outputs."""

    def begin(self, now_s: float, wanted: int) -> None:
        """Tell the engine to wait. Only the first call since `start_over` sets the clock."""
        self.wake()
        if not self.is_begun:
            self.started_s = self.arrived_s = now_s
            self.wanted = wanted
            self.is_begun = True

    def arrived(self, now_s: float) -> None:
        self.arrived_s = now_s
        self.wake()

    def wake(self) -> None:
        """Have the wait decided on again: a fetch has ended, or something else is new."""
        self.until_s = -math.inf

    def start_over(self) -> None:
        """Forget the wait. The next `begin` starts another one."""
        self.is_begun = False
