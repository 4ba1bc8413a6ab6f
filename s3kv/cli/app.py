"""The commands: each parses its arguments, runs one of the modules beside it, prints, and exits."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import click

from s3kv import __version__
from s3kv.cli import doctor as examination
from s3kv.cli import show
from s3kv.cli.inspection import Inspection
from s3kv.cli.inspection import inspect as inspect_object
from s3kv.cli.settings import read_settings
from s3kv.cli.usage import by_age, measure
from s3kv.config import Config
from s3kv.errors import S3KVError, StoreError
from s3kv.host.slab import available_bytes
from s3kv.objects.s3 import S3Store

FOUND, WRONG_USE, NO_STORE = 1, 2, 3
_T = TypeVar("_T")
_EPILOG = """\b
EXIT CODES
  0  all is well
  1  something was found: a fault, a damaged object, no such object
  2  the command was used wrongly, or a setting is wrong
  3  the bucket could not be asked: the message says why

Credentials are found as every AWS tool finds them."""


@click.group(epilog=_EPILOG, context_settings={"max_content_width": 100})
@click.version_option(__version__)
def cli() -> None:
    """Look into the bucket of an s3kv cache, and at what its engines need.

    Every command takes the settings of the engines: --bucket and the other options, or the file
    with their JSON (--config). With --json it prints one JSON document and nothing else.
    """


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that name the bucket, `--json`, and our errors as exit codes."""

    @click.option("--bucket", help="Name of the bucket.")
    @click.option("--prefix", help="All keys start with this.  [default: s3kv]")
    @click.option("--region", help="AWS region; otherwise what AWS's own settings say.")
    @click.option("--endpoint-url", help="URL of an S3-compatible server.")
    @click.option(
        "--config",
        "file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="JSON file: what stands after --kv-transfer-config, or the settings alone.",
    )
    @click.option("--set", "assign", multiple=True, metavar="NAME=VALUE", help="Any other setting.")
    @click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    @functools.wraps(command)
    def wrapped(*, file: Path | None, assign: tuple[str, ...], **options: Any) -> None:
        names = ("bucket", "prefix", "region", "endpoint_url")
        named = {name: options.pop(name) for name in names}
        try:
            command(config=read_settings(file, named, assign), **options)
        except S3KVError as error:
            click.echo(f"s3kv: {error}", err=True)
            raise SystemExit(NO_STORE if isinstance(error, StoreError) else WRONG_USE) from error

    return wrapped


@cli.command(epilog=_EPILOG)
@click.option("--read-only", is_flag=True, help="For hosts that only read: write nothing.")
@_with_settings
def doctor(config: Config, read_only: bool, as_json: bool) -> None:
    """Say whether this host can use this bucket, and what to do if not.

    Makes every call the cache makes (list, PUT if absent, GET, HEAD, DELETE) on an object of its
    own, PREFIX/doctor/ID, which is gone afterwards. Then measures the latency of a small GET,
    and compares clock, memory and hash seed of this host with what an engine here would need.
    """
    key = examination.probe_key(config, uuid4().hex)

    async def examine(store: S3Store) -> list[examination.Finding]:
        bucket = examination.BucketExamination(
            store, config, key, clock_s=time.perf_counter, wall_s=_now_s
        )
        return await bucket.run(read_only=read_only)

    findings = _on_bucket(config, examine)
    findings += examination.examine_host(config, available_bytes(), os.environ)
    healthy = examination.is_healthy(findings)
    if as_json:
        _print_json({"healthy": healthy, "findings": [asdict(finding) for finding in findings]})
    else:
        show.findings(findings)
    raise SystemExit(0 if healthy else FOUND)


@cli.command(epilog=_EPILOG)
@_with_settings
def du(config: Config, as_json: bool) -> None:
    """Show what the bucket holds: chunks and bytes by namespace, model and age.

    Lists everything under the prefix, 1,000 objects per request. An object's age is the time since
    it was last written.
    """
    usages = _on_bucket(config, lambda store: measure(store, config.prefix, _now_s()))
    if as_json:
        document = [asdict(u) | {"bytes_by_age": by_age(u.bytes_by_age)} for u in usages]
        _print_json({"namespaces": document, "nbytes": sum(u.nbytes for u in usages)})
    else:
        show.usage(usages, _now_s())


@cli.command(epilog=_EPILOG)
@click.argument("key")
@_with_settings
def inspect(config: Config, key: str, as_json: bool) -> None:
    """Show the header of the object KEY, and verify the object.

    Reads the whole object and verifies it against its key as an engine with these settings would:
    namespace, group, rank, block hash, length and digest. Give the setting integrity (--set) as the
    engines have it, and with blake3-keyed the secret; with none, there is no digest to verify.
    """
    found = _on_bucket(config, lambda store: inspect_object(store, config, key))
    if found is None:
        click.echo(f"s3kv: there is no object {key!r} in {config.bucket!r}", err=True)
        raise SystemExit(FOUND)
    if as_json:
        _print_json(_as_document(found))
    else:
        show.inspection(found)
    raise SystemExit(0 if found.refusal is None else FOUND)


def _as_document(found: Inspection) -> dict[str, Any]:
    document = asdict(found)
    if found.header is not None:
        document["header"]["block_hash"] = found.header.block_hash.hex()
    return document


def _on_bucket(config: Config, work: Callable[[S3Store], Awaitable[_T]]) -> _T:
    async def run() -> _T:
        store = S3Store(config)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


def _now_s() -> float:
    return datetime.now(timezone.utc).timestamp()


def _print_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=2, allow_nan=False))
