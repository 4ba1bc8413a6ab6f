"""The rule for how long a request waits: `decide`, a pure function of `WaitFacts`. `keep_waiting`
applies its decisions.

A request waits for chunks only while waiting is expected to be faster than computing them once the
prompts before it are computed. No request waits for a bucket that is known to be slow; its chunks
arrive later and serve other requests. A request loses time only before the first measurement or
when the bucket becomes slow, and at most the compute time of the chunks. Encoder outputs follow
this rule by rows, not chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from s3kv.types import Tally

GAIN = 0.9
"""Largest expected fetch time that is worth a wait, as a fraction of the compute time. The rest is
a margin for error."""

LATE = 1.5
"""Time after which a fetch is late, as a multiple of the expected time. A late fetch is known only
to be slow, and a slow fetch may take as long again."""

PATIENCE_S = 1.0
"""Patience before the first measurement: ten times the first-byte time of a healthy S3."""

PATIENCE_MIN_S = 0.25
"""Shortest patience. Arrivals are noticed only at the end of an engine step; two may run."""

PATIENCE_FETCHES = 2.0
"""Patience in fetch times."""

PATIENCE_COMPUTE = 0.5
"""Patience as a fraction of the time to compute the missing chunks. If the bucket has tail latency,
the slowest of many answers takes much longer than twice the mean. Waiting for it costs less than
computing everything after it."""


class Queue(NamedTuple):
    """Chunks that the engine still has to compute. begun: of the requests in its last step; new: of
    those that it has been given since."""

    begun: float = 0.0
    new: float = 0.0


class Forecast(NamedTuple):
    """Times of the fetches that a request waits for, in seconds. None: not known.

    all_s: expected time from the first request to the last arrival. fetch_s: measured time of one
    of them. alone_s: measured time of a fetch that runs alone. absence_s: time of an answer that a
    chunk is absent. absent_share: fraction of recent lookups whose first unknown chunk was absent.
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
    """Whether `begin` has been called since the last `start_over`."""
    started_s: float = 0.0
    """Time of the first `begin` since then."""
    asked_s: float = 0.0
    """Time at which the request last ordered or joined a fetch."""
    arrived_s: float = 0.0
    """Time of the request's last arrival, or of the start of the wait."""
    lost_s: float = 0.0
    """Seconds of the wait, until `seen_s`, in which the engine could have computed the request."""
    seen_s: float = 0.0
    """Time of the last decision, or of the start of the wait."""
    seen_ahead: float = 0.0
    """`WaitFacts.ahead` at that time."""
    until_s: float = -math.inf
    """Time until which the answer stays "wait", unless `wake` is called earlier."""
    wanted: int = 0
    """Chunks, or rows of encoder outputs, that it might get from the bucket, as last estimated."""

    def begin(self, now_s: float, wanted: int, ahead: float = 0.0) -> None:
        """Start or continue the wait. Only the first call since `start_over` sets the clock."""
        self.wake()
        if not self.is_begun:
            self.started_s = self.arrived_s = self.seen_s = now_s
            self.is_begun, self.lost_s, self.seen_ahead, self.wanted = True, 0.0, ahead, wanted

    def arrived(self, now_s: float) -> None:
        self.arrived_s = now_s
        self.wake()

    def wake(self) -> None:
        """Make a new decision due: a fetch has ended, or other facts have changed."""
        self.until_s = -math.inf

    def start_over(self) -> None:
        """Forget the wait. The next `begin` starts another one."""
        self.is_begun = False


@dataclass(frozen=True, slots=True)
class WaitFacts:
    """Inputs of `decide`. Times are seconds of one monotonic clock; counts are chunks (rows for
    encoder outputs).

    missing: chunks not yet arrived. unproven: missing chunks that the bucket is not known to have,
        if the rule counts them.
    progress_s: last arrival of a chunk, while fetches ordered before these are under way; otherwise
        minus infinity.
    queue: what the engine computes before those of this request.
    compute_s: time to compute one chunk.
    gate: whether waits must pay off (`recompute_gate`); otherwise only `max_wait_s` counts.
    """

    now_s: float
    wait: Wait
    missing: int
    unproven: int
    progress_s: float
    queue: Queue
    compute_s: float
    forecast: Forecast
    max_wait_s: float
    gate: bool

    @property
    def ahead(self) -> float:
        """Chunks computed before those of this request. Requests that have overtaken it since the
        last decision do not count: those begun before can only have become fewer."""
        wait = self.wait
        before = max(0.0, wait.seen_ahead - (self.now_s - wait.seen_s) / self.compute_s)
        return min(self.queue.begun, before) + self.queue.new


def keep_waiting(facts: WaitFacts, counters: Tally, gave_up: Callable[[float], object]) -> bool:
    """Extend the wait to its deadline, or end and count it. Returns whether it continues.
    gave_up: called with the seconds since the last arrival if the end shows that fetches are slow.
    """
    wait, now_s, until_s = facts.wait, facts.now_s, decide(facts)
    wait.lost_s, wait.seen_s, wait.seen_ahead = lost(facts), now_s, facts.ahead
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
    | `all_s` is unknown, or less than `GAIN` of the time to compute what is ahead and what is
      likely there | the first of `started_s` and `max_wait_s`, the time at which all that was
      wanted would be computed if the request had not waited, and the end of patience |
    | what is left of `all_s` since `asked_s` is less than that, and no fetch is late | the first of
      these, and the time at which a fetch is late |
    | otherwise | it does not pay |

    A fetch is late when `LATE` times `all_s` has passed since the last request or arrival (also one
    ordered before). Patience begins with the last arrival, and does not end before what is ahead
    has been computed. It is `PATIENCE_S` until a fetch has been measured, then the largest of
    `PATIENCE_FETCHES` fetch times, `PATIENCE_MIN_S`, and `PATIENCE_COMPUTE` times the time to
    compute the missing chunks (at most `PATIENCE_S`).
    """
    wait, forecast = facts.wait, facts.forecast
    latest_s = wait.started_s + facts.max_wait_s
    if not facts.gate:
        return latest_s
    arrived_s = max(wait.arrived_s, facts.progress_s)
    free_s = facts.now_s + facts.compute_s * facts.ahead
    all_s, worth_s = forecast.all_s, GAIN * facts.compute_s * (facts.ahead + likely(facts))
    if all_s is not None and all_s >= worth_s:
        late_s = max(wait.asked_s, arrived_s) + LATE * all_s
        if facts.now_s >= late_s or wait.asked_s + all_s - facts.now_s >= worth_s:
            return -math.inf
        latest_s = min(latest_s, late_s)
    patience_s = PATIENCE_S
    if forecast.fetch_s is not None:
        for_much_s = min(PATIENCE_S, PATIENCE_COMPUTE * facts.compute_s * facts.missing)
        patience_s = max(PATIENCE_MIN_S, PATIENCE_FETCHES * forecast.fetch_s, for_much_s)
    computed_s = free_s + facts.compute_s * wait.wanted - lost(facts)
    return min(latest_s, computed_s, max(free_s, arrived_s + patience_s))


def lost(facts: WaitFacts) -> float:
    """`Wait.lost_s` as of now. The time to compute what was ahead is not lost; it is known better
    now than at the last decision."""
    wait = facts.wait
    more_s = facts.now_s - wait.seen_s - facts.compute_s * wait.seen_ahead
    return wait.lost_s + max(0.0, more_s)


def likely(facts: WaitFacts) -> float:
    """Expected number of missing chunks that the bucket has; before the first absence, all.

    A prefix is stored from its front. With the recent frequency `absent_share`, none of the
    unproven chunks exists; otherwise every number of them is equally likely at first. Large numbers
    become more likely as time passes, because an absence is answered sooner than a chunk arrives.
    With exponential times of absences, and fetches longer by the measured difference, each further
    absent chunk multiplies the odds by `ratio`.
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
