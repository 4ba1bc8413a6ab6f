"""The jobs of one worker inside its I/O process: messages in, tasks run, messages out.

A job is a task, and its `Done` is sent from the task's done-callback: once, whatever became of
the task, and only when the task can touch the slab no more.

    received ──place free──▶ running ──ended──▶ Done(outcome of the transfer)
        │                       └────Cancel───▶ (cancelled, still unwinding) ──▶ Done(CANCELLED)
        └──────Cancel─────────▶ Done(CANCELLED)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Callable
from functools import partial

from s3kv.errors import StoreDenied, StoreError, StoreMissing, StoreUnavailable
from s3kv.host.slab import Slab
from s3kv.io import wire
from s3kv.io.hedging import Lateness
from s3kv.io.jobs import Direction, Job, JobQueue
from s3kv.io.manifest import introduce
from s3kv.io.pacing import PacedStore
from s3kv.io.refreshing import Refresher, RefreshRule
from s3kv.io.transfers import End, Transfers
from s3kv.io.window import Window
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.costs import nanodollars, prices_of
from s3kv.objects.items import ItemFormat
from s3kv.objects.keys import Namespace
from s3kv.objects.sessions import zone_of
from s3kv.objects.store import ObjectStore
from s3kv.types import ChunkKey, Outcome

_log = logging.getLogger("s3kv.io")

_CLOSE_TIMEOUT_S = 1.0
_UNWIND_TIMEOUT_S = 2.0
"""For cancelled jobs to end. The process's own end stops what is left after it."""
_INTRODUCTION_PAUSE_S = 60.0
_TROUBLE: dict[type[StoreError], wire.Trouble] = {
    StoreDenied: "denied",
    StoreMissing: "missing",
    StoreUnavailable: "unavailable",
}


class Service:
    """Runs the jobs of one worker. All methods are called on the loop.

    send: takes each message for the worker, in order. hang_up: ends the process.
    """

    def __init__(
        self,
        hello: wire.Hello,
        slab: Slab,
        store: ObjectStore,
        send: Callable[[wire.Up], None],
        hang_up: Callable[[], None],
        rng: random.Random,
    ) -> None:
        config = hello.config
        self._config = config
        self._slab = slab
        self._store = store
        self._send = send
        self._hang_up = hang_up
        self._namespace = Namespace(hello.namespace_prefix, hello.namespace_digest)
        self._shard = hello.shard
        self._item_dtype = hello.item_dtype
        self._integrity = hello.integrity
        self._formats = {
            group: ChunkFormat(hello.namespace_digest, tensors, group, hello.shard, hello.integrity)
            for group, tensors in hello.groups.items()
        }
        self._queue = JobQueue(config.max_inflight_requests, config.max_inflight_bytes)
        self._window = Window(config.max_inflight_requests)
        self._lateness = Lateness(config.hedge_percent)
        self._paced = PacedStore(store, self._window, self._lateness, self._queue)
        self._refresher = self._make_refresher(rng)
        self._transfers = Transfers(
            self._paced,
            config.max_attempts,
            rng,
            delete_corrupt=config.on_corrupt == "delete",
            refresher=self._refresher,
        )
        self._tasks: dict[int, asyncio.Task[End]] = {}
        self._cancelled: set[int] = set()
        self._defects = 0
        self._manifest = hello.manifest
        self._introducing: asyncio.Task[None] | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._started = False
        self._drain_left: int | None = None
        self._drained = asyncio.Event()

    def _make_refresher(self, rng: random.Random) -> Refresher | None:
        refresh_after_s = self._config.refresh_after_s
        if refresh_after_s == 0:
            return None
        if zone_of(self._config.bucket) is not None:
            _log.warning(
                "refresh_after_s has no effect: objects in a directory bucket are not refreshed"
            )
            return None
        rule = RefreshRule(refresh_after_s, rng)
        return Refresher(self._store, rule, lambda: self._queue.has_spare)

    def start(self) -> None:
        """Try the bucket, then say `Ready` and begin with the jobs received meanwhile."""
        self._starting = asyncio.get_running_loop().create_task(self._try_bucket())
        self._starting.add_done_callback(self._bucket_tried)

    def _bucket_tried(self, task: asyncio.Task[tuple[wire.Trouble | None, str]]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            trouble, message = task.result()
        else:
            _log.error("trying the bucket: %r", error, exc_info=error)
            trouble, message = "defect", repr(error)
        serving = trouble is None or (error is None and self._config.on_unavailable == "serve")
        self._send(wire.Ready(serving, trouble, message))
        if not serving:
            self._hang_up()
            return
        self._started = True
        self._start_jobs()
        if self._refresher is not None:
            self._refreshing = asyncio.get_running_loop().create_task(self._refresher.run())
            self._refreshing.add_done_callback(partial(self._background_ended, "refreshing"))
        if self._manifest:
            self._introducing = asyncio.get_running_loop().create_task(self._introduce())
            self._introducing.add_done_callback(
                partial(self._background_ended, "the manifest of the namespace")
            )

    async def _introduce(self) -> None:
        """Say which namespace this is, as soon as the bucket answers; where objects are refreshed,
        see to it that the manifest does not expire before them."""
        told = False
        while True:
            try:
                said = await self._transfers.attempts(
                    lambda: introduce(self._store, self._namespace, self._manifest)
                )
            except StoreUnavailable:
                await asyncio.sleep(_INTRODUCTION_PAUSE_S)
            except StoreError as error:
                _log.warning("the manifest of the namespace cannot be looked at: %s", error)
                return
            else:
                if not told:
                    _log.info("%s", said)
                if self._refresher is None:
                    return
                told = True
                self._refresher.exists(self._namespace.manifest)
                await asyncio.sleep(self._config.refresh_after_s)

    def _background_ended(self, what: str, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._defects += 1
            _log.error("%s: %r", what, error, exc_info=error)

    async def _try_bucket(self) -> tuple[wire.Trouble | None, str]:
        timeout_s = self._config.start_timeout_ms / 1000
        try:
            await asyncio.wait_for(self._transfers.attempts(self._store.check), timeout_s)
        except asyncio.TimeoutError:
            return "unavailable", (
                f"bucket {self._config.bucket!r} gave no answer within start_timeout_ms "
                f"({self._config.start_timeout_ms}): look at endpoint_url and the network"
            )
        except StoreError as error:
            return _TROUBLE.get(type(error), "unavailable"), str(error)
        return None, ""

    def receive(self, message: wire.Down) -> None:
        """Act on one message. Raises `WireError` for one that must not come now."""
        match message:
            case wire.Fetch():
                self._accept(message, Direction.FETCH)
            case wire.Upload():
                self._accept(message, Direction.UPLOAD)
            case wire.Cancel():
                self._cancel(message.job_id)
            case wire.Withdraw():
                self._withdraw(message.job_id)
            case wire.Ping():
                self._send(self._statistics())
            case wire.Drain():
                self._drain(message.timeout_s)
            case wire.Hello():
                raise wire.WireError("a second Hello")

    def _accept(self, message: wire.Fetch | wire.Upload, direction: Direction) -> None:
        if message.job_id in self._queue:
            raise wire.WireError(f"job {message.job_id} is not done yet and was sent again")
        if self._drain_left is not None:
            self._say_done(message.job_id, End(Outcome.CANCELLED, 0, "shutting down"), 0.0)
            return
        job = self._job(message, direction)
        if isinstance(job, str):
            self._say_done(message.job_id, End(Outcome.FAILED, 0, job), 0.0)
            return
        self._queue.add(job)
        self._start_jobs()

    def _job(self, message: wire.Fetch | wire.Upload, direction: Direction) -> Job | str:
        """The job a message asks for, or what is wrong with it."""
        layout = self._format_of(message)
        if layout is None:
            return f"group {message.group} is none of {sorted(self._formats)}"
        end = message.offset + layout.object_bytes
        if not 0 <= message.offset < end <= self._slab.nbytes:
            return f"bytes {message.offset} to {end} are outside the slab"
        try:
            key = self._namespace.chunk(ChunkKey(message.group, message.block_hash), self._shard)
        except ValueError as error:
            return str(error)
        buffer = self._slab.view[message.offset : end]
        due_s = self._due_s(message, direction)
        return Job(message.job_id, direction, key, message.block_hash, layout, buffer, due_s)

    def _due_s(self, message: wire.Fetch | wire.Upload, direction: Direction) -> float:
        """Fetches are waited for so long at most. The planner of chunks tries an upload again by
        itself, seconds later, when it is of more use; the planner of items never does."""
        if direction is Direction.UPLOAD and message.item is None:
            return -math.inf
        return asyncio.get_running_loop().time() + self._config.max_wait_ms / 1000

    def _format_of(self, message: wire.Fetch | wire.Upload) -> ChunkFormat | ItemFormat | None:
        if message.item is None or self._item_dtype is None:
            return self._formats.get(message.group)
        return ItemFormat(self._namespace.digest, self._item_dtype, message.item, self._integrity)

    def _start_jobs(self) -> None:
        self._queue.limit_requests(self._window.size)
        while self._started and (job := self._queue.take()) is not None:
            task = asyncio.get_running_loop().create_task(self._transfers.run(job))
            self._tasks[job.job_id] = task
            task.add_done_callback(partial(self._job_ended, job, time.monotonic()))

    def _job_ended(self, job: Job, started_s: float, task: asyncio.Task[End]) -> None:
        del self._tasks[job.job_id]
        self._cancelled.discard(job.job_id)
        self._queue.end(job)
        self._say_done(job.job_id, self._end_of(job, task), time.monotonic() - started_s)
        self._start_jobs()
        self._look_whether_drained()

    def _end_of(self, job: Job, task: asyncio.Task[End]) -> End:
        if task.cancelled():
            return End(Outcome.CANCELLED, 0, "cancelled")
        error = task.exception()
        if error is None:
            return task.result()
        # A defect of ours or of a library in one job must not take the others with it.
        self._defects += 1
        _log.error("%s of %s: %r", job.direction.value, job.key, error, exc_info=error)
        return End(Outcome.FAILED, 0, repr(error))

    def _say_done(self, job_id: int, end: End, seconds: float) -> None:
        detail = end.detail[: wire.MAX_DETAIL_CHARS]
        self._send(wire.Done(job_id, end.outcome, end.nbytes, seconds, detail, end.reason))

    def _withdraw(self, job_id: int) -> bool:
        """End a job that has not begun. False when there is none."""
        if self._queue.withdraw(job_id) is None:
            return False
        self._say_done(job_id, End(Outcome.CANCELLED, 0, "cancelled before it began"), 0.0)
        return True

    def _cancel(self, job_id: int) -> None:
        begun = not self._withdraw(job_id) and job_id in self._tasks
        if begun and job_id not in self._cancelled:
            # Once: a second cancellation would interrupt the tidying up after the first.
            self._cancelled.add(job_id)
            self._tasks[job_id].cancel()

    def _drain(self, timeout_s: float) -> None:
        self._drain_left = 0
        self._queue.in_hurry = True
        if self._refreshing is not None:
            self._refreshing.cancel()
        for job_id in self._queue.ids(Direction.FETCH):
            self._cancel(job_id)
        loop = asyncio.get_running_loop()
        self._transfers.drain_until_s = loop.time() + timeout_s
        loop.call_later(timeout_s, self._give_up_uploads)
        self._start_jobs()
        self._look_whether_drained()

    def _give_up_uploads(self) -> None:
        given_up = self._queue.ids(Direction.UPLOAD)
        self._drain_left = len(given_up)
        for job_id in given_up:
            self._cancel(job_id)
        self._look_whether_drained()

    def _look_whether_drained(self) -> None:
        idle = not self._queue.running and not self._queue.waiting
        if self._drain_left is not None and idle and not self._drained.is_set():
            self._drained.set()
            self._send(wire.Drained(self._drain_left))

    def _statistics(self) -> wire.Stats:
        traffic = self._store.traffic
        return wire.Stats(
            self._queue.waiting,
            self._queue.running,
            self._queue.running_bytes,
            self._transfers.retries,
            self._paced.throttled,
            self._window.size,
            self._window.cuts,
            self._lateness.hedges,
            self._paced.hedges_won,
            *self._refreshes(),
            self._defects,
            time.process_time(),
            dict(traffic.requests),
            nanodollars(prices_of(self._config, traffic), traffic),
        )

    def _refreshes(self) -> tuple[int, int, int]:
        told = self._refresher
        return (0, 0, 0) if told is None else (told.done, told.failed, told.skipped)

    async def finish(self) -> None:
        """Let a drain have its time, end every task, and close the store."""
        if self._drain_left is not None:
            await self._drained.wait()
        self._started = False
        for job_id in tuple(self._tasks):
            self._cancel(job_id)
        tasks = (self._starting, self._introducing, self._refreshing)
        background = [task for task in tasks if task is not None]
        for task in background:
            task.cancel()
        await asyncio.wait([*background, *self._tasks.values()], timeout=_UNWIND_TIMEOUT_S)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._store.close(), _CLOSE_TIMEOUT_S)
