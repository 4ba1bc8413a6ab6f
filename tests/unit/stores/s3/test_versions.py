"""Buckets that keep versions: what is erased there, and the warning that deleting frees nothing.

On moto, SeaweedFS and Ceph, with both clients.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from s3kv.objects.keys import Namespace
from s3kv.place import Place
from s3kv.stores.store import ObjectInfo, ObjectStore
from s3kv.types import ChunkKey
from s3kv.upkeep.cleaner import Cleaner
from tests import servers
from tests.servers import REAL_SERVERS
from tests.unit.stores.s3.conftest import OpenStore

BUCKET = "s3kv-versions"


def versions(boto: Any) -> list[tuple[str, str]]:
    """Key and version of everything that is kept, delete markers included."""
    told = boto.list_object_versions(Bucket=BUCKET)
    kept = told.get("Versions", []) + told.get("DeleteMarkers", [])
    return [(item["Key"], item["VersionId"]) for item in kept]


@pytest.fixture(params=["moto", *REAL_SERVERS])
def place(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Any]]:
    """The URL of a server, and a client for it, which both have an empty bucket."""
    with servers.fresh_bucket(request.param, BUCKET, request, monkeypatch) as found:
        yield found


@pytest_asyncio.fixture
async def store(s3_store: OpenStore, place: tuple[str, Any]) -> AsyncIterator[ObjectStore]:
    async with s3_store(place[0], bucket=BUCKET) as opened:
        yield opened


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("s3kv")]


def keep(boto: Any, status: str) -> None:
    boto.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": status})


async def write(store: ObjectStore, key: str) -> ObjectInfo:
    await store.put(key, Place.of(b"x"), if_absent=False)
    info = await store.head(key)
    assert info is not None
    return info


class Stop(Exception):
    """The cleaner has had its turn."""


async def test_a_cleaner_warns_that_it_frees_nothing(
    store: ObjectStore, place: tuple[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    _, boto = place
    keep(boto, "Enabled")
    chunk = Namespace("s3kv", "a" * 32).chunk(ChunkKey(0, bytes(32)), "h0-7of8-l0-31of32")
    await write(store, chunk)
    turns = iter(range(3))

    async def sleep(_: float) -> None:
        if next(turns) == 2:  # after the one before the first turn, and the one for the lease
            raise Stop

    cleaner = Cleaner(
        store,
        "s3kv",
        max_bytes=1,
        idle_s=0.0,
        min_age_s=-60.0,  # what was written just now may go
        holder="us",
        on_refresh_after=lambda _: None,
        rng=random.Random(1),
        sleep=sleep,
    )
    with caplog.at_level(logging.WARNING, "s3kv"), pytest.raises(Stop):
        await cleaner.run()
    assert (cleaner.sweeps, cleaner.deleted_objects) == (1, 1)
    assert "NoncurrentVersionExpiration" in "".join(warnings_of(caplog))
    assert len([key for key, _ in versions(boto) if key == chunk]) == 2


async def test_what_is_erased_leaves_nothing(store: ObjectStore, place: tuple[str, Any]) -> None:
    """Neither what was overwritten, refreshed and deleted before, nor a delete marker."""
    _, boto = place
    keep(boto, "Enabled")
    await write(store, "k")
    info = await write(store, "k")
    await store.refresh("k", info.modified_s)
    await write(store, "kk")
    kept = len(versions(boto))
    assert kept == 4
    assert await store.erase("k") is True
    assert [key for key, _ in versions(boto)] == ["kk"]
    assert await store.erase("none") is True
    assert [key for key, _ in versions(boto)] == ["kk"]


@pytest.mark.parametrize("place", ["moto", REAL_SERVERS[-1]], indirect=True)
async def test_what_is_erased_after_versioning_was_suspended(
    store: ObjectStore, place: tuple[str, Any]
) -> None:
    """SeaweedFS answers to each deletion that it is done, and keeps both versions."""
    _, boto = place
    keep(boto, "Enabled")
    await write(store, "k")
    keep(boto, "Suspended")
    await write(store, "k")
    assert await store.erase("k") is True
    assert versions(boto) == []


async def test_versions_that_may_not_be_deleted_stay(
    store: ObjectStore, place: tuple[str, Any], request: pytest.FixtureRequest
) -> None:
    if "moto" in request.node.name:
        pytest.skip("moto evaluates no policies")
    _, boto = place
    keep(boto, "Enabled")
    await write(store, "k")
    arn = f"arn:aws:s3:::{BUCKET}/*"
    deny = {"Effect": "Deny", "Principal": "*", "Action": "s3:DeleteObjectVersion", "Resource": arn}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [deny]})
    boto.put_bucket_policy(Bucket=BUCKET, Policy=policy)
    assert await store.erase("k") is False
    assert await store.head("k") is None
    assert len(versions(boto)) == 2


@pytest.mark.parametrize(
    ("statuses", "warnings"), [((), 0), (("Enabled",), 1), (("Enabled", "Suspended"), 0)]
)
@pytest.mark.parametrize("deletion", ["delete", "delete_many"])
async def test_deleting_from_a_bucket_that_keeps_versions_warns_once(
    store: ObjectStore,
    place: tuple[str, Any],
    statuses: tuple[str, ...],
    warnings: int,
    deletion: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, boto = place
    for status in statuses:
        keep(boto, status)
    with caplog.at_level(logging.WARNING, "s3kv"):
        for key in ("a", "b"):
            info = await write(store, key)
            if deletion == "delete":
                assert await store.delete(key) is True
            else:
                assert await store.delete_many([info]) == []
    told = warnings_of(caplog)
    assert len(told) == warnings
    assert all("NoncurrentVersionExpiration" in message for message in told)
    assert [await store.head(key) for key in ("a", "b")] == [None, None]
