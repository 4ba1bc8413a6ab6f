"""What the benchmarks with a real engine share: the server, the model's prompts, a warm engine.

The S3 server is the one of AWS_ENDPOINT_URL and S3KV_BUCKET, or an embedded moto, which is a
Python program and slow: figures to be compared come from a real server on the same machine.
"""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import origin
from lab.engine import Engine
from lab.models import prompts
from lab.s3 import moto_process

CHUNK_TOKENS = 128
SHORT_TOKENS = 100
"""Of a prompt that no cache can hit or save: shorter than a chunk."""


def begin(server: str, give_up_s: float) -> None:
    """Say on stderr against which server this benchmark runs. A benchmark that has not ended after
    `give_up_s` prints the stacks of its threads and exits with 1."""
    say(f"server: {server}; gives up after {give_up_s:g} s")
    faulthandler.dump_traceback_later(give_up_s, exit=True)


def say(what: str) -> None:
    """Tell on stderr how far a benchmark is."""
    print(what, file=sys.stderr, flush=True)


@contextmanager
def s3() -> Iterator[tuple[dict[str, str], dict[str, Any], str]]:
    """Environment, connector settings, and what to call the server."""
    if bucket := os.environ.get("S3KV_BUCKET"):
        url = os.environ.get("AWS_ENDPOINT_URL")
        yield {}, {"bucket": bucket, "endpoint_url": url}, url or "AWS"
        return
    with moto_process() as server:
        server.client().create_bucket(Bucket="bench")
        yield server.env, {"bucket": "bench", "endpoint_url": server.url}, "moto"


def connector(settings: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """s3kv's, as the engine's kv_transfer_config."""
    return {
        "kv_connector": "S3KVConnector",
        "kv_connector_module_path": "s3kv.connectors",
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(settings)
        | {"prefix": prefix, "chunk_tokens": CHUNK_TOKENS, "host_bytes": "2GiB"},
    }


@contextmanager
def warm_engine(
    model: Path,
    log_path: Path,
    connector: Mapping[str, Any] | None,
    env: Mapping[str, str],
    python: str = sys.executable,
) -> Iterator[Engine]:
    """An engine that has written to all of its KV cache, so that no page of it is touched for the
    first time while something is measured, and has answered prompts no connector cares for."""
    engine = Engine(
        model,
        log_path=log_path,
        connector=connector,
        env=env,
        python=python,
        kv_cache_memory_bytes=2**30,
        max_num_batched_tokens=2_048,
    )
    with engine:
        engine.call("lab.memory:touch_kv_cache")
        engine.generate(prompts(2, SHORT_TOKENS, seed=9))
        yield engine


def machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores"


def publish(result: Mapping[str, Any], path: Path | None) -> None:
    """Print the result as JSON, with its origin; write it to `path`, too, if there is one. The
    benchmark has ended: what `begin` set off is taken back."""
    faulthandler.cancel_dump_traceback_later()
    text = json.dumps({**origin.of(result.get("benchmark", "")), **result}, indent=2)
    print(text)
    if path:
        path.write_text(text + "\n")
