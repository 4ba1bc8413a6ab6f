"""Pacing: limits the requests that run at once, and sends late reads a second time.

Both rules apply to every request to the store, below the retries. Decision 16 has measurements.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from s3kv.errors import StoreThrottled
from s3kv.io.sources.hedging import Claim, Lateness, Unanswered, hedged, now_s

T = TypeVar("T")

HEDGE_PERCENT = 10.0
"""Largest share of fetches that are sent a second time."""


class Window:
    """Request window: the number of requests that the store takes at once.

    It halves when the store answers "slow down", and grows by one per round of other answers, up to
    its limit, full or not: uploads alone never fill it. Requests sent before a cut say nothing
    about the new window, so only the first such answer of an overload cuts. Pure: times are seconds
    of one monotonic clock, passed in. limit: maximum size, and the initial one.
    """

    def __init__(self, limit: int) -> None:
        self.cuts = 0
        self._limit, self._size = limit, float(limit)
        self._cut_s = -math.inf

    @property
    def size(self) -> int:
        """Requests that may run at once; at least 1."""
        return int(self._size)

    @property
    def is_cut(self) -> bool:
        return self.size < self._limit

    def throttled(self, sent_s: float, now_s: float) -> None:
        """Note that a request sent at `sent_s` was answered with "slow down"."""
        if sent_s < self._cut_s:
            return
        self._cut_s = now_s
        self.cuts += self._size > 1
        self._size = max(1.0, self._size / 2)

    def answered(self) -> None:
        """Note an answered request."""
        self._size = min(float(self._limit), self._size + 1 / self._size)


class Pacing:
    """The window and the hedging of one store. Belongs to one asyncio loop."""

    def __init__(self, max_requests: int, hedge_percent: float) -> None:
        self.window = Window(max_requests)
        self.throttled = self.hedges = self.hedges_won = 0
        self._lateness = Lateness(hedge_percent)
        self._unanswered = Unanswered(self._lateness)

    async def send(self, request: Callable[[], Awaitable[T]]) -> T:
        """Send a request. Its answer may change the window."""
        sent_s = now_s()
        try:
            answer = await request()
            self.window.answered()
        except StoreThrottled:
            self.throttled += 1
            self.window.throttled(sent_s, now_s())
            raise
        return answer

    async def read(self, get: Callable[[Claim], Awaitable[T]], *, until_s: float = math.inf) -> T:
        """Send a read, and a second one if the first is late before `until_s` on the loop's clock.
        get: sends a read, and calls its claim before it writes."""
        self._lateness.sent()
        late = self._unanswered.sent()
        loop = asyncio.get_running_loop()

        async def timed(claim: Claim) -> T:
            sent_s = now_s()

            def began() -> None:
                self._lateness.began(now_s() - sent_s)
                self._unanswered.answered(late)

            def begin() -> bool:  # in the thread that serves the connection
                loop.call_soon_threadsafe(began)
                return claim()

            return await self.send(lambda: get(begin))

        try:
            answer, won = await hedged(timed, late, partial(self._may_hedge, until_s))
        finally:
            self._unanswered.answered(late)
        self.hedges_won += won
        return answer

    def _may_hedge(self, until_s: float) -> bool:
        allowed = now_s() < until_s and not self.window.is_cut and self._lateness.take()
        self.hedges += allowed
        return allowed
