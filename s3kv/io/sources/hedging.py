"""Hedging: a late read is sent a second time. Decision 16 has measurements."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from s3kv.place import Place
from s3kv.stores.lanes import ended

T = TypeVar("T")

Claim = Callable[[], bool]
"""Claim of a read to its place. Called once, in the receiving thread, when the object is about to
arrive and before its first byte is written; does not block. False: another read has the place, so
this one must not write, and its result or error is meaningless."""


class Arrival:
    """A `Receiver` that lands if its claim is granted.

    land: the memory for the requested bytes, given the length of the whole object. arrived: called
    as `Receiver.arrived`. Both are called in the thread that receives, and only after the claim has
    been granted.
    """

    def __init__(
        self,
        claim: Claim,
        land: Callable[[int], Place | None],
        arrived: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._claim, self._land, self.arrived = claim, land, arrived

    def begin(self, nbytes: int) -> Place | None:
        return self._land(nbytes) if self._claim() else None


_SAMPLES = 256
_FEWEST_SAMPLES = 32
_QUANTILE, _FACTOR = 0.95, 1.5
"""A read is late after 1.5 times the 95th percentile of first-byte times. At the percentile itself,
half of the second requests would be needless, and use up the budget."""
_FIRST_LATE_S = _FACTOR * 0.2
"""The threshold until there are enough samples: AWS names 100 to 200 ms for first bytes ("Best
practices design patterns: optimizing Amazon S3 performance"). Without it, the first prefix of an
engine would wait for its slowest read."""
_LAST = 2
"""Number of reads without a first byte up to which they count as the last ones. A prefix waits only
for them, so they are late earlier."""
_LAST_FACTOR = 3.0
"""The last reads are late after three times the median, if that is earlier."""
_FIRST_LAST_LATE_S = 0.1
"""Their threshold until there are enough samples: the lower figure that AWS names."""
_BURST = 8.0


class Lateness:
    """Hedging thresholds (from recent first-byte times) and budget. Pure.

    percent: share of all reads that may have a second request; 0: none may. The budget starts with
    8 requests and never accumulates more: a store in trouble must not suddenly get twice the
    requests.
    """

    def __init__(self, percent: float) -> None:
        self._late_s, self._last_late_s = _FIRST_LATE_S, _FIRST_LAST_LATE_S
        self._share = percent / 100
        self._begun = 0
        self._budget = _BURST if percent > 0 else 0.0
        self._samples: deque[float] = deque(maxlen=_SAMPLES)

    def sent(self) -> None:
        """Count a read."""
        self._budget = min(_BURST, self._budget + self._share)

    def began(self, seconds: float) -> None:
        """Note the time of a first byte."""
        self._samples.append(seconds)
        self._begun += 1
        known = len(self._samples)
        if known == _FEWEST_SAMPLES or (known > _FEWEST_SAMPLES and self._begun % 16 == 0):
            ordered = sorted(self._samples)
            self._late_s = _FACTOR * ordered[int(_QUANTILE * known)]
            self._last_late_s = min(self._late_s, _LAST_FACTOR * ordered[known // 2])

    def late_s(self, unanswered: int) -> float:
        """Time after which a read is late, while `unanswered` reads have no first byte."""
        return self._last_late_s if unanswered <= _LAST else self._late_s

    def take(self) -> bool:
        """Spend budget on a second request. Returns False if there is none left."""
        if self._budget < 1:
            return False
        self._budget -= 1
        return True


class Unanswered:
    """Reads without a first byte. Notifies each once, when it is late. Used on one asyncio loop."""

    def __init__(self, lateness: Lateness) -> None:
        self._lateness = lateness
        self._sent_s: dict[asyncio.Future[None], float] = {}
        """Times at which they were sent, oldest first, by the future that is done once late."""
        self._timer: asyncio.TimerHandle | None = None

    def sent(self) -> asyncio.Future[None]:
        """Note a read that is sent now. Returns the future that is done once it is late."""
        read: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sent_s[read] = now_s()
        if self._timer is None:
            self._look()
        return read

    def answered(self, read: asyncio.Future[None]) -> None:
        """Note a read's first byte, or its end. Idempotent."""
        if self._sent_s.pop(read, None) is not None and len(self._sent_s) <= _LAST:
            self._look()

    def _look(self) -> None:
        """Notify the reads that are late, and schedule the next check for when another is."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        late_s = self._lateness.late_s(len(self._sent_s))
        for read, sent_s in self._sent_s.items():
            if read.done():
                continue
            if now_s() < sent_s + late_s:
                self._timer = asyncio.get_running_loop().call_at(sent_s + late_s, self._look)
                return
            read.set_result(None)


async def hedged(
    request: Callable[[Claim], Coroutine[Any, Any, T]],
    late: asyncio.Future[None],
    may_hedge: Callable[[], bool],
) -> tuple[T, bool]:
    """Run `request`, and a second one if the object has not begun to arrive when `late` is done
    and `may_hedge` allows it. Returns the outcome and whether the second request produced it.

    Both requests share one place. The first to receive the head of its answer claims it before any
    byte of the body is written; the other is then cancelled, to free the network. One request's
    error counts only if the other can no longer succeed.
    Both have ended when this returns, raises or is cancelled, so nothing writes to the place then.
    """
    loop = asyncio.get_running_loop()
    # Numbers of the requests that called their claim, in order; the first has the place. The
    # threads that serve the connections append to it.
    claims: list[int] = []
    claimed: asyncio.Future[None] = loop.create_future()
    requests: list[asyncio.Task[T]] = []
    cancelled: set[asyncio.Task[T]] = set()

    def cancel(tasks: Iterable[asyncio.Task[T]]) -> None:
        for task in set(tasks) - cancelled:  # a second time would interrupt its cleanup
            cancelled.add(task)
            task.cancel()

    def send() -> None:
        number = len(requests)

        def settle() -> None:
            claimed.set_result(None)
            cancel(requests[:number] + requests[number + 1 :])

        def claim() -> bool:
            claims.append(number)
            is_first = claims[0] == number
            if is_first:
                loop.call_soon_threadsafe(settle)
            return is_first

        requests.append(loop.create_task(request(claim)))

    send()
    try:
        await _first_of(*requests, claimed, late)
        if not requests[0].done() and not claims and may_hedge():
            send()
        winner = await _winner_of(requests, claims, claimed)
        return winner.result(), bool(claims) and winner is not requests[0]
    finally:
        cancel(requests)
        await ended(requests)


async def _winner_of(
    requests: list[asyncio.Task[T]], claims: Sequence[int], claimed: asyncio.Future[None]
) -> asyncio.Task[T]:
    """Wait for the request that decides the outcome, and return it: the one that claimed the
    place, else the first that succeeded without it, else the last one sent."""
    while not claims:
        running = [task for task in requests if not task.done()]
        for task in requests:
            if task.done() and task.exception() is None:
                return task
        if not running:
            return requests[-1]
        await _first_of(*running, claimed)
    winner = requests[claims[0]]
    await _first_of(winner)
    return winner


async def _first_of(*awaited: asyncio.Future[Any]) -> None:
    await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)


def now_s() -> float:
    """Now, on the running loop's clock."""
    return asyncio.get_running_loop().time()
