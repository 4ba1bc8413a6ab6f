"""The rule for how long a request waits: `decide`, a pure function of `WaitFacts`. `keep_waiting`
carries out its decisions.

A request waits for chunks only while that is expected to be faster than to compute them. So no
request waits for a bucket that is known to be slow; its chunks arrive later and serve others. A
request loses time only before the first measurement, or when the bucket becomes slow, and at most
the time to compute the chunks. Encoder outputs follow the same rule, with rows in place of chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from s3kv.types import Tally

GAIN = 0.9
"""Largest expected fetch time that is worth a wait, as a share of the computing time. The rest is a
margin for error."""

LATE = 1.5
"""Time after which a fetch is late, as a share of the expected one. All that is known of a late
fetch is that it is a slow one, and slow ones may take as long again."""

PATIENCE_S = 1.0
"""Patience before the first measurement: ten times the first-byte time of a healthy S3."""

PATIENCE_MIN_S = 0.25
"""Shortest patience. An arrival is noticed only when an engine step ends, and two may run."""

PATIENCE_FETCHES = 2.0
"""Patience in fetch times."""

PATIENCE_COMPUTE = 0.5
"""Patience as a share of the time to compute what is missing. The slowest of many answers of a
bucket with a tail takes much longer than twice the mean. To wait for it costs less than to compute
all that comes after it."""


class Forecast(NamedTuple):
    """Times of the fetches that a request waits for, in seconds. None: nothing is known.

    all_s: expected from the request of the first to the arrival of the last. fetch_s: of one of
    them, as measured. alone_s: of one alone, as measured. absence_s: of an answer that a chunk is
    not there. absent_share: share of the recent lookups whose first unknown chunk was not there.
    """

    all_s: float | None
    fetch_s: float | None
    alone_s: float | None = None
    absence_s: float | None = None
    absent_share: float = 0.0


@dataclass(slots=True, eq=False)
class Wait:
    """A request's wait for chunks or items: its clock, and its sleep between two decisions. Times
    are seconds of the planner's monotonic clock."""

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
    """Chunks, or rows of encoder outputs, that it might get from the bucket, as of `started_s`."""

    def begin(self, now_s: float, wanted: int) -> None:
        """Tell the engine to wait. Only the first call since `start_over` sets the clock."""
        self.wake()
        if not self.is_begun:
            self.started_s = self.arrived_s = now_s
            self.is_begun, self.wanted = True, wanted

    def arrived(self, now_s: float) -> None:
        self.arrived_s = now_s
        self.wake()

    def wake(self) -> None:
        """Have the wait decided on again: a fetch has ended, or something else is new."""
        self.until_s = -math.inf

    def start_over(self) -> None:
        """Forget the wait. The next `begin` starts another one."""
        self.is_begun = False


@dataclass(frozen=True, slots=True)
class WaitFacts:
    """All that `decide` goes by. Times are seconds of one monotonic clock, counts are chunks (of
    encoder outputs: rows).

    missing: those still on their way. unproven: those of the missing ones that the bucket may not
        have, because it does not have the next one.
    compute_s: time to compute one.
    gate: whether waits have to pay (`recompute_gate`); otherwise only `max_wait_s` counts.
    """

    now_s: float
    wait: Wait
    missing: int
    unproven: int
    compute_s: float
    forecast: Forecast
    max_wait_s: float
    gate: bool


def keep_waiting(facts: WaitFacts, counters: Tally, gave_up: Callable[[float], object]) -> bool:
    """Prolong the wait to its deadline, or end and count it. Returns whether it goes on.
    gave_up: called with the seconds since the last arrival if the end shows that fetches are slow.
    """
    wait, now_s, until_s = facts.wait, facts.now_s, decide(facts)
    if now_s < until_s:
        wait.until_s = until_s
        return True
    counters["deadline_cuts"] += 1
    if until_s > -math.inf and wait.arrived_s < now_s:
        gave_up(now_s - wait.arrived_s)
    return False


def decide(facts: WaitFacts) -> float:
    """The deadline of a wait: the time until which it lasts if nothing new happens; minus infinity
    if it does not pay. The first case that applies counts.

    | case | deadline |
    |---|---|
    | no `gate` | `started_s` and `max_wait_s` |
    | `all_s` is unknown, or less than `GAIN` of the time to compute what is likely there | the
      first of `started_s` and `max_wait_s`, `started_s` and the time to compute all that was
      wanted, `arrived_s` and patience |
    | what is left of `all_s` since `asked_s` is less than that, and no fetch is late | the first of
      these, and the time at which a fetch is late |
    | otherwise | it does not pay |

    A fetch is late when `LATE` of `all_s` have passed since the last request or arrival. Patience
    is `PATIENCE_S` before a fetch has been measured; then `PATIENCE_FETCHES` fetches or
    `PATIENCE_MIN_S`, or, if that is more, `PATIENCE_COMPUTE` of the time to compute what is
    missing, up to `PATIENCE_S`.
    """
    wait, forecast = facts.wait, facts.forecast
    latest_s = wait.started_s + facts.max_wait_s
    if not facts.gate:
        return latest_s
    all_s, worth_s = forecast.all_s, GAIN * facts.compute_s * likely(facts)
    if all_s is not None and all_s >= worth_s:
        late_s = max(wait.asked_s, wait.arrived_s) + LATE * all_s
        if facts.now_s >= late_s or wait.asked_s + all_s - facts.now_s >= worth_s:
            return -math.inf
        latest_s = min(latest_s, late_s)
    patience_s = PATIENCE_S
    if forecast.fetch_s is not None:
        for_much_s = min(PATIENCE_S, PATIENCE_COMPUTE * facts.compute_s * facts.missing)
        patience_s = max(PATIENCE_MIN_S, PATIENCE_FETCHES * forecast.fetch_s, for_much_s)
    computed_s = wait.started_s + facts.compute_s * wait.wanted
    return min(latest_s, computed_s, wait.arrived_s + patience_s)


def likely(facts: WaitFacts) -> float:
    """Expected number of the missing ones that the bucket has; before the first absence, all.

    A prefix is stored from its front. None of the unproven ones is there as often as that has been
    so of late (`absent_share`); otherwise any number is at first as likely as any other. A large
    one becomes more likely as time passes, because an answer that a chunk is not there comes sooner
    than a chunk does: with the time of an absence exponential, and that of a fetch as much longer
    as fetches are measured to be, the odds of each absence more are `ratio`.
    """
    unproven, forecast = facts.unproven, facts.forecast
    absence_s, absent_share = forecast.absence_s, forecast.absent_share
    if not unproven or not absence_s:
        return facts.missing
    longer_s = max(0.0, (forecast.alone_s or 0.0) - absence_s)
    ratio = math.exp(-min(facts.now_s - facts.wait.asked_s, longer_s) / absence_s)
    odds = [ratio**absent for absent in range(unproven + 1)]
    absent = sum(absent * share for absent, share in enumerate(odds)) / sum(odds)
    return facts.missing - absent_share * unproven - (1 - absent_share) * absent
