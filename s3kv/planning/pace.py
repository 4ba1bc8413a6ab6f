"""How fast fetching and computing are, and whether waiting for the bucket still pays.

The rule (a deadline on every wait): a request waits for its missing chunks only while

1. they are expected to arrive sooner than the engine would compute them,
2. it has not waited as long as computing everything it hoped for would have taken,
3. something has arrived within the last `PATIENCE_S`, and
4. it has not waited `max_wait_s`.

So a request is at most about twice as late as without a cache, and never more than a second late
for a bucket that does not answer at all. Giving up is a measurement too: the requests after it do
not wait, until something has arrived again.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

PATIENCE_S = 1.0
"""Ten times the slowest first byte of a healthy S3."""

_SMOOTHING = 0.3
"""Weight of a new sample of the fetch speed: three or four settle a change."""

_SETTLING_TOKENS = 4_096.0
"""Prefilled tokens that make up two thirds of the estimate: one large step, or a few small."""

_MIN_PREFILL_SAMPLE_TOKENS = 64
"""Steps with fewer tokens are decode-bound and say nothing about prefill."""


_MAX_STEPS_INFLIGHT = 8
"""More than any engine keeps in flight; a step that never reports is forgotten."""


@dataclass(frozen=True, slots=True)
class PaceStatistics:
    fetch_chunks_per_s: float | None
    prefill_tokens_per_s: float


class Pace:
    """Measured speeds. Times are seconds of one monotonic clock, passed in."""

    __slots__ = (
        "_busy_chunks",
        "_busy_since_s",
        "_chunks_per_s",
        "_prefill_measured",
        "_prefill_tokens_per_s",
        "_step_ended_s",
        "_steps",
    )

    def __init__(self, *, prefill_tokens_per_s: float) -> None:
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._prefill_measured = False
        self._chunks_per_s: float | None = None
        self._busy_since_s: float | None = None
        self._busy_chunks = 0
        self._steps: deque[tuple[float, int]] = deque(maxlen=_MAX_STEPS_INFLIGHT)
        self._step_ended_s = -math.inf

    def fetch_started(self, now_s: float) -> None:
        if self._busy_since_s is None:
            self._busy_since_s = now_s
            self._busy_chunks = 0

    def fetch_ended(self, now_s: float, *, arrived: bool, still_inflight: int) -> None:
        """A fetch ended; only arrived chunks count towards the speed."""
        if self._busy_since_s is not None and arrived:
            self._busy_chunks += 1
            elapsed_s = now_s - self._busy_since_s
            if elapsed_s > 0:
                self._chunks_per_s = _smooth(self._chunks_per_s, self._busy_chunks / elapsed_s)
        if still_inflight == 0:
            self._busy_since_s = None

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

    def gave_up(self, now_s: float) -> None:
        """A request has stopped waiting: what came in the time it waited is the speed."""
        if self._busy_since_s is not None and now_s > self._busy_since_s:
            sample = self._busy_chunks / (now_s - self._busy_since_s)
            self._chunks_per_s = _smooth(self._chunks_per_s, sample)

    def compute_s(self, tokens: int) -> float:
        """Expected time to prefill `tokens`."""
        return tokens / self._prefill_tokens_per_s

    def fetch_s(self, chunks: int) -> float | None:
        """Expected time until that many chunks have arrived; None before the first arrival."""
        if self._chunks_per_s is None:
            return None
        return chunks / self._chunks_per_s if self._chunks_per_s else math.inf

    def statistics(self) -> PaceStatistics:
        return PaceStatistics(self._chunks_per_s, self._prefill_tokens_per_s)


def _smooth(old: float | None, sample: float) -> float:
    return sample if old is None else old + _SMOOTHING * (sample - old)


def wait_until_s(
    pace: Pace,
    *,
    now_s: float,
    started_s: float,
    arrival_s: float,
    wanted_tokens: int,
    missing_tokens: int,
    chunks_ahead: int,
    max_wait_s: float,
    gate: bool,
) -> float:
    """Until when a request may wait if nothing new happens; a time not after `now_s` means: stop.

    started_s, arrival_s: when the wait began, and when something last arrived for it.
    wanted_tokens: all the request may yet get from the bucket, as of `started_s`.
    missing_tokens: those it has asked for and that have not arrived.
    chunks_ahead: chunks on their way, for anybody, that will arrive no later than its last one.
    """
    hard_s = started_s + max_wait_s
    if not gate:
        return hard_s
    expected_s = pace.fetch_s(chunks_ahead)
    if expected_s is not None and expected_s >= pace.compute_s(missing_tokens):
        return -math.inf
    return min(hard_s, started_s + pace.compute_s(wanted_tokens), arrival_s + PATIENCE_S)
