"""`s3kv ls`: the namespaces of a bucket or a disk, and the counts of their objects."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import click

from s3kv.cli import show, walk
from s3kv.cli.disk import disk_option, on_bucket_or_disk
from s3kv.cli.invocation import EPILOG, now_s, print_json, with_settings
from s3kv.cli.walk import NamespaceContent
from s3kv.config import Config
from s3kv.stores.store import Inventory


@click.command(epilog=EPILOG)
@click.argument("namespace", required=False)
@click.option("--summary", is_flag=True, help="Count objects, bytes and ages; compare manifests.")
@disk_option
@with_settings
def ls(
    config: Config, namespace: str | None, summary: bool, disk: str | None, as_json: bool
) -> None:
    """List the namespaces, or count the objects of one NAMESPACE.

    With --summary it counts the objects of each namespace, the largest first, and shows the fields
    in which the manifests differ, which explain why one engine does not find the chunks of another.
    For one NAMESPACE it counts those and shows the whole manifest; the beginning of its name is
    enough. It lists every object, 1,000 per request.

    With --disk it always counts. Models and manifests are in the bucket alone.

    With --json every line is a JSON document of its own.
    """

    async def run(store: Inventory) -> None:
        if namespace is None:
            found, under = await walk.namespaces(store, config.prefix), None
            if not found:
                await walk.report_empty(store, disk or config.bucket, config.prefix)
                return
        else:
            place = await walk.resolve(store, config.prefix, namespace)
            found, under = [await walk.describe(store, place)], place.root
        counts = summary or namespace is not None or disk is not None
        if counts:
            with show.bars() as on_progress:
                found = await walk.count(
                    store, config.prefix, found, now_s(), under, on_progress=on_progress
                )
        if as_json:
            for one in found:
                print_json(_counted(one) if counts else _named(one), indent=None)
        elif counts:
            fields = walk.differing(found) if namespace is None else None
            _print_summary(found, fields, on_disk=disk is not None)
        else:
            rows = [(one.namespace.digest, one.model or "–") for one in found]
            show.print_table(["namespace", "model"], rows)

    on_bucket_or_disk(config, disk, run)


def _named(one: NamespaceContent) -> dict[str, Any]:
    return {"namespace": one.namespace.digest, "model": one.model}


def _counted(one: NamespaceContent) -> dict[str, Any]:
    return _named(one) | {
        "objects": one.objects,
        "nbytes": one.nbytes,
        "oldest": _time(one.oldest_s) if one.objects else None,
        "newest": _time(one.newest_s) if one.objects else None,
        "bytes_by_age": one.bytes_by_age,
        "manifest": dict(one.manifest),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


def _print_summary(
    found: Sequence[NamespaceContent], fields: Sequence[str] | None, *, on_disk: bool
) -> None:
    """Print the counts, the ages of the bytes, and these fields of the manifests (None: all)."""
    now = now_s()
    rows = [
        (
            one.namespace.digest,
            one.model or "–",
            f"{one.objects:,}",
            show.size(one.nbytes),
            *((show.age(now - s) if one.objects else "–") for s in (one.oldest_s, one.newest_s)),
        )
        for one in found
    ]
    nbytes = sum(one.nbytes for one in found)
    rows.append(("total", "", f"{sum(o.objects for o in found):,}", show.size(nbytes), "", ""))
    names = ("objects", "bytes", "oldest", "newest")
    show.print_table(["namespace", "model", *show.numbers(*names)], rows)
    by_age = {name: sum(one.bytes_by_age[name] for one in found) for name in walk.AGES}
    show.print_table(
        ["last used" if on_disk else "last written", *show.numbers("bytes")],
        [(name, show.size(nbytes)) for name, nbytes in by_age.items()],
    )
    told = [
        (one.namespace.digest, name, one.manifest[name])
        for one in found
        for name in (one.manifest if fields is None else fields)
        if name in one.manifest
    ]
    told += [(o.namespace.digest, "no manifest of its own", "") for o in found if not o.manifest]
    if told and not on_disk:
        show.print_table(["namespace", "manifest", ""], told)
