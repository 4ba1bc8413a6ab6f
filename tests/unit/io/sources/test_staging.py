"""Memory beside the slab is bounded, shared in turn, and used again."""

from __future__ import annotations

import asyncio

import pytest

from s3kv.io.sources import staging
from s3kv.io.sources.staging import StagingMemory


async def hold(staging: StagingMemory, until: asyncio.Event, *lengths: int) -> int:
    async with staging.lease(lengths) as buffers:
        assert tuple(map(len, buffers)) == lengths
        await until.wait()
        return staging.leased_bytes


async def test_leases_share_the_bound_in_order_of_arrival() -> None:
    staging, ends = StagingMemory(100), [asyncio.Event() for _ in range(4)]
    wanted = [(30, 30), (60,), (30,), (200,)]
    leases = [
        asyncio.create_task(hold(staging, end, *lengths))
        for end, lengths in zip(ends, wanted, strict=True)
    ]
    await asyncio.sleep(0.01)
    assert staging.leased_bytes == 60, "the third would fit, and does not overtake"
    for end, leased in zip(ends, (90, 30, 200, 0), strict=True):
        end.set()
        await asyncio.sleep(0.01)
        assert staging.leased_bytes == leased
    assert [await lease for lease in leases] == [60, 90, 30, 200]


async def test_a_lease_that_is_given_up_leaves_nothing_behind() -> None:
    staging, end = StagingMemory(100), asyncio.Event()
    held = asyncio.create_task(hold(staging, end, 80))
    waits = asyncio.create_task(hold(staging, end, 50))
    await asyncio.sleep(0.01)
    for lease in (waits, held):
        lease.cancel()
        await asyncio.wait([lease])
    assert staging.leased_bytes == 0
    end.set()
    assert await hold(staging, end, 100) == 100


async def test_a_buffer_is_used_again_and_what_is_kept_is_bounded() -> None:
    staging = StagingMemory(100)
    async with staging.lease((40, 40)) as (first, _):
        first[0] = 7
    async with staging.lease((40, 40)) as (second, third):
        assert {second.obj is first.obj, third.obj is first.obj} == {True, False}
    async with staging.lease((60,)), staging.lease((40,)) as (fourth,):
        assert fourth.obj is not first.obj, "60 of 100 bytes leave no room for what was kept"
    async with staging.lease((101,)) as (large,):
        pass
    async with staging.lease((101,)) as (again,):
        assert again.obj is not large.obj


async def test_a_buffer_taken_at_once_counts_until_it_is_given_back() -> None:
    staging = StagingMemory(100)
    taken = staging.take(60)
    assert staging.take(41) is None
    staging.give_back(taken)
    assert staging.leased_bytes == 0
    assert staging.take(60) is taken


async def test_memory_that_the_system_refuses_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(length: int) -> bytearray:
        raise MemoryError

    memory = StagingMemory(100)
    monkeypatch.setattr(staging, "bytearray", refused, raising=False)
    assert memory.take(60) is None
    assert memory.leased_bytes == 0
