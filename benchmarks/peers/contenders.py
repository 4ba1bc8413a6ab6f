"""The connectors that are compared: how each is configured, and where it leaves what it saves.

Every one gets the same host memory and chunks of 128 tokens, and otherwise its defaults.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks.peers.lmcache_in_engine import FOLDER
from benchmarks.rig import CHUNK_TOKENS, connector
from lab.engine import EngineFailed
from lab.offloading import offloading
from lab.s3 import REGION, S3Server
from lab.service import free_ports

START_TIMEOUT_S = 100.0


@dataclass(frozen=True, slots=True)
class Bucket:
    server: S3Server
    name: str
    """Of the bucket."""
    ca_bundle: str = ""
    """File of the server's certificate, for TLS."""

    def under(self, prefix: str) -> dict[str, int]:
        """Objects whose keys start with `prefix`, and their bytes."""
        return self.server.everything(self.name, prefix)

    def touch(self, prefix: str, chunks: int, chunk_bytes: int) -> None:
        """Write and delete, so that a server that keeps its objects in memory has that memory:
        otherwise whoever saves first pays for it."""
        client = self.server.client()
        body = bytes(chunk_bytes)
        for number in range(chunks):
            client.put_object(Bucket=self.name, Key=f"{prefix}/{number}", Body=body)
        self.empty(f"{prefix}/")

    def empty(self, prefix: str) -> None:
        self.server.empty(self.name, prefix)


@dataclass(frozen=True, slots=True)
class Contender:
    """One connector with an empty place of its own to save to.

    model: another path of the model, relative to the engine's folder. prepare: as in `Engine`.
    server: a process that the connector needs, which ends with the engine; its log is at the path.
    """

    name: str
    connector: Mapping[str, Any]
    saved: Callable[[], dict[str, int]]
    forget: Callable[[], None]
    env: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable
    model: Path | None = None
    prepare: str | None = None
    server: Callable[[Path], AbstractContextManager[psutil.Process | None]] = lambda _: (
        nullcontext()
    )


def s3kv(bucket: Bucket, run: str, host_gib: int, name: str = "s3kv", **settings: Any) -> Contender:
    prefix = f"{run}/{name}"
    return Contender(
        name,
        connector(_settings(bucket) | settings, prefix, host_gib),
        saved=lambda: bucket.server.objects(bucket.name, prefix),
        forget=lambda: bucket.empty(prefix),
    )


def s3kv_disk(bucket: Bucket, folder: Path, run: str, host_gib: int) -> Contender:
    """s3kv with files in a local folder before the bucket."""
    path = folder / "disk" / run
    disk = {"disk_path": str(path), "disk_bytes": "64GiB", "disk_writes": "all"}
    ours = s3kv(bucket, run, host_gib, "s3kv-disk", **disk)

    def forget() -> None:
        ours.forget()
        shutil.rmtree(path)

    return replace(ours, forget=forget)


def offloading_s3kv(bucket: Bucket, run: str, host_gib: int) -> Contender:
    """vLLM's OffloadingConnector with s3kv's tier."""
    prefix = f"{run}/tier"
    return Contender(
        "offloading-s3kv",
        _offloading({"type": "s3kv", "prefix": prefix, **_settings(bucket)}, host_gib),
        saved=lambda: bucket.server.objects(bucket.name, prefix),
        forget=lambda: bucket.empty(prefix),
    )


def offloading_obj(bucket: Bucket, run: str, host_gib: int, python: str) -> Contender:
    """vLLM's OffloadingConnector with the `obj` tier: NIXL's OBJ plugin, the C++ AWS SDK."""
    prefix = f"{run}/obj"
    store = {
        "bucket": bucket.name,
        "endpoint_override": bucket.server.url,
        "access_key": bucket.server.env["AWS_ACCESS_KEY_ID"],
        "secret_key": bucket.server.env["AWS_SECRET_ACCESS_KEY"],
        "region": bucket.server.env.get("AWS_DEFAULT_REGION", REGION),
    }
    if bucket.ca_bundle:
        store |= {"scheme": "https", "ca_bundle": bucket.ca_bundle}
    return Contender(
        "offloading-obj",
        _offloading({"type": "obj", "prefix": prefix, "store_config": store}, host_gib),
        saved=lambda: bucket.under(prefix),
        forget=lambda: bucket.empty(prefix),
        # Without it vLLM 0.32 ends the engine at the first transfer that succeeds: vllm#55576.
        env=_PLAIN_S3 | {"NIXL_TELEMETRY_ENABLE": "1"},
        python=python,
    )


def offloading_fs(folder: Path, run: str, host_gib: int) -> Contender:
    """vLLM's OffloadingConnector with the `fs` tier: files in a local folder."""
    root = folder / "fs" / run
    root.mkdir(parents=True)
    return Contender(
        "offloading-fs",
        _offloading({"type": "fs", "root_dir": str(root)}, host_gib),
        saved=lambda: {str(p): p.stat().st_size for p in root.rglob("*.bin")},
        forget=lambda: shutil.rmtree(root),
    )


def lmcache(
    bucket: Bucket, folder: Path, model: Path, run: str, host_gib: int, python: str
) -> Contender:
    """LMCacheMPConnector and an `lmcache server` of its own, with its S3 adapter (awscrt).

    The names of its objects begin with the model's path, and it takes the bucket for a part of the
    host's name. So the model lies in a folder with the bucket's name, relative to the engine's.
    """
    path = Path(bucket.name, run, "lmcache")
    (folder / path).parent.mkdir(parents=True)
    (folder / path).symlink_to(model.resolve())
    port, http_port = free_ports(2)
    adapter = {
        "type": "s3",
        "s3_endpoint": urlsplit(bucket.server.url or "").netloc,
        "s3_region": bucket.server.env.get("AWS_DEFAULT_REGION", REGION),
        "s3_prefer_http2": False,
        "disable_tls": not bucket.ca_bundle,
    }
    options = {
        "port": port,
        "http-port": http_port,
        "chunk-size": CHUNK_TOKENS,
        "l1-size-gb": host_gib,
        "l1-init-size-gb": host_gib,
        "eviction-policy": "LRU",
        "supported-transfer-mode": "auto",  # of which the engine takes `engine_driven` on a CPU
        "shm-name": f"peers-{port}",
        "l2-adapter": json.dumps(adapter),
    }
    # Observability wants more packages.
    command = [str(Path(python).with_name("lmcache")), "server", "--disable-observability"]
    command += [f"--{name}={value}" for name, value in options.items()]
    env = _PLAIN_S3 | {"LMCACHE_TRACK_USAGE": "false"}
    return Contender(
        "lmcache",
        {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": port,
            },
        },
        saved=lambda: bucket.under(f"{run}/lmcache@"),
        forget=lambda: bucket.empty(f"{run}/lmcache@"),
        env=env | {FOLDER: str(folder)},
        python=python,
        model=path,
        prepare="benchmarks.peers.lmcache_in_engine:prepare",
        server=lambda log: _served(command, env | bucket.server.env, port, log),
    )


@contextmanager
def _served(
    command: list[str], env: Mapping[str, str], port: int, log_path: Path
) -> Iterator[psutil.Process]:
    """A process that listens on this port, until the block ends."""
    with log_path.open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | dict(env))
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise EngineFailed(f"{command[0]} does not start: {log_path.read_text()[-2000:]}")
            time.sleep(0.1)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(START_TIMEOUT_S)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


# Checksums in the form AWS alone understands are left out where a client can be asked to.
_PLAIN_S3 = {
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
}


def _settings(bucket: Bucket) -> dict[str, Any]:
    settings = {"bucket": bucket.name, "endpoint_url": bucket.server.url, "compress": "off"}
    return settings | ({"ca_bundle": bucket.ca_bundle} if bucket.ca_bundle else {})


def _offloading(tier: Mapping[str, Any], host_gib: int) -> dict[str, Any]:
    return offloading(tier, host_gib * 2**30, block_size=CHUNK_TOKENS)
