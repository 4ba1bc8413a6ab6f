"""Host memory of blocks and of tensors: what is put, found, flushed and waited for."""

from __future__ import annotations

import asyncio

import pytest

from lab.faults import Fault
from lab.proxy import Proxy
from s3kv.config import Config
from tests.unit.library.stores import (
    big,
    block,
    hash_of,
    new_pools,
    opening,
    opening_big,
    room,
    rows,
    same,
)


async def test_a_block_put_while_it_is_fetched_is_kept(config: Config) -> None:
    """The fetch finds nothing; neither a put nor a put_block may count on it."""
    pools = new_pools(4)
    async with await opening(config, pools=pools) as store:
        assert store.prefetch([hash_of(1), hash_of(2)]) == 2
        number = store.allocate()
        for name, tensor in block(2).items():
            pools[name][number] = tensor
        assert store.put_block(hash_of(2), number)
        store.release(number)
        assert await store.put(hash_of(1), block(1))
        assert store.where(hash_of(1)).host
        await store.flush()
        assert store.where(hash_of(1)).bucket
        assert store.where(hash_of(2)).bucket
    async with await opening(config) as store:
        for key in (1, 2):
            into = room()
            assert await store.get(hash_of(key), into)
            assert same(into, block(key))


async def test_flush_names_what_the_bucket_did_not_take(
    behind: tuple[Proxy, Config], short_pauses: None
) -> None:
    between, config = behind
    async with await opening(config) as store:
        between.fault(Fault(kind="refuse"))
        assert await store.put(hash_of(1), block(1))
        assert await store.put_tensor(hash_of(2), rows(2))
        left = await store.flush()
        assert (left.blocks, left.tensors) == ((hash_of(1),), (hash_of(2),))
        assert left
        assert await store.flush() == left, "still in host memory, and still not in the bucket"
        between.lift()
        assert await store.put(hash_of(3), block(3))
        assert await store.put_tensor(hash_of(3), rows(3))
        assert not await store.flush(), "one upload that works opens the way for the others"
        assert store.where(hash_of(1)).bucket
        assert store.where_tensor(hash_of(2)).bucket


async def test_a_hit_uploads_what_an_outage_has_kept_from_the_bucket(
    behind: tuple[Proxy, Config], short_pauses: None
) -> None:
    between, config = behind
    async with await opening(config) as store:
        between.fault(Fault(kind="refuse"))
        assert await store.put(hash_of(1), block(1))
        assert await store.put_tensor(hash_of(1), rows(1))
        assert await store.flush()
        between.lift()
        assert await store.put(hash_of(2), block(2))
        assert await store.put_tensor(hash_of(2), rows(2))
        async with asyncio.timeout(30):
            while not (store.where(hash_of(1)).bucket and store.where_tensor(hash_of(1)).bucket):
                assert await store.get(hash_of(1), room())
                assert await store.get_tensor(hash_of(1)) is not None
                await asyncio.sleep(0.02)


async def test_a_prefetch_leaves_room_and_a_put_can_wait_for_it(
    behind: tuple[Proxy, Config],
) -> None:
    between, config = behind
    a_quarter = 220_000
    async with opening_big(config, a_quarter) as store:
        between.fault(Fault(kind="delay", seconds=3, verbs=("GET", "PUT")))
        assert store.prefetch(hash_of(number) for number in range(100, 200)) == 2
        for number in (1, 2):
            assert await store.put(hash_of(number), big(number, a_quarter))
        assert not await store.put(hash_of(3), big(3, a_quarter))
        waiting, cancelled = (
            asyncio.create_task(store.put(hash_of(number), big(number, a_quarter), wait=True))
            for number in (3, 4)
        )
        await asyncio.sleep(0.02)
        assert not waiting.done()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        between.lift()
        assert await waiting
        assert not store.where(hash_of(4)).host
