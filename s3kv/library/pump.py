"""Pump: drives an I/O process from a caller's asyncio loop, and handles cancelled calls.

An engine's step loop drives the connectors; here a timer does. It checks every millisecond which
jobs have ended; without jobs, it checks every second whether the process lives.

A call runs in its caller's task. A cancelled call ends at once if it waits for an object, for a
copy shared by several callers, or for room. It never ends while a thread reads or writes memory
that the caller has lent or gets back: see `carried`. A result that arrives after its call has ended
is given back: see `claimed`. Timers and callbacks handle a slot when its job or copy ends, so the
end of a task cannot stop them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from s3kv.errors import ClosedError
from s3kv.host.placement import FIRST_TOUCH, NodeChoice
from s3kv.io.tier import Tier, open_tier
from s3kv.io.wire import Handshake
from s3kv.messages import BucketJob, JobEnd, JobKind

logger = logging.getLogger("s3kv")

_POLL_S, _IDLE_S = 0.001, 1.0

T = TypeVar("T")


def in_thread(work: Callable[[], T], threads: Executor | None = None) -> asyncio.Future[T]:
    """Start `work` in one of `threads`, or in a new thread; the caller may block all of the loop's.
    Returns the future of its result; await it with `carried`."""
    return asyncio.get_running_loop().run_in_executor(threads or ThreadPoolExecutor(1), work)


async def carried(work: asyncio.Future[T]) -> T:
    """Await `work` to its end and return its result. If cancelled meanwhile, however often, this
    raises `CancelledError` only after `work` has ended, and logs an error of `work`."""
    cancelled: tuple[Any, ...] | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error.args
    if cancelled is None:
        return work.result()
    if not work.cancelled() and (failure := work.exception()) is not None:
        logger.warning("s3kv: in a call that was cancelled: %s", failure)
    raise asyncio.CancelledError(*cancelled)


async def claimed(coming: asyncio.Future[T | None], unclaimed: Callable[[T], object]) -> T | None:
    """Await `coming`, which must not be cancelled, and return its result. If cancelled meanwhile,
    this raises `CancelledError` at once, and calls `unclaimed` with the result when it arrives,
    unless that is None."""

    def give_back(coming: asyncio.Future[T | None]) -> None:
        if coming.exception() is None and (result := coming.result()) is not None:
            unclaimed(result)

    try:
        await asyncio.wait([coming])
    except asyncio.CancelledError:
        coming.add_done_callback(give_back)
        raise
    return coming.result()


def succeeded(work: asyncio.Future[Any]) -> bool:
    """Whether `work` has ended without an error and was not cancelled."""
    return work.done() and not work.cancelled() and work.exception() is None


async def opened(handshake: Handshake, nbytes: int, node: NodeChoice = FIRST_TOUCH) -> Tier:
    """Open a tier as `open_tier` does, in a thread. If cancelled meanwhile, this raises
    `CancelledError` after the tier has been closed."""
    opening = in_thread(partial(open_tier, nbytes, handshake, node=node))
    try:
        return await carried(opening)
    except asyncio.CancelledError:
        if succeeded(opening):
            opening.result().close()
        raise


class Pump:
    """Gives jobs to the client of `tier`, and polls it. Call all methods on the loop's thread.

    on_done: called with the end of every job. is_busy: called before each poll, and may order more
    jobs; after False, the next poll is a second later, or after `wake`. `close` closes the tier.
    """

    def __init__(
        self, tier: Tier, on_done: Callable[[JobEnd], None], is_busy: Callable[[], bool]
    ) -> None:
        self._client = tier.client
        self._slab = tier.slab
        self._drain_timeout_s = tier.handshake.config.drain_timeout_s
        self._on_done = on_done
        self._is_busy = is_busy
        self._fetches: set[int] = set()
        self._underway: set[asyncio.Future[Any]] = set()
        self._users: list[Callable[[], object]] = []
        self._closing: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._next_look: asyncio.TimerHandle | None = None
        self._look_later(_IDLE_S)
        self.copy_threads = ThreadPoolExecutor(thread_name_prefix="s3kv-library")

    @property
    def is_closing(self) -> bool:
        return self._closing is not None

    def check_open(self) -> None:
        """Raise `ClosedError` once `close` has been called, and `RuntimeError` in another loop: no
        timer would wake a call there."""
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("the store is for the loop that opened it: open one for each loop")
        if self.is_closing:
            raise ClosedError("the store is closed: open another one")

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a call in its caller's task; `close` waits for its end."""
        ended = self.start(asyncio.get_running_loop().create_future())
        try:
            return await work
        finally:
            ended.set_result(None)

    def start(self, work: asyncio.Future[T]) -> asyncio.Future[T]:
        """Make `close` wait for `work`, and return it."""
        self._underway.add(work)
        work.add_done_callback(self._underway.discard)
        return work

    def submit(self, job: BucketJob) -> None:
        """Submit a job as `IoClient.submit` does, and send it at once."""
        if job.kind is JobKind.FETCH:
            self._fetches.add(job.job_id)
        self._client.submit(job)
        self.wake()

    def wake(self) -> None:
        """Send the jobs given to the client, and start to poll."""
        self._client.flush()
        if self._next_look is None or self._next_look.when() > self._loop.time() + _POLL_S:
            self._look_later(_POLL_S)

    def announce(self) -> None:
        """Wake all callers of `next_end`: a job or copy has ended."""
        self._ended.set()
        self._ended.clear()

    async def next_end(self) -> None:
        """Wait for the next `announce`."""
        await self._ended.wait()

    def before_slab(self, close: Callable[[], object]) -> None:
        """Make the pump's `close` call this `close`, in a thread, before it closes the slab."""
        self._users.append(close)

    async def close(self, drain_timeout_s: float | None = None) -> None:
        """Cancel fetches, wait for calls, allow uploads `drain_timeout_s` seconds (default: the
        setting), and release everything. Raises `RuntimeError` in another loop, if ours is open.

        Idempotent. Every call, even a cancelled one, ends only when all of this is done.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop and not (self._closing and succeeded(self._closing)):
            self._move(loop)
        if self._closing is None:
            patience_s = self._drain_timeout_s if drain_timeout_s is None else drain_timeout_s
            self._closing = loop.create_task(self._close(patience_s))
            for job_id in self._fetches:
                self._client.cancel(job_id)
            self._client.flush()
            self.announce()
        await carried(self._closing)

    def _move(self, loop: asyncio.AbstractEventLoop) -> None:
        """Move to `loop`, without the calls of ours, which is closed: they never end."""
        if not self._loop.is_closed():
            raise RuntimeError("close the store in the loop that opened it, or that loop first")
        self._loop, self._closing = loop, None
        self._underway, self._ended = set(), asyncio.Event()

    async def _close(self, drain_timeout_s: float) -> None:
        try:
            while self._underway:
                await asyncio.wait(self._underway)
            self._stop_polling()
            await carried(in_thread(partial(self._client.drain, drain_timeout_s)))
            self._take_ends()
        finally:
            self._stop_polling()
            await carried(in_thread(self._give_back))

    def _stop_polling(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None

    def _give_back(self) -> None:
        with ExitStack() as stack:  # in reverse order, and all of them even if one raises
            stack.callback(self._slab.close)
            for close in self._users:
                stack.callback(close)
            stack.callback(self._client.close)
            stack.callback(self.copy_threads.shutdown)

    def _look_later(self, pause_s: float) -> None:
        self._stop_polling()
        self._next_look = self._loop.call_later(pause_s, self._look)

    def _look(self) -> None:
        self._next_look = None
        is_busy = self._is_busy()
        if self._next_look is None:  # `_is_busy` may have ordered a job, and so woken the pump
            self._look_later(_POLL_S if is_busy else _IDLE_S)
        self._take_ends()

    def _take_ends(self) -> None:
        for done in self._client.poll():
            self._fetches.discard(done.job_id)
            self._on_done(done)
