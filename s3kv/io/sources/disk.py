"""The local disk as a source: the first one asked, and a copy of the objects of the others.

    fetch:  file there, verified ──▶ hit           no file, or a bad one (deleted) ──▶ absent
    keep:   object ──▶ copy in memory ──▶ file     dropped if too many copies wait

Nothing waits for a file to be written: the object is copied, and a thread of low priority writes
the copy. A disk that fails is not used for a while, and costs only its hits.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from s3kv.io.sources.executors import started
from s3kv.io.sources.hedging import now_s
from s3kv.io.sources.staging import StagingMemory
from s3kv.io.sources.transfer_job import TransferJob
from s3kv.messages import JobEnd, JobKind
from s3kv.objects.headers import Mismatch
from s3kv.place import Place, copy_bytes
from s3kv.stores.disk import Directory
from s3kv.stores.lanes import ended
from s3kv.types import Outcome, once_a_minute
from s3kv.upkeep.disk_cleaning import clean, is_crowded
from s3kv.upkeep.refreshing import Refresher

_log = logging.getLogger("s3kv.io")
_T = TypeVar("_T")

_WRITER_NICENESS = 10
MOST_COPIED_BYTES = 256 * 2**20
"""Limit on memory for objects that wait to be written, per I/O process."""
PATIENCE_S = 5.0
"""Time after which a read counts as hanging: the next source is asked."""
OFF_S = 60.0
"""Time for which a disk that has failed is not used."""
_COUNTERS = (
    *("io_disk_reads", "io_disk_read_bytes", "io_disk_writes", "io_disk_written_bytes"),
    *("io_disk_dropped", "io_disk_corrupt", "io_disk_failed", "io_disk_evicted_bytes"),
)
_CLEAN_EVERY_S = 1.0
_MOST_USES = 2**14
_MOST_READS = 2**12
"""Most reads that have not come back. Where the disk hangs, each keeps about 6 KB."""
_CLOSE_TIMEOUT_S = 1.0


class Workers(Protocol):
    """Runs functions that block, off the loop."""

    def read(self, work: Callable[[], _T]) -> Awaitable[_T]:
        """Run `work`; several at once."""

    def write(self, work: Callable[[], _T]) -> Awaitable[_T]:
        """Run `work`; one after another."""

    def copy(self, work: Callable[[], _T]) -> Awaitable[_T]:
        """Run `work`, which uses no disk, without waiting for one that hangs."""

    def close(self) -> None:
        """Start no further function."""


class WorkerThreads:
    """`Workers` of one asyncio loop: as many reading threads as there may be jobs, so no read waits
    for one that hangs; one writing thread of low priority; and two that copy memory."""

    def __init__(self, readers: int) -> None:
        self._readers = started(readers, "s3kv-disk-read")
        yields = partial(os.setpriority, os.PRIO_PROCESS, 0, _WRITER_NICENESS)  # of that thread
        self._writer = started(1, "s3kv-disk-write", yields)
        self._copiers = started(2, "s3kv-disk-copy")

    def read(self, work: Callable[[], _T]) -> Awaitable[_T]:
        return asyncio.wrap_future(self._readers.submit(work))

    def write(self, work: Callable[[], _T]) -> Awaitable[_T]:
        return asyncio.wrap_future(self._writer.submit(work))

    def copy(self, work: Callable[[], _T]) -> Awaitable[_T]:
        return asyncio.wrap_future(self._copiers.submit(work))

    def close(self) -> None:
        for executor in (self._readers, self._writer, self._copiers):
            executor.shutdown(wait=False, cancel_futures=True)


class DiskSource:
    """The files of a directory as a source. Belongs to one asyncio loop.

    refresher: records the objects in use, so that the bucket keeps them. keeps_uploads: whether it
        also keeps copies of uploads.
    """

    name = "disk"
    is_near = True

    def __init__(
        self, directory: Directory, workers: Workers, refresher: Refresher, *, keeps_uploads: bool
    ) -> None:
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self._directory, self._workers, self._refresher = directory, workers, refresher
        self._keeps_uploads = keeps_uploads
        self._copies = StagingMemory(MOST_COPIED_BYTES)
        self._off_until_s = {"reading": 0.0, "writing": 0.0}
        self._clean_after_s = 0.0
        self._may_log = once_a_minute(now_s)
        self._fresh_until_s: dict[str, float] = {}
        """By key; the most recently used are last."""
        self._closing = threading.Event()
        self._tasks, self._reads = set[asyncio.Future[Any]](), set[asyncio.Future[Any]]()

    def start(self) -> None:
        """Start counting the files; no job waits for it. Nothing is written until it is done."""
        self._begin(self._clean())

    async def fetch(self, job: TransferJob) -> JobEnd | None:
        """Fetch and verify, for `Source.fetch`. A failure of the disk does not fail the job."""
        if now_s() < self._off_until_s["reading"]:
            return None
        try:
            nbytes, reason = await self._read(job)
        except OSError as error:
            self._failed("reading", error)
            if error.errno == errno.EIO:  # else this one file would disable the disk at each use
                self._delete(job.key)
            return None
        if nbytes is None:
            return job.end(Outcome.MISSING, f"{job.key} is not on the disk")
        if reason is not None:
            self.counters["io_disk_corrupt"] += 1
            if self._may_log(reason):
                _log.warning("%s on the disk failed verification: %s", job.key, reason)
            self._delete(job.key)
            return job.end(Outcome.MISSING, f"{job.key} on the disk was bad")
        self.counters["io_disk_reads"] += 1
        self.counters["io_disk_read_bytes"] += nbytes
        return job.end(Outcome.OK, nbytes=nbytes, fresh_s=self._used(job.key))

    def _delete(self, key: str) -> None:
        self._begin(self._off_loop(lambda: self._directory.delete(self._directory.file_of(key))))

    def _used(self, key: str) -> float:
        """Record a use of the bucket's object, unless it is still fresh from an earlier one.
        Returns `JobEnd.fresh_s`."""
        until_s = self._fresh_until_s.pop(key, 0.0)
        if until_s <= now_s():
            until_s = now_s() + self._refresher.exists(key)
        self._fresh_until_s[key] = until_s
        if len(self._fresh_until_s) > _MOST_USES:
            del self._fresh_until_s[next(iter(self._fresh_until_s))]
        return until_s - now_s()

    async def _read(self, job: TransferJob) -> tuple[int | None, Mismatch | None]:
        over, using = threading.Event(), threading.Lock()

        def read() -> tuple[int | None, Mismatch | None]:
            if over.is_set():
                return None, None
            nbytes = self._directory.read(job.key, job.place, over.is_set, using)
            with using:
                if nbytes is None or over.is_set():
                    return None, None
                return nbytes, job.format.check(job.place, nbytes, job.block_hash)

        if len(self._reads) >= _MOST_READS:
            raise TimeoutError(0, "earlier reads hang")
        reading = asyncio.ensure_future(self._workers.read(read))
        self._reads.add(reading)
        reading.add_done_callback(self._read_ended)
        try:
            done, _ = await asyncio.wait([reading], timeout=PATIENCE_S)
            if not done:
                raise TimeoutError(0, f"no answer for {PATIENCE_S:g} s")
            return reading.result()
        finally:
            with using:  # a thread that hangs must not touch the place when it continues
                over.set()

    def _read_ended(self, reading: asyncio.Future[Any]) -> None:
        self._reads.discard(reading)
        if not reading.cancelled():
            reading.exception()  # retrieved: asyncio logs errors that are not

    async def keep(self, job: TransferJob, nbytes: int) -> None:
        """Copy the first `nbytes` of the job's place (a whole object), and have the copy written to
        the disk. The place is not read after this has ended."""
        if job.kind is JobKind.UPLOAD and not self._keeps_uploads:
            return
        buffer = None
        if now_s() >= self._off_until_s["writing"] and not self._closing.is_set():
            buffer = self._copies.take(nbytes)
        if buffer is None:
            self.counters["io_disk_dropped"] += 1
            return
        copy = partial(copy_bytes, job.place.cut(0, nbytes).views, buffer)
        copying = asyncio.ensure_future(self._workers.copy(copy))
        try:
            await ended([copying])
        finally:
            self._begin(self._write(job.key, buffer, copying))

    async def _write(self, key: str, buffer: bytearray, copying: asyncio.Future[int]) -> None:
        write = partial(self._directory.write, key, Place.of(buffer), self._closing.is_set)
        try:
            result = None if copying.exception() else await self._off_loop(write)
        finally:
            self._copies.give_back(buffer)
        if result == "written":
            self.counters["io_disk_writes"] += 1
            self.counters["io_disk_written_bytes"] += len(buffer)
        elif result != "there":
            self.counters["io_disk_dropped"] += 1
        if now_s() >= self._clean_after_s:
            self._clean_after_s = now_s() + _CLEAN_EVERY_S
            wanted = self._directory.file_bytes(len(buffer))
            if await self._off_loop(partial(is_crowded, self._directory, wanted)):
                await self._clean(wanted)

    async def _clean(self, wanted_bytes: int = 0) -> None:
        deleted = await self._off_loop(partial(clean, self._directory, wanted_bytes))
        self.counters["io_disk_evicted_bytes"] += deleted or 0

    async def _off_loop(self, work: Callable[[], _T]) -> _T | None:
        """Run `work` in the thread that writes. None if it fails."""
        try:
            return await self._workers.write(work)
        except OSError as error:
            self._failed("writing", error)
            return None

    def _failed(self, what: str, error: OSError) -> None:
        """Stop reading or writing on the disk for a while."""
        self.counters["io_disk_failed"] += 1
        if now_s() >= self._off_until_s[what]:
            why = error.strerror or type(error).__name__
            said = "%s files in %s failed (%s): no %s there for %.0f s"
            _log.warning(said, what, self._directory.path, why, what, OFF_S)
        self._off_until_s[what] = now_s() + OFF_S

    def _begin(self, work: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Write the waiting copies for up to a second, then end. Idempotent."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_TIMEOUT_S)
        self._closing.set()
        self._workers.close()
        for task in self._tasks | self._reads:
            task.cancel()
