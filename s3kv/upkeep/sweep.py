"""Sweep of a bucket: deletes the objects used longest ago, to keep to a budget.

Engines may write meanwhile, and need an object that they have refreshed or replaced since it was
listed. So a HEAD can check it again just before, and the deletion is conditional on its ETag if the
server supports that. Deleting an object in use costs an engine a miss.

A namespace's manifest and shapes are deleted when the namespace is empty.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from s3kv.objects.keys import Namespace
from s3kv.stores.lanes import in_lanes, in_turn
from s3kv.stores.store import MAX_BATCH, Inventory, ObjectInfo
from s3kv.upkeep.ages import Ages, Cut
from s3kv.upkeep.listing import Checkpoint, chunks, owned, tried

HEADS_AT_ONCE = 32
REMEMBERED = 100_000
"""Most of the oldest objects held in memory while a bucket is listed, 0.5 KiB each. If all victims
(a twentieth of two million objects) are among them, it is listed once instead of twice."""
MOST_HELD = 10_000
"""Most namespaces, and most manifests and shapes, that one run holds in memory: anyone with write
access may have added more, which are left for later runs."""
_REPORT_EVERY = 1000
Report = Callable[[str, int, int | None], None]
"""Called with the activity, the number of items done, and their total (None if not known)."""


@dataclass(slots=True)
class Swept:
    """The result for one namespace; "others": for all beyond `MOST_HELD`. Counts are of chunks and
    items. changed: objects that were selected but stay, because they have been written since they
    were listed, or the store refuses to delete them; part of those kept."""

    digest: str
    deleted_objects: int = 0
    deleted_bytes: int = 0
    kept_objects: int = 0
    kept_bytes: int = 0
    changed: int = 0
    manifest_deleted: bool = False


class Oldest:
    """The `REMEMBERED` objects written longest ago of all that were added."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str, int, str, str, str]] = []
        """The newest first. Plain values: the garbage collector does not visit these."""
        self._left_out_s = math.inf
        """Last write of the oldest object that was added and is not held."""

    def add(self, of: Namespace, info: ObjectInfo) -> None:
        entry = (-info.modified_s, info.key, info.nbytes, info.etag, of.prefix, of.digest)
        if len(self._heap) < REMEMBERED:
            heapq.heappush(self._heap, entry)
            return
        newest = heapq.heappushpop(self._heap, entry)
        self._left_out_s = min(self._left_out_s, -newest[0])

    def has_all(self, cut: Cut) -> bool:
        """Whether every object that the cut may take is held."""
        return self._left_out_s >= cut.second + cut.width

    def taken(self, cut: Cut) -> Iterator[tuple[Namespace, ObjectInfo]]:
        """The objects that the cut takes."""
        for negative_s, key, nbytes, etag, prefix, digest in self._heap:
            if cut.takes(-negative_s, nbytes):
                yield Namespace(prefix, digest), ObjectInfo(key, nbytes, -negative_s, etag)


@dataclass(slots=True)
class Sweep:
    """One run over the bucket. Belongs to one asyncio loop. `namespaces` holds the results so far,
    even if `run` has raised.

    Times are seconds since the epoch. under: as for `owned`. max_bytes: the most that may be left;
    None for no limit. before_s: objects last written before this go. spare_s: objects last written
    since then stay.
    look_again: check each object with a HEAD right before it is deleted; without it an object that
    was refreshed after it was listed may be deleted. dry_run: count the objects that would be
    deleted, and delete none.
    approve: called with the bytes to delete and with all bytes, before any object is deleted.
    checkpoint: awaited after every 1,000 keys that are listed, and before every attempt to delete.
    An error that either raises ends the run.
    """

    store: Inventory
    prefix: str
    under: str | None = None
    max_bytes: int | None = None
    before_s: float = 0.0
    spare_s: float = math.inf
    look_again: bool = True
    dry_run: bool = False
    on_progress: Report = lambda what, done, total: None
    approve: Callable[[int, int], None] = lambda going, held: None
    checkpoint: Checkpoint = lambda: asyncio.sleep(0)
    namespaces: dict[str, Swept] = field(default_factory=dict, init=False)
    oldest_s: float | None = field(default=None, init=False)
    """Last write of the oldest object that the run leaves, to the second; None if there is none."""
    _signs: dict[Namespace, list[ObjectInfo]] = field(default_factory=dict, init=False)
    """The manifest and shapes of each namespace, `_signs_held` in all."""
    _signs_held: int = field(default=0, init=False)
    _oldest: Oldest = field(default_factory=Oldest, init=False)

    @property
    def total(self) -> Swept:
        """The sums over all namespaces so far."""
        counts = ("deleted_objects", "deleted_bytes", "kept_objects", "kept_bytes", "changed")
        done = self.namespaces.values()
        return Swept("total", **{name: sum(getattr(one, name) for one in done) for name in counts})

    async def run(self) -> None:
        """Run the sweep. Raises `StoreError`."""
        cut = await self._survey()
        batch: list[tuple[Swept, ObjectInfo]] = []
        async for victim in self._victims(cut):
            batch.append(victim)
            if len(batch) == MAX_BATCH:
                await self._delete(batch)
                batch.clear()
        await self._delete(batch)
        for namespace, signs in self._signs.items():
            if self.max_bytes == 0 or max(s.modified_s for s in signs) < cut.second + 1:
                await self._delete_signs(namespace, signs)

    async def _survey(self) -> Cut:
        """Count everything, and decide which age is too old."""
        ages, objects = Ages(), 0
        async for of, address, info in owned(self.store, self.prefix, self.under, self.checkpoint):
            swept = self._swept(of)
            if address is None:
                if self._signs_held < MOST_HELD:
                    self._signs_held += 1
                    self._signs.setdefault(of, []).append(info)
                continue
            ages.add(info.modified_s, info.nbytes)
            self._oldest.add(of, info)
            swept.kept_objects += 1
            swept.kept_bytes += info.nbytes
            objects += 1
            if objects % _REPORT_EVERY == 0:
                self.on_progress("counting", objects, None)
        cut = ages.cut(max_bytes=self.max_bytes, before_s=self.before_s)
        if cut.second + cut.width > self.spare_s:
            cut = Cut(math.floor(self.spare_s))
        self.approve(ages.taken(cut), ages.nbytes)
        self.oldest_s = ages.oldest_s(cut)
        return cut

    async def _victims(self, cut: Cut) -> AsyncIterator[tuple[Swept, ObjectInfo]]:
        """The objects to delete, each with the result it counts for."""
        if self._oldest.has_all(cut):
            for namespace, info in self._oldest.taken(cut):
                yield self._swept(namespace), info
            return
        objects = sum(swept.kept_objects for swept in self.namespaces.values())
        seen = 0
        async for address, info in chunks(self.store, self.prefix, self.under, self.checkpoint):
            seen += 1
            if seen % _REPORT_EVERY == 0:
                self.on_progress("deleting", min(seen, objects), objects)
            if cut.takes(info.modified_s, info.nbytes):
                yield self._swept(address.namespace), info

    def _swept(self, namespace: Namespace) -> Swept:
        is_full = len(self.namespaces) >= MOST_HELD
        name = "others" if is_full and namespace.digest not in self.namespaces else namespace.digest
        return self.namespaces.setdefault(name, Swept(name))

    async def _delete(self, victims: Sequence[tuple[Swept, ObjectInfo]]) -> None:
        stayed = set() if self.dry_run else await self._delete_unchanged([i for _, i in victims])
        for swept, info in victims:
            if info.key in stayed:
                swept.changed += 1
                continue
            swept.deleted_objects += 1
            swept.deleted_bytes += info.nbytes
            swept.kept_objects -= 1
            swept.kept_bytes -= info.nbytes

    async def _delete_unchanged(self, objects: Sequence[ObjectInfo]) -> Collection[str]:
        """Delete the objects that are still those listed. Returns the keys of the others."""
        stayed: set[str] = set()

        async def look(_: int, listed: ObjectInfo) -> None:
            now = await tried(lambda: self.store.head(listed.key)) or listed  # or it is gone
            # A HEAD returns whole seconds, a listing may return fractions.
            if int(now.modified_s) != int(listed.modified_s) or now.etag != listed.etag:
                stayed.add(listed.key)

        if self.look_again:
            await in_lanes(HEADS_AT_ONCE, in_turn(objects), look)
        going = [info for info in objects if info.key not in stayed]

        async def delete() -> Sequence[str]:
            await self.checkpoint()
            return await self.store.delete_many(going)

        if going:
            stayed |= set(await tried(delete))
        return stayed

    async def _delete_signs(self, namespace: Namespace, signs: Sequence[ObjectInfo]) -> None:
        swept = self._swept(namespace)
        if swept.kept_objects > 0:
            return
        if not self.dry_run:
            async for _ in chunks(self.store, self.prefix, namespace.root, self.checkpoint):
                return  # a chunk was written meanwhile
            for at in range(0, len(signs), MAX_BATCH):
                await self._delete_unchanged(signs[at : at + MAX_BATCH])
        swept.manifest_deleted = True
