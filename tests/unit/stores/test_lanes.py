"""Coroutines side by side: each item is done once, and all end together."""

from __future__ import annotations

import asyncio

import pytest

from s3kv.errors import StoreError
from s3kv.stores.lanes import in_lanes, in_turn


async def test_lanes_work_side_by_side_and_each_item_is_done_once() -> None:
    done: list[tuple[int, int]] = []
    begun = 0
    all_at_work = asyncio.Event()

    async def work(lane: int, item: int) -> None:
        nonlocal begun
        begun += 1
        if begun == 3:
            all_at_work.set()
        await all_at_work.wait()
        done.append((lane, item))

    await in_lanes(3, in_turn(range(9)), work)
    assert sorted(item for _, item in done) == list(range(9))
    assert {lane for lane, _ in done} == {0, 1, 2}


async def test_if_one_lane_fails_none_goes_on() -> None:
    begun: list[int] = []

    async def work(_: int, item: int) -> None:
        begun.append(item)
        if item == 1:
            raise StoreError("planned")
        await asyncio.Event().wait()

    with pytest.raises(StoreError, match="planned"):
        await in_lanes(2, in_turn(range(9)), work)
    assert begun == [0, 1]
