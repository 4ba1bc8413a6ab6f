"""The commands: each parses its arguments, runs one of the modules beside it, prints, and exits."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from typing import Any
from uuid import uuid4

import click

from s3kv import __version__
from s3kv.cli import doctor as examination
from s3kv.cli import show
from s3kv.cli.configure import configure
from s3kv.cli.cost import cost
from s3kv.cli.inspection import Inspection
from s3kv.cli.inspection import inspect as inspect_object
from s3kv.cli.invocation import EPILOG, FOUND, now_s, on_bucket, print_json, with_settings
from s3kv.cli.usage import by_age, measure
from s3kv.config import Config
from s3kv.host.slab import available_bytes
from s3kv.objects.s3 import S3Store


@click.group(epilog=EPILOG, context_settings={"max_content_width": 100})
@click.version_option(__version__)
def cli() -> None:
    """Look into the bucket of an s3kv cache, and at what its engines need.

    Every command takes the settings of the engines: --bucket and the other options, or the file
    with their JSON (--config). With --json it prints one JSON document and nothing else.
    """


@cli.command(epilog=EPILOG)
@click.option("--read-only", is_flag=True, help="For hosts that only read: write nothing.")
@with_settings
def doctor(config: Config, read_only: bool, as_json: bool) -> None:
    """Say whether this host can use this bucket, and what to do if not.

    Makes every call the cache makes (list, PUT if absent, GET, HEAD, DELETE) on an object of its
    own, PREFIX/doctor/ID, which is gone afterwards. Then measures the latency of a small GET,
    and compares clock, memory and hash seed of this host with what an engine here would need.
    """
    key = examination.probe_key(config, uuid4().hex)

    async def examine(store: S3Store) -> list[examination.Finding]:
        bucket = examination.BucketExamination(
            store, config, key, clock_s=time.perf_counter, wall_s=now_s
        )
        return await bucket.run(read_only=read_only)

    findings = on_bucket(config, examine)
    findings += examination.examine_host(config, available_bytes(), os.environ)
    healthy = examination.is_healthy(findings)
    if as_json:
        print_json({"healthy": healthy, "findings": [asdict(finding) for finding in findings]})
    else:
        show.findings(findings)
    raise SystemExit(0 if healthy else FOUND)


@cli.command(epilog=EPILOG)
@with_settings
def du(config: Config, as_json: bool) -> None:
    """Show what the bucket holds: chunks and bytes by namespace, model and age.

    Lists everything under the prefix, 1,000 objects per request. An object's age is the time since
    it was last written.
    """
    usages = on_bucket(config, lambda store: measure(store, config.prefix, now_s()))
    if as_json:
        document = [asdict(u) | {"bytes_by_age": by_age(u.bytes_by_age)} for u in usages]
        print_json({"namespaces": document, "nbytes": sum(u.nbytes for u in usages)})
    else:
        show.usage(usages, now_s())


@cli.command(epilog=EPILOG)
@click.argument("key")
@with_settings
def inspect(config: Config, key: str, as_json: bool) -> None:
    """Show the header of the object KEY, and verify the object.

    Reads the whole object and verifies it against its key as an engine with these settings would:
    namespace, group, rank, block hash, length and digest. Give the setting integrity (--set) as the
    engines have it, and with blake3-keyed the secret; with none, there is no digest to verify.
    """
    found = on_bucket(config, lambda store: inspect_object(store, config, key))
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


for command in (configure, cost):
    cli.add_command(command)
