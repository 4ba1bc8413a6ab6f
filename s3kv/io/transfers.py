"""One job against the store: attempts, verification, and what its end is called.

A fetch receives straight into the slab and is verified there. An upload gets its header (and in
it the digest) here, not in the worker, so that hashing costs the engine nothing. Both hash on the
event loop: xxh3 takes 0.2 to 0.8 ms for 8 MiB, about what receiving 1 MiB takes, and a thread
would have to be waited for before a cancelled job's slot is free. BLAKE3 takes four times as long.

An object that does not verify is a miss, and what becomes of it is a setting, `on_corrupt`:

    ignore  it stays in the bucket. This process never fetches it again; a new one will, once.
    delete  it is read once more, because what is damaged may be the reading. If it is bad again
            and still the same (ETag), it is deleted, and the next save of the chunk replaces it.
            What cannot be deleted is ignored.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple, TypeVar

from s3kv.errors import StoreDenied, StoreError, StoreUnavailable
from s3kv.io.jobs import Direction, Job
from s3kv.io.quarantine import Quarantine
from s3kv.io.refreshing import Refresher
from s3kv.objects.codec import Refusal
from s3kv.objects.store import ObjectInfo, ObjectStore
from s3kv.types import Outcome

T = TypeVar("T")

_BACKOFF_FIRST_S = 0.05
_BACKOFF_MAX_S = 1.0


class End(NamedTuple):
    """How a job ended; the fields are those of `wire.Done`."""

    outcome: Outcome
    nbytes: int
    detail: str
    reason: str = ""


class Transfers:
    """Carries out jobs, each once, any number at a time; the caller bounds them.

    A request that has failed is sent again here, until `Job.due_s`; in a drain an upload is, until
    `drain_until_s`. Nothing above tries again within that time, and nothing below at all.

    rng: for the jitter of the backoff. delete_corrupt: `on_corrupt`. refresher: is told of what
    is in use. sleep: for the tests.
    """

    def __init__(
        self,
        store: ObjectStore,
        max_attempts: int,
        rng: random.Random,
        *,
        delete_corrupt: bool = False,
        refresher: Refresher | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.retries = 0
        self.drain_until_s = -math.inf
        self._store = store
        self._max_attempts = max_attempts
        self._rng = rng
        self._delete_corrupt = delete_corrupt
        self._refresher = refresher
        self._quarantine = Quarantine()
        self._sleep = sleep

    async def run(self, job: Job) -> End:
        """Move one object. When this has ended, in whichever way, `job.buffer` is at rest."""
        transfer = self._fetch if job.direction is Direction.FETCH else self._upload
        try:
            return await transfer(job)
        except StoreError as error:
            denied = isinstance(error, StoreDenied)
            return End(Outcome.DENIED if denied else Outcome.FAILED, 0, str(error))

    async def _fetch(self, job: Job) -> End:
        if job.key in self._quarantine:
            said = f"{job.key} is in quarantine: its object was not what its key says"
            return End(Outcome.MISSING, 0, said, "quarantined")
        info, reason = await self._read(job)
        if info is None:
            return End(Outcome.MISSING, 0, f"{job.key} is not in the bucket")
        if reason is None:
            if self._refresher is not None:
                self._refresher.hit(info)
            return End(Outcome.OK, info.nbytes, "")
        said = f"{job.key} ({info.nbytes} bytes) is not what its key says: {reason}"
        if not self._delete_corrupt:
            self._quarantine.add(job.key)
            return End(Outcome.CORRUPT, 0, said, reason)
        return await self._look_again(job, said, reason)

    async def _read(self, job: Job) -> tuple[ObjectInfo | None, Refusal | None]:
        """The object now in the buffer, and what is wrong with it."""
        read = partial(self._store.get_into, job.key, job.buffer)
        info = await self.attempts(read, until_s=job.due_s)
        if info is None:
            return None, None
        return info, job.format.check(job.buffer, info.nbytes, job.block_hash)

    async def _look_again(self, job: Job, said: str, reason: str) -> End:
        """Delete a bad object, unless it turns out to be good, gone or another one by now.

        The ETag is asked for before the second look: whoever repairs the object after that changes
        it, and a conditional delete then leaves the new one alone. A store without conditional
        deletes may lose a repair made in the moment between; that costs a miss.
        """
        try:
            info = await self.attempts(partial(self._store.head, job.key), until_s=job.due_s)
            read, again = await self._read(job)
            if info is None or read is None:
                return End(Outcome.CORRUPT, 0, f"{said}; it is gone now", reason)
            if again is None:
                return End(Outcome.OK, read.nbytes, f"{said}; a second reading was right", reason)
            delete = partial(self._store.delete, job.key, if_etag=info.etag)
            deleted = await self.attempts(delete, until_s=job.due_s)
        except StoreError as error:
            self._quarantine.add(job.key)
            return End(Outcome.CORRUPT, 0, f"{said}; it could not be deleted: {error}", reason)
        what = "it has been deleted" if deleted else "somebody has replaced it"
        return End(Outcome.CORRUPT, 0, f"{said}; {what}", reason)

    async def _upload(self, job: Job) -> End:
        job.format.seal(job.buffer, job.block_hash)
        write = partial(self._store.put, job.key, job.buffer, if_absent=True)
        created = await self.attempts(write, until_s=max(job.due_s, self.drain_until_s))
        if not created:
            if self._refresher is not None:
                self._refresher.exists(job.key)
            return End(Outcome.EXISTS, 0, "")
        self._quarantine.lift(job.key)
        return End(Outcome.OK, job.nbytes, "")

    async def attempts(self, call: Callable[[], Awaitable[T]], *, until_s: float = math.inf) -> T:
        """`call()`, again after `StoreUnavailable`, `max_attempts` times in all, and none begun
        after `until_s` on the loop's clock but the first.

        Between attempts it sleeps 50, 100, 200 … ms, at most 1 s, less up to a half at random. The
        job keeps its place meanwhile: with an ailing store fewer requests are sent. Raises what the
        last attempt raised.
        """
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
            await self._sleep(pause_s)
        return await call()
