"""One job against the store: attempts, verification, and what its end is called.

A fetch receives straight into the slab and is verified there. An upload gets its header (and in
it the digest) here, not in the worker, so that hashing costs the engine nothing. Both hash on the
event loop: xxh3 takes 0.2 to 0.8 ms for 8 MiB, about what receiving 1 MiB takes, and a thread
would have to be waited for before a cancelled job's slot is free.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from s3kv.errors import StoreDenied, StoreError, StoreUnavailable
from s3kv.io.jobs import Direction, Job
from s3kv.objects.store import ObjectStore
from s3kv.types import Outcome

T = TypeVar("T")

_BACKOFF_FIRST_S = 0.05
_BACKOFF_MAX_S = 1.0


class End(NamedTuple):
    """How a job ended; the fields are those of `wire.Done`."""

    outcome: Outcome
    nbytes: int
    detail: str


class Transfers:
    """Carries out jobs, each once, any number at a time; the caller bounds them.

    rng: for the jitter of the backoff. sleep: for the tests.
    """

    def __init__(
        self,
        store: ObjectStore,
        max_attempts: int,
        rng: random.Random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.retries = 0
        self._store = store
        self._max_attempts = max_attempts
        self._rng = rng
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
        nbytes = await self.attempts(lambda: self._store.get_into(job.key, job.buffer))
        if nbytes is None:
            return End(Outcome.MISSING, 0, f"{job.key} is not in the bucket")
        reason = job.format.check(job.buffer, nbytes, job.block_hash)
        if reason is not None:
            said = f"{job.key} ({nbytes} bytes) is not what its key says: {reason}"
            return End(Outcome.CORRUPT, 0, said)
        return End(Outcome.OK, nbytes, "")

    async def _upload(self, job: Job) -> End:
        job.format.seal(job.buffer, job.block_hash)
        created = await self.attempts(lambda: self._store.put(job.key, job.buffer, if_absent=True))
        return End(Outcome.OK, job.nbytes, "") if created else End(Outcome.EXISTS, 0, "")

    async def attempts(self, call: Callable[[], Awaitable[T]]) -> T:
        """`call()`, again after `StoreUnavailable`, `max_attempts` times in all.

        Between attempts it sleeps 50, 100, 200 … ms, at most 1 s, less up to a half at random. The
        job keeps its place meanwhile: with an ailing store fewer requests are sent. Raises what the
        last attempt raised.
        """
        for attempt in range(self._max_attempts - 1):
            try:
                return await call()
            except StoreUnavailable:
                self.retries += 1
            pause_s = min(_BACKOFF_MAX_S, _BACKOFF_FIRST_S * 2**attempt)
            await self._sleep(pause_s * self._rng.uniform(0.5, 1.0))
        return await call()
