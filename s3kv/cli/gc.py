"""`s3kv gc`: keeps a bucket within a budget without lifecycle rules, while engines write to it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import click

from s3kv.cli import show, walk
from s3kv.cli.disk import disk_option, on_bucket_or_disk
from s3kv.cli.invocation import EPILOG, duration, now_s, print_json, size, with_settings
from s3kv.config import Config
from s3kv.errors import ConfigError
from s3kv.stores.store import Inventory
from s3kv.upkeep.sweep import Sweep


@click.command(epilog=EPILOG)
@click.argument("namespace", required=False)
@click.option("--max-bytes", type=size, help="Bytes to leave, such as 2TiB; 0: none.")
@click.option(
    "--older-than", type=duration, help="Delete objects older than this, such as 7d or 12h."
)
@click.option("--dry-run", is_flag=True, help="Print the objects to delete, and delete nothing.")
@click.option("--yes", is_flag=True, help="Delete more than half of the bytes without asking.")
@disk_option
@with_settings
def gc(
    config: Config,
    namespace: str | None,
    disk: str | None,
    max_bytes: int | None,
    older_than: float | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete the objects used longest ago, for stores without lifecycle rules.

    With a NAMESPACE, or the beginning of its name, only its objects are counted and deleted.

    Age is the time since an object was last written or refreshed, by the store's clock, compared
    with the clock of this host. With --max-bytes the oldest objects go, in any namespace, until all
    chunks together take no more than that. With both options an object goes if either selects it.
    Deleting more than half of the bytes needs a confirmation, or --yes without a terminal.

    Safe while engines run: an object written or refreshed after it was listed stays. Deletes only
    chunks and items, and the manifest and shapes of a namespace that is empty now.

    Lists the bucket once, or twice if more than 100,000 objects go (one request for every 1,000
    objects each time), and sends a HEAD for each object before it deletes 250 with one request.
    """
    if max_bytes is None and older_than is None:
        raise click.UsageError("give --max-bytes, --older-than or both")
    before_s = 0.0 if older_than is None else now_s() - older_than

    sweep = partial(
        Sweep, prefix=config.prefix, max_bytes=max_bytes, before_s=before_s, dry_run=dry_run
    )
    run = partial(_run, config, namespace, disk, as_json)
    try:
        run(sweep if yes or dry_run else partial(sweep, approve=_approve_half))
    except _MoreThanHalf as error:
        # Ask between two runs: within one, Ctrl-C would be left to its event loop.
        asks = sys.stdin is not None and sys.stdin.isatty()
        if not (asks and click.confirm(f"s3kv: {error}. Delete them?", err=True)):
            raise ConfigError(f"{error}: nothing was deleted; --yes deletes them") from None
        run(sweep)


class _MoreThanHalf(Exception):
    """More than half of the bytes would be deleted. No object has been deleted."""


def _approve_half(going: int, held: int) -> None:
    if 2 * going > held:
        told = f"gc would delete {show.size(going)} of {show.size(held)}, more than half"
        raise _MoreThanHalf(told)


def _run(
    config: Config,
    namespace: str | None,
    disk: str | None,
    as_json: bool,
    sweep: Callable[..., Sweep],
) -> None:
    """Run a sweep, and print its results, even if it breaks off halfway."""
    done: list[Sweep] = []

    async def work(store: Inventory) -> None:
        under = None
        if namespace is not None:
            under = (await walk.resolve(store, config.prefix, namespace)).root
        with show.bars() as on_progress:
            done.append(sweep(store, under=under, on_progress=on_progress))
            try:
                await done[0].run()
            except _MoreThanHalf:
                done.clear()
                raise
        if not done[0].namespaces and under is None:
            await walk.report_empty(store, disk or config.bucket, config.prefix)
        if not done[0].namespaces and as_json:
            _print(done[0], as_json)

    try:
        on_bucket_or_disk(config, disk, work, deletes=True)
    finally:
        if done and done[0].namespaces:
            _print(done[0], as_json)


def _print(sweep: Sweep, as_json: bool) -> None:
    done = sorted(sweep.namespaces.values(), key=lambda swept: -swept.deleted_bytes)
    total = sweep.total
    if as_json:
        counts = {"dry_run": sweep.dry_run, "deleted_bytes": total.deleted_bytes}
        print_json(counts | {"namespaces": [asdict(one) for one in done]})
        return
    names = ("would go" if sweep.dry_run else "deleted", "bytes", "changed", "left", "bytes")
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
