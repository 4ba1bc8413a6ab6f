"""The commands: each parses its arguments, runs one of the modules beside it, prints, and exits."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from s3kv import __version__
from s3kv.cli import show
from s3kv.cli.bench import bench
from s3kv.cli.configure import configure
from s3kv.cli.cost import cost
from s3kv.cli.doctor.command import doctor
from s3kv.cli.gc import gc
from s3kv.cli.inspection import Inspection
from s3kv.cli.inspection import inspect as inspect_object
from s3kv.cli.invocation import EPILOG, FOUND, now_s, on_bucket, print_json, with_settings
from s3kv.cli.ls import ls
from s3kv.cli.stat import stat
from s3kv.cli.usage import by_age, measure
from s3kv.cli.verify import verify
from s3kv.cli.warm import warm
from s3kv.config import Config


@click.group(epilog=EPILOG, context_settings={"max_content_width": 100})
@click.version_option(__version__)
def cli() -> None:
    """Look into the bucket of an s3kv cache, and at what its engines need.

    Commands that ask the bucket take the settings of the engines: --bucket and the other options,
    or the file with their JSON (--config). With --json a command prints one JSON document and
    nothing else; ls prints one on every line.
    """


@cli.command(epilog=EPILOG)
@with_settings
def du(config: Config, as_json: bool) -> None:
    """Show what the bucket holds: chunks and bytes by namespace, model and age.

    Lists everything under the prefix, 1,000 objects per request. An object's age is the time since
    it was last written or refreshed.
    """
    usages = on_bucket(config, lambda store: measure(store, config.prefix, now_s()))
    if as_json:
        document = [asdict(u) | {"bytes_by_age": by_age(u.bytes_by_age)} for u in usages]
        print_json({"namespaces": document, "nbytes": sum(u.nbytes for u in usages)})
    else:
        show.usage(usages, now_s())


@cli.command(epilog=EPILOG)
@click.argument("key")
@click.option("--stats", is_flag=True, help="Least, most and mean of every tensor. Needs torch.")
@with_settings
def inspect(config: Config, key: str, stats: bool, as_json: bool) -> None:
    """Show the header of the object KEY, and verify the object.

    Reads the whole object and verifies it against its key as an engine with these settings would:
    namespace, group, rank, block hash, length and digest. Give the setting integrity (--set) as the
    engines have it, and with blake3-keyed the secret; with none, there is no digest to verify.
    """
    found = on_bucket(
        config, lambda store: inspect_object(store, config, key, with_statistics=stats)
    )
    if found is None:
        click.echo(f"s3kv: there is no object {key!r} in {config.bucket!r}", err=True)
        raise SystemExit(FOUND)
    if as_json:
        print_json(_as_document(found))
    else:
        show.inspection(found)
    raise SystemExit(0 if found.refusal is None else FOUND)


def _as_document(found: Inspection) -> dict[str, Any]:
    document = asdict(found)
    if found.header is not None:
        document["header"]["block_hash"] = found.header.block_hash.hex()
    return document


for command in (bench, configure, cost, doctor, gc, ls, stat, verify, warm):
    cli.add_command(command)
