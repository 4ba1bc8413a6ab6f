"""Measured speeds of fetching and computing, and the rule for how long a request waits.

Every wait has a deadline. A request waits for its missing chunks only while

1. fetching them is expected to take at most `GAIN` of the time to compute those that the bucket is
   expected to have; a fetch that is late (`LATE`) counts as one that has just begun,
2. it has waited less than the time to compute all chunks it wanted when the wait began,
3. its last arrival is recent: within twice the expected time of a fetch, or within half of the
   time to compute what is missing, if that is more, but not than `PATIENCE_S`; while no fetch has
   been measured, within `PATIENCE_S`, and
4. it has waited less than `max_wait_s`.

So no request waits for a bucket that is known to be slow; its chunks arrive later and serve others.
A request loses time only before the first measurement, or when the bucket becomes slow, and at most
the time to compute the chunks. A wait whose time ran out is a measurement, too: a fetch is then
expected to take twice as long as that wait, and longer after each further one, until one arrives.
So is an answer that a chunk is not there: no fetch is expected to take less time.

Where one chunk is missing, those before it may be, too, because a prefix is stored from its front.
Any length up to the missing chunk is taken to be as likely as any other. A long one becomes more
likely as time passes, because an answer that a chunk is not there comes sooner than a chunk does.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from s3kv.planning.states import IdentityEnum, Transitions

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
"""Patience in expected fetch times."""

PATIENCE_COMPUTE = 0.5
"""Patience as a share of the time to compute what is missing. The slowest of many answers of a
bucket with a tail takes much longer than twice the mean. To wait for it costs less than to compute
all that comes after it."""

_SMOOTHING = 0.2
"""Weight of a new fetch in the estimate."""

_SETTLING_TOKENS = 4_096.0
"""Prefilled tokens after which an older step weighs a third as much."""

_MIN_PREFILL_SAMPLE_TOKENS = 64
"""Steps with fewer tokens are decode-bound and say nothing about prefill."""

PREFILL_TOKENS_PER_S = 8_000.0
"""Speed of prefill before the first measured step, which replaces it: it decides for the first
requests of an engine alone."""

_MAX_STEPS_INFLIGHT = 8
"""More steps than any engine keeps in flight; a step that never reports is forgotten."""


class FetchTime:
    """Estimate of a fetch's time: a latency, plus a time per unit `n` of the load on the network
    (fetches under way, or bytes up to the end of the fetch).

    It is the least-squares line through the recent fetches; older ones weigh less. If one
    connection is the limit, only the latency shows; on a full network, only the time per unit.
    Until a fetch arrives, waits whose time ran out are a lower bound, and so are absences: answers
    that something is not there.
    """

    def __init__(self) -> None:
        self.absence_s: float | None = None
        """Mean time of an absence; None before the first."""
        self._count = self._absences = 0
        self._n = self._seconds = self._variance = self._covariance = 0.0
        self._at_least_s = 0.0

    def add(self, n: float, seconds: float) -> None:
        """Note a fetch that took `seconds`."""
        self._at_least_s = 0.0
        self._count += 1
        weight = max(_SMOOTHING, 1 / self._count)
        more_n, more_s = n - self._n, seconds - self._seconds
        self._n += weight * more_n
        self._seconds += weight * more_s
        self._variance = (1 - weight) * (self._variance + weight * more_n * more_n)
        self._covariance = (1 - weight) * (self._covariance + weight * more_n * more_s)

    def absent(self, seconds: float) -> None:
        """Note an absence that took `seconds`."""
        self._absences += 1
        weight = max(_SMOOTHING, 1 / self._absences)
        self.absence_s = weight * seconds + (1 - weight) * (self.absence_s or 0.0)

    def gave_up(self, waited_s: float) -> None:
        """Note a wait that ran out after `waited_s`. Each further one doubles the estimate."""
        self._at_least_s = 2 * max(self._at_least_s, waited_s)

    def measured(self, n: float) -> float | None:
        """Seconds according to the fetches that arrived; None before the first."""
        if not self._count:
            return None
        slope = self._covariance / self._variance if self._variance > 0 else 0.0
        # Load never makes a fetch faster, and no time is negative.
        slope = min(max(slope, 0.0), self._seconds / self._n)
        return self._seconds + slope * (n - self._n)

    def at(self, n: float) -> float | None:
        """Expected seconds; None before the first measurement."""
        measured_s = self.measured(n)
        if measured_s is None:
            return max(self._at_least_s, self.absence_s or 0.0) or None
        return max(measured_s, self._at_least_s)

    def patience_s(self, n: float) -> float:
        """Longest time to wait without an arrival, in seconds."""
        measured_s = self.measured(n)
        if measured_s is None:
            return PATIENCE_S
        return max(PATIENCE_MIN_S, PATIENCE_FETCHES * measured_s)


class Pace:
    """Speeds of one engine. Times are seconds of one monotonic clock, passed in.

    fetches_at_once: fetches the I/O process sends at once; the others queue there.
    prefill_tokens_per_s: assumed until a step has been measured.
    """

    def __init__(
        self, *, fetches_at_once: int, prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S
    ) -> None:
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self._squared_tokens = self._token_seconds = 0.0
        self._fetches_at_once = fetches_at_once
        self.fetch = FetchTime()
        """Of a chunk, by the fetches under way beside it."""
        self._steps: deque[tuple[int, float, int]] = deque(maxlen=_MAX_STEPS_INFLIGHT)
        """Those that are measured: number, start in seconds, tokens."""
        self._step_number = 0
        self._step_ended_s = -math.inf

    def fetched(self, seconds: float, *, began_with: int, ended_with: int) -> None:
        """Note a chunk that arrived `seconds` after its request was sent.

        began_with, ended_with: fetches under way at its start and end, this one included.
        """
        self.fetch.add(self._concurrency(began_with, ended_with), seconds)

    def gave_up(self, waited_s: float, chunks: int) -> None:
        """Note a wait whose time ran out after `waited_s`; the last of `chunks` had not arrived."""
        self.fetch.gave_up(waited_s / max(1.0, chunks / self._fetches_at_once))

    def _concurrency(self, began_with: int, ended_with: int) -> float:
        most = self._fetches_at_once
        return (min(began_with, most) + min(ended_with, most)) / 2

    def step_started(self, now_s: float, scheduled_tokens: int) -> int | None:
        """Note the start of a step. Returns its number; None for a step that is not measured."""
        if scheduled_tokens < _MIN_PREFILL_SAMPLE_TOKENS:
            return None
        self._step_number += 1
        self._steps.append((self._step_number, now_s, scheduled_tokens))
        return self._step_number

    def step_ended(self, now_s: float, number: int | None) -> None:
        """Note the end of a step. Not every step has to be told of: engines leave out those that
        compute nothing.

        number: from `step_started`; None if the step is not measured.
        """
        last_ended_s, self._step_ended_s = self._step_ended_s, now_s
        while number is not None and self._steps and self._steps[0][0] <= number:
            oldest, started_s, tokens = self._steps.popleft()
            # Steps may be planned ahead, but they run one after another.
            seconds = now_s - max(started_s, last_ended_s)
            if oldest == number and seconds > 0:
                self._prefilled(tokens, seconds)

    def _prefilled(self, tokens: int, seconds: float) -> None:
        # The least-squares line through the origin. A step of 1,600 tokens counts 256 times as much
        # as one of 100, which says little about long prompts.
        kept = math.exp(-tokens / _SETTLING_TOKENS)
        self._squared_tokens = kept * self._squared_tokens + tokens * tokens
        self._token_seconds = kept * self._token_seconds + tokens * seconds
        self.prefill_tokens_per_s = self._squared_tokens / self._token_seconds

    def compute_s(self, tokens: float) -> float:
        """Expected time to prefill `tokens`."""
        return tokens / self.prefill_tokens_per_s

    def fetch_s(self, chunks: int, rounds: int) -> float | None:
        """Expected time until the last of `chunks` has arrived; None before the first measurement.

        rounds: number of times that an answer must arrive before more chunks can be requested.
        """
        full_s = self.fetch.at(self._concurrency(chunks, 1))
        alone_s = self.fetch.at(1)
        if full_s is None or alone_s is None:
            return None
        return full_s * max(1.0, chunks / self._fetches_at_once) + rounds * alone_s

    def likely(self, chunks: int, waited_s: float) -> float:
        """Expected number of `chunks` that the bucket has, where it does not have the next one and
        has answered for none of them after `waited_s`.

        With the time of an absence exponential, and that of a fetch as much longer as fetches are
        measured to be, the odds of each absence more are `ratio`.
        """
        absence_s = self.fetch.absence_s
        if not chunks or not absence_s:
            return chunks
        longer_s = max(0.0, (self.fetch.measured(1) or 0.0) - absence_s)
        ratio = math.exp(-min(waited_s, longer_s) / absence_s)
        odds = [ratio**absent for absent in range(chunks + 1)]
        return sum((chunks - absent) * share for absent, share in enumerate(odds)) / sum(odds)

    def patience_s(self, chunks: int) -> float:
        """Longest time to wait without an arrival while `chunks` are on their way."""
        return self.fetch.patience_s(self._concurrency(chunks, 1))


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
    arrival_s: float = 0.0
    """Time of the last arrival for it, or of the start of the wait."""
    until_s: float = -math.inf
    """The end of its sleep; in the past unless it is ASLEEP."""
    wanted: int = 0
    """What it might get from the bucket, as of `started_s`: chunks, or rows of encoder outputs."""

    def begin(self, now_s: float, wanted: int) -> None:
        """Tell the engine to wait. Only the first call since `start_over` sets the clock."""
        if self.state is _IDLE:
            self.started_s = self.arrival_s = now_s
            self.wanted = wanted
        self._step(WaitEvent.BEGIN)

    def asked(self, now_s: float) -> None:
        self.asked_s = now_s

    def arrived(self, now_s: float) -> None:
        self.arrival_s = now_s
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

    def limit_s(
        self,
        now_s: float,
        *,
        expected_s: float | None,
        patience_s: float,
        likely_compute_s: float,
        missing_compute_s: float,
        wanted_compute_s: float,
        max_wait_s: float,
        gate: bool,
    ) -> float:
        """Time until which it may last if nothing new happens. A time not after now means: stop,
        and -inf that it is no longer expected to pay.

        expected_s: time from `asked_s` until everything missing has arrived; None if unknown.
        patience_s: longest time without an arrival, if little is missing.
        likely_compute_s: time to compute what of it the bucket is expected to have.
        missing_compute_s: time to compute what is missing.
        wanted_compute_s: time to compute all that was `wanted`.
        gate: whether the first three conditions of the rule apply.
        """
        hard_s = self.started_s + max_wait_s
        if not gate:
            return hard_s
        worth_s = GAIN * likely_compute_s
        if expected_s is not None and expected_s >= worth_s:
            late_s = max(self.asked_s, self.arrival_s) + LATE * expected_s
            if now_s >= late_s or self.asked_s + expected_s - now_s >= worth_s:
                return -math.inf
            hard_s = min(hard_s, late_s)
        patience_s = max(patience_s, min(PATIENCE_S, PATIENCE_COMPUTE * missing_compute_s))
        return min(hard_s, self.started_s + wanted_compute_s, self.arrival_s + patience_s)

    def _step(self, event: WaitEvent) -> None:
        self.state = WAIT_TRANSITIONS.after(self.state, event)
