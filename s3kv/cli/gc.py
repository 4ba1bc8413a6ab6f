"""`s3kv gc`: keeps a bucket to a budget without lifecycle rules, while engines write to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

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
from s3kv.config import Config
from s3kv.objects.store import BulkStore
from s3kv.objects.sweep import Sweep, Swept


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
