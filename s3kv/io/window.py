"""How many requests the store takes at once: additive increase, multiplicative decrease.

It grows by one per round of answers while it is full, and shrinks when the store says that it is
too much (`throttled`: by half) or shows it (first bytes take several times as long as they did:
by a quarter, and never below a quarter of the most, because a slow answer has other causes, too).
Requests that were sent before a cut say nothing about the window after it, so of one overload
only the first answer cuts. Pure: times are seconds of one monotonic clock, passed in.
"""

from __future__ import annotations

import math

_THROTTLED = 0.5
_SLOW = 0.75
_SLOW_FACTOR = 4.0
_SLOW_AT_LEAST_S = 0.1
"""Latency below this is never congestion worth slowing down for."""
_SMOOTHING = 0.2
_FORGETTING = 1.002
"""The best latency is forgotten by as much with every answer, twice in 350: a store that has become
slower for good is not overloaded for ever."""


class Window:
    """limit: requests at once, at most. It starts there."""

    def __init__(self, limit: int) -> None:
        self.cuts = 0
        self._limit = limit
        self._size = float(limit)
        self._cut_s = -math.inf
        self._latency_s: float | None = None
        self._best_s = math.inf

    @property
    def size(self) -> int:
        """At least 1."""
        return int(self._size)

    @property
    def is_cut(self) -> bool:
        return self.size < self._limit

    def throttled(self, sent_s: float, now_s: float) -> None:
        """A request sent at `sent_s` was answered with "slow down"."""
        self._cut(_THROTTLED, 1.0, sent_s, now_s)

    def answered(self, *, running: int) -> None:
        """A request was answered; so many run, it included."""
        if running >= self.size:
            self._size = min(float(self._limit), self._size + 1 / self._size)

    def began(self, sent_s: float, now_s: float) -> None:
        """The first byte of an object has come."""
        sample_s = now_s - sent_s
        old_s = sample_s if self._latency_s is None else self._latency_s
        self._latency_s = old_s + _SMOOTHING * (sample_s - old_s)
        self._best_s = min(self._best_s * _FORGETTING, self._latency_s)
        if self._latency_s > max(_SLOW_AT_LEAST_S, _SLOW_FACTOR * self._best_s):
            self._cut(_SLOW, self._limit / 4, sent_s, now_s)

    def _cut(self, factor: float, at_least: float, sent_s: float, now_s: float) -> None:
        if sent_s < self._cut_s:
            return
        self._cut_s = now_s
        smaller = max(1.0, at_least, self._size * factor)
        if smaller < self._size:
            self._size = smaller
            self.cuts += 1
