"""A bucket that keeps to a budget of bytes, under the requests of a trace.

`KeptBucket` is kept as a fleet keeps it, by the very code: each replica has a
`s3kv.upkeep.cleaner.Cleaner` and a `s3kv.upkeep.refreshing.Refresher`, in virtual time. Only
the store is a model: requests take time, a listing has pages, and every request is counted.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import cache

from lab.memory_store import MemoryStore
from s3kv.config import Config
from s3kv.objects.keys import Namespace
from s3kv.place import Place
from s3kv.stores.store import ObjectInfo, Receiver
from s3kv.types import ChunkKey
from s3kv.upkeep.cleaner import MIN_AGE_S, Cleaner
from s3kv.upkeep.refreshing import Refresher, RefreshRule
from tests.system.sim.loop import VirtualLoop

_DEFAULTS = Config(bucket="trace")
PREFIX = _DEFAULTS.prefix
_NAMESPACE = Namespace(PREFIX, "0" * 32)
_EPOCH_S = 1e9
_ETAG = '"0"'
_PAGE = 1000
"""Keys in one answer to a LIST."""
_REQUEST_S = 0.1
"""Time of one request of the cleaner or of a refresh."""


class CountedStore(MemoryStore):
    """Objects of one size, of which only the key and the time of the last write are kept, and the
    lease's object. Counts requests: by verb, and `refreshes` and `refused` ones."""

    def __init__(self, loop: VirtualLoop, object_bytes: int) -> None:
        super().__init__(lambda: _EPOCH_S + loop.time())
        self.counts: Counter[str] = Counter()
        self.peak = 0
        self._loop = loop
        self._object_bytes = object_bytes

    def add(self, key: str) -> bool:
        """Write the object unless it is there."""
        if key in self._objects:
            return False
        self.hold(key, b"")
        self.peak = max(self.peak, len(self._objects))
        return True

    def find(self, key: str) -> ObjectInfo | None:
        return self._told(key) if key in self._objects else None

    async def _take(self, verb: str) -> None:
        self.counts[verb] += 1
        await asyncio.sleep(_REQUEST_S)

    async def get_into(
        self, key: str, place: Place, receiver: Receiver | None = None, first: int | None = None
    ) -> ObjectInfo | None:
        await self._take("gets")
        return await super().get_into(key, place, receiver, first)

    async def put(self, key: str, place: Place, *, if_absent: bool) -> bool:
        await self._take("lease_puts")
        return await super().put(key, place, if_absent=if_absent)

    async def head(self, key: str) -> ObjectInfo | None:
        await self._take("heads")
        return await super().head(key)

    async def refresh(self, key: str, modified_s: float) -> bool:
        await self._take("copies")
        done = await super().refresh(key, modified_s)
        self.counts["refreshes" if done else "refused"] += 1
        return done

    async def delete_many(self, objects: Sequence[ObjectInfo]) -> Sequence[str]:
        await self._take("deletes")
        for info in objects:
            self.counts["deleted"] += self._objects.pop(info.key, None) is not None
        return ()

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[ObjectInfo]:
        found = sorted(key for key in self._objects if key.startswith(prefix) and key > after)
        for start in range(0, max(1, len(found)), _PAGE):
            await self._take("lists")
            for key in found[start : start + _PAGE]:
                if key in self._objects:
                    yield self._info(key)

    def _info(self, key: str) -> ObjectInfo:
        data, modified_s = self._objects[key]
        if data:
            return super()._info(key)
        return ObjectInfo(key, self._object_bytes, modified_s, _ETAG)


class KeptBucket:
    """A bucket that `replicas` I/O processes keep to `max_bytes`."""

    def __init__(self, object_bytes: int, max_bytes: int, *, replicas: int, seed: int) -> None:
        self.loop = VirtualLoop()
        self._store = CountedStore(self.loop, object_bytes)
        self.counts = self._store.counts
        self._refreshers: list[Refresher] = []
        self._fresh_until_s: dict[tuple[int, bytes], float] = {}
        self._cleaners: list[Cleaner] = []
        for replica in range(replicas):
            self._add_replica(max_bytes, replica, random.Random(f"{seed}/{replica}"))

    def _add_replica(self, max_bytes: int, replica: int, rng: random.Random) -> None:
        rule = RefreshRule(math.inf, rng)

        def refresh_after(seconds: float) -> None:
            rule.refresh_after_s = seconds

        refresher = Refresher(self._store, rule, lambda: True)
        cleaner = Cleaner(
            self._store,
            PREFIX,
            max_bytes=max_bytes,
            idle_s=0.0,
            min_age_s=MIN_AGE_S,
            holder=str(replica),
            on_refresh_after=refresh_after,
            rng=rng,
            clock=self.loop.time,
        )
        self._refreshers.append(refresher)
        self._cleaners.append(cleaner)
        self.loop.create_task(refresher.run())
        self.loop.create_task(refresher.look())
        self.loop.create_task(cleaner.run())

    @property
    def peak_objects(self) -> int:
        return self._store.peak

    def get(self, key: bytes, replica: int, now_s: float) -> bool:
        """Whether the object is there; a use if so. Times are seconds and never go back."""
        self.loop.run_until(now_s)
        self.counts["gets"] += 1
        info = self._store.find(_name(key))
        if info is None:
            return False
        self.counts["hits"] += 1
        self._refreshers[replica].hit(info)
        return True

    def use(self, key: bytes, replica: int, now_s: float) -> None:
        """Note a hit on a copy elsewhere, which does not know the age of the object, unless one has
        been noted for which it is still fresh."""
        if self._fresh_until_s.get((replica, key), 0.0) <= now_s:
            self.loop.run_until(now_s)
            fresh_s = self._refreshers[replica].exists(_name(key))
            self._fresh_until_s[replica, key] = now_s + fresh_s

    def put(self, key: bytes, replica: int, now_s: float) -> bool:
        """Write it if it is not there; a use in any case. Returns whether it was written."""
        self.loop.run_until(now_s)
        self.counts["puts"] += 1
        if self._store.add(_name(key)):
            return True
        self._refreshers[replica].exists(_name(key))
        return False

    def end(self, now_s: float) -> None:
        """Nothing more is asked."""
        self.loop.run_until(now_s)
        self.counts["sweeps"] = sum(cleaner.sweeps for cleaner in self._cleaners)
        self.loop.give_up()
        if self.loop.failures:
            raise RuntimeError(self.loop.failures[0])


@cache
def _name(key: bytes) -> str:
    return _NAMESPACE.chunk(ChunkKey(0, key), "whole")
