"""A second request for an object whose first is late, and which of the two may write.

Both have the same buffer, so only one may ever write to it: the first whose answer's head has
arrived claims the buffer before a byte of the body is written, and the other is cancelled. Whatever
ends here ends after both have: the buffer is then at rest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from s3kv.objects.store import Claim

T = TypeVar("T")

_SAMPLES = 256
_FEWEST_SAMPLES = 32
"""Before that, nobody knows what is late."""
_QUANTILE = 0.95
_BURST = 8.0


class Lateness:
    """After how long a first byte is late, and how many second requests that has been worth.

    percent: of all requests, how many may have a second one. What a quiet hour did not use is not
    saved up: a store in trouble must not get twice the requests all at once. Pure.
    """

    def __init__(self, percent: float) -> None:
        self.hedges = 0
        self._share = percent / 100
        self._requests = 0
        self._allowance = 0.0
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self._late_s: float | None = None

    def sent(self) -> None:
        """A request is sent, a first one."""
        self._requests += 1
        self._allowance = min(_BURST, self._allowance + self._share)

    def began(self, seconds: float) -> None:
        """A first byte took so long."""
        self._samples.append(seconds)
        if self._late_s is None or self._requests % 16 == 0:
            self._late_s = self._quantile()

    def _quantile(self) -> float | None:
        if len(self._samples) < _FEWEST_SAMPLES:
            return None
        return sorted(self._samples)[int(_QUANTILE * len(self._samples))]

    @property
    def late_s(self) -> float | None:
        """The 95th percentile of the last first bytes; None while too few are known."""
        return self._late_s if self._share > 0 else None

    def take(self) -> bool:
        """Whether one more second request keeps the share; counts it if so."""
        if self._allowance < 1:
            return False
        self._allowance -= 1
        self.hedges += 1
        return True


class _Race:
    """Up to two requests for one buffer. The first to claim it has it, and ends the other."""

    def __init__(self) -> None:
        self.winner: asyncio.Task[Any] | None = None
        self.decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._runners: list[asyncio.Task[Any]] = []
        self._cancelled: set[asyncio.Task[Any]] = set()

    def send(self, request: Callable[[Claim], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        number = len(self._runners)
        runner = asyncio.create_task(request(lambda: self._claim(number)))
        self._runners.append(runner)
        return runner

    def _claim(self, number: int) -> bool:
        runner = self._runners[number]
        if self.winner is None:
            self.winner = runner
            self.decided.set_result(None)
            self._cancel(other for other in self._runners if other is not runner)
        return self.winner is runner

    async def outcome(self) -> Any:
        """The winner's, or without one the first that is no error, or else the last error."""
        while self.winner is None:
            for runner in self._runners:
                if runner.done() and runner.exception() is None:
                    return runner.result()
            running = [runner for runner in self._runners if not runner.done()]
            if not running:
                return self._runners[-1].result()
            news: list[asyncio.Future[Any]] = [*running, self.decided]
            await asyncio.wait(news, return_when=asyncio.FIRST_COMPLETED)
        return await self.winner

    def _cancel(self, runners: Iterable[asyncio.Task[Any]]) -> None:
        for runner in runners:
            if runner not in self._cancelled:
                # Once: a second cancellation would interrupt the tidying up after the first.
                self._cancelled.add(runner)
                runner.cancel()

    async def end(self) -> None:
        self._cancel(self._runners)
        await asyncio.gather(*self._runners, return_exceptions=True)


async def hedged(
    request: Callable[[Claim], Coroutine[Any, Any, T]],
    late_s: float,
    may_hedge: Callable[[], bool],
) -> tuple[T, bool]:
    """The outcome of `request`, sent a second time when its object has not begun to arrive after
    `late_s` and `may_hedge` allows it. The second item tells whether the second one won.

    An error of one counts only when the other cannot succeed any more. However this ends, both
    have ended.
    """
    race = _Race()
    first = race.send(request)
    second: asyncio.Task[T] | None = None
    try:
        begun: list[asyncio.Future[Any]] = [first, race.decided]
        await asyncio.wait(begun, timeout=late_s, return_when=asyncio.FIRST_COMPLETED)
        if not first.done() and race.winner is None and may_hedge():
            second = race.send(request)
        outcome: T = await race.outcome()
        return outcome, second is not None and race.winner is second
    finally:
        await race.end()
