"""Sweep of a bucket: deletes the objects used longest ago, to keep to a budget.

Engines may write meanwhile. An object is deleted only if it is still the one that was listed,
because an engine that has replaced it since has use for it: the deletion depends on its ETag, if
the server knows such conditions. Deleting an object that was wanted after all costs an engine one
request that finds nothing, and computing it again.

A namespace's manifest and shapes go when the namespace holds nothing any more.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from s3kv.objects.keys import Namespace
from s3kv.stores.store import MAX_BATCH, ObjectInfo, ObjectStore
from s3kv.upkeep.ages import Ages, Cut
from s3kv.upkeep.listing import chunks, owned, tried

REMEMBERED = 100_000
"""Most of the oldest objects that are kept in mind while a bucket is listed, of 0.5 KiB each. If
all that are to go are among them, it is listed once instead of twice: one listing is enough for a
twentieth of two million objects."""
_CHECK_EVERY = 1000
Victim = tuple[Namespace, ObjectInfo]


class Oldest:
    """The `REMEMBERED` objects written longest ago of all that were added."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str, Namespace, ObjectInfo]] = []
        """The newest first."""
        self._left_out_s = math.inf
        """Last write of the oldest object that was added and is not held."""

    def add(self, namespace: Namespace, info: ObjectInfo) -> None:
        entry = (-info.modified_s, info.key, namespace, info)
        if len(self._heap) < REMEMBERED:
            heapq.heappush(self._heap, entry)
            return
        newest = heapq.heappushpop(self._heap, entry)
        self._left_out_s = min(self._left_out_s, -newest[0])

    def has_all(self, cut: Cut) -> bool:
        """Whether every object that the cut may take is held."""
        return self._left_out_s >= cut.second + (cut.nbytes > 0)

    def taken(self, cut: Cut) -> Iterator[Victim]:
        """The objects that the cut takes."""
        for _, _, namespace, info in self._heap:
            if cut.takes(info.modified_s, info.nbytes):
                yield namespace, info


@dataclass(slots=True)
class Sweep:
    """One run over the bucket. Belongs to one asyncio loop. The counts are those of chunks and
    items so far, even if `run` has raised.

    Times are seconds since the epoch. max_bytes: the most that may be left; None for no limit.
    before_s: objects last written before this go. spare_s: objects last written since then stay. An
    object that was refreshed after it was listed may go.
    checkpoint: awaited after every 1,000 objects that are listed, and before every attempt to
    delete; an error that it raises ends the run.
    """

    store: ObjectStore
    prefix: str
    checkpoint: Callable[[], Awaitable[None]]
    max_bytes: int | None = None
    before_s: float = 0.0
    spare_s: float = math.inf
    deleted_objects: int = field(default=0, init=False)
    deleted_bytes: int = field(default=0, init=False)
    kept_bytes: int = field(default=0, init=False)
    oldest_s: float | None = field(default=None, init=False)
    """Last write of the oldest object that the run leaves, to the second; None if it leaves none.
    """
    _kept: Counter[Namespace] = field(default_factory=Counter, init=False)
    """Objects in each namespace."""
    _signs: dict[Namespace, list[ObjectInfo]] = field(default_factory=dict, init=False)
    """By namespace, its manifest and its shapes."""
    _oldest: Oldest = field(default_factory=Oldest, init=False)

    async def run(self) -> None:
        """Run the sweep. Raises `StoreError`."""
        cut = await self._survey()
        second = cut.second
        batch: list[Victim] = []
        async for victim in self._victims(cut):
            batch.append(victim)
            if len(batch) == MAX_BATCH:
                await self._delete(batch)
                batch.clear()
        await self._delete(batch)
        for namespace, signs in self._signs.items():
            if max(sign.modified_s for sign in signs) < second + 1:
                await self._delete_signs(namespace, signs)

    async def _survey(self) -> Cut:
        """Count everything, and decide which age is too old."""
        ages = Ages()
        async for namespace, address, info in owned(self.store, self.prefix):
            if address is None:
                self._signs.setdefault(namespace, []).append(info)
                continue
            ages.add(info.modified_s, info.nbytes)
            self._oldest.add(namespace, info)
            self._kept[namespace] += 1
            self.kept_bytes += info.nbytes
            if self._kept.total() % _CHECK_EVERY == 0:
                await self.checkpoint()
        cut = ages.cut(max_bytes=self.max_bytes, before_s=self.before_s)
        if cut.second + (cut.nbytes > 0) > self.spare_s:
            cut = Cut(math.floor(self.spare_s))
        self.oldest_s = ages.oldest_s(cut)
        return cut

    async def _victims(self, cut: Cut) -> AsyncIterator[Victim]:
        """The objects to delete."""
        if self._oldest.has_all(cut):
            for victim in self._oldest.taken(cut):
                yield victim
            return
        seen = 0
        async for address, info in chunks(self.store, self.prefix):
            seen += 1
            if seen % _CHECK_EVERY == 0:
                await self.checkpoint()
            if cut.takes(info.modified_s, info.nbytes):
                yield address.namespace, info

    async def _delete(self, victims: Sequence[Victim]) -> None:
        stayed = await self._delete_unchanged([info for _, info in victims])
        for namespace, info in victims:
            if info.key not in stayed:
                self.deleted_objects += 1
                self.deleted_bytes += info.nbytes
                self.kept_bytes -= info.nbytes
                self._kept[namespace] -= 1

    async def _delete_unchanged(self, objects: Sequence[ObjectInfo]) -> Collection[str]:
        """Delete the objects that are still those listed. Returns the keys of the others."""

        async def delete() -> Sequence[str]:
            await self.checkpoint()
            return await self.store.delete_many(objects)

        return set(await tried(delete)) if objects else ()

    async def _delete_signs(self, namespace: Namespace, signs: Sequence[ObjectInfo]) -> None:
        if self._kept[namespace] > 0:
            return
        async for _ in chunks(self.store, self.prefix, namespace.root):
            return  # a chunk was written meanwhile
        await self._delete_unchanged(signs)
