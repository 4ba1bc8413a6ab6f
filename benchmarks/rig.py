"""What the benchmarks with a real engine share: the server, the model's prompts, a warm engine.

The S3 server is one with the shape of S3 with `--shaped` (`benchmarks/shaped.py`), a SeaweedFS with
`--weed`, or else that of AWS_ENDPOINT_URL and S3KV_BUCKET, or else an embedded moto, which is a
Python program and slow.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.deadline import say
from benchmarks.origin import commit, computing
from benchmarks.shaped import BUCKET, HOST, Running, Shape, add_options, shape_of, shaped
from lab.certificates import self_signed
from lab.engine import Engine
from lab.models import FAT, FATTER, Preset, build, prompts
from lab.s3 import S3Server, environment, moto_process
from lab.weed import weed_process

CHUNK_TOKENS = 128
SHORT_TOKENS = 100
"""Of a prompt that no cache can hit or save: shorter than a chunk."""
VOLUMES = 600
"""Of SeaweedFS: enough for the objects of a long run."""
QUICK_PROMPTS = 4
"""Of a short run: enough for a median, and less than two minutes of engines."""


@dataclass(frozen=True, slots=True)
class Size:
    """Size of the model and its prompts. host_gib: host memory of a connector. give_up_s: for each
    engine of a round."""

    preset: Preset
    prompts: int
    prompt_tokens: int
    host_gib: int
    give_up_s: float

    @property
    def chunks_per_prompt(self) -> int:
        return self.prompt_tokens // CHUNK_TOKENS

    @property
    def chunk_bytes(self) -> int:
        return CHUNK_TOKENS * self.preset.kv_bytes_per_token

    @property
    def kv_bytes(self) -> int:
        """Room for the KV of all prompts at once."""
        nbytes = self.prompts * self.prompt_tokens * self.preset.kv_bytes_per_token
        return max(2**30, nbytes * 4 // 3)

    def quick(self) -> Size:
        """The same with a few prompts, for a run that only shows that everything works."""
        return replace(self, prompts=min(self.prompts, QUICK_PROMPTS))

    def told(self) -> str:
        """For a result."""
        per_token = self.preset.kv_bytes_per_token
        return f"{self.prompts} x {self.prompt_tokens} tokens, {per_token} B/token"


SMALL = Size(FAT, 16, 1_600, 4, 300.0)
"""First bytes vary so much at S3 that fewer prompts give no median to speak of."""
LARGE = Size(FATTER, 2, 8_000, 4, 600.0)


@dataclass(frozen=True, slots=True)
class Store:
    """The server of a benchmark. url: None is AWS itself. env: what a process needs in its
    environment. ca_bundle: file of the certificate, for TLS with a certificate of our own."""

    name: str
    url: str | None
    bucket: str
    env: dict[str, str] = field(default_factory=dict)
    ca_bundle: str = ""
    shape: Shape | None = None
    running: Running | None = None
    """Of a server with that shape."""

    @property
    def settings(self) -> dict[str, Any]:
        """Of s3kv."""
        settings = {"bucket": self.bucket, "endpoint_url": self.url}
        return settings | ({"ca_bundle": self.ca_bundle} if self.ca_bundle else {})

    @property
    def s3(self) -> S3Server:
        return S3Server(self.url, self.env or dict(os.environ))

    def told(self) -> dict[str, Any]:
        """For a result: the server, and of one with the shape of S3 its figures and the processor
        time that it has used so far."""
        told: dict[str, Any] = {"server": self.name}
        if self.shape is not None:
            told["shape"] = dataclasses.asdict(self.shape) | {"tls": bool(self.ca_bundle)}
        if self.running is not None:
            times = psutil.Process(self.running.process.pid).cpu_times()
            told["server_cpu_s"] = round(times.user + times.system, 1)
        return told


def add_server(parser: argparse.ArgumentParser) -> None:
    """The options of the server."""
    parser.add_argument("--shaped", action="store_true", help="a server with the shape of S3")
    parser.add_argument("--weed", action="store_true", help="a SeaweedFS of this machine")
    parser.add_argument("--tls", action="store_true", help="of that server")
    add_options(parser)


@contextmanager
def s3(options: argparse.Namespace | None = None) -> Iterator[Store]:
    """The server that the options and the environment ask for."""
    if options is not None and options.shaped:
        with _s3_shaped(shape_of(options), options.tls) as store:
            yield store
    elif options is not None and options.weed:
        with TemporaryDirectory() as folder, weed_process(Path(folder), VOLUMES) as server:
            server.client().create_bucket(Bucket=BUCKET)
            os.environ |= server.env  # for the clients of this process
            yield Store("SeaweedFS", server.url, BUCKET, server.env)
    elif bucket := os.environ.get("S3KV_BUCKET"):
        url = os.environ.get("AWS_ENDPOINT_URL")
        yield Store(url or "AWS", url, bucket)
    else:
        with moto_process() as server:
            server.client().create_bucket(Bucket="bench")
            yield Store("moto", server.url, "bench", server.env)


@contextmanager
def _s3_shaped(shape: Shape, tls: bool) -> Iterator[Store]:
    with TemporaryDirectory() as folder:
        certificate = str(self_signed(Path(folder) / "tls", f"IP:{HOST}")) if tls else ""
        bundle = f"{certificate}.crt" if tls else ""
        env = environment("none", "none-secret") | ({"AWS_CA_BUNDLE": bundle} if tls else {})
        # Bodies without AWS's own framing.
        env["AWS_REQUEST_CHECKSUM_CALCULATION"] = "when_required"
        os.environ |= env  # for the clients of this process
        with shaped(shape, certificate) as server:
            name = f"benchmarks.shaped at {server.url}"
            yield Store(name, server.url, BUCKET, env, bundle, shape, server)


def connector(
    settings: Mapping[str, Any], prefix: str, host_gib: int = SMALL.host_gib
) -> dict[str, Any]:
    """s3kv's, as the engine's kv_transfer_config. Objects are plain, unless the settings differ."""
    return {
        "kv_connector": "S3KVConnector",
        "kv_connector_module_path": "s3kv.connectors",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"compress": "off"}
        | dict(settings)
        | {"prefix": prefix, "chunk_tokens": CHUNK_TOKENS, "host_bytes": f"{host_gib}GiB"},
    }


@contextmanager
def warm_engine(
    model: Path,
    log_path: Path,
    connector: Mapping[str, Any] | None,
    env: Mapping[str, str],
    python: str = sys.executable,
    size: Size = SMALL,
    prepare: str | None = None,
) -> Iterator[Engine]:
    """An engine that has written to all of its KV cache, so that no page of it is touched for the
    first time while something is measured, and has answered prompts no connector cares for."""
    engine = Engine(
        model,
        log_path=log_path,
        connector=connector,
        env=env,
        python=python,
        prepare=prepare,
        kv_cache_memory_bytes=size.kv_bytes,
        max_model_len=size.preset.max_tokens,
        max_num_batched_tokens=2_048,
    )
    with engine:
        engine.call("lab.on_cpu:touch_kv_cache")
        engine.generate(prompts(2, SHORT_TOKENS, seed=9))
        yield engine


class Bench:
    """Passes of prompts over engines with one model, each with s3kv or without a connector.

    warm: the passes whose hits are noted.
    """

    max_tokens = 8
    """Of an answer."""

    def __init__(self, folder: Path, store: Store, size: Size, *warm: str) -> None:
        self.folder, self.store, self.size = folder, store, size
        self.model = build(folder, size.preset)
        self.seconds: dict[str, list[float]] = {}
        self._warm = warm
        self._hits: set[str] = set()

    @contextmanager
    def engine(self, name: str, prefix: str | None, **settings: Any) -> Iterator[Engine]:
        """An engine with these settings of s3kv; prefix: None for one without a connector."""
        say(f"engine {name}")
        settings = self.store.settings | settings
        ours = connector(settings, prefix, self.size.host_gib) if prefix else None
        log, env = self.folder / f"{name}.log", self.store.env
        with warm_engine(self.model, log, ours, env, size=self.size) as engine:
            yield engine

    def run(self, name: str, engine: Engine, asked: Sequence[Sequence[int]]) -> None:
        """One pass."""
        answers = engine.generate(asked, max_tokens=self.max_tokens)
        self.seconds.setdefault(name, []).extend(answer.seconds for answer in answers)
        if name in self._warm:
            self._hits |= {str(answer.cached_tokens) for answer in answers}

    def told(self) -> dict[str, Any]:
        """For a result."""
        ms = {name: round(1e3 * statistics.median(s), 1) for name, s in self.seconds.items()}
        return {"median_ms": ms, "tokens_hit_of_prompt": sorted(self._hits)}


def machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores"


def publish(result: Mapping[str, Any], path: Path | None) -> None:
    """Print the result as JSON, with its origin; write it to `path`, too, if there is one."""
    text = json.dumps({"commit": commit(), "computing": computing(), **result}, indent=2)
    print(text)
    if path:
        path.write_text(text + "\n")
