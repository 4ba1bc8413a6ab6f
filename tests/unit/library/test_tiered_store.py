"""TieredStore over an I/O process and an S3 server; a block in use stays in the bucket."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from s3kv.config import Config
from s3kv.errors import ConfigError, IoProcessError, StoreMissing
from s3kv.library.tiered_store import TieredStore
from s3kv.types import Location
from tests.servers import BUCKET, KEYS, REGION, boto_client
from tests.unit.library.stores import block, gives, hash_of, new_pools, opening, room
from tests.waiting import until


def named(number: int) -> tuple[bytes, dict[str, torch.Tensor]]:
    return hash_of(number), block(number)


async def test_a_block_comes_back_from_memory_and_from_the_bucket(config: Config) -> None:
    key, tensors = named(1)
    async with opening(config) as store:
        assert await store.put(key, tensors)
        assert store.where(key).host
        assert await gives(store, 1)
        await store.flush()
        assert store.where(key).bucket is True

    async with opening(config) as other:
        where = other.where(key)
        assert not where.host
        assert where.bucket is None
        assert await gives(other, 1)
        assert other.where(key).host


async def test_a_miss_is_false_and_known(config: Config) -> None:
    key, _ = named(2)
    async with opening(config) as store:
        assert not await store.get(key, room())
        assert store.where(key).bucket is False
        assert store.prefetch([key]) == 0


async def test_prefetched_blocks_arrive_without_being_asked_for(config: Config) -> None:
    blocks = [named(n) for n in range(8)]
    async with opening(config) as store:
        for key, tensors in blocks:
            await store.put(key, tensors)
        await store.flush()
    async with opening(config) as store:
        assert store.prefetch([key for key, _ in blocks]) == len(blocks)
        async with asyncio.timeout(20):
            await until(lambda: all(store.where(key).host for key, _ in blocks))


async def test_wrong_tensors_are_refused(config: Config) -> None:
    key, tensors = named(9)
    async with opening(config) as store:
        with pytest.raises(ValueError, match="expected are"):
            await store.put(key, {"k": tensors["k"]})
        with pytest.raises(ValueError, match="'k' is"):
            await store.get(key, {"k": torch.zeros(1), "v": tensors["v"]})


async def test_a_store_that_cannot_work_says_why_at_start(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OSError("no processes are left"))
    missing = Config(bucket="no-such-bucket", endpoint_url=config.endpoint_url, region=REGION)
    for error, said, opened in (
        (ConfigError, "host_bytes", opening(config, shapes={"big": ((2**21,), torch.uint8)})),
        (TypeError, "integer", opening(config, shapes={"k": ((4.0,), torch.uint8)})),
        (StoreMissing, "no-such-bucket", opening(missing)),
        (IoProcessError, "no processes are left", opening(config)),
    ):
        if error is IoProcessError:
            monkeypatch.setattr("s3kv.io.client.Child", full)
        with pytest.raises(error, match=said):
            await opened
        documented = [each.__name__ for each in error.__mro__]
        assert any(f"`{name}`" in str(TieredStore.open.__doc__) for name in documented)


KEY = hash_of(1)
AFTER_S = 1.0
"""The shortest that a store tells: S3 has whole seconds."""


class Objects:
    """The bucket's objects, seen from outside."""

    def __init__(self, config: Config) -> None:
        self._client = boto_client(str(config.endpoint_url), KEYS)
        self._prefix = config.prefix

    def written(self) -> list[Any]:
        """When each block was last written."""
        listed = self._client.list_objects_v2(Bucket=BUCKET, Prefix=self._prefix)
        found = [one for one in listed.get("Contents", ()) if one["Key"].endswith(".safetensors")]
        return [one["LastModified"] for one in found]

    def delete(self) -> None:
        """What a lifecycle rule does, or a cleaner, or `s3kv gc`."""
        for one in self._client.list_objects_v2(Bucket=BUCKET, Prefix=self._prefix)["Contents"]:
            if one["Key"].endswith(".safetensors"):
                self._client.delete_object(Bucket=BUCKET, Key=one["Key"])


@pytest.fixture
async def store(config: Config) -> AsyncIterator[TieredStore]:
    """With one block, in all tiers."""
    config = dataclasses.replace(config, refresh_after_s=AFTER_S)
    async with opening(config, pools=new_pools(2)) as store:
        assert await store.put(KEY, block(1))
        await from_the_device(store)
        assert await store.flush() == ()
        assert store.where(KEY) == Location(device=True, host=True, bucket=True)
        yield store


async def from_the_device(store: TieredStore) -> None:
    store.release(await store.acquire(KEY))


async def from_host_memory(store: TieredStore) -> None:
    # Everything else of the pool is in use, so the block is not in the pool.
    held = [number for number in (store.allocate(), store.allocate()) if number is not None]
    assert not store.where(KEY).device
    assert await store.get(KEY, room())
    for number in held:
        store.release(number)


async def put_again(store: TieredStore) -> None:
    assert await store.put(KEY, block(1))


USES = pytest.mark.parametrize("use", [from_the_device, from_host_memory, put_again])
Use = Callable[[TieredStore], Awaitable[None]]


async def use_until(store: TieredStore, use: Use, holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await use(store)
            await asyncio.sleep(0.05)


@USES
async def test_it_is_refreshed(store: TieredStore, config: Config, use: Use) -> None:
    objects = Objects(config)
    first = objects.written()
    await use_until(store, use, lambda: objects.written() > first)


@USES
async def test_it_is_uploaded_again_after_it_was_deleted(
    store: TieredStore, config: Config, use: Use
) -> None:
    objects = Objects(config)
    objects.delete()
    assert objects.written() == []
    await use_until(store, use, lambda: objects.written() != [])
    assert await store.flush() == ()
    assert store.where(KEY).bucket is True


async def test_what_may_have_been_deleted_is_not_said_to_be_in_the_bucket(
    store: TieredStore, config: Config
) -> None:
    """Unless the bucket says so: a put asks, and a flush waits for the answer."""
    objects, numbers = Objects(config), range(1, 9)
    for number in numbers:
        assert await store.put(hash_of(number), block(number))
    assert await store.flush() == ()
    objects.delete()
    async with asyncio.timeout(60):
        await until(lambda: not any(store.where(hash_of(number)).bucket for number in numbers))
    assert store.where(KEY).bucket is None
    for number in numbers:
        assert await store.put(hash_of(number), block(number))
    assert await store.flush() == ()
    assert len(objects.written()) == len(numbers)
    assert store.where(KEY).bucket is True
