"""An S3 of our own, in a process of its own: `with moto_process() as s3: s3.url …`.

moto in the process that uses it would share its GIL, and with an engine's that is a lie about
both. `python -m lab.s3 [port]` prints its port and serves until its stdin ends, so it cannot
outlive who started it. With LAB_S3_DELAY_MS in its environment it waits up to so many milliseconds
before each answer, at random: a test of hits or saves must pass with a slow store, too.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lab.service import first_line, started

REGION = "us-east-1"


def environment(key: str, secret: str) -> dict[str, str]:
    """What a process needs in its environment to use a server with these credentials."""
    keys = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
    return keys | {"AWS_DEFAULT_REGION": REGION, "AWS_EC2_METADATA_DISABLED": "true"}


@dataclass(frozen=True, slots=True)
class S3Server:
    """An S3 endpoint and credentials that may do everything there; url None is AWS itself."""

    url: str | None
    env: dict[str, str]
    """What a process needs in its environment to use the server."""

    def client(self) -> Any:
        """A boto3 client: a second opinion that shares no code with s3kv."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name=self.env.get("AWS_DEFAULT_REGION"),
            aws_access_key_id=self.env.get("AWS_ACCESS_KEY_ID"),
            aws_secret_access_key=self.env.get("AWS_SECRET_ACCESS_KEY"),
        )

    def objects(self, bucket: str, prefix: str = "") -> dict[str, int]:
        """Every key of a chunk that starts with `prefix`, with its object's length in bytes."""
        everything = self.everything(bucket, prefix)
        return {key: size for key, size in everything.items() if key.endswith(".safetensors")}

    def everything(self, bucket: str, prefix: str = "") -> dict[str, int]:
        """The same with the manifests and shapes of the namespaces."""
        pages = self.client().get_paginator("list_objects_v2")
        return {
            entry["Key"]: entry["Size"]
            for page in pages.paginate(Bucket=bucket, Prefix=prefix)
            for entry in page.get("Contents", ())
        }

    def empty(self, bucket: str, prefix: str = "") -> None:
        """Delete everything that starts with `prefix`."""
        client = self.client()
        for key in self.everything(bucket, prefix):
            client.delete_object(Bucket=bucket, Key=key)

    def contents(self, bucket: str) -> dict[str, bytes]:
        """The objects of all chunks, by their keys."""
        client = self.client()
        return {
            key: client.get_object(Bucket=bucket, Key=key)["Body"].read()
            for key in self.objects(bucket)
        }

    def change(
        self, bucket: str, change: Callable[[bytes], bytes], keys: Iterable[str] | None = None
    ) -> int:
        """Put other bytes in the place of these objects, of all chunks unless told. Returns their
        number."""
        client, held = self.client(), self.contents(bucket)
        wanted = list(held if keys is None else keys)
        for key in wanted:
            client.put_object(Bucket=bucket, Key=key, Body=change(held[key]))
        return len(wanted)


@contextmanager
def moto_process(port: int = 0) -> Iterator[S3Server]:
    """A fresh, empty moto server; it keeps everything in memory. port 0: any that is free.

    It is killed when the block ends, in the middle of whatever it does.
    """
    with started("lab.s3", str(port), quiet=True) as process:
        url = f"http://127.0.0.1:{int(first_line(process))}"
        yield S3Server(url, environment("testing", "testing-secret"))


def serve(port: int) -> None:
    from moto.server import ThreadedMotoServer

    if delay_ms := float(os.environ.get("LAB_S3_DELAY_MS", "0")):
        _delay(delay_ms)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    sys.stdin.read()


def _delay(most_ms: float) -> None:
    from werkzeug.serving import WSGIRequestHandler

    rng = random.Random(0)
    answer = WSGIRequestHandler.run_wsgi

    def answer_late(handler: WSGIRequestHandler) -> None:
        # Squared, so that many answers are quick and few take long, as behind a network.
        time.sleep(rng.random() ** 2 * most_ms / 1_000)
        answer(handler)

    WSGIRequestHandler.run_wsgi = answer_late  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    serve(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
