"""`s3kv bench`."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import click
from rich.console import Console
from rich.table import Table

from s3kv.cli import models, show
from s3kv.cli.floor import floor_s
from s3kv.cli.invocation import EPILOG, on_bucket, print_json, with_settings
from s3kv.cli.progress import bars
from s3kv.cli.quantities import size
from s3kv.cli.speed import Measurement, Speed, Speeds
from s3kv.config import Config
from s3kv.errors import ConfigError
from s3kv.objects.s3 import S3Store
from s3kv.types import default_chunk_tokens

_SMALL_REQUESTS = 32
_BYTES_PER_TOKEN = 128 * 2**10


@dataclass(frozen=True, slots=True)
class Expectation:
    """Of a prompt whose every chunk is in the bucket. known_ms: when the cache knows that they are;
    unknown_ms: when it asks for a few at first. floor_ms: through plain sockets. computed_ms:
    without the cache."""

    chunks: int
    known_ms: float
    unknown_ms: float
    floor_ms: float
    computed_ms: float


@click.command(epilog=EPILOG)
@click.option(
    "--model-config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The model's config.json, which says how much KV a token is.",
)
@click.option(
    "--bytes-per-token",
    type=size,
    help="How much KV a token is, per worker.  [default: 128KiB, as Llama-3-8B's]",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1),
    default=8192,
    show_default=True,
    help="Length of the prompt whose chunks are fetched.",
)
@with_settings
def bench(
    config: Config,
    model_config: Path | None,
    bytes_per_token: int | None,
    prompt_tokens: int,
    as_json: bool,
) -> None:
    """Measure this host against this bucket: what time to first token to expect.

    Writes as many objects of a chunk's size as one worker asks for at once (at most
    max_inflight_bytes), then reads as many as the prompt has chunks, through the client of the
    cache and, to compare, through plain sockets. What it writes, under PREFIX/bench/ID, is deleted,
    also on Ctrl-C. Requests and bytes are paid for as any others. The copy to the GPU is not in it.
    """
    if model_config is not None and bytes_per_token is not None:
        raise ConfigError("give either --model-config or --bytes-per-token")
    chunk_tokens = config.chunk_tokens or default_chunk_tokens(16)
    per_token = bytes_per_token or _BYTES_PER_TOKEN
    if model_config is not None:
        per_token = models.read_shape(model_config, models.Parallelism()).bytes_per_token
    chunks = max(1, prompt_tokens // chunk_tokens)
    speeds = on_bucket(config, partial(_measure, config, per_token * chunk_tokens, chunks))
    expected = expect(config, speeds, chunks, prompt_tokens)
    if as_json:
        print_json(_document(speeds, expected))
    else:
        _show(config, speeds, expected, prompt_tokens)


async def _measure(config: Config, object_bytes: int, chunks: int, store: S3Store) -> Speeds:
    with bars() as on_progress:
        measurement = Measurement(
            store,
            config,
            f"{config.prefix}/bench/{uuid4().hex}",
            object_bytes=object_bytes,
            floor=partial(floor_s, config),
            clock_s=time.perf_counter,
            on_progress=on_progress,
        )
        return await measurement.run(chunks, _SMALL_REQUESTS)


def expect(config: Config, speeds: Speeds, chunks: int, prompt_tokens: int) -> Expectation:
    """What the speeds mean for a prompt of that many chunks. Pure.

    A prefix of which nothing is known begins with `probe_chunks`, and twice as many with every
    answer: a first byte's wait for every doubling until all requests are in use.
    """
    asked = min(chunks, speeds.at_once)
    doublings = max(0, math.ceil(math.log2(asked / min(asked, config.probe_chunks))))
    known_ms = speeds.get.seconds * 1e3
    return Expectation(
        chunks=chunks,
        known_ms=known_ms,
        unknown_ms=known_ms + doublings * speeds.small.p50_ms,
        floor_ms=speeds.floor_s * 1e3,
        computed_ms=prompt_tokens / config.prefill_tokens_per_s * 1e3,
    )


def _document(speeds: Speeds, expected: Expectation) -> dict[str, Any]:
    return {
        "object_bytes": speeds.object_bytes,
        "at_once": speeds.at_once,
        "put": _of(speeds.put),
        "get": _of(speeds.get),
        "small_get": _of(speeds.small),
        "prompt": asdict(expected),
    }


def _of(speed: Speed) -> dict[str, Any]:
    return asdict(speed) | {"bytes_per_s": speed.bytes_per_s}


def _show(config: Config, speeds: Speeds, expected: Expectation, prompt_tokens: int) -> None:
    table = Table("", box=None)
    for name in ("p50", "p95", "p99", "max", "throughput"):
        table.add_column(name, justify="right")
    what = f"{show.size(speeds.object_bytes)}, {speeds.at_once} at once"
    rows = (
        (f"PUT of {what}", speeds.put),
        (f"GET of {what}", speeds.get),
        ("GET of 1 KiB, one after another", speeds.small),
    )
    for name, speed in rows:
        times = (speed.p50_ms, speed.p95_ms, speed.p99_ms, speed.max_ms)
        rate = f"{speed.bytes_per_s / 1e6:,.0f} MB/s" if speed.nbytes > 2**20 else ""
        table.add_row(name, *(f"{ms:,.1f} ms" for ms in times), rate)
    console = Console()
    console.print(table)
    console.print(
        f"A prompt of {prompt_tokens:,} tokens, {expected.chunks} chunks, is in host memory after\n"
        f"  {expected.known_ms:,.0f} ms when the cache knows that the bucket has it\n"
        f"  {expected.unknown_ms:,.0f} ms when it has to find out\n"
        f"  {expected.floor_ms:,.0f} ms through plain sockets: the floor\n"
        f"  {expected.computed_ms:,.0f} ms computed instead, at prefill_tokens_per_s "
        f"{config.prefill_tokens_per_s:,.0f} (--set)",
        highlight=False,
    )
