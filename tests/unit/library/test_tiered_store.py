"""TieredStore over a real I/O process and an S3 server."""

from __future__ import annotations

import asyncio

import pytest
import torch

from s3kv.config import Config
from s3kv.errors import ConfigError, StoreMissing
from tests.servers import REGION
from tests.unit.library.stores import block, hash_of, opening, room, same


def named(number: int) -> tuple[bytes, dict[str, torch.Tensor]]:
    return hash_of(number), block(number)


async def test_a_block_comes_back_from_memory_and_from_the_bucket(config: Config) -> None:
    key, tensors = named(1)
    async with opening(config) as store:
        assert await store.put(key, tensors)
        assert store.where(key).host
        into = room()
        assert await store.get(key, into)
        assert same(into, tensors)
        await store.flush()
        assert store.where(key).bucket is True

    async with opening(config) as other:
        where = other.where(key)
        assert not where.host
        assert where.bucket is None
        into = room()
        assert await other.get(key, into)
        assert same(into, tensors)
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
            while not all(store.where(key).host for key, _ in blocks):  # noqa: ASYNC110 no event is public
                await asyncio.sleep(0.005)


async def test_wrong_tensors_are_refused(config: Config) -> None:
    key, tensors = named(9)
    async with opening(config) as store:
        with pytest.raises(ValueError, match="expected are"):
            await store.put(key, {"k": tensors["k"]})
        with pytest.raises(ValueError, match="'k' is"):
            await store.get(key, {"k": torch.zeros(1), "v": tensors["v"]})


async def test_a_store_that_cannot_work_says_why_at_start(config: Config) -> None:
    with pytest.raises(ConfigError, match="host_bytes"):
        await opening(config, shapes={"big": ((2**21,), torch.uint8)})
    missing = Config(bucket="no-such-bucket", endpoint_url=config.endpoint_url, region=REGION)
    with pytest.raises(StoreMissing, match="no-such-bucket"):
        await opening(missing)
