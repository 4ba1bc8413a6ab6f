"""The suite on every store: moto, SeaweedFS, Ceph, the environment's, the reference, encrypted."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import pytest_asyncio
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from lab import constants
from lab.memory_store import MemoryStore
from lab.s3 import S3Server
from s3kv.config import Config
from s3kv.io.sources.encrypted_store import EncryptedStore
from s3kv.objects.encryption import EncryptedForm, encrypted_bytes
from s3kv.place import Place
from s3kv.stores.s3 import s3_store
from s3kv.stores.s3.address import find_address
from s3kv.stores.s3.fast_client import FastClient
from s3kv.stores.s3.s3_store import S3Store
from s3kv.stores.s3.sdk_client import SdkClient
from s3kv.stores.store import ObjectStore
from tests import servers
from tests.unit.stores.suite import ObjectStoreSuite, pattern, write

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

    @pytest.fixture
    def store(self, plain_store: ObjectStore) -> ObjectStore:
        return plain_store

    @pytest_asyncio.fixture
    async def plain_store(
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


SEGMENT_BYTES = 500


class Ring:
    """Stands for `Keyring`: the objects of all keys are encrypted, and keep their keys. So there
    is no object of the suite that passes as it is."""

    def forms(self, key: str) -> tuple[EncryptedForm, ...]:
        return (EncryptedForm(key, "00000000", AESGCM(hashlib.sha256(key.encode()).digest())),)


def encrypting(store: ObjectStore) -> EncryptedStore:
    return EncryptedStore(store, Ring())  # type: ignore[arg-type]


def with_cases(test: Callable[..., Any], names: str, cases: Sequence[Any]) -> Any:
    """The same test with other cases than in the suite."""
    copied = FunctionType(test.__code__, test.__globals__, test.__name__)
    return pytest.mark.parametrize(names, cases)(copied)


class EncryptedSuite(ObjectStoreSuite):
    """Ranges begin with a segment, and end with one or with the object. No object is empty."""

    listed_bytes = staticmethod(encrypted_bytes)

    @pytest.fixture(autouse=True)
    def short_segments(self) -> Iterator[None]:
        with constants.changed(encrypted_segment_bytes=SEGMENT_BYTES):
            yield

    test_round_trip = with_cases(ObjectStoreSuite.test_round_trip, "nbytes", [1, 4096, 2**20 + 7])
    test_header_and_payload_apart = with_cases(
        ObjectStoreSuite.test_header_and_payload_apart, "nbytes", [1, 999, 1000, 1001, 700_000]
    )
    test_a_receiver_has_the_memory = with_cases(
        ObjectStoreSuite.test_a_receiver_has_the_memory, "nbytes", [1, 2, 500, 3000, 700_000]
    )
    test_a_range = with_cases(
        ObjectStoreSuite.test_a_range,
        "bounds",
        [(0, 3000), (0, 1000), (500, 1500), (1000, 3000), (0, 500), (1000, 1500), (2000, 2500)],
    )
    test_a_receiver_of_a_range = with_cases(
        ObjectStoreSuite.test_a_receiver_of_a_range,
        "first,nbytes",
        [(0, 700_000), (0, 800_000), (500, 600_000), (699_500, 500), (1000, 900_000)],
    )
    test_an_object_that_ends_within_the_range = with_cases(
        ObjectStoreSuite.test_an_object_that_ends_within_the_range, "first", [0, 1000, 2500]
    )
    test_a_range_beyond_the_end = with_cases(
        ObjectStoreSuite.test_a_range_beyond_the_end, "first", [3000, 3500, 9000]
    )


class TestEncryptedMemoryStore(EncryptedSuite):
    @pytest.fixture
    def store(self) -> EncryptedStore:
        return encrypting(MemoryStore())


class TestEncryptedS3StoreOnMoto(EncryptedSuite, TestS3StoreOnMoto):
    @pytest.fixture(params=[partial(FastClient, threads=3)], ids=["fast in threads"])
    def client(self, request: pytest.FixtureRequest) -> Any:
        return request.param

    @pytest.fixture
    def store(self, plain_store: ObjectStore) -> ObjectStore:
        return encrypting(plain_store)

    async def test_another_client_sees_the_same(
        self, store: ObjectStore, place: tuple[str, str, dict[str, str]], root: str
    ) -> None:
        """And none of what is inside."""
        url, bucket, keys = place
        data = pattern(70_000, 1)
        await write(store, root + "k", data)
        other = servers.boto_client(url, keys)
        found = await asyncio.to_thread(other.get_object, Bucket=bucket, Key=root + "k")
        body = found["Body"].read()
        assert len(body) == encrypted_bytes(70_000)
        assert bytes(data[:500]) not in body
