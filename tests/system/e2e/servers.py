"""An object store that comes and goes."""

from __future__ import annotations

from contextlib import ExitStack

from lab.s3 import moto_process
from lab.service import free_ports


class Store:
    """An S3 at one address that can be killed, and come back there with what it held."""

    BUCKET = "kv-cache"

    def __init__(self) -> None:
        (self._port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self._port}"
        self._running = ExitStack()
        self._held: dict[str, bytes] = {}

    def start(self) -> None:
        self.s3 = self._running.enter_context(moto_process(self._port))
        self.s3.client().create_bucket(Bucket=self.BUCKET)
        for key, body in self._held.items():
            self.s3.client().put_object(Bucket=self.BUCKET, Key=key, Body=body)

    def remember(self) -> None:
        self._held = self.s3.contents(self.BUCKET)

    def kill(self) -> None:
        self._running.close()
