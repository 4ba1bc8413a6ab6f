"""Transfers: runs one job against the store, with attempts, verification, and outcome.

A fetch receives into the slab and is verified there. An upload gets its header, with the digest,
here and not in the worker, so that hashing takes no time from the engine. Both hash on the event
loop: xxh3 takes 0.2 to 0.8 ms for 8 MiB, about as long as receiving 1 MiB. A thread would delay the
release of a cancelled job's slot. BLAKE3 takes four times as long.

An object that does not verify is a miss. The setting `on_corrupt` decides its fate:

    ignore  It stays in the bucket. It is read once more some time later, because the reading may
            have been damaged and not the object. If it is bad again, this process never fetches it
            again (`Quarantine` has the table).
    delete  It is read once more at once. If it is bad again and still the same (ETag), it is
            deleted, and the next save of the chunk replaces it. An object that cannot be deleted is
            ignored.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from s3kv.errors import StoreDenied, StoreError, StoreRefused, StoreUnavailable
from s3kv.io.sources.other_shards import SharedReads
from s3kv.io.sources.pacing import Pacing
from s3kv.io.sources.quarantine import Quarantine
from s3kv.io.sources.ranges import RangedReads, Reading
from s3kv.io.sources.transfer_job import TransferJob
from s3kv.messages import JobEnd, JobKind
from s3kv.stores.store import Claim, ObjectInfo, ObjectStore
from s3kv.types import Outcome
from s3kv.upkeep.refreshing import Refresher

T = TypeVar("T")

_BACKOFF_FIRST_S = 0.05
_BACKOFF_MAX_S = 1.0
_FOUND_KEYS = 1_024
_FOUND_S = 30.0
"""Time for which a key counts as found after its fetch: longer than a chunk that is computed
meanwhile takes to be copied, and too short for the object to be deleted as unused."""


class Transfers:
    """Executor of jobs. Runs any number at a time; the caller limits them.

    It repeats failed requests until `TransferJob.due_s`, and uploads in a drain until
    `drain_until_s`. No layer above repeats them within that time. The store below repeats none, but
    for the one fresh connection that `ObjectStore` allows.

    rng: for the jitter of the backoff. refresher: takes note of the objects in use. delete_corrupt:
    whether `on_corrupt` is "delete". ranged: reads large objects in ranges; None: nothing does.
    shared: reads chunks out of the objects of ranks of other parallel sizes; None: nothing does.
    """

    def __init__(
        self,
        store: ObjectStore,
        pacing: Pacing,
        max_attempts: int,
        rng: random.Random,
        *,
        refresher: Refresher,
        delete_corrupt: bool = False,
        ranged: RangedReads | None = None,
        shared: SharedReads | None = None,
    ) -> None:
        self.retries = 0
        self.drain_until_s = -math.inf
        self._store = store
        self._pacing = pacing
        self._max_attempts = max_attempts
        self._rng = rng
        self._delete_corrupt = delete_corrupt
        self._refresher = refresher
        self._ranged = ranged
        self._shared = shared
        self._quarantine = Quarantine()
        self._fetches: dict[str, asyncio.Task[Any] | None] = {}
        """Fetches under way, by key."""
        self._found: dict[str, tuple[float, float]] = {}
        """By key: when a fetch found its object, and `JobEnd.fresh_s`. The oldest are first."""

    async def run(self, job: TransferJob) -> JobEnd:
        """Move one object. After it has returned, raised or been cancelled, nothing reads or writes
        `job.buffer`."""
        transfer = self._fetch_and_note if job.kind is JobKind.FETCH else self._upload
        try:
            end = await transfer(job)
        except StoreError as error:
            end = job.end(_outcome_of(error), str(error))
        if job.kind is JobKind.FETCH and not end.source:
            end.source = "bucket"
        return end

    async def _fetch_and_note(self, job: TransferJob) -> JobEnd:
        """Fetch, and note the answer for an upload of a chunk that is computed meanwhile."""
        task = self._fetches[job.key] = asyncio.current_task()
        self._found.pop(job.key, None)
        try:
            end = await self._fetch(job)
        finally:
            if self._fetches.get(job.key) is task:
                del self._fetches[job.key]
        if end.outcome is Outcome.OK:
            self._found[job.key] = _now_s(), end.fresh_s
            if len(self._found) > _FOUND_KEYS:
                del self._found[next(iter(self._found))]
        return end

    async def _found_fresh_s(self, key: str) -> float | None:
        """`JobEnd.fresh_s` of an object that a fetch has found just now; None if none has. Waits
        for one that is under way."""
        if (task := self._fetches.get(key)) is not None:
            await asyncio.wait([task])
        at_s, fresh_s = self._found.pop(key, (-math.inf, 0.0))
        return fresh_s if _now_s() < at_s + _FOUND_S else None

    async def _fetch(self, job: TransferJob) -> JobEnd:
        end = await self._fetch_object(job, delete_corrupt=self._delete_corrupt)
        if self._shared is None or end.outcome is not Outcome.MISSING or end.reason:
            return end
        fetch = partial(self._fetch_object, delete_corrupt=False)
        return await self._shared.read(job, fetch) or end

    async def _fetch_object(self, job: TransferJob, *, delete_corrupt: bool) -> JobEnd:
        if self._quarantine.bars(job.key, _now_s()):
            said = f"{job.key} is in quarantine: its object was not what its key says"
            return job.end(Outcome.MISSING, said, reason="quarantined")
        info, reason = await self._read(job, in_ranges=not self._quarantine.suspects(job.key))
        if info is None:
            self._quarantine.lift(job.key)
            return job.end(Outcome.MISSING, f"{job.key} is not in the bucket")
        if reason is None:
            self._quarantine.lift(job.key)
            return job.end(Outcome.OK, nbytes=info.nbytes, fresh_s=self._refresher.hit(info))
        said = f"{job.key} ({info.nbytes} bytes) is not what its key says: {reason}"
        if not delete_corrupt:
            self._quarantine.bad(job.key, _now_s())
            return job.end(Outcome.CORRUPT, said, reason=reason)
        return await self._look_again(job, said, reason)

    async def _read(self, job: TransferJob, *, in_ranges: bool = False) -> Reading:
        """Read the object into the buffer and verify it. in_ranges: it may be read in ranges. A
        second reading is whole, so that two bad ones have not only ranges in common."""
        reads = _Reads(self, self._store, job)
        if in_ranges and self._ranged is not None:
            return await self._ranged.read(job, reads)
        return await reads.whole()

    async def read(self, get: Callable[[Claim], Awaitable[T]], job: TransferJob) -> T:
        """Send a read of a job's object, with all its attempts."""
        read = partial(self._pacing.read, get, until_s=job.due_s)
        return await self._retried(read, until_s=job.due_s)

    async def _look_again(self, job: TransferJob, said: str, reason: str) -> JobEnd:
        """Delete a bad object, unless a second reading finds it good, gone or replaced.

        The ETag is read before the second reading. A repair after that changes the ETag, and the
        conditional delete leaves the repaired object alone. A store without conditional deletes may
        lose a repair made in between; that costs a miss.
        """
        certain = False
        try:
            info = await self.attempts(partial(self._store.head, job.key), until_s=job.due_s)
            read, again = await self._read(job)
            certain = again is not None
            if info is None or read is None:
                self._quarantine.lift(job.key)
                return job.end(Outcome.CORRUPT, f"{said}; it is gone now", reason=reason)
            if again is None:
                self._quarantine.lift(job.key)
                said = f"{said}; a second reading was right"
                fresh_s = self._refresher.hit(read)
                return job.end(Outcome.OK, said, nbytes=read.nbytes, reason=reason, fresh_s=fresh_s)
            delete = partial(self._store.delete, job.key, if_etag=info.etag)
            deleted = await self.attempts(delete, until_s=job.due_s)
        except StoreError as error:
            self._quarantine.bad(job.key, _now_s(), certain=certain)
            said = f"{said}; it could not be deleted: {error}"
            return job.end(Outcome.CORRUPT, said, reason=reason)
        self._quarantine.lift(job.key)
        what = "it has been deleted" if deleted else "somebody has replaced it"
        return job.end(Outcome.CORRUPT, f"{said}; {what}", reason=reason)

    async def _upload(self, job: TransferJob) -> JobEnd:
        if (fresh_s := await self._found_fresh_s(job.key)) is not None:
            return job.end(Outcome.EXISTS, fresh_s=fresh_s)
        job.format.seal(job.buffer, job.block_hash)
        write = partial(self._store.put, job.key, job.buffer, if_absent=True)
        created = await self.attempts(write, until_s=max(job.due_s, self.drain_until_s))
        if not created:
            self._quarantine.exists(job.key)
            return job.end(Outcome.EXISTS, fresh_s=self._refresher.exists(job.key))
        self._quarantine.lift(job.key)
        return job.end(Outcome.OK, nbytes=job.nbytes, fresh_s=self._refresher.written())

    async def attempts(self, call: Callable[[], Awaitable[T]], *, until_s: float = math.inf) -> T:
        """Await the request `call()`, and repeat it after `StoreUnavailable`: at most
        `max_attempts` attempts, of which only the first may begin after `until_s` on the loop's
        clock.

        The pauses between attempts are 50, 100, 200 … ms, at most 1 s, less a random part of up to
        half. The job keeps its place meanwhile, so that a failing store gets fewer requests. Raises
        the last attempt's error.
        """
        return await self._retried(partial(self._pacing.send, call), until_s=until_s)

    async def _retried(self, call: Callable[[], Awaitable[T]], *, until_s: float) -> T:
        now_s = asyncio.get_running_loop().time
        for attempt in range(self._max_attempts - 1):
            pause_s = min(_BACKOFF_MAX_S, _BACKOFF_FIRST_S * 2**attempt)
            pause_s *= self._rng.uniform(0.5, 1.0)
            try:
                return await call()
            except StoreUnavailable:
                if now_s() + pause_s >= until_s:
                    raise
            self.retries += 1
            await asyncio.sleep(pause_s)
        return await call()


class _Reads:
    """The `Requests` of one job."""

    def __init__(self, transfers: Transfers, store: ObjectStore, job: TransferJob) -> None:
        self._transfers, self._store, self._job = transfers, store, job

    async def whole(self) -> Reading:
        job = self._job
        get = partial(self._store.get_into, job.key, job.buffer)
        info = await self._transfers.read(get, job)
        if info is None:
            return None, None
        return info, job.format.check(job.buffer, info.nbytes, job.block_hash)

    async def part(self, bounds: range) -> ObjectInfo | None:
        job = self._job
        buffer = job.buffer[bounds.start : bounds.stop]
        get = partial(self._store.get_range, job.key, bounds.start, buffer)
        return await self._transfers.read(get, job)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _outcome_of(error: StoreError) -> Outcome:
    if isinstance(error, StoreRefused):
        return Outcome.INVALID
    return Outcome.DENIED if isinstance(error, StoreDenied) else Outcome.FAILED
