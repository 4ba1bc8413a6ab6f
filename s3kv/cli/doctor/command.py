"""`s3kv doctor`."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from functools import partial
from uuid import uuid4

import click
from rich.text import Text

from s3kv.cli import show
from s3kv.cli.doctor import bucket, disk, host, master_keys
from s3kv.cli.doctor.findings import Finding, is_healthy
from s3kv.cli.invocation import EPILOG, FOUND, print_json, size, with_settings, with_tier_bytes
from s3kv.config import Config
from s3kv.errors import ConfigError
from s3kv.stores.s3.s3_store import MAX_PUT_BYTES

_STYLES = {"ok": "green", "warning": "yellow", "fault": "bold red", "skipped": "dim"}


@click.command(epilog=EPILOG)
@click.option("--read-only", is_flag=True, help="Write nothing, for hosts that only read.")
@click.option(
    "--bandwidth",
    type=size,
    default="8MiB",
    show_default=True,
    help="Send and read this much to measure throughput; 0 measures none.",
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Workers of all engines on this host: the sum of their tensor × pipeline parallel sizes.",
)
@click.option(
    "--hash-algo",
    type=click.Choice(("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")),
    default="sha256",
    show_default=True,
    help="The engine's --prefix-caching-hash-algo.",
)
@partial(with_settings, parsed=with_tier_bytes)
def doctor(
    config: tuple[Config, int | None],
    read_only: bool,
    bandwidth: int,
    workers: int,
    hash_algo: str,
    as_json: bool,
) -> None:
    """Check access from this host to the bucket, and print a remedy for each fault.

    Tries the cache's calls (list, PUT if absent, GET, HEAD, DELETE; a copy, if engines refresh
    objects) on an object of its own, PREFIX/doctor/ID, which it deletes. Measures the latency, and
    the throughput of one connection and of a worker's number, reading --bandwidth on each.
    With disk_path it makes that directory, and measures the disk with files of its own. With
    encryption it reads the keys, from KMS too, and measures how fast this host encrypts.
    Then compares this host's clock, memory and limits, vLLM version, GPU and hash seed with the
    requirements of an engine, and measures how fast it decodes compressed chunks. It imports
    neither torch nor vLLM; if torch is installed, a separate process queries it about the GPU.
    """
    if bandwidth > MAX_PUT_BYTES:
        told = f"--bandwidth is {show.size(bandwidth)}: allowed is at most "
        raise ConfigError(told + show.size(MAX_PUT_BYTES))
    ours, tier_bytes = config
    findings = bucket.examine(ours, uuid4().hex, bandwidth_bytes=bandwidth, read_only=read_only)
    findings += disk.examine(ours, time.perf_counter, read_only=read_only)
    findings += master_keys.examine(ours, time.perf_counter)
    findings += host.examine(
        ours, host.look(os.environ), workers=workers, algorithm=hash_algo, tier_bytes=tier_bytes
    )
    healthy = is_healthy(findings)
    if as_json:
        print_json({"healthy": healthy, "findings": [asdict(finding) for finding in findings]})
    else:
        show.print_grid(_row(finding) for finding in findings)
    raise SystemExit(0 if healthy else FOUND)


def _row(finding: Finding) -> tuple[Text, str, Text]:
    """The finding, with its remedy beneath."""
    detail = Text(finding.detail)
    if finding.remedy:
        detail.append(f"\n→ {finding.remedy}", "bold" if finding.status != "ok" else "dim")
    return Text(finding.status, _STYLES[finding.status]), finding.check, detail
