"""Service of one worker in its I/O process: receives messages, runs jobs, sends messages.

Each job is a task. The task's done-callback sends its `JobEnd`: exactly once, however the task
ended, and only when the task can no longer touch the slab.

    received ──place free──▶ running ──ended──▶ JobEnd(outcome of the transfer)
        │                       └────Cancel───▶ (cancelled, still unwinding) ──▶ JobEnd(CANCELLED)
        └──────Cancel─────────▶ JobEnd(CANCELLED)
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

from s3kv.config import MAX_INFLIGHT_BYTES
from s3kv.errors import StoreError
from s3kv.host.slab import Slab
from s3kv.io import wire
from s3kv.io.formats import Formats
from s3kv.io.server.jobs import JobQueue
from s3kv.io.sources.bucket import BucketSource
from s3kv.io.sources.chain import chain_of
from s3kv.io.sources.compressing import Compressor
from s3kv.io.sources.disk import DiskSource, Workers
from s3kv.io.sources.reception import Decoder
from s3kv.io.sources.transfer_job import TransferJob
from s3kv.messages import BucketJob, JobEnd, JobKind
from s3kv.objects.keys import Namespace
from s3kv.place import Place
from s3kv.stores.disk import Directory
from s3kv.stores.store import ObjectStore
from s3kv.types import Outcome, once_a_minute
from s3kv.upkeep.housekeeping import Housekeeping
from s3kv.upkeep.registration import Registration

_log = logging.getLogger("s3kv.io")

_CLOSE_TIMEOUT_S = 1.0
_UNWIND_TIMEOUT_S = 2.0
"""Time for cancelled jobs to end. The process then exits, which stops the rest."""


class Service:
    """Runs the jobs of one worker. All methods are called on the loop.

    send: takes each message for the worker, in order. hang_up: ends the process. disk: the
    directory of `disk_path`, and the threads that read and write it. compressor: None: objects are
    uploaded plain, and compressed ones are misses.
    """

    def __init__(
        self,
        handshake: wire.Handshake,
        slab: Slab,
        store: ObjectStore,
        send: Callable[[wire.Up], None],
        hang_up: Callable[[], None],
        rng: random.Random,
        disk: tuple[Directory, Workers] | None = None,
        compressor: Compressor | None = None,
    ) -> None:
        config = handshake.config
        self._handshake, self._slab, self._store = handshake, slab, store
        self._send, self._hang_up = send, hang_up
        self._namespace = Namespace(handshake.namespace_prefix, handshake.namespace_digest)
        self._formats = Formats(handshake, slab.nbytes)
        limits = config.max_inflight_requests, MAX_INFLIGHT_BYTES
        # A slow or throttling bucket must not delay hits of the disk.
        self._near = JobQueue(*limits)
        self._queue = JobQueue(*limits, before=self._near)
        registration = Registration(self._namespace, handshake.manifest, handshake.shapes)
        self._housekeeping = Housekeeping(
            store, config, registration, lambda: self._queue.has_spare, rng
        )
        self._refresher = self._housekeeping.refresher
        borrow = partial(self._queue.borrowed, self._start_jobs)
        loop = asyncio.get_running_loop()
        self._compressor = compressor or Compressor("off", Decoder(loop.time))
        self._bucket = BucketSource(store, config, self._refresher, borrow, rng, self._compressor)
        keeps_uploads = config.disk_writes == "all"
        self._disk = disk and DiskSource(*disk, self._refresher, keeps_uploads=keeps_uploads)
        self._chain = chain_of(handshake, store, self._bucket, borrow, self._disk)
        self._tasks: dict[int, asyncio.Task[JobEnd]] = {}
        self._cancelled: set[int] = set()
        self._defects = 0
        self._may_log = once_a_minute(loop.time)
        self._started = False
        self._drain_left: int | None = None
        self._drained = asyncio.Event()

    def start(self) -> None:
        """Try the bucket, then send `Ready` and start the jobs received meanwhile."""
        self._starting = asyncio.get_running_loop().create_task(self._try_bucket())
        self._starting.add_done_callback(self._bucket_tried)

    def _bucket_tried(self, task: asyncio.Task[wire.Ready]) -> None:
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            _log.error("trying the bucket: %r", error, exc_info=error)
        ready = task.result() if error is None else wire.Ready(False, "defect", repr(error))
        self._send(ready)
        if not ready.serving:
            self._hang_up()
            return
        self._started = True
        self._start_jobs()
        self._housekeeping.start()
        if self._disk is not None:
            self._disk.start()

    async def _try_bucket(self) -> wire.Ready:
        config = self._handshake.config
        trouble: wire.Trouble
        try:
            checked = self._bucket.attempts(lambda: self._store.check(self._namespace.root))
            known = await asyncio.wait_for(checked, wire.START_TIMEOUT_S)
        except asyncio.TimeoutError:
            trouble = "unavailable"
            message = (
                f"bucket {config.bucket!r} gave no answer within "
                f"{wire.START_TIMEOUT_S:g} s: check endpoint_url and the network"
            )
        except StoreError as error:
            trouble, message = wire.TROUBLES.get(type(error), "unavailable"), str(error)
        else:
            return wire.Ready(True, None, "", known)
        return wire.Ready(config.on_unavailable == "serve", trouble, wire.truncated(message))

    def receive(self, message: wire.Down) -> None:
        """Act on one message. Raises `WireError` for a message that is not allowed now."""
        match message:
            case BucketJob():
                self._accept(message)
            case wire.Cancel():
                self._cancel(message.job_id, if_waiting=message.if_waiting)
            case wire.Ping():
                self._send(self._statistics())
            case wire.Drain():
                self._drain(message.timeout_s)
            case wire.Handshake():
                raise wire.WireError("a second Handshake")

    def _accept(self, message: BucketJob) -> None:
        if message.job_id in self._queue or message.job_id in self._near:
            raise wire.WireError(f"job {message.job_id} has not ended and was sent again")
        if self._drain_left is not None:
            self._send_end(_unsent(message, Outcome.CANCELLED, "shutting down"))
            return
        try:
            key = self._namespace.chunk(message.key, self._handshake.shard)
            if message.kind is JobKind.USE:
                self._refresher.use(key, partial(self._use_ended, message))
                return
            job = self._job(message, key)
        except ValueError as error:
            self._send_end(_unsent(message, Outcome.INVALID, str(error)))
            return
        is_near = self._disk is not None and job.kind is JobKind.FETCH
        (self._near if is_near else self._queue).add(job)
        self._start_jobs()

    def _use_ended(self, message: BucketJob, outcome: Outcome, fresh_s: float) -> None:
        self._send_end(JobEnd(message.job_id, message.kind, outcome, fresh_s=fresh_s))

    def _job(self, message: BucketJob, key: str) -> TransferJob:
        """The job that a message requests. Raises `ValueError` if it is invalid."""
        layout, where = self._formats.of(message)
        job_id, kind, block_hash = message.job_id, message.kind, message.key.block_hash
        slot, due_s = self._slab.view[where], self._due_s(message)
        if self._handshake.is_borrowed:
            place = Place(memoryview(bytearray(layout.header_bytes)), slot)
        else:
            place = Place.of(slot, layout.header_bytes)
        return TransferJob(job_id, kind, key, block_hash, layout, place, due_s, message.near)

    def _due_s(self, message: BucketJob) -> float:
        """Deadline of retries, on the loop's clock: `max_wait_ms` from now for a fetch and for an
        item. A chunk's upload gets no retries: its planner tries again seconds later, when that is
        more useful. The outbox of items never tries again, and neither does vLLM."""
        is_retried = message.item is None and not self._handshake.is_borrowed
        if message.kind is JobKind.UPLOAD and is_retried:
            return -math.inf
        return asyncio.get_running_loop().time() + self._handshake.config.max_wait_ms / 1000

    def _start_jobs(self) -> None:
        self._queue.limit_requests(self._bucket.pacing.window.size)
        for queue, near in ((self._near, True), (self._queue, False if self._disk else None)):
            while self._started and (job := queue.take()) is not None:
                task = asyncio.get_running_loop().create_task(self._chain.run(job, near))
                self._tasks[job.job_id] = task
                task.add_done_callback(partial(self._job_ended, queue, job, time.monotonic()))

    def _job_ended(
        self, queue: JobQueue, job: TransferJob, started_s: float, task: asyncio.Task[JobEnd]
    ) -> None:
        del self._tasks[job.job_id]
        queue.end(job)
        end = self._end_of(job, task)
        is_absent = end.outcome is Outcome.MISSING and not end.reason
        goes_on = queue is self._near and is_absent and not job.near
        if goes_on and job.job_id not in self._cancelled:
            self._queue.add(job)
        else:
            self._cancelled.discard(job.job_id)
            # Cancelled too late for the disk to notice; the bucket was never queried.
            end = job.end(Outcome.CANCELLED, "cancelled") if goes_on else end
            end.seconds = time.monotonic() - started_s
            self._send_end(end)
        self._start_jobs()
        self._check_drained()

    def _end_of(self, job: TransferJob, task: asyncio.Task[JobEnd]) -> JobEnd:
        if task.cancelled():
            return job.end(Outcome.CANCELLED, "cancelled")
        if (error := task.exception()) is None:
            return task.result()
        # A defect in one job, in s3kv or in a library, must not affect the others.
        self._defects += 1
        if self._may_log(type(error)):
            _log.error("%s of %s: %r", job.kind.value, job.key, error, exc_info=error)
        return job.end(Outcome.FAILED, repr(error))

    def _send_end(self, end: JobEnd) -> None:
        end.detail = wire.truncated(end.detail)
        self._send(end)

    def _cancel(self, job_id: int, *, if_waiting: bool = False) -> None:
        if (job := self._queue.withdraw(job_id) or self._near.withdraw(job_id)) is not None:
            self._send_end(job.end(Outcome.CANCELLED, "cancelled before it began"))
        elif job_id in self._tasks and job_id not in self._cancelled and not if_waiting:
            # Only once: a second cancellation would interrupt the cleanup after the first.
            self._cancelled.add(job_id)
            self._tasks[job_id].cancel()

    def _drain(self, timeout_s: float) -> None:
        self._drain_left = 0
        self._queue.in_hurry = True
        self._housekeeping.drain()
        self._compressor.in_hurry = True
        for job_id in self._near.ids(JobKind.FETCH) + self._queue.ids(JobKind.FETCH):
            self._cancel(job_id)
        loop = asyncio.get_running_loop()
        self._bucket.drain_until_s = loop.time() + timeout_s
        loop.call_later(timeout_s, self._give_up_uploads)
        self._start_jobs()
        self._check_drained()

    def _give_up_uploads(self) -> None:
        given_up = self._queue.ids(JobKind.UPLOAD)
        self._drain_left = len(given_up)
        for job_id in given_up:
            self._cancel(job_id)
        self._check_drained()

    def _check_drained(self) -> None:
        idle = not any(queue.running or queue.waiting for queue in (self._near, self._queue))
        if self._drain_left is not None and idle and not self._drained.is_set():
            self._drained.set()
            self._send(wire.Drained(self._drain_left))

    def _statistics(self) -> wire.Stats:
        queue, pacing = self._queue, self._bucket.pacing
        counters = self._housekeeping.counters() | {
            "io_retries": self._bucket.retries,
            "io_throttled": pacing.throttled,
            "io_window_cuts": pacing.window.cuts,
            "io_hedges": pacing.hedges,
            "io_hedges_won": pacing.hedges_won,
            "io_defects": self._defects + self._housekeeping.defects,
        }
        if self._disk is not None:
            counters |= self._disk.counters
        if self._compressor.decoder.codec is not None:
            counters |= self._compressor.counters | self._compressor.decoder.counters
        waiting, running = queue.waiting + self._near.waiting, queue.running + self._near.running
        nbytes = queue.running_bytes + self._near.running_bytes
        return wire.Stats(waiting, running, nbytes, pacing.window.size, counters)

    async def finish(self) -> None:
        """Wait for a drain in progress, end every task, and close the store."""
        if self._drain_left is not None:
            await self._drained.wait()
        self._started = False
        for job_id in tuple(self._tasks):
            self._cancel(job_id)
        self._starting.cancel()
        ending = [self._starting, *self._tasks.values(), *self._housekeeping.cancel()]
        await asyncio.wait(ending, timeout=_UNWIND_TIMEOUT_S)
        if self._disk is not None:
            await self._disk.close()
        self._compressor.close()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._store.close(), _CLOSE_TIMEOUT_S)


def _unsent(message: BucketJob, outcome: Outcome, detail: str) -> JobEnd:
    return JobEnd(message.job_id, message.kind, outcome, detail=detail)
