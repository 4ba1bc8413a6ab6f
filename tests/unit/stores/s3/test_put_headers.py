"""Buckets whose policy demands headers of every upload, with both clients.

Ceph evaluates such a policy itself. Before moto, which does not, the proxy refuses what the policy
would; moto tells what each object was written with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from lab.faults import s3_error
from lab.proxy import proxy
from s3kv.errors import StoreDenied
from s3kv.place import Place
from tests import servers
from tests.rgw import KMS_KEY
from tests.servers import REAL_SERVERS
from tests.unit.stores.s3.conftest import OpenStore

BUCKET = "s3kv-policies"
ENCRYPTION = "x-amz-server-side-encryption"
KMS = {ENCRYPTION: "aws:kms", f"{ENCRYPTION}-aws-kms-key-id": KMS_KEY}
ACL = {"x-amz-acl": "bucket-owner-full-control"}
DATA = memoryview(bytes(range(256)) * 300)


@dataclass
class Ground:
    """A server with an empty bucket whose policy demands `demanded`."""

    is_real: bool
    url: str
    boto: Any


@pytest.fixture(params=[KMS, ACL], ids=["kms", "acl"])
def demanded(request: pytest.FixtureRequest) -> dict[str, str]:
    return request.param


@pytest.fixture(params=["moto", REAL_SERVERS[-1]])
def ground(
    request: pytest.FixtureRequest, demanded: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Ground]:
    name, value = next(iter(demanded.items()))
    with servers.fresh_bucket(request.param, BUCKET, request, monkeypatch) as (url, boto):
        if request.param != "moto":
            policy = servers.demanding(BUCKET, name, value)
            boto.put_bucket_policy(Bucket=BUCKET, Policy=policy)
            yield Ground(True, url, boto)
            return
        with proxy(url) as between:
            between.fault(s3_error(403, "AccessDenied", verbs=("PUT",), lacks=f"{name}: {value}"))
            yield Ground(False, between.url, boto)


async def test_a_bucket_that_demands_headers_can_be_written(
    ground: Ground, s3_store: OpenStore, demanded: dict[str, str]
) -> None:
    async with s3_store(ground.url, bucket=BUCKET, put_headers=demanded) as store:
        assert await store.put("k", Place.of(DATA), if_absent=True) is True
        assert await store.put("k", Place.of(DATA), if_absent=True) is False
        assert await store.put("k", Place.of(DATA), if_absent=False) is True
        buffer = memoryview(bytearray(len(DATA)))
        info = await store.get_into("k", Place.of(buffer))
        assert info is not None
        assert buffer == DATA
        assert await store.get_into("k", Place.of(buffer[:300]), first=1000) == info
        assert buffer[:300] == DATA[1000:1300]
        if not ground.is_real:  # Ceph copies no encrypted object
            assert await store.refresh("k", info.modified_s) is True
        told = ground.boto.head_object(Bucket=BUCKET, Key="k")
        if demanded is KMS:
            assert (told["ServerSideEncryption"], told["SSEKMSKeyId"]) == ("aws:kms", KMS_KEY)
        assert await store.delete("k", if_etag=info.etag if ground.is_real else None) is True


async def test_and_cannot_be_written_without_them(
    ground: Ground, s3_store: OpenStore, demanded: dict[str, str]
) -> None:
    async with s3_store(ground.url, bucket=BUCKET) as store:
        with pytest.raises(StoreDenied, match="s3:PutObject"):
            await store.put("k", Place.of(DATA), if_absent=True)
        assert await store.head("k") is None


async def test_every_write_has_the_headers_signed_and_no_read_has_them(s3_store: OpenStore) -> None:
    """AWS refuses a read with them."""
    server = servers.canned(servers.http("<a/>"))
    async with server as at, s3_store(at.url, put_headers=KMS | ACL) as store:
        await store.put("k", Place.of(DATA), if_absent=True)
        await store.put("k", Place.of(DATA), if_absent=False)
        await store.refresh("k", 1e9)
        await store.get_into("k", Place.of(bytearray(4)))
        await store.delete("k")
    heads = [head.lower() for head in at.heads]
    writes = [head for head in heads if head.startswith("put ")]
    assert (len(writes), len(heads)) == (3, 5)
    for head in heads:
        signed = re.search("signedheaders=([^,]*)", head)
        for name, value in (KMS | ACL).items():
            assert (f"\r\n{name}: {value}\r\n" in head) == (head in writes)
            assert (name in signed[1].split(";")) == (head in writes)
