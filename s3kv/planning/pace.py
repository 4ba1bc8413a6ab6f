"""Measured speeds of fetching and computing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from s3kv.planning.deadline import Forecast, Queue
from s3kv.types import Outcome

_BUCKET = "bucket"
"""Name of the bucket as a source, also assumed for an end without a source."""

_SMOOTHING = 0.2
"""Weight of a new fetch in the estimate."""

_SETTLING_TOKENS = 4_096.0
"""Prefilled tokens after which an older step weighs a third as much."""

MIN_PREFILL_SAMPLE_TOKENS = 64
"""Steps with fewer tokens are decode-bound and say nothing about prefill."""

PREFILL_TOKENS_PER_S = 8_000.0
"""Prefill speed assumed before the first measured step, which replaces it. It matters only for the
first requests of an engine."""

_MAX_STEPS_INFLIGHT = 8
"""More steps than any engine keeps in flight; a step that never reports is forgotten."""


class _TimeByLoad:
    """Least-squares line through the recent fetches from one source; older ones weigh less."""

    def __init__(self) -> None:
        self._count = 0
        self._n = self._seconds = self._variance = self._covariance = 0.0

    def add(self, n: float, seconds: float) -> None:
        self._count += 1
        weight = max(_SMOOTHING, 1 / self._count)
        more_n, more_s = n - self._n, seconds - self._seconds
        self._n += weight * more_n
        self._seconds += weight * more_s
        self._variance = (1 - weight) * (self._variance + weight * more_n * more_n)
        self._covariance = (1 - weight) * (self._covariance + weight * more_n * more_s)

    def at(self, n: float) -> float:
        slope = self._covariance / self._variance if self._variance > 0 else 0.0
        # Load never makes a fetch faster, and no time is negative.
        slope = min(max(slope, 0.0), self._seconds / self._n)
        return self._seconds + slope * (n - self._n)


class FetchTime:
    """Estimate of a fetch's time: a latency, plus a time per unit `n` of the load on the network
    (fetches under way, or bytes up to the end of the fetch).

    Each source (`JobEnd.source`) has its own line, so a fast source does not make the bucket look
    fast, and the bucket does not make the source look slow. If one connection is the limit, the
    line shows only the latency; on a full network, only the time per unit. The bucket is expected
    to answer, because it has the most; before its first answer, the last source that answered.

    Until a fetch arrives, waits that timed out are a lower bound, and so are absences: answers that
    an object is absent. Both cover all sources together: a fetch that has not arrived has no source
    yet, and an absence is the answer of all sources.
    """

    def __init__(self) -> None:
        self.absence_s: float | None = None
        """Mean time of an absence; None before the first."""
        self.absent_share = 0.0
        """Share of the recent lookups whose first unknown chunk was not there."""
        self._absences = 0
        self._at_least_s = 0.0
        self._lines: dict[str, _TimeByLoad] = {}
        self._expected: _TimeByLoad | None = None

    def add(self, n: float, seconds: float, source: str = _BUCKET) -> None:
        """Note a fetch that took `seconds`."""
        self._at_least_s = 0.0
        line = self._lines.setdefault(source or _BUCKET, _TimeByLoad())
        line.add(n, seconds)
        self._expected = self._lines.get(_BUCKET, line)

    def ended(self, outcome: Outcome, n: float, seconds: float, source: str = "") -> None:
        """Record the end of a fetch; a failed one is ignored."""
        if outcome.is_success:
            self.add(n, seconds, source)
        elif outcome is Outcome.MISSING:
            self._absences += 1
            weight = max(_SMOOTHING, 1 / self._absences)
            self.absence_s = weight * seconds + (1 - weight) * (self.absence_s or 0.0)

    def probed(self, *, found: bool) -> None:
        """Note the answer for the first unknown chunk of a lookup."""
        self.absent_share += _SMOOTHING * ((not found) - self.absent_share)

    def gave_up(self, waited_s: float) -> None:
        """Note a wait that ran out after `waited_s`. Each further one doubles the estimate."""
        self._at_least_s = 2 * max(self._at_least_s, waited_s)

    def measured(self, n: float) -> float | None:
        """Seconds according to the fetches that arrived; None before the first."""
        return None if self._expected is None else self._expected.at(n)

    def at(self, n: float) -> float | None:
        """Expected seconds; None before the first measurement."""
        measured_s = self.measured(n)
        if measured_s is None:
            return max(self._at_least_s, self.absence_s or 0.0) or None
        return max(measured_s, self._at_least_s)


class FetchPace:
    """Times of fetches, separate for those that ask the bucket and those that end without it
    (`near`). A request that awaits only near fetches does not wait for the bucket."""

    def __init__(self) -> None:
        self.fetch, self.near = FetchTime(), FetchTime()
        self.near_share = 0.0
        """Share of the recent hits that did not need the bucket."""

    def of(self, *, near: bool) -> FetchTime:
        return self.near if near else self.fetch


class Pace(FetchPace):
    """Speeds of one engine. Times are seconds of one monotonic clock, passed in. The time of a
    chunk's fetch depends on the number of concurrent fetches.

    fetches_at_once: fetches the I/O process sends at once; the others queue there.
    prefill_tokens_per_s: assumed until a step has been measured.
    """

    def __init__(
        self, *, fetches_at_once: int, prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S
    ) -> None:
        super().__init__()
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self._squared_tokens = self._token_seconds = 0.0
        self._fetches_at_once = fetches_at_once
        self._steps: deque[tuple[int, float, int]] = deque(maxlen=_MAX_STEPS_INFLIGHT)
        """Measured steps: number, start in seconds, tokens."""
        self._step_number = 0
        self._is_idle = False  # whether the last step had nothing to compute
        self._step_ended_s = -math.inf
        self._begun_tokens = self._begun_s = 0.0  # of the requests in the last step
        self.new_tokens = 0.0
        """Tokens that the engine has been given to compute since the last step started."""

    def fetched(
        self,
        outcome: Outcome,
        seconds: float,
        began_with: int,
        ended_with: int,
        source: str = "",
        *,
        near: bool = False,
    ) -> None:
        """Note the end of a chunk's fetch, `seconds` after its request was sent.

        began_with, ended_with: fetches under way at its start and end, this one included. near:
        whether it ended without the bucket.
        """
        load = self._concurrency(began_with, ended_with)
        self.of(near=near).ended(outcome, load, seconds, source)
        if outcome.is_success:
            self.near_share += _SMOOTHING * (near - self.near_share)

    def gave_up(self, waited_s: float, chunks: int, *, near: bool = False) -> None:
        """Record a wait that timed out after `waited_s` without the last of `chunks`."""
        self.of(near=near).gave_up(waited_s / max(1.0, chunks / self._fetches_at_once))

    def _concurrency(self, began_with: int, ended_with: int) -> float:
        most = self._fetches_at_once
        return (min(began_with, most) + min(ended_with, most)) / 2

    def step_started(
        self, now_s: float, scheduled_tokens: int, left_tokens: float = 0
    ) -> int | None:
        """Note the start of a step. Returns its number; None for a step that is not measured.
        left_tokens: tokens of its requests that later steps compute."""
        self._is_idle = scheduled_tokens == 0
        self._begun_tokens, self._begun_s = scheduled_tokens + left_tokens, now_s
        self.new_tokens = 0.0
        if scheduled_tokens < MIN_PREFILL_SAMPLE_TOKENS:
            return None
        self._step_number += 1
        self._steps.append((self._step_number, now_s, scheduled_tokens))
        return self._step_number

    def step_ended(self, now_s: float, number: int | None) -> None:
        """Record the end of a step. Engines do not report steps that compute nothing.

        number: from `step_started`; None if the step is not measured.
        """
        last_ended_s, self._step_ended_s = self._step_ended_s, now_s
        while number is not None and self._steps and self._steps[0][0] <= number:
            oldest, started_s, tokens = self._steps.popleft()
            # Steps may be planned ahead, but they run one after another.
            seconds = now_s - max(started_s, last_ended_s)
            if oldest == number and seconds > 0:
                self.prefilled(tokens, seconds)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Note that prefill of `tokens` took `seconds`."""
        # The least-squares line through the origin. A step of 1,600 tokens counts 256 times as much
        # as one of 100, which says little about long prompts.
        kept = math.exp(-tokens / _SETTLING_TOKENS)
        self._squared_tokens = kept * self._squared_tokens + tokens * tokens
        self._token_seconds = kept * self._token_seconds + tokens * seconds
        self.prefill_tokens_per_s = self._squared_tokens / self._token_seconds

    def compute_s(self, tokens: float) -> float:
        """Expected time to prefill `tokens`."""
        return tokens / self.prefill_tokens_per_s

    def queue(self, now_s: float, chunks_per_token: float) -> Queue:
        """The engine's queue as expected now."""
        done_tokens = (now_s - self._begun_s) * self.prefill_tokens_per_s
        begun_tokens = max(0.0, self._begun_tokens - done_tokens)
        return Queue(chunks_per_token * begun_tokens, chunks_per_token * self.new_tokens)

    def forecast(self, chunks: int, rounds: int, *, near: bool = False) -> Forecast:
        """Forecast of the fetches until the last of `chunks` has arrived.

        rounds: number of times that an answer must arrive before more chunks can be requested.
        near: whether none of the awaited fetches asks the bucket.
        """
        fetch, load = self.of(near=near), self._concurrency(chunks, 1)
        all_s = self._expected(FetchTime.at, load, near=near)
        alone_s = self._expected(FetchTime.at, 1, near=near)
        if all_s is not None and alone_s is not None:
            all_s = all_s * max(1.0, chunks / self._fetches_at_once) + rounds * alone_s
        # While other requests run, a wait costs the engine nothing, and a hit saves it work.
        absent_share = fetch.absent_share if self._is_idle else 0.0
        fetch_s = self._expected(FetchTime.measured, load, near=near)
        measured_s = self._expected(FetchTime.measured, 1, near=near)
        return Forecast(all_s, fetch_s, measured_s, fetch.absence_s, absent_share)

    def _expected(
        self, time: Callable[[FetchTime, float], float | None], load: float, *, near: bool
    ) -> float | None:
        """Seconds of a fetch: bucket and this host's sources, weighted by shares of recent hits."""
        there = time(self.of(near=near), load)
        if near or not self.near_share or (here := time(self.near, load)) is None:
            return there
        return here if there is None else there - self.near_share * max(0.0, there - here)
