"""Sweep of a bucket: deletes the objects used longest ago, to keep to a budget.

Engines may write meanwhile. An object is deleted only if it is still the one that was listed,
because an engine that has replaced it since has use for it: the deletion depends on its ETag, if
the server knows such conditions. Deleting an object that was wanted after all costs an engine one
request that finds nothing, and computing it again.

A refresh is a write, so the order is least recently used first, as exact as refreshes are frequent.
A namespace's manifest and shapes go when the namespace holds nothing any more.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from s3kv.objects.keys import Namespace
from s3kv.stores.store import MAX_BATCH, ObjectInfo, ObjectStore
from s3kv.upkeep.listing import chunks, owned, tried

MOST_DELETED = 100_000
"""Most objects that one run deletes: those written longest ago, which are kept in mind while the
bucket is listed, 0.5 KiB each. They are a twentieth of two million objects."""
_CHECK_EVERY = 1000
Victim = tuple[Namespace, ObjectInfo]
_Aged = tuple[float, str, Namespace, ObjectInfo]


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
    """Last write of the oldest object that the run leaves; None if it leaves none."""
    is_partial: bool = field(default=False, init=False)
    """Whether it may leave objects that should go: there are more than `MOST_DELETED`."""
    _kept: Counter[Namespace] = field(default_factory=Counter, init=False)
    """Objects in each namespace."""
    _signs: dict[Namespace, list[ObjectInfo]] = field(default_factory=dict, init=False)
    """By namespace, its manifest and its shapes."""
    _oldest: list[tuple[float, str, Namespace, ObjectInfo]] = field(
        default_factory=list, init=False
    )
    """Heap of the objects written longest ago, the newest first."""

    async def run(self) -> None:
        """Run the sweep. Raises `StoreError`."""
        going = await self._survey()
        for at in range(0, len(going), MAX_BATCH):
            await self._delete(going[at : at + MAX_BATCH])
        until_s = max(self.before_s, *(info.modified_s + 1 for _, info in going[-1:]), 0.0)
        for namespace, signs in self._signs.items():
            if max(sign.modified_s for sign in signs) < until_s:
                await self._delete_signs(namespace, signs)

    async def _survey(self) -> list[Victim]:
        """Count everything. Returns the objects to delete, those written longest ago first."""
        seen = 0
        async for namespace, address, info in owned(self.store, self.prefix):
            if address is None:
                self._signs.setdefault(namespace, []).append(info)
                continue
            push = heapq.heappush if len(self._oldest) < MOST_DELETED else heapq.heappushpop
            push(self._oldest, (-info.modified_s, info.key, namespace, info))
            self._kept[namespace] += 1
            self.kept_bytes += info.nbytes
            seen += 1
            if seen % _CHECK_EVERY == 0:
                await self.checkpoint()
        return list(self._going(sorted(self._oldest, reverse=True)))

    def _going(self, oldest: Sequence[_Aged]) -> Iterator[Victim]:
        """Of these objects, those to delete."""
        excess = 0 if self.max_bytes is None else self.kept_bytes - self.max_bytes
        spare_s = math.floor(min(self.spare_s, 2**53))  # listings may give whole seconds
        for _, _, namespace, info in oldest:
            self.oldest_s = info.modified_s
            wanted = info.modified_s < self.before_s or excess > 0
            if not wanted or info.modified_s >= spare_s:
                return
            excess -= info.nbytes
            yield namespace, info
        self.is_partial = self._kept.total() > len(oldest)
        if not self.is_partial:
            self.oldest_s = None

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
