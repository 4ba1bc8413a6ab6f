"""Reading chunks that ranks of another parallel size have stored.

Every rank stores its own shard and requests it first. If that object is absent and the namespace
has shards of other shapes, the rank then requests those that cover its heads and layers, one set
after the other:

    own object ──not there──▶ first cover ──a shard not there, or bad──▶ next cover ──▶ a miss
        └──▶ hit                  └──all there and verified──▶ rearranged into the slot: a hit

The objects of a cover are read into separate memory and verified there like any other. The slot is
written only when all of them have arrived, so an interrupted read leaves it untouched. A rank never
replaces an object of another shape: if it does not verify, this rank may have the wrong format for
it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace

from s3kv.errors import StoreError
from s3kv.io import wire
from s3kv.io.sources.staging import StagingMemory
from s3kv.io.sources.transfer_job import Borrow, TransferJob
from s3kv.messages import JobEnd
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.keys import Namespace
from s3kv.objects.rearranging import Pages, Rearrangement, rearrangements
from s3kv.objects.shards import Shard, covers
from s3kv.place import Place
from s3kv.stores.lanes import all_of
from s3kv.stores.store import ObjectStore
from s3kv.types import ChunkKey, Outcome, once_a_minute

_log = logging.getLogger("s3kv.io")

LOOK_AGAIN_S = 600.0
"""Time between two listings of the shapes: a fleet of another shape may begin at any time."""
LOOK_AFTER_ERROR_S = 60.0
_MOST_SHAPES = 4096
"""Maximum number of keys read. Each rank of every size has one; any writer can add more."""

ShardCover = list[Rearrangement]


class OtherShards:
    """The shards of other shapes as a source. Belongs to one asyncio loop. fetch: fetches the
    object of a job from the bucket, and verifies it; raises `StoreError`."""

    name = "other_shards"
    is_near = False

    def __init__(
        self,
        handshake: wire.Handshake,
        store: ObjectStore,
        fetch: Callable[[TransferJob], Awaitable[JobEnd]],
        borrow: Borrow,
        staging: StagingMemory,
    ) -> None:
        self._store = store
        self._namespace = Namespace(handshake.namespace_prefix, handshake.namespace_digest)
        self._shard = Shard.parse(handshake.shard)
        self._pages = handshake.pages
        self._fetch, self._borrow, self._staging = fetch, borrow, staging
        self._shapes: set[Shard] = set()
        self._covers: dict[int, list[ShardCover]] = {}
        """By coverage, the covers that follow from the present shapes."""
        self._look_after_s = -math.inf
        self._looking = asyncio.Lock()
        self._may_log = once_a_minute(asyncio.get_running_loop().time)

    async def fetch(self, job: TransferJob) -> JobEnd | None:
        """Fetch, for `Source.fetch`. The job's place is written only once all shards are there."""
        if self._pages is None or self._shard is None:  # ranks of other sizes share nothing with it
            return None
        await self._look()
        end = None
        own = job.format
        assert isinstance(own, ChunkFormat), "items are not divided among ranks"
        for cover in self._covers_of(own, self._shard, self._pages):
            end = await self._read(job, ChunkKey(own.coverage, job.block_hash), cover)
            if end.outcome is Outcome.OK:
                break
        return end

    async def _look(self) -> None:
        """Update the shapes of the namespace, if the last listing is too old."""
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
        prefix, shapes = self._namespace.shapes, set[Shard]()
        left = _MOST_SHAPES
        async for info in self._store.list(prefix):
            if (shard := Shard.parse(info.key.removeprefix(prefix))) is not None:
                shapes.add(shard)
            left -= 1
            if not left:
                break
        return shapes

    def _covers_of(self, own: ChunkFormat, shard: Shard, pages: Pages) -> list[ShardCover]:
        if own.coverage not in self._covers:
            sets = covers(shard, self._shapes)
            known = (rearrangements(own, shard, shards, pages) for shards in sets)
            self._covers[own.coverage] = [cover for cover in known if cover is not None]
        return self._covers[own.coverage]

    async def _read(self, job: TransferJob, key: ChunkKey, cover: ShardCover) -> JobEnd:
        lengths = [part.format.object_bytes for part in cover]
        nbytes = 0
        async with self._staging.lease(lengths) as buffers:
            pairs = zip(cover, buffers, strict=True)
            places = [Place.of(buffer, part.format.header_bytes) for part, buffer in pairs]
            with self._borrow(len(cover) - 1) as (count, _):
                requests = asyncio.Semaphore(1 + count)

                async def read(part: Rearrangement, place: Place) -> JobEnd | None:
                    nonlocal nbytes
                    name = self._namespace.chunk(key, part.format.shard)
                    wanted = replace(job, key=name, format=part.format, place=place)
                    async with requests:
                        end = await self._fetch(wanted)
                    nbytes += end.nbytes
                    if end.outcome is Outcome.CORRUPT and self._may_log(end.outcome):
                        _log.warning("a shard of another shape is not used: %s", end.detail)
                    return end if end.outcome is Outcome.OK else None

                ends = await all_of(read(*pair) for pair in zip(cover, places, strict=True))
            if ends is None:
                said = f"{job.key} is not in shards of other shapes either"
                return job.end(Outcome.MISSING, said)
            for part, place in zip(cover, places, strict=True):
                part.apply(place, job.place)
            job.format.seal(job.place, job.block_hash)
            return job.end(Outcome.OK, nbytes=nbytes, fresh_s=min(end.fresh_s for end in ends))
