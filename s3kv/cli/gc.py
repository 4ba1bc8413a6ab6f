"""`s3kv gc`: keeps a bucket to a budget without lifecycle rules, while engines write to it.

An object is deleted only if it is still the one that was listed, because an engine that has
refreshed or replaced it since has use for it. So a HEAD looks at it once more right before, and the
deletion depends on its ETag, if the server knows such conditions. Deleting an object that was
wanted after all costs an engine one request that finds nothing, and computing it again.

A namespace's manifest and shapes go when the namespace holds nothing any more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field

import click

from s3kv.cli import show
from s3kv.cli.invocation import (
    EPILOG,
    duration,
    now_s,
    on_bucket,
    print_json,
    size,
    with_settings,
)
from s3kv.cli.walk import chunks, in_lanes, in_turn, owned, tried
from s3kv.config import Config
from s3kv.objects.ages import Ages, Cut
from s3kv.objects.keys import Namespace
from s3kv.objects.store import MAX_BATCH, BulkStore, ObjectInfo

HEADS_AT_ONCE = 32
_REPORT_EVERY = 1000


@dataclass(slots=True)
class Swept:
    """The result for one namespace. Bytes and objects are those of chunks and items.

    changed: objects that were to go but stay, because they have been written since they were
    listed; part of those kept.
    """

    digest: str
    deleted_objects: int = 0
    deleted_bytes: int = 0
    kept_objects: int = 0
    kept_bytes: int = 0
    changed: int = 0
    manifest_deleted: bool = False


@click.command(epilog=EPILOG)
@click.option("--max-bytes", type=size, help="Bytes to leave in the bucket, such as 2TiB.")
@click.option(
    "--older-than", type=duration, help="Delete objects older than this, such as 7d or 12h."
)
@click.option("--dry-run", is_flag=True, help="Print what would be deleted, and delete nothing.")
@with_settings
def gc(
    config: Config,
    max_bytes: int | None,
    older_than: float | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Delete the objects used longest ago, for stores without lifecycle rules.

    Age is the time since an object was last written or refreshed, by the store's clock, compared
    with the clock of this host. With --max-bytes the oldest objects go, in any namespace, until all
    chunks together take no more than that. With both options an object goes if either selects it.

    Safe while engines run: an object written or refreshed after it was listed stays. Deletes only
    chunks and items, and the manifest and shapes of a namespace that holds none any more.

    Lists the bucket twice (one request for every 1,000 objects each time), and sends a HEAD for
    each object that is to go before it deletes 1,000 with one request.
    """
    if max_bytes is None and older_than is None:
        raise click.UsageError("give --max-bytes, --older-than or both")
    before_s = 0.0 if older_than is None else now_s() - older_than
    done: list[Swept] = []

    async def sweep(store: BulkStore) -> None:
        with show.bars() as on_progress:
            run = Sweep(
                store,
                config.prefix,
                max_bytes=max_bytes,
                before_s=before_s,
                dry_run=dry_run,
                on_progress=on_progress,
            )
            try:
                await run.run()
            finally:
                done.extend(sorted(run.namespaces.values(), key=lambda n: -n.deleted_bytes))

    try:
        on_bucket(config, sweep)
    finally:
        # Also printed when the bucket stopped answering halfway.
        if done:
            _print(done, dry_run, as_json)


@dataclass(slots=True)
class Sweep:
    """One run over the bucket. Belongs to one asyncio loop. `namespaces` holds the results so far,
    even if `run` has raised.

    max_bytes: the most that may be left; None for no limit. before_s: objects last written before
    this go, in seconds since the epoch. dry_run: count the objects that would go, and delete none.
    """

    store: BulkStore
    prefix: str
    max_bytes: int | None = None
    before_s: float = 0.0
    dry_run: bool = False
    on_progress: show.Report = lambda what, done, total: None
    namespaces: dict[str, Swept] = field(default_factory=dict, init=False)
    _signs: dict[Namespace, list[ObjectInfo]] = field(default_factory=dict, init=False)
    """By namespace, its manifest and its shapes."""

    async def run(self) -> None:
        """Run the sweep. Raises `StoreError`."""
        cut = await self._survey()
        second = cut.second
        victims = await self._find(cut)
        for start in range(0, len(victims), MAX_BATCH):
            await self._delete(victims[start : start + MAX_BATCH])
            self.on_progress("deleting", min(start + MAX_BATCH, len(victims)), len(victims))
        for namespace, signs in self._signs.items():
            if max(sign.modified_s for sign in signs) < second + 1:
                await self._delete_signs(namespace, signs)

    async def _survey(self) -> Cut:
        """Count everything, and decide which age is too old."""
        ages, objects = Ages(), 0
        async for namespace, address, info in owned(self.store, self.prefix):
            swept = self._swept(namespace)
            if address is None:
                self._signs.setdefault(namespace, []).append(info)
                continue
            ages.add(info.modified_s, info.nbytes)
            swept.kept_objects += 1
            swept.kept_bytes += info.nbytes
            objects += 1
            if objects % _REPORT_EVERY == 0:
                self.on_progress("counting", objects, None)
        return ages.cut(max_bytes=self.max_bytes, before_s=self.before_s)

    async def _find(self, cut: Cut) -> list[tuple[Swept, ObjectInfo]]:
        """The objects to delete, the oldest first, each with the result it counts for."""
        objects = sum(swept.kept_objects for swept in self.namespaces.values())
        victims: list[tuple[Swept, ObjectInfo]] = []
        seen = 0
        async for address, info in chunks(self.store, self.prefix):
            seen += 1
            if seen % _REPORT_EVERY == 0:
                self.on_progress("choosing", min(seen, objects), objects)
            if cut.takes(info.modified_s, info.nbytes):
                victims.append((self._swept(address.namespace), info))
        return sorted(victims, key=lambda victim: (victim[1].modified_s, victim[1].key))

    def _swept(self, namespace: Namespace) -> Swept:
        return self.namespaces.setdefault(namespace.digest, Swept(namespace.digest))

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
            now = await tried(lambda: self.store.head(listed.key))
            # A HEAD gives whole seconds, a listing may give fractions. What is gone may go.
            if now is not None and (int(now.modified_s), now.etag) != (
                int(listed.modified_s),
                listed.etag,
            ):
                stayed.add(listed.key)

        await in_lanes(HEADS_AT_ONCE, in_turn(objects), look)
        going = [info for info in objects if info.key not in stayed]
        if going:
            stayed |= set(await tried(lambda: self.store.delete_many(going)))
        return stayed

    async def _delete_signs(self, namespace: Namespace, signs: Sequence[ObjectInfo]) -> None:
        swept = self._swept(namespace)
        if swept.kept_objects > 0:
            return
        if not self.dry_run:
            async for _ in chunks(self.store, self.prefix, namespace.root):
                return  # a chunk was written meanwhile
            await self._delete_unchanged(signs)
        swept.manifest_deleted = True


def _print(done: Sequence[Swept], dry_run: bool, as_json: bool) -> None:
    total = Swept(
        "total",
        deleted_objects=sum(one.deleted_objects for one in done),
        deleted_bytes=sum(one.deleted_bytes for one in done),
        kept_objects=sum(one.kept_objects for one in done),
        kept_bytes=sum(one.kept_bytes for one in done),
        changed=sum(one.changed for one in done),
    )
    if as_json:
        spaces = [asdict(one) for one in done]
        counts = {"dry_run": dry_run, "deleted_bytes": total.deleted_bytes}
        print_json(counts | {"namespaces": spaces})
        return
    names = ("would go" if dry_run else "deleted", "bytes", "changed", "left", "bytes")
    rows = [
        (
            f"{one.digest}{' (and its manifest)' if one.manifest_deleted else ''}",
            f"{one.deleted_objects:,}",
            show.size(one.deleted_bytes),
            f"{one.changed:,}",
            f"{one.kept_objects:,}",
            show.size(one.kept_bytes),
        )
        for one in (*done, total)
    ]
    show.print_table(["namespace", *show.numbers(*names)], rows)
