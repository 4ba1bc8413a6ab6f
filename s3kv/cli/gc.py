"""`s3kv gc`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table

from s3kv.cli import show
from s3kv.cli import sweep as sweeping
from s3kv.cli.invocation import EPILOG, now_s, on_bucket, print_json, with_settings
from s3kv.cli.progress import bars
from s3kv.cli.quantities import duration, size
from s3kv.config import Config
from s3kv.objects.s3 import S3Store


@click.command(epilog=EPILOG)
@click.option("--max-bytes", type=size, help="Leave so much, such as 2TiB.")
@click.option("--older-than", type=duration, help="Delete what is older, such as 7d or 12h.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and delete nothing.")
@with_settings
def gc(
    config: Config,
    max_bytes: int | None,
    older_than: float | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Delete what was used longest ago, for stores without lifecycle rules.

    Age is the time since an object was last written or refreshed, by the store's clock, compared
    with the clock of this host. With --max-bytes the oldest go, whatever namespace they are in,
    until the chunks of all are no more than that; with both options what either wants.

    Safe while engines run: an object that was written or refreshed after it was listed stays.
    Deletes only chunks and items, and the manifest of a namespace that holds none any more.

    Lists the bucket twice (a request for every 1,000 objects each time), and asks for each object
    that is to go once more before it deletes 1,000 with one request.
    """
    if max_bytes is None and older_than is None:
        raise click.UsageError("say what is to go: --max-bytes, --older-than or both")
    limits = sweeping.Limits(max_bytes, 0.0 if older_than is None else now_s() - older_than)

    with bars() as on_progress:
        done: list[sweeping.Swept] = []

        async def sweep(store: S3Store) -> None:
            run = sweeping.Sweep(
                store, config.prefix, limits, dry_run=dry_run, on_progress=on_progress
            )
            try:
                await run.run()
            finally:
                done.extend(sorted(run.namespaces.values(), key=lambda n: -n.deleted_bytes))

        try:
            on_bucket(config, sweep)
        finally:
            # Also what had been deleted when the bucket stopped answering.
            if done:
                _print(done, dry_run, as_json)


def _print(done: Sequence[sweeping.Swept], dry_run: bool, as_json: bool) -> None:
    if as_json:
        total = sum(one.deleted_bytes for one in done)
        spaces = [asdict(one) for one in done]
        print_json({"dry_run": dry_run, "deleted_bytes": total, "namespaces": spaces})
        return
    table = Table("namespace", box=None)
    for name in ("would go" if dry_run else "deleted", "bytes", "changed", "left", "bytes"):
        table.add_column(name, justify="right")
    for one in done:
        table.add_row(
            f"{one.digest}{' (and its manifest)' if one.manifest_deleted else ''}",
            f"{one.deleted_objects:,}",
            show.size(one.deleted_bytes),
            f"{one.changed:,}",
            f"{one.kept_objects:,}",
            show.size(one.kept_bytes),
        )
    table.add_row(
        "total",
        f"{sum(one.deleted_objects for one in done):,}",
        show.size(sum(one.deleted_bytes for one in done)),
        f"{sum(one.changed for one in done):,}",
        f"{sum(one.kept_objects for one in done):,}",
        show.size(sum(one.kept_bytes for one in done)),
    )
    Console().print(table)
