"""Reading chunks that ranks of another parallel size have stored.

Every rank stores its own shard and asks for it first. Where the namespace has shards of other
shapes, a chunk that is not there is then looked for in those that cover this rank's heads and
layers, one set after the other:

    own object ──not there──▶ first cover ──a shard not there, or bad──▶ next cover ──▶ a miss
        └──▶ hit                  └──all there and verified──▶ rearranged into the slot: a hit

The objects of a cover are read into memory of their own and verified there like any other. The slot
is written in one go when all of them are there, so a read that breaks off leaves it alone. An
object of another shape is never deleted from here: that it does not verify may be this rank's
mistake about its format.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace

from s3kv.errors import StoreError
from s3kv.io import wire
from s3kv.io.sources.ranges import all_of
from s3kv.io.sources.transfer_job import TransferJob
from s3kv.messages import JobEnd
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.keys import Namespace
from s3kv.objects.rearranging import Pages, Rearrangement, rearrangements
from s3kv.objects.shards import Shard, covers
from s3kv.stores.store import ObjectStore
from s3kv.types import ChunkKey, Outcome

_log = logging.getLogger("s3kv.io")

LOOK_AGAIN_S = 600.0
"""Time between two listings of the shapes: a fleet of another shape may begin at any time."""
LOOK_AFTER_ERROR_S = 60.0
_MOST_SHAPES = 4096
"""Most shapes read. There are as many as ranks in all sizes; anybody who may write can add more."""
_AT_ONCE = 4
"""Most chunks rearranged at once. Each takes memory beside the slab: the objects of one cover."""

ShardCover = list[Rearrangement]


def shared_reads(
    handshake: wire.Handshake,
    store: ObjectStore,
    namespace: Namespace,
    borrow: Callable[[int], int],
    give_back: Callable[[], None],
) -> SharedReads | None:
    """The shared reads of a rank; None for one that shares with no other size."""
    shard = Shard.parse(handshake.shard)
    if handshake.pages is None or shard is None:
        return None
    return SharedReads(store, namespace, shard, handshake.pages, borrow, give_back)


class SharedReads:
    """Reads of other shapes' shards. Belongs to one asyncio loop.

    shard: this rank's. pages: as in `objects.rearranging`. borrow, give_back: as in `RangedReads`.
    """

    def __init__(
        self,
        store: ObjectStore,
        namespace: Namespace,
        shard: Shard,
        pages: Pages,
        borrow: Callable[[int], int],
        give_back: Callable[[], None],
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._shard = shard
        self._pages = pages
        self._borrow = borrow
        self._give_back = give_back
        self._shapes: set[Shard] = set()
        self._covers: dict[int, list[ShardCover]] = {}
        """By coverage, what the shapes of now amount to."""
        self._look_after_s = -math.inf
        self._looking = asyncio.Lock()
        self._memory = asyncio.Semaphore(_AT_ONCE)

    async def read(
        self, job: TransferJob, fetch: Callable[[TransferJob], Awaitable[JobEnd]]
    ) -> JobEnd | None:
        """Read the chunk of a job, which is not there under this rank's own name, out of other
        shapes' shards. None if they do not hold it.

        fetch: fetches the object of a job, and verifies it. Raises `StoreError`. Nothing is written
        to the job's buffer unless all of it is.
        """
        await self._look()
        for cover in self._covers_of(job):
            async with self._memory:
                end = await self._read(job, cover, fetch)
            if end is not None:
                return end
        return None

    async def _look(self) -> None:
        """Know the shapes of the namespace, from a listing that is not too old."""
        async with self._looking:
            now_s = asyncio.get_running_loop().time()
            if now_s < self._look_after_s:
                return
            try:
                shapes = await self._list()
            except StoreError as error:
                _log.warning("the shapes of the namespace cannot be listed: %s", error)
                self._look_after_s = now_s + LOOK_AFTER_ERROR_S
                return
            self._look_after_s = now_s + LOOK_AGAIN_S
            if shapes != self._shapes:
                self._shapes, self._covers = shapes, {}

    async def _list(self) -> set[Shard]:
        prefix = self._namespace.shapes
        shapes: set[Shard] = set()
        async for info in self._store.list(prefix):
            shard = Shard.parse(info.key.removeprefix(prefix))
            if shard is not None:
                shapes.add(shard)
            if len(shapes) == _MOST_SHAPES:
                break
        return shapes

    def _covers_of(self, job: TransferJob) -> list[ShardCover]:
        own = job.format
        assert isinstance(own, ChunkFormat), "items are not divided among ranks"
        if own.coverage not in self._covers:
            sets = covers(self._shard, self._shapes)
            known = (rearrangements(own, self._shard, shards, self._pages) for shards in sets)
            self._covers[own.coverage] = [cover for cover in known if cover is not None]
        return self._covers[own.coverage]

    async def _read(
        self,
        job: TransferJob,
        cover: ShardCover,
        fetch: Callable[[TransferJob], Awaitable[JobEnd]],
    ) -> JobEnd | None:
        own = job.format
        assert isinstance(own, ChunkFormat)
        key = ChunkKey(own.coverage, job.block_hash)
        buffers = [memoryview(bytearray(part.format.object_bytes)) for part in cover]
        nbytes = 0
        borrowed = self._borrow(len(cover) - 1) if len(cover) > 1 else 0
        places = asyncio.Semaphore(1 + borrowed)

        async def read(part: Rearrangement, buffer: memoryview) -> JobEnd | None:
            nonlocal nbytes
            name = self._namespace.chunk(key, part.format.shard)
            async with places:
                end = await fetch(replace(job, key=name, format=part.format, buffer=buffer))
            nbytes += end.nbytes
            if end.outcome is Outcome.CORRUPT:
                _log.warning("a shard of another shape is not used: %s", end.detail)
            return end if end.outcome is Outcome.OK else None

        try:
            ends = await all_of(read(*pair) for pair in zip(cover, buffers, strict=True))
        finally:
            for _ in range(borrowed):
                self._give_back()
        if ends is None:
            return None
        for part, buffer in zip(cover, buffers, strict=True):
            part.apply(buffer, job.buffer)
        own.seal(job.buffer, job.block_hash)
        end = job.end(Outcome.OK, nbytes=nbytes)
        end.source = "other_shards"
        return end
