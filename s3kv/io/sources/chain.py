"""The chain of sources: runs jobs, fetches from its sources in order and uploads to the bucket.

    first source ──absent──▶ next source ──absent──▶ … ──absent──▶ a miss
        └──hit, bad or failed: the end of the fetch

An object that is bad, in quarantine or unreachable is not absent: the fetch ends there. A source
that only holds copies of a later source's objects answers "absent" instead, and counts the failure.
Sources of this host come first. A near fetch asks only these, so it ends without the bucket.

A chunk may be computed while its fetch is under way. Its upload waits for the fetch, and sends
nothing if the fetch finds the object beyond this host.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, Protocol

from s3kv.errors import StoreError
from s3kv.io import wire
from s3kv.io.sources.bucket import BucketSource
from s3kv.io.sources.disk import DiskSource
from s3kv.io.sources.hedging import now_s
from s3kv.io.sources.other_shards import OtherShards
from s3kv.io.sources.staging import StagingMemory
from s3kv.io.sources.transfer_job import Borrow, TransferJob
from s3kv.messages import JobEnd, JobKind
from s3kv.stores.store import ObjectStore
from s3kv.types import Outcome

MOST_STAGED_BYTES = 256 * 2**20
"""Limit on memory for shards of other shapes."""
_FOUND_KEYS = 1_024
_FOUND_S = 30.0
"""Time for which a key counts as found after the start of its fetch: long enough to compute and
copy the chunk meanwhile, and too short for the object to be deleted as unused."""


class Source(Protocol):
    """A place that objects are fetched from. Belongs to one asyncio loop."""

    @property
    def name(self) -> str:
        """`JobEnd.source` of its answers."""

    @property
    def is_near(self) -> bool:
        """Whether it is on this host, and copies objects of the bucket."""

    async def fetch(self, job: TransferJob) -> JobEnd | None:
        """Fetch the object of a job into its place, and verify it. None if the source has nowhere
        to look for such an object.

        The outcome is OK for a hit, MISSING for an absent object (with a detail, and a `reason` for
        one in quarantine), CORRUPT for a bad one. Raises `StoreError` if the source fails. After it
        has ended (returned, raised or been cancelled), nothing writes to `job.place`.
        """


def chain_of(
    handshake: wire.Handshake,
    store: ObjectStore,
    bucket: BucketSource,
    borrow: Borrow,
    disk: DiskSource | None,
) -> Chain:
    """The chain of one rank."""
    others = OtherShards(handshake, store, bucket.fetch, borrow, StagingMemory(MOST_STAGED_BYTES))
    return Chain([*([disk] if disk else ()), bucket, others], bucket, disk)


class Chain:
    """Executor of jobs. Runs any number at a time; the caller limits them.

    sources: in the order in which they are asked. disk: the source that keeps copies of uploads and
    of the objects from the others.
    """

    def __init__(
        self, sources: Sequence[Source], bucket: BucketSource, disk: DiskSource | None = None
    ) -> None:
        self._sources, self._bucket, self._disk = sources, bucket, disk
        self._fetches: dict[str, tuple[asyncio.Task[Any] | None, float]] = {}
        """The last fetches, by key, oldest first: the task, which may have ended, and its start."""

    async def run(self, job: TransferJob, near: bool | None = None) -> JobEnd:
        """Move one object, in a task of its own. After it has returned, raised or been cancelled,
        nothing reads or writes `job.place`. near: whether a fetch asks only the sources of this
        host, or only the others; None: all."""
        if job.kind is JobKind.FETCH:
            return await self._fetch(job, near)
        if (fresh_s := await self._found_fresh_s(job.key)) is not None:
            return job.end(Outcome.EXISTS, fresh_s=fresh_s)
        try:
            end = await self._bucket.upload(job)
        except StoreError as error:
            end = job.failed(error)
        await self._keep(job, job.nbytes)  # whatever the outcome: it is sealed
        return end

    async def _fetch(self, job: TransferJob, near: bool | None) -> JobEnd:
        self._fetches.pop(job.key, None)
        self._fetches[job.key] = asyncio.current_task(), now_s()
        if len(self._fetches) > _FOUND_KEYS:
            del self._fetches[next(iter(self._fetches))]
        end = job.end(Outcome.MISSING, f"{job.key} has no source", near=job.near)
        for source in self._sources:
            if (job.near and not source.is_near) or near not in (None, source.is_near):
                continue
            try:
                answer = await source.fetch(job)
            except StoreError as error:
                answer = job.failed(error)
            if answer is not None:
                end = answer
                end.source, end.near = source.name, source.is_near
            if end.outcome is not Outcome.MISSING or end.reason:
                break
        if end.outcome is Outcome.OK and not end.near:
            # An item may be shorter than its place; a chunk of other shards fills it.
            await self._keep(job, end.nbytes if end.source == BucketSource.name else job.nbytes)
        return end

    async def _keep(self, job: TransferJob, nbytes: int) -> None:
        if self._disk is not None:
            await self._disk.keep(job, nbytes)

    async def _found_fresh_s(self, key: str) -> float | None:
        """`JobEnd.fresh_s` of an object that a recent fetch has found; None if none has. Waits for
        a fetch that is under way."""
        task, began_s = self._fetches.get(key, (None, -math.inf))
        if task is None:
            return None
        await asyncio.wait([task])
        if self._fetches.get(key, (task,))[0] is not task:  # it continues beyond this host
            return await self._found_fresh_s(key)
        self._fetches.pop(key, None)
        if task.cancelled() or task.exception() or now_s() >= began_s + _FOUND_S:
            return None
        end: JobEnd = task.result()
        return end.fresh_s if end.outcome is Outcome.OK and not end.near else None
