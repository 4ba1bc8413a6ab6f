"""The connectors that are compared: how each is configured, and where it leaves what it saves.

Every one gets the same host memory and chunks of 128 tokens, and otherwise its defaults.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.rig import CHUNK_TOKENS, connector
from lab.offloading import offloading
from lab.s3 import REGION, S3Server


@dataclass(frozen=True, slots=True)
class Bucket:
    server: S3Server
    name: str
    """Of the bucket."""
    virtual_host: str | None = None
    """HOST:PORT that stands for the bucket itself, for clients that know no other way."""
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
        client = self.server.client()
        for key in self.server.everything(self.name, prefix):
            client.delete_object(Bucket=self.name, Key=key)


@dataclass(frozen=True, slots=True)
class Contender:
    """One connector with an empty place of its own to save to.

    ends: the engine ends by itself when it is told to; one that does not is killed.
    """

    name: str
    connector: Mapping[str, Any]
    saved: Callable[[], dict[str, int]]
    forget: Callable[[], None]
    env: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable
    ends: bool = True


def s3kv(bucket: Bucket, run: str, host_gib: int) -> Contender:
    prefix = f"{run}/s3kv"
    return Contender(
        "s3kv",
        connector(_settings(bucket), prefix, host_gib),
        saved=lambda: bucket.server.objects(bucket.name, prefix),
        forget=lambda: bucket.empty(prefix),
    )


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
    root = folder / f"fs-{run}"
    root.mkdir()
    return Contender(
        "offloading-fs",
        _offloading({"type": "fs", "root_dir": str(root)}, host_gib),
        saved=lambda: {str(p): p.stat().st_size for p in root.rglob("*.bin")},
        forget=lambda: shutil.rmtree(root),
    )


def lmcache(
    bucket: Bucket, folder: Path, model: Path, run: str, host_gib: int, python: str
) -> Contender:
    """LMCacheConnectorV1, in the engine's process, with its S3 remote (awscrt)."""
    prefix = str(model).replace("/", "_")  # keys start with the model's path, and nothing else
    settings = {
        "chunk_size": CHUNK_TOKENS,
        "local_cpu": False,
        "max_local_cpu_size": host_gib,
        "remote_url": f"s3://{bucket.virtual_host}",
        "remote_serde": "naive",
        "extra_config": {
            "s3_region": bucket.server.env.get("AWS_DEFAULT_REGION", REGION),
            "disable_tls": not bucket.ca_bundle,
            "s3_prefer_http2": False,
        },
    }
    config = folder / f"lmcache-{run}.yaml"
    config.write_text(json.dumps(settings))  # JSON is YAML
    return Contender(
        "lmcache",
        {
            "kv_connector": "LMCacheOnCpu",
            "kv_connector_module_path": "benchmarks.peers.lmcache_on_cpu",
            "kv_role": "kv_both",
        },
        saved=lambda: bucket.under(prefix),
        forget=lambda: bucket.empty(prefix),
        # Its keys are Python's hashes, which are random unless told not to be.
        env=_PLAIN_S3
        | {
            "LMCACHE_CONFIG_FILE": str(config),
            "LMCACHE_TRACK_USAGE": "false",
            "PYTHONHASHSEED": "0",
        },
        python=python,
        ends=False,
    )


# Checksums in the form AWS alone understands are left out where a client can be asked to.
_PLAIN_S3 = {
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
}


def _settings(bucket: Bucket) -> dict[str, Any]:
    settings = {"bucket": bucket.name, "endpoint_url": bucket.server.url}
    return settings | ({"ca_bundle": bucket.ca_bundle} if bucket.ca_bundle else {})


def _offloading(tier: Mapping[str, Any], host_gib: int) -> dict[str, Any]:
    return offloading(tier, host_gib * 2**30, block_size=CHUNK_TOKENS)
