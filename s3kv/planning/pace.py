"""How fast fetching and computing are, and whether waiting for the bucket still pays.

The rule (a deadline on every wait): a request waits for its missing chunks only while

1. all it may yet get from the bucket is expected to arrive in `GAIN` of the time in which the
   engine computes it,
2. it has not waited as long as computing everything it hoped for would have taken,
3. something has arrived for it lately: within twice the time a fetch is expected to take, or
   `PATIENCE_S` while that is not known, and
4. it has not waited `max_wait_s`.

A bucket that is known to be slow is therefore not waited for at all; what was asked of it arrives
later and serves others. Only while nothing is known, and when it turns slow, does a request lose
time: at most as much as computing takes. Giving up is a measurement too: a fetch is taken to last
twice as long as was waited in vain, and longer with every further attempt, until one arrives.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

GAIN = 0.9
"""What an expectation may err by before waiting for it costs time."""

PATIENCE_S = 1.0
"""Ten times the first byte of a healthy S3."""

PATIENCE_MIN_S = 0.25
"""What arrives is heard of at the end of an engine step only, and two steps may be under way."""

PATIENCE_FETCHES = 2.0
"""What comes later is not worth the wait: others were expected to come before it."""

_SMOOTHING = 0.2
"""Weight of a new fetch; a request's first window is eight of them."""

_SETTLING_TOKENS = 4_096.0
"""Prefilled tokens that make up two thirds of the estimate: one large step, or a few small."""

_MIN_PREFILL_SAMPLE_TOKENS = 64
"""Steps with fewer tokens are decode-bound and say nothing about prefill."""

_MAX_STEPS_INFLIGHT = 8
"""More than any engine keeps in flight; a step that never reports is forgotten."""


class FetchTime:
    """How long a fetch takes: a latency, and a share for each unit `n` of what it shares the way
    with (fetches under way, or bytes ahead of its end).

    The line through the recent fetches by least squares, old ones weighing less and less. With one
    connection at its limit only the latency shows, on a full network only the share. Beside it what
    was waited for in vain says how long a fetch takes at least, until one arrives.
    """

    __slots__ = ("_at_least_s", "_count", "_covariance", "_n", "_seconds", "_variance")

    def __init__(self) -> None:
        self._count = 0
        self._n = self._seconds = self._variance = self._covariance = 0.0
        self._at_least_s = 0.0

    def add(self, n: float, seconds: float) -> None:
        """A fetch took so long."""
        self._at_least_s = 0.0
        self._count += 1
        weight = max(_SMOOTHING, 1 / self._count)
        more_n, more_s = n - self._n, seconds - self._seconds
        self._n += weight * more_n
        self._seconds += weight * more_s
        self._variance = (1 - weight) * (self._variance + weight * more_n * more_n)
        self._covariance = (1 - weight) * (self._covariance + weight * more_n * more_s)

    def gave_up(self, waited_s: float) -> None:
        """A fetch had not come after so long. Every further one doubles what is expected."""
        self._at_least_s = 2 * max(self._at_least_s, waited_s)

    def measured(self, n: float) -> float | None:
        """Seconds, as those took that arrived; None before the first."""
        if not self._count:
            return None
        slope = self._covariance / self._variance if self._variance > 0 else 0.0
        # More at once never make one faster, and none takes less than nothing.
        slope = min(max(slope, 0.0), self._seconds / self._n)
        return self._seconds + slope * (n - self._n)

    def at(self, n: float) -> float | None:
        """Seconds, expected; None while nothing is known."""
        measured_s = self.measured(n)
        if measured_s is None:
            return self._at_least_s or None
        return max(measured_s, self._at_least_s)

    def patience_s(self, n: float) -> float:
        """How long to go on when nothing comes."""
        measured_s = self.measured(n)
        if measured_s is None:
            return PATIENCE_S
        return max(PATIENCE_MIN_S, PATIENCE_FETCHES * measured_s)


@dataclass(frozen=True, slots=True)
class PaceStatistics:
    fetch_s: float | None
    """One fetch alone."""
    fetch_full_s: float | None
    """One of as many as are sent at once."""
    prefill_tokens_per_s: float


class Pace:
    """Measured speeds. Times are seconds of one monotonic clock, passed in.

    fetches_at_once: how many the I/O process sends at once; the others queue there.
    """

    __slots__ = (
        "_fetch",
        "_fetches_at_once",
        "_prefill_measured",
        "_prefill_tokens_per_s",
        "_step_ended_s",
        "_steps",
    )

    def __init__(self, *, prefill_tokens_per_s: float, fetches_at_once: int) -> None:
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._prefill_measured = False
        self._fetches_at_once = fetches_at_once
        self._fetch = FetchTime()
        self._steps: deque[tuple[float, int]] = deque(maxlen=_MAX_STEPS_INFLIGHT)
        self._step_ended_s = -math.inf

    def fetched(self, seconds: float, *, began_with: int, ended_with: int) -> None:
        """A chunk arrived, `seconds` after its request was sent.

        began_with, ended_with: fetches under way then, this one included.
        """
        self._fetch.add(self._concurrency(began_with, ended_with), seconds)

    def gave_up(self, waited_s: float, chunks: int) -> None:
        """Of `chunks` on their way the last had not come after so long."""
        self._fetch.gave_up(waited_s / max(1.0, chunks / self._fetches_at_once))

    def _concurrency(self, began_with: int, ended_with: int) -> float:
        most = self._fetches_at_once
        return (min(began_with, most) + min(ended_with, most)) / 2

    def step_started(self, now_s: float, scheduled_tokens: int) -> None:
        self._steps.append((now_s, scheduled_tokens))

    def step_ended(self, now_s: float) -> None:
        if not self._steps:
            return
        started_s, tokens = self._steps.popleft()
        # Steps may be planned ahead, but they are carried out one after the other.
        started_s, self._step_ended_s = max(started_s, self._step_ended_s), now_s
        if tokens >= _MIN_PREFILL_SAMPLE_TOKENS and now_s > started_s:
            self._prefilled(tokens, tokens / (now_s - started_s))

    def _prefilled(self, tokens: int, tokens_per_s: float) -> None:
        # What was assumed before the first measurement does not count any more after it.
        weight = 1 - math.exp(-tokens / _SETTLING_TOKENS) if self._prefill_measured else 1.0
        self._prefill_tokens_per_s += weight * (tokens_per_s - self._prefill_tokens_per_s)
        self._prefill_measured = True

    def compute_s(self, tokens: int) -> float:
        """Expected time to prefill `tokens`."""
        return tokens / self._prefill_tokens_per_s

    def fetch_s(self, chunks: int, rounds: int) -> float | None:
        """Expected time until the last of `chunks` has arrived; None while nothing is known.

        rounds: how often the answer has to be awaited before more of them can be asked for.
        """
        full_s = self._fetch.at(self._concurrency(chunks, 1))
        alone_s = self._fetch.at(1)
        if full_s is None or alone_s is None:
            return None
        return full_s * max(1.0, chunks / self._fetches_at_once) + rounds * alone_s

    def patience_s(self, chunks: int) -> float:
        """How long nothing may come of `chunks` on their way."""
        return self._fetch.patience_s(self._concurrency(chunks, 1))

    def statistics(self) -> PaceStatistics:
        return PaceStatistics(
            self._fetch.measured(1),
            self._fetch.measured(self._fetches_at_once),
            self._prefill_tokens_per_s,
        )


def wait_until_s(
    *,
    now_s: float,
    started_s: float,
    asked_s: float,
    arrival_s: float,
    expected_s: float | None,
    patience_s: float,
    missing_compute_s: float,
    wanted_compute_s: float,
    max_wait_s: float,
    gate: bool,
) -> float:
    """Until when a request may wait if nothing new happens; a time not after now means: stop.

    started_s, asked_s, arrival_s: when the wait began, when it last asked for something, and when
        something last arrived for it.
    expected_s: from `asked_s` until all it may yet get has arrived; None while nothing is known.
    patience_s: how long nothing may arrive.
    missing_compute_s: what the engine needs to compute what it may yet get.
    wanted_compute_s: the same for all it might get from the bucket, as of `started_s`.
    gate: whether the first three points of the rule count.
    """
    hard_s = started_s + max_wait_s
    if not gate:
        return hard_s
    if expected_s is not None and expected_s - (now_s - asked_s) >= GAIN * missing_compute_s:
        return -math.inf
    return min(hard_s, started_s + wanted_compute_s, arrival_s + patience_s)
