"""Keeping a bucket to a budget without lifecycle rules, while engines write to it.

An object goes when it is still the one that was listed: it is looked at once more right before,
because whoever has refreshed or replaced it since has use for it, and deleted on the condition
that its ETag is the same, where the server knows such conditions. What is deleted although it
was wanted costs an engine one request that finds nothing, and computing it again.

A namespace's manifest goes when the namespace holds nothing any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from s3kv.cli.patience import chunks, listed, tried
from s3kv.objects import keys
from s3kv.objects.ages import Ages, Cut
from s3kv.objects.store import MAX_BATCH, BulkStore, ObjectInfo

HEADS_AT_ONCE = 32

_REPORT_EVERY = 1000
Progress = Callable[[str, int, int | None], None]
"""As `progress.Report`, which is for a terminal."""


@dataclass(frozen=True, slots=True)
class Limits:
    """max_bytes: what may be left. before_s: what was last written before this goes, seconds since
    the epoch."""

    max_bytes: int | None = None
    before_s: float = 0.0


@dataclass(slots=True)
class Swept:
    """What became of one namespace. Bytes and objects are those of chunks and items.

    changed: objects that were to go and stay, because they have been written since they were
    listed; part of those kept.
    """

    digest: str
    deleted_objects: int = 0
    deleted_bytes: int = 0
    kept_objects: int = 0
    kept_bytes: int = 0
    changed: int = 0
    manifest_deleted: bool = False


@dataclass(slots=True)
class _Survey:
    ages: Ages = field(default_factory=Ages)
    objects: int = 0
    manifests: dict[str, ObjectInfo] = field(default_factory=dict)


class Sweep:
    """One run over the bucket. Belongs to one asyncio loop. `namespaces` tells, also when `run` has
    raised, what has been done so far.

    dry_run: count what would go, and delete nothing.
    """

    def __init__(
        self,
        store: BulkStore,
        prefix: str,
        limits: Limits,
        *,
        dry_run: bool = False,
        on_progress: Progress = lambda what, done, total: None,
    ) -> None:
        self.namespaces: dict[str, Swept] = {}
        self._store = store
        self._prefix = prefix
        self._limits = limits
        self._dry_run = dry_run
        self._on_progress = on_progress
        self._looking = asyncio.Semaphore(HEADS_AT_ONCE)

    async def run(self) -> None:
        """Raises `StoreError`."""
        survey = await self._survey()
        cut = survey.ages.cut(max_bytes=self._limits.max_bytes, before_s=self._limits.before_s)
        second = cut.second
        victims = await self._find(cut, survey.objects)
        for start in range(0, len(victims), MAX_BATCH):
            await self._delete(victims[start : start + MAX_BATCH])
            self._on_progress("deleting", min(start + MAX_BATCH, len(victims)), len(victims))
        for digest, manifest in survey.manifests.items():
            if manifest.modified_s < second + 1:
                await self._delete_manifest(digest, manifest)

    async def _survey(self) -> _Survey:
        survey = _Survey()
        async for info in listed(self._store, keys.all_namespaces(self._prefix)):
            address = keys.parse(info.key)
            place = address.namespace if address else keys.parse_manifest(info.key)
            if place is None or place.prefix != self._prefix:
                continue
            swept = self.namespaces.setdefault(place.digest, Swept(place.digest))
            if address is None:
                survey.manifests[place.digest] = info
                continue
            survey.ages.add(info.modified_s, info.nbytes)
            swept.kept_objects += 1
            swept.kept_bytes += info.nbytes
            survey.objects += 1
            if survey.objects % _REPORT_EVERY == 0:
                self._on_progress("counting", survey.objects, None)
        return survey

    async def _find(self, cut: Cut, objects: int) -> Sequence[ObjectInfo]:
        """What is to go, the oldest first."""
        victims: list[ObjectInfo] = []
        seen = 0
        async for _, info in chunks(self._store, self._prefix):
            seen += 1
            if seen % _REPORT_EVERY == 0:
                self._on_progress("choosing", min(seen, objects), objects)
            if cut.takes(info.modified_s, info.nbytes):
                victims.append(info)
        return sorted(victims, key=attrgetter("modified_s", "key"))

    async def _delete(self, victims: Sequence[ObjectInfo]) -> None:
        if self._dry_run:
            self._count(victims, ())
            return
        unchanged = await asyncio.gather(*map(self._is_unchanged, victims))
        going = [info for info, same in zip(victims, unchanged, strict=True) if same]
        stayed = {info.key for info, same in zip(victims, unchanged, strict=True) if not same}
        if going:
            stayed |= set(await tried(lambda: self._store.delete_many(going)))
        self._count(victims, stayed)

    async def _is_unchanged(self, listed: ObjectInfo) -> bool:
        """Also of an object that is gone: then there is nothing to lose."""
        async with self._looking:
            now = await tried(lambda: self._store.head(listed.key))
        # A HEAD tells whole seconds, a listing may tell fractions.
        return now is None or (
            int(now.modified_s) == int(listed.modified_s) and now.etag == listed.etag
        )

    def _count(self, victims: Sequence[ObjectInfo], stayed: set[str] | tuple[()]) -> None:
        for info in victims:
            address = keys.parse(info.key)
            assert address is not None
            digest = address.namespace.digest
            swept = self.namespaces.setdefault(digest, Swept(digest))
            if info.key in stayed:
                swept.changed += 1
                continue
            swept.deleted_objects += 1
            swept.deleted_bytes += info.nbytes
            swept.kept_objects -= 1
            swept.kept_bytes -= info.nbytes

    async def _delete_manifest(self, digest: str, manifest: ObjectInfo) -> None:
        swept = self.namespaces[digest]
        if swept.kept_objects > 0:
            return
        if not self._dry_run:
            root = keys.Namespace(self._prefix, digest).root
            async for _ in chunks(self._store, self._prefix, root):
                return  # written meanwhile
            await tried(lambda: self._store.delete(manifest.key, if_etag=manifest.etag))
        swept.manifest_deleted = True
