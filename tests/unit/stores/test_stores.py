"""The suite on every store: moto, SeaweedFS, Ceph, the environment's, and the reference."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from lab.memory_store import MemoryStore
from lab.s3 import S3Server
from s3kv.config import Config
from s3kv.place import Place
from s3kv.stores.s3 import s3_store
from s3kv.stores.s3.address import find_address
from s3kv.stores.s3.fast_client import FastClient
from s3kv.stores.s3.s3_store import S3Store
from s3kv.stores.s3.sdk_client import SdkClient
from s3kv.stores.store import ObjectStore
from tests import servers
from tests.unit.stores.suite import ObjectStoreSuite, pattern

REAL = servers.real_server()


@pytest.fixture(
    params=[FastClient, partial(FastClient, threads=3), SdkClient],
    ids=["fast", "fast in threads", "SDK"],
)
def client(request: pytest.FixtureRequest) -> Any:
    return request.param


class S3Suite(ObjectStoreSuite):
    """With both clients. `place` is (endpoint URL, bucket, credentials)."""

    timeout_ms = 10_000

    @pytest_asyncio.fixture
    async def store(
        self, client: Any, place: tuple[str, str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[ObjectStore]:
        url, bucket, keys = place
        servers.set_credentials(monkeypatch, keys)
        monkeypatch.setattr(s3_store, "PAGE_KEYS", 10)
        config = Config(bucket=bucket, endpoint_url=url, request_timeout_ms=self.timeout_ms)
        store = S3Store(config, client(config, find_address(config)))
        yield store
        await store.close()

    async def test_another_client_sees_the_same(
        self, store: ObjectStore, place: tuple[str, str, dict[str, str]], root: str
    ) -> None:
        url, bucket, keys = place
        other = servers.boto_client(url, keys)
        key = root + ("odd +%20 ü/../k" if self.keys_are_texts else "odd +%20 ü/k")
        await store.put(key, Place.of(pattern(70_000, 1)), if_absent=True)
        found = await asyncio.to_thread(other.get_object, Bucket=bucket, Key=key)
        assert found["Body"].read() == bytes(pattern(70_000, 1))
        await asyncio.to_thread(other.put_object, Bucket=bucket, Key=key, Body=b"from elsewhere")
        buffer = memoryview(bytearray(100))
        assert (await store.get_into(key, Place.of(buffer))).nbytes == 14
        assert bytes(buffer[:14]) == b"from elsewhere"


@pytest.fixture(scope="module")
def moto_url() -> Iterator[str]:
    with servers.moto_server() as url:
        yield url


class TestS3StoreOnMoto(S3Suite):
    conditional_batches = False  # it does not look at the ETags in there
    conditional_copies = False

    @pytest.fixture
    def place(self, moto_url: str) -> tuple[str, str, dict[str, str]]:
        return moto_url, servers.BUCKET, servers.KEYS


@pytest.mark.infra
@pytest.mark.nightly
class TestS3StoreOnCeph(S3Suite):
    # Not in Pacific (16.2): it deletes whatever is there.
    conditional_deletes = conditional_batches = False
    conditional_copies = False  # it looks for the condition under a name of its own

    @pytest.fixture
    def place(self, rgw: S3Server) -> tuple[str, str, dict[str, str]]:
        servers.boto_client(rgw.url, rgw.env).create_bucket(Bucket=servers.BUCKET)
        return rgw.url, servers.BUCKET, rgw.env


@pytest.fixture(scope="module")
def weed_bucket(weed: S3Server) -> S3Server:
    """With an empty bucket, `BUCKET`."""
    servers.boto_client(weed.url, weed.env).create_bucket(Bucket=servers.BUCKET)
    return weed


@pytest.mark.long
class TestS3StoreOnSeaweedFS(S3Suite):
    keys_are_texts = False
    timeout_ms = 60_000  # writers of one key wait for its lock; each asks once a second

    @pytest.fixture
    def place(self, weed_bucket: S3Server) -> tuple[str, str, dict[str, str]]:
        return weed_bucket.url, servers.BUCKET, weed_bucket.env


if REAL is not None:

    class TestS3StoreOnRealServer(S3Suite):
        @pytest.fixture
        def place(self) -> Any:
            return REAL


class TestMemoryStore(ObjectStoreSuite):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()
