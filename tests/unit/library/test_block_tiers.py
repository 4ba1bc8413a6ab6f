"""A `TieredStore` over the caller's own pool of blocks, with a real I/O process and S3 server."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
import torch

from s3kv.config import Config
from s3kv.device.slot_payloads import ChunkPlaces
from s3kv.errors import ConfigError, UnsupportedError
from s3kv.library.tiered_store import TieredStore
from tests.unit.library import stores
from tests.unit.library.stores import hash_of

SHAPES = {"k": ((4, 64), torch.bfloat16), "v": ((2, 3, 4), torch.float32)}
Tensors = dict[str, torch.Tensor]


def new_pools(blocks: int) -> Tensors:
    """As an engine may have them: keys of blocks beside each other, values a side at a time."""
    keys = torch.zeros(blocks, 4, 80, dtype=torch.bfloat16)[:, :, :64]
    return {"k": keys, "v": torch.zeros(2, blocks, 3, 4).movedim(1, 0)}


def content(number: int) -> Tensors:
    return stores.block(number, SHAPES)


def holds(pools: Tensors, block: int, number: int) -> bool:
    return all(torch.equal(pools[n][block], t) for n, t in content(number).items())


def compute(pools: Tensors, block: int, number: int) -> None:
    for name, tensor in content(number).items():
        pools[name][block] = tensor


async def opened(config: Config, pools: Tensors | None, **more: object) -> TieredStore:
    return await stores.opening(config, shapes=SHAPES, pools=pools, **more)


async def computed(store: TieredStore, pools: Tensors, number: int) -> bool:
    """Whether the block was kept in host memory. It is released at once. Its number is numpy's, as
    in an engine's table."""
    block = store.allocate()
    compute(pools, block, number)
    block = np.int64(block)
    kept = store.put_block(hash_of(number), block)
    store.release(block)
    return kept


async def test_a_block_goes_from_one_pool_to_another_through_the_bucket(config: Config) -> None:
    pools = new_pools(4)
    async with await opened(config, pools) as store:
        assert await store.acquire(hash_of(1)) is None
        assert await computed(store, pools, 1)
        block = await store.acquire(hash_of(1))
        assert holds(pools, block, 1)
        store.release(block)
        await store.flush()
        where = store.where(hash_of(1))
        assert (where.device, where.host, where.bucket) == (True, True, True)
        assert store.counters["device_hits"] == 1
        assert store.counters["loads"] == 0

    other = new_pools(4)
    async with await opened(config, other) as store:
        block = await store.acquire(hash_of(1))
        assert holds(other, block, 1)
        assert store.counters["loads"] == 1
        store.release(block)
        # What was put by block is the same object as what is put by tensor.
        assert await stores.gives(store, 1, SHAPES)


async def test_with_all_blocks_held_tensors_go_past_the_pool(config: Config) -> None:
    pools = new_pools(1)
    async with await opened(config, pools) as store:
        assert store.allocate() == 0
        compute(pools, 0, 9)
        assert store.allocate() is None
        assert await store.put(hash_of(1), content(1))
        assert not store.where(hash_of(1)).device
        assert await store.acquire(hash_of(1)) is None
        assert store.counters["loads_without_block"] == 1
        assert await stores.gives(store, 1, SHAPES)
        assert holds(pools, 0, 9), "a held block was written to"
        store.release(0)
        assert await store.acquire(hash_of(1)) == 0


async def test_many_who_acquire_one_block_cause_one_load(config: Config) -> None:
    pools = new_pools(3)
    async with await opened(config, pools) as store:
        assert await computed(store, pools, 1)
        await store.flush()
    async with await opened(config, pools) as store:
        blocks = await asyncio.gather(*(store.acquire(hash_of(1)) for _ in range(20)))
        assert len(set(blocks)) == 1
        assert (store.counters["fetches"], store.counters["loads"]) == (1, 1)
        for block in blocks:
            store.release(block)
        for call in (store.release, lambda block: store.put_block(hash_of(1), block)):
            with pytest.raises(ValueError, match="not held"):
                call(block)


async def test_only_blocks_of_the_store_are_used(config: Config) -> None:
    pools = new_pools(6)
    async with await opened(config, pools, pool_blocks=[2, 5]) as store:
        for number in range(5):
            assert await computed(store, pools, number)
            await store.flush()  # until then the block that is copied is nobody else's
        for number in range(5):
            block = await store.acquire(hash_of(number))
            assert block in (2, 5)
            assert holds(pools, block, number)
            store.release(block)
        assert not pools["k"][[0, 1, 3, 4]].any()


def refused(*_: object, **__: object) -> None:
    raise RuntimeError("the copy was refused")


async def test_a_load_that_fails_leaves_the_block_free_and_host_memory_right(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = new_pools(1)
    async with await opened(config, pools) as store:
        assert await computed(store, pools, 1)
        await store.flush()
    async with await opened(config, pools) as store:
        with monkeypatch.context() as broken:
            broken.setattr(ChunkPlaces, "locate", refused)
            assert await store.acquire(hash_of(1)) is None
            assert store.counters["loads_failed"] == 1
            assert await stores.gives(store, 1, SHAPES), "it can go past the pool"
        block = await store.acquire(hash_of(1))
        assert block == 0
        assert holds(pools, block, 1)


async def test_a_save_that_fails_leaves_the_block_in_the_pool_alone(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = new_pools(2)
    async with await opened(config, pools) as store:
        with monkeypatch.context() as broken:
            broken.setattr(ChunkPlaces, "locate_whole", refused)
            await computed(store, pools, 1)
            await store.flush()
        assert store.counters["saves_failed"] == 1
        where = store.where(hash_of(1))
        assert (where.device, where.host, where.bucket) == (True, False, None)
        assert await store.put(hash_of(1), content(1)), "the next put brings it to the bucket"
        await store.flush()
        assert store.where(hash_of(1)).bucket


async def test_what_cannot_be_is_refused(config: Config) -> None:
    pools = new_pools(2)
    with pytest.raises(ConfigError, match="pool_blocks is given, and pools is not"):
        await opened(config, None, pool_blocks=[0])
    with pytest.raises(TypeError, match="float"):
        await opened(config, pools, pool_blocks=[1.0])
    with pytest.raises(ValueError, match="0 to 1"):
        await opened(config, pools, pool_blocks=[1, 2])
    with pytest.raises(ValueError, match="only once"):
        await opened(config, pools, pool_blocks=[1, 1])
    assert "s3kv-copies" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(ValueError, match="expected are"):
        await opened(config, {"k": pools["k"]})
    with pytest.raises(UnsupportedError, match="layer k"):
        await opened(config, pools | {"k": pools["k"][:1].expand(2, 4, 64)})
    async with await opened(config, None) as store:
        for call in (store.allocate, lambda: store.release(0), lambda: store.put_block(b"x", 0)):
            with pytest.raises(ConfigError, match="pools="):
                call()
        with pytest.raises(ConfigError, match="pools="):
            await store.acquire(b"x")
