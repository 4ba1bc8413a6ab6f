"""How fast fetching and computing are, and whether waiting for the bucket still pays.

The rule (deadline on every wait): a request waits for its missing chunks only while they are
expected to arrive sooner than the engine would compute them, and never longer in all than
computing everything it asked for would have taken, nor than `max_wait_s`. So however slow the
bucket is, a request is at most about twice as late as without a cache, and usually the first
measured chunk already tells.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

_SMOOTHING = 0.3
"""Weight of a new sample: three or four samples settle a change of speed."""

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
        "_prefill_tokens_per_s",
        "_step_ended_s",
        "_steps",
    )

    def __init__(self, *, prefill_tokens_per_s: float) -> None:
        self._prefill_tokens_per_s = prefill_tokens_per_s
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
            sample = tokens / (now_s - started_s)
            self._prefill_tokens_per_s = _smooth(self._prefill_tokens_per_s, sample)

    def compute_s(self, tokens: int) -> float:
        """Expected time to prefill `tokens`."""
        return tokens / self._prefill_tokens_per_s

    def fetch_s(self, chunks: int) -> float | None:
        """Expected time until that many chunks have arrived; None before the first arrival."""
        if self._chunks_per_s is None:
            return None
        return chunks / self._chunks_per_s

    def statistics(self) -> PaceStatistics:
        return PaceStatistics(self._chunks_per_s, self._prefill_tokens_per_s)


def _smooth(old: float | None, sample: float) -> float:
    return sample if old is None else old + _SMOOTHING * (sample - old)


def wait_until_s(
    pace: Pace,
    *,
    now_s: float,
    started_s: float,
    asked_tokens: int,
    missing_tokens: int,
    chunks_ahead: int,
    max_wait_s: float,
    gate: bool,
) -> float:
    """Until when a request may wait if nothing new happens; a time not after `now_s` means: stop.

    asked_tokens: all the request has asked the bucket for since `started_s`.
    missing_tokens: those of them that have not arrived.
    chunks_ahead: chunks on their way, for anybody, that will arrive no later than its last one.
    """
    hard_s = started_s + max_wait_s
    if not gate:
        return hard_s
    expected_s = pace.fetch_s(chunks_ahead)
    if expected_s is not None and expected_s >= pace.compute_s(missing_tokens):
        return -math.inf
    return min(hard_s, started_s + pace.compute_s(asked_tokens))
