"""`s3kv stat`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from s3kv.cli import catalogue, show
from s3kv.cli.invocation import EPILOG, now_s, on_bucket, print_json, with_settings
from s3kv.cli.usage import NamespaceUsage, count
from s3kv.config import Config
from s3kv.objects.s3 import S3Store

_Found = Sequence[tuple[catalogue.Entry, NamespaceUsage]]


@click.command(epilog=EPILOG)
@click.argument("namespace", required=False)
@with_settings
def stat(config: Config, namespace: str | None, as_json: bool) -> None:
    """Show the totals, and each namespace with its manifest: what it is, how much, how old.

    Of the manifests it shows the fields in which the namespaces differ, which is why one engine
    does not find what another has saved. Of one NAMESPACE (the beginning of its name will do) it
    shows them all, and so it does with --json. Lists every object, 1,000 per request.
    """

    async def run(store: S3Store) -> _Found:
        if namespace is None:
            found = await catalogue.entries(store, config.prefix)
        else:
            place = await catalogue.resolve(store, config.prefix, namespace)
            found = [await catalogue.entry(store, place)]
        under = found[0].namespace.root if namespace is not None else None
        usages = await count(store, config.prefix, now_s(), under)
        empty = NamespaceUsage
        return [
            (one, usages.get(one.namespace.digest) or empty(one.namespace.digest)) for one in found
        ]

    found = on_bucket(config, run)
    if as_json:
        print_json(
            {
                "objects": sum(usage.objects for _, usage in found),
                "nbytes": sum(usage.nbytes for _, usage in found),
                "namespaces": [_document(entry, usage) for entry, usage in found],
            }
        )
    else:
        _print(found, whole=namespace is not None)


def _document(entry: catalogue.Entry, usage: NamespaceUsage) -> dict[str, Any]:
    return {
        "namespace": entry.namespace.digest,
        "objects": usage.objects,
        "nbytes": usage.nbytes,
        "oldest": _time(usage.oldest_s) if usage.objects else None,
        "newest": _time(usage.newest_s) if usage.objects else None,
        "manifest": dict(entry.fields),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


def _print(found: _Found, *, whole: bool) -> None:
    console = Console()
    told = catalogue.differing([entry for entry, _ in found])
    for entry, usage in found:
        table = Table.grid(padding=(0, 2))
        table.add_row("namespace", entry.namespace.digest)
        table.add_row("model", Text(entry.model or "–"))
        table.add_row("objects", f"{usage.objects:,}")
        table.add_row("bytes", show.size(usage.nbytes))
        if usage.objects:
            table.add_row("oldest", _time(usage.oldest_s))
            table.add_row("newest", _time(usage.newest_s))
        if not entry.fields:
            table.add_row("manifest", "none that belongs to this namespace")
        for name in entry.fields if whole else told:
            if name in entry.fields:
                table.add_row(Text(name), Text(entry.fields[name]))
        console.print(table)
        console.print()
    objects = sum(usage.objects for _, usage in found)
    nbytes = sum(usage.nbytes for _, usage in found)
    console.print(f"{len(found)} namespaces, {objects:,} objects, {show.size(nbytes)}")
