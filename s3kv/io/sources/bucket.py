"""The bucket as a source: attempts, window, hedging, ranges, verification, and quarantine.

A fetch receives into the slab and is verified there. An upload gets its header, with the digest,
here and not in the worker, so that hashing takes no time from the engine. Plain objects are hashed
on the event loop: xxh3 takes 0.2 to 0.8 ms for 8 MiB, about as long as receiving 1 MiB. BLAKE3
takes four times as long. Compressed objects are hashed by the threads that encode and decode.

An object that does not verify is a miss, and is not read again for a while (`Quarantine`): the
damage may be in the answer and not in the object. The next upload of the chunk replaces it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from s3kv.config import Config
from s3kv.io.sources.compressing import Compressor
from s3kv.io.sources.hedging import Arrival, Claim, now_s
from s3kv.io.sources.pacing import HEDGE_PERCENT, Pacing
from s3kv.io.sources.quarantine import Quarantine
from s3kv.io.sources.ranges import RANGE_BYTES, RangedReads, Reading
from s3kv.io.sources.reception import Reception
from s3kv.io.sources.transfer_job import Borrow, TransferJob
from s3kv.messages import JobEnd
from s3kv.objects.compression import NO_CODEC
from s3kv.objects.item_format import ItemFormat
from s3kv.stores.store import ObjectInfo, ObjectStore
from s3kv.types import Outcome
from s3kv.upkeep.listing import tried
from s3kv.upkeep.refreshing import Refresher

T = TypeVar("T")

MAX_ATTEMPTS = 3
"""Maximum number of attempts per request; see `attempts`."""
_BACKOFF_FIRST_S = 0.05
_BACKOFF_MAX_S = 1.0


class BucketSource:
    """The bucket of one rank: a source, and the target of its uploads. Runs any number of jobs at a
    time; the caller limits them. Belongs to one asyncio loop.

    It retries failed requests until `TransferJob.due_s`, and uploads in a drain until
    `drain_until_s`. No layer above retries them within that time. The store below retries nothing,
    except for the one fresh connection that `ObjectStore` allows.

    refresher: records the objects in use. borrow: for ranges. rng: for the jitter of pauses.
    compressor: for uploads; its decoder is used for fetches.
    """

    name = "bucket"
    is_near = False

    def __init__(
        self,
        store: ObjectStore,
        config: Config,
        refresher: Refresher,
        borrow: Borrow,
        rng: random.Random,
        compressor: Compressor,
    ) -> None:
        self.retries = 0
        self.drain_until_s = -math.inf
        self.pacing = Pacing(config.max_inflight_requests, HEDGE_PERCENT)
        self._store = store
        self._refresher = refresher
        self._compressor, self._decoder = compressor, compressor.decoder
        receive = partial(Reception, self._decoder)
        self._ranged = RangedReads(RANGE_BYTES, borrow, receive, self._whole, self._part)
        self._rng = rng
        self._quarantine = Quarantine()

    async def fetch(self, job: TransferJob) -> JobEnd:
        """Fetch and verify, for `Source.fetch`."""
        if self._quarantine.bars(job.key, now_s()):
            said = f"{job.key} is in quarantine: its object failed verification"
            return job.end(Outcome.MISSING, said, reason="quarantined")
        # A second read is whole, so ranges cannot be the common cause of two bad reads.
        read = self._whole if self._quarantine.holds(job.key) else self._ranged.read
        info, reason = await read(job)
        if info is None:
            self._quarantine.lift(job.key)
            return job.end(Outcome.MISSING, f"{job.key} is not in the bucket")
        if reason is None:
            self._quarantine.lift(job.key)
            is_item = isinstance(job.format, ItemFormat)  # it may be shorter than its place
            nbytes = info.nbytes if is_item else job.nbytes
            return job.end(Outcome.OK, nbytes=nbytes, fresh_s=self._refresher.hit(info))
        if reason == "codec":
            said = f"{job.key} is compressed: {NO_CODEC}"
            return job.end(Outcome.MISSING, said, reason=reason)
        self._quarantine.bad(job.key, now_s())
        said = f"{job.key} failed verification: {reason}"
        return job.end(Outcome.CORRUPT, said, reason=reason)

    async def _whole(self, job: TransferJob) -> Reading:
        """Read the object of a job by one GET into its place, and verify it."""

        async def get(claim: Claim) -> Reading:
            reception = Reception(self._decoder, job)
            try:
                receiver = Arrival(claim, reception.land, reception.progress)
                info = await self._store.get_into(job.key, job.place, receiver)
                return info, None if info is None else await reception.check(info.nbytes)
            finally:
                await reception.stop()

        return await self._read(get, job)

    async def _part(
        self, job: TransferJob, bounds: range, reception: Reception
    ) -> ObjectInfo | None:
        """Read a range of the object of a job, as `ObjectStore.get_into` does."""

        def get(claim: Claim) -> Awaitable[ObjectInfo | None]:
            place = job.place.cut(bounds.start, bounds.stop)
            receiver = Arrival(claim, lambda nbytes: reception.land(nbytes, bounds))
            return self._store.get_into(job.key, place, receiver, bounds.start)

        return await self._read(get, job)

    async def _read(self, get: Callable[[Claim], Awaitable[T]], job: TransferJob) -> T:
        """Send a read of a job's object, with all its attempts."""
        read = partial(self.pacing.read, get, until_s=job.due_s)
        return await self._retried(read, until_s=job.due_s)

    async def upload(self, job: TransferJob) -> JobEnd:
        """Seal the object in a job's place and write it, if the bucket has none or a bad one.
        Raises `StoreError`."""
        job.format.seal(job.place, job.block_hash)
        is_bad = self._quarantine.holds(job.key)
        async with self._compressor.stored(job) as place:
            write = partial(self._store.put, job.key, place, if_absent=not is_bad)
            created = await self.attempts(write, until_s=max(job.due_s, self.drain_until_s))
        if not created:
            return job.end(Outcome.EXISTS, fresh_s=self._refresher.exists(job.key))
        self._quarantine.lift(job.key)
        return job.end(Outcome.OK, nbytes=job.nbytes, fresh_s=self._refresher.written())

    async def attempts(self, call: Callable[[], Awaitable[T]], *, until_s: float = math.inf) -> T:
        """Await the request `call()`, and repeat it after `StoreUnavailable`: at most
        `MAX_ATTEMPTS` attempts. Only the first may begin after `until_s` on the loop's clock.

        The pauses between attempts are 50, 100, 200 … ms, at most 1 s, less a random part of up to
        half. The job keeps its place meanwhile, so that a failing store gets fewer requests. Raises
        the last attempt's error.
        """
        return await self._retried(partial(self.pacing.send, call), until_s=until_s)

    async def _retried(self, call: Callable[[], Awaitable[T]], *, until_s: float) -> T:
        lengths_s = (_BACKOFF_FIRST_S * 2**number for number in range(MAX_ATTEMPTS - 1))
        pauses_s = (min(_BACKOFF_MAX_S, s) * self._rng.uniform(0.5, 1.0) for s in lengths_s)

        def may_pause(pause_s: float) -> bool:
            allowed = now_s() + pause_s < until_s
            self.retries += allowed
            return allowed

        return await tried(call, pauses_s, may_pause)
