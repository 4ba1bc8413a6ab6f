"""What a cancelled call of the library leaves behind, and what it does to the caller's tensors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from s3kv.config import Config
from s3kv.library.tiered_store import TieredStore
from tests.unit.library.stores import block, gated_threads, gives, hash_of, new_pools, opening, room


@pytest.fixture
async def store(config: Config) -> AsyncIterator[TieredStore]:
    async with await opening(config) as store:
        yield store


async def test_a_time_limit_is_told_as_one(store: TieredStore) -> None:
    """`CancelledError` arrives at the timeout that has asked for it, one or two of them."""
    gate = gated_threads()
    opening = asyncio.get_running_loop().call_later(0.2, gate.set)
    with pytest.raises(TimeoutError):  # noqa: PT012 the timeouts are what is tried
        async with asyncio.timeout(0.1):
            async with asyncio.timeout(0.05):
                await store.put(hash_of(1), block(1))
    assert opening.when() <= asyncio.get_running_loop().time(), "the copy was waited for"
    gate.clear()
    asyncio.get_running_loop().call_later(0.2, gate.set)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(store.put(hash_of(2), block(2)), 0.05)
    await asyncio.sleep(0)  # and is not cancelled once more


@pytest.mark.parametrize("turns", [0, 3])
async def test_a_store_outlives_the_end_of_every_task(config: Config, turns: int) -> None:
    """As `asyncio.run` ends them, those of the store as well."""
    pools = new_pools(4)
    async with await opening(config, pools=pools) as store:
        assert await store.put(hash_of(0), block(0))
        await store.flush()
    async with await opening(config, pools=pools) as store:
        calls = [
            asyncio.create_task(call)
            for call in (
                store.put(hash_of(1), block(1)),
                store.get(hash_of(0), room()),
                store.acquire(hash_of(0)),
            )
        ]
        for _ in range(turns):
            await asyncio.sleep(0.001)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        for number in (0, 1):
            assert await store.put(hash_of(number), block(number))
        assert not await store.flush()
        for number in (0, 1):
            assert await gives(store, number)
