"""A slab, and clients of it that are closed after the test."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lab import constants
from s3kv.config import Config
from s3kv.host.slab import Slab
from s3kv.io.client import IoClient
from s3kv.stores import disk
from tests.servers import BUCKET, set_credentials
from tests.unit.io import rig

Open = Callable[..., IoClient]


@pytest.fixture(autouse=True)
def free_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_FREE_SHARE", 0.0)  # whatever this machine's disk has left


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = Slab.create(64 * rig.SLOT_BYTES)
    yield slab
    slab.close()


@pytest.fixture
def open_client(slab: Slab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Starts a client, with settings and constants (`lab.constants`)."""
    set_credentials(monkeypatch)
    clients: list[IoClient] = []
    stack = contextlib.ExitStack()

    def open_client(
        url: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        module: str = "s3kv.io",
        **settings: Any,
    ) -> IoClient:
        settings, others = constants.split(settings)
        stack.enter_context(constants.changed(**others))
        config = Config(**{"bucket": BUCKET, "endpoint_url": url, **settings})
        clients.append(IoClient(rig.handshake(config), slab, clock=clock, module=module))
        clients[-1].start()
        return clients[-1]

    with stack:
        yield open_client
    for client in clients:
        client.close()
