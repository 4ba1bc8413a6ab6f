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
from benchmarks.rig import CHUNK_TOKENS, Store, connector
from lab.engine import EngineFailed
from lab.offloading import offloading
from lab.s3 import REGION
from lab.service import free_ports

START_TIMEOUT_S = 100.0
HOST_GIB = 2
"""Host memory of each connector: room for the KV of all prompts."""


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


def s3kv(store: Store, run: str, name: str = "s3kv", **settings: Any) -> Contender:
    prefix = f"{run}/{name}"
    return Contender(
        name,
        connector(store.settings | settings, prefix, HOST_GIB),
        saved=lambda: store.s3.objects(store.bucket, prefix),
        forget=lambda: store.s3.empty(store.bucket, prefix),
    )


def s3kv_disk(store: Store, folder: Path, run: str) -> Contender:
    """s3kv with files in a local folder before the bucket."""
    path = folder / "disk" / run
    disk = {"disk_path": str(path), "disk_bytes": "64GiB", "disk_writes": "all"}
    ours = s3kv(store, run, "s3kv-disk", **disk)

    def forget() -> None:
        ours.forget()
        shutil.rmtree(path)

    return replace(ours, forget=forget)


def offloading_s3kv(store: Store, run: str) -> Contender:
    """vLLM's OffloadingConnector with s3kv's tier."""
    prefix = f"{run}/tier"
    return Contender(
        "offloading-s3kv",
        _offloading({"type": "s3kv", "prefix": prefix, "compress": "off", **store.settings}),
        saved=lambda: store.s3.objects(store.bucket, prefix),
        forget=lambda: store.s3.empty(store.bucket, prefix),
    )


def offloading_obj(store: Store, run: str, python: str) -> Contender:
    """vLLM's OffloadingConnector with the `obj` tier: NIXL's OBJ plugin, the C++ AWS SDK."""
    prefix = f"{run}/obj"
    place = {
        "bucket": store.bucket,
        "endpoint_override": store.url,
        "access_key": store.s3.env["AWS_ACCESS_KEY_ID"],
        "secret_key": store.s3.env["AWS_SECRET_ACCESS_KEY"],
        "region": store.s3.env.get("AWS_DEFAULT_REGION", REGION),
    }
    if store.ca_bundle:
        place |= {"scheme": "https", "ca_bundle": store.ca_bundle}
    return Contender(
        "offloading-obj",
        _offloading({"type": "obj", "prefix": prefix, "store_config": place}),
        saved=lambda: store.s3.everything(store.bucket, prefix),
        forget=lambda: store.s3.empty(store.bucket, prefix),
        # Without it vLLM 0.32 ends the engine at the first transfer that succeeds: vllm#55576.
        env=_PLAIN_S3 | {"NIXL_TELEMETRY_ENABLE": "1"},
        python=python,
    )


def offloading_fs(folder: Path, run: str) -> Contender:
    """vLLM's OffloadingConnector with the `fs` tier: files in a local folder."""
    root = folder / "fs" / run
    root.mkdir(parents=True)
    return Contender(
        "offloading-fs",
        _offloading({"type": "fs", "root_dir": str(root)}),
        saved=lambda: {str(p): p.stat().st_size for p in root.rglob("*.bin")},
        forget=lambda: shutil.rmtree(root),
    )


def lmcache(store: Store, folder: Path, model: Path, run: str, python: str) -> Contender:
    """LMCacheMPConnector and an `lmcache server` of its own, with its S3 adapter (awscrt).

    The names of its objects begin with the model's path, and it takes the bucket for a part of the
    host's name. So the model lies in a folder with the bucket's name, relative to the engine's.
    """
    path = Path(store.bucket, run, "lmcache")
    (folder / path).parent.mkdir(parents=True)
    (folder / path).symlink_to(model.resolve())
    port, http_port = free_ports(2)
    adapter = {
        "type": "s3",
        "s3_endpoint": urlsplit(store.url or "").netloc,
        "s3_region": store.s3.env.get("AWS_DEFAULT_REGION", REGION),
        "s3_prefer_http2": False,
        "disable_tls": not store.ca_bundle,
    }
    options = {
        "port": port,
        "http-port": http_port,
        "chunk-size": CHUNK_TOKENS,
        "l1-size-gb": HOST_GIB,
        "l1-init-size-gb": HOST_GIB,
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
        saved=lambda: store.s3.everything(store.bucket, f"{run}/lmcache@"),
        forget=lambda: store.s3.empty(store.bucket, f"{run}/lmcache@"),
        env=env | {FOLDER: str(folder)},
        python=python,
        model=path,
        prepare="benchmarks.peers.lmcache_in_engine:prepare",
        server=lambda log: _served(command, env | store.s3.env, port, log),
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


def _offloading(tier: Mapping[str, Any]) -> dict[str, Any]:
    return offloading(tier, HOST_GIB * 2**30, block_size=CHUNK_TOKENS)
