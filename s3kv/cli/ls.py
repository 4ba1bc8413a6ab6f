"""`s3kv ls`."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from s3kv.cli import catalogue, show
from s3kv.cli.invocation import EPILOG, now_s, on_bucket, with_settings
from s3kv.cli.patience import chunks
from s3kv.config import Config
from s3kv.objects.keys import ChunkAddress, Namespace
from s3kv.objects.s3 import S3Store
from s3kv.objects.store import ObjectInfo


@click.command(epilog=EPILOG)
@click.argument("namespace", required=False)
@click.option("--limit", type=click.IntRange(min=1), default=1000, show_default=True)
@with_settings
def ls(config: Config, namespace: str | None, limit: int, as_json: bool) -> None:
    """List the namespaces, or the chunks and items of one NAMESPACE.

    The beginning of a namespace's name will do. Chunks come in the order of their block hashes,
    with their length and the time since they were last written or refreshed; no more than --limit
    of them. With --json every line is a JSON document of its own, and comes as soon as it is known.
    """

    async def run(store: S3Store) -> None:
        if namespace is None:
            _print_namespaces(await catalogue.entries(store, config.prefix), as_json)
            return
        await _list_chunks(
            store, await catalogue.resolve(store, config.prefix, namespace), limit, as_json
        )

    on_bucket(config, run)


def _print_namespaces(entries: list[catalogue.Entry], as_json: bool) -> None:
    if as_json:
        for one in entries:
            _print_line({"namespace": one.namespace.digest, "model": one.model})
        return
    table = Table("namespace", "model", box=None)
    for one in entries:
        table.add_row(one.namespace.digest, Text(one.model or "–"))
    Console().print(table)


async def _list_chunks(store: S3Store, place: Namespace, limit: int, as_json: bool) -> None:
    listed = 0
    async for address, info in chunks(store, place.prefix, place.root):
        if listed == limit:
            click.echo(f"s3kv: and more; this were {limit} (--limit)", err=True)
            return
        listed += 1
        if as_json:
            _print_line(_document(address, info))
        else:
            age = show.age(now_s() - info.modified_s)
            click.echo(f"{show.size(info.nbytes):>10}  {age:>7}  {info.key}")


def _document(address: ChunkAddress, info: ObjectInfo) -> dict[str, Any]:
    return {
        "key": info.key,
        "nbytes": info.nbytes,
        "modified": datetime.fromtimestamp(info.modified_s, timezone.utc).isoformat(),
        "block_hash": address.key.block_hash.hex(),
        "group": address.key.group,
        "shard": address.shard,
    }


def _print_line(document: dict[str, Any]) -> None:
    click.echo(json.dumps(document, allow_nan=False))
