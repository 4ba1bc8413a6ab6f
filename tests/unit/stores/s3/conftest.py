"""Credentials without the machine's own settings, and stores through each client."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from s3kv.config import Config
from s3kv.stores.s3.s3_store import open_store
from s3kv.stores.store import ObjectStore
from tests import servers

OpenStore = Callable[..., AbstractAsyncContextManager[ObjectStore]]


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    servers.set_credentials(monkeypatch)
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@asynccontextmanager
async def opened(url: str | None = None, **settings: Any) -> AsyncIterator[ObjectStore]:
    """A store on the bucket "bkt" of the server at a URL, with further settings."""
    store = open_store(Config(**{"bucket": "bkt", "endpoint_url": url, **settings}))
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def facing(it: Any, s3_store: OpenStore) -> AsyncIterator[tuple[Any, ObjectStore]]:
    """A server for which `it.answer` answers, and a store on it. Yields `it` and the store."""
    async with servers.canned(it.answer) as at, s3_store(at.url) as store:
        yield it, store


@pytest.fixture(params=["fast", "aiobotocore"])
def s3_store(request: pytest.FixtureRequest) -> OpenStore:
    """`opened`, with one of the clients."""
    return lambda url=None, **settings: opened(url, client=request.param, **settings)
