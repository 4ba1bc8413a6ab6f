"""Watch over requests: gives up on one that moves too slowly.

The owner of the request reports what it waits for and how many bytes have moved; `Watch` calls back
when too few have moved for too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

ASLEEP_S = 0.1
"""Delay of a timer above which this loop counts as not having run (the machine was stopped, or had
no spare core). The peer may not have run either, so its silence means nothing yet: its wait is
extended by the delay, once per wait and by at most the wait itself."""


class Stalled(Exception):
    """Timeout: too little has moved for too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Time limits of a request.

    connect_ms: for a connection, TLS included. first_byte_ms: for the answer to begin, once the
    request has been sent. progress_ms: for the next byte, in either direction.
    min_bytes_per_s: lowest rate of a body. A slower one counts as hanging although it moves: each
    byte extends the limit by 1 / min_bytes_per_s, to at most `progress_ms` from now.
    """

    connect_ms: int
    first_byte_ms: int
    progress_ms: int
    min_bytes_per_s: int


class Watch:
    """The deadline of one request at a time. Belongs to one asyncio loop.

    stalled: called once per wait, with the error. is_draining: called at the end of a wait with its
    length in ms; returns whether the peer takes the request fast enough although no progress was
    reported. If so, the wait starts again.
    """

    def __init__(
        self,
        patience: Patience,
        stalled: Callable[[Stalled], None],
        is_draining: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._patience = patience
        self._stalled, self._is_draining = stalled, is_draining
        self._timer: asyncio.TimerHandle | None = None
        self._wait_ms = 0
        self._give_up_s = 0.0
        self._for_answer = self._overslept = False

    def wait(self, wait_ms: int, *, for_answer: bool = False) -> None:
        """Set the deadline to `wait_ms` from now. for_answer: the request has been sent."""
        self._wait_ms, self._for_answer, self._overslept = wait_ms, for_answer, False
        self._give_up_s = self._loop.time() + wait_ms / 1e3
        self.stop()
        self._look()

    def moved(self, nbytes: int) -> None:
        """Note that bytes of a body have moved."""
        at_most_s = self._loop.time() + self._patience.progress_ms / 1e3
        extended_s = self._give_up_s + nbytes / self._patience.min_bytes_per_s
        self._give_up_s = min(extended_s, at_most_s)

    def stop(self) -> None:
        """Stop watching until the next `wait`."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        left_s = self._give_up_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        elif -left_s > ASLEEP_S and not self._overslept:
            self._overslept = True
            again_s = min(-left_s, self._wait_ms / 1e3)
            self._give_up_s = self._loop.time() + again_s
            self._timer = self._loop.call_later(again_s, self._look)
        elif self._is_draining(self._wait_ms):
            self.wait(self._wait_ms, for_answer=self._for_answer)
        else:
            self._stalled(Stalled(self._why()))

    def _why(self) -> str:
        patience = self._patience
        if self._for_answer:
            return f"got no answer within {patience.first_byte_ms} ms (half of request_timeout_ms)"
        return (
            f"moved fewer than {patience.min_bytes_per_s} bytes a second "
            f"for {patience.progress_ms} ms (request_timeout_ms)"
        )


async def watched(patience: Patience, work: Callable[[Watch], Coroutine[Any, Any, T]]) -> T:
    """Run `work`, a request on a connection that is not ours, or raise `Stalled` if it stalls.
    `work` has ended in every case."""
    given_up: list[Stalled] = []

    def give_up(error: Stalled) -> None:
        given_up.append(error)
        task.cancel()

    watch = Watch(patience, give_up)
    task = asyncio.get_running_loop().create_task(work(watch))
    # The connection may have to be opened first.
    watch.wait(patience.connect_ms + patience.first_byte_ms, for_answer=True)
    try:
        await asyncio.wait([task])
    finally:
        watch.stop()
        task.cancel()
        await asyncio.wait([task])
        has_failed = task.cancelled() or task.exception() is not None
    if given_up and has_failed:
        raise given_up[0]
    return task.result()
