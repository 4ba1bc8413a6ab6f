"""`s3kv doctor`."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import asdict
from uuid import uuid4

import click

from s3kv.cli import show
from s3kv.cli.doctor import host, software
from s3kv.cli.doctor.bucket import BucketExamination, probe_key
from s3kv.cli.doctor.findings import Finding, is_healthy
from s3kv.cli.invocation import EPILOG, FOUND, now_s, print_json, with_settings
from s3kv.cli.quantities import size
from s3kv.config import Config
from s3kv.objects.s3 import S3Store


@click.command(epilog=EPILOG)
@click.option("--read-only", is_flag=True, help="For hosts that only read: write nothing.")
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
    help="Workers of all engines on this host: tensor × pipeline parallel size.",
)
@click.option(
    "--hash-algo",
    default="sha256",
    show_default=True,
    help="The engine's --prefix-caching-hash-algo.",
)
@with_settings
def doctor(
    config: Config, read_only: bool, bandwidth: int, workers: int, hash_algo: str, as_json: bool
) -> None:
    """Say whether this host can use this bucket, and what to do if not.

    Makes every call the cache makes (list, PUT if absent, GET, HEAD, DELETE) on an object of its
    own, PREFIX/doctor/ID, which is gone afterwards, and measures latency and throughput of one
    connection. Then compares clock, memory and its limits, vLLM's version, GPU and hash seed of
    this host with what an engine here would need. It imports neither torch nor vLLM; torch, if it
    is installed, is asked in a process of its own.
    """
    bucket = BucketExamination(
        S3Store,
        config,
        probe_key(config, uuid4().hex),
        bandwidth_bytes=bandwidth,
        clock_s=time.perf_counter,
        wall_s=now_s,
    )
    findings = asyncio.run(bucket.run(read_only=read_only))
    findings += _this_host(config, workers, hash_algo)
    healthy = is_healthy(findings)
    if as_json:
        print_json({"healthy": healthy, "findings": [asdict(finding) for finding in findings]})
    else:
        show.findings(findings)
    raise SystemExit(0 if healthy else FOUND)


def _this_host(config: Config, workers: int, algorithm: str) -> list[Finding]:
    gpu = software.look_for_gpu()
    pinned_bytes = software.pinned_bytes(gpu)
    facts = host.look(os.environ)
    return [
        *host.examine(
            config, facts, workers=workers, algorithm=algorithm, pinned_bytes=pinned_bytes
        ),
        software.examine_vllm(software.vllm_version()),
        software.examine_gpu(gpu),
    ]
