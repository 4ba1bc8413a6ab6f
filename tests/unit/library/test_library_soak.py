"""Thousands of calls of the library at once, a third of them cancelled at random moments.

`S3KV_SEED=…` draws the same calls and moments again; what a call is doing then depends on the
machine. A caller whose put was cancelled writes to its tensors at once, and one whose get was
cancelled looks later whether anybody else has.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

from lab.books import check
from s3kv.config import Config
from s3kv.library.tiered_store import TieredStore
from tests.unit.library.stores import SlowThreads, block, fresh_bucket, hash_of, opening, same
from tests.waiting import until

SHAPES = {"k": ((16, 512), torch.bfloat16), "v": ((8, 512), torch.float32)}
"""So large that the least host memory there is holds 28 blocks."""
BLOCKS = 60
POOL = 6
TASKS = 12
LONGEST_S = 40.0
OVERWRITTEN = 7
CONTENT = [block(number, SHAPES) for number in range(BLOCKS)]


class Caller:
    """Makes calls, and compares every byte it gets. cut: share of the calls to be cancelled."""

    def __init__(
        self, store: TieredStore, pools: dict[str, torch.Tensor], seed: int, cut: float
    ) -> None:
        self.ends: Counter[str] = Counter()
        self.mine: list[dict[str, torch.Tensor]] = []
        """Tensors of gets that were cancelled, which nobody may write to any more."""
        self._store = store
        self._pools = pools
        self._draw = random.Random(seed)
        self._cut = cut

    async def calls(self, count: int) -> None:
        kinds = (self.put, self.get, self.block)
        for _ in range(count):
            kind = self._draw.choices(kinds, (4, 5, 4))[0]
            async with asyncio.timeout(LONGEST_S):
                if self._draw.random() < 0.05:
                    self._store.prefetch(map(hash_of, self._draw.sample(range(BLOCKS), 20)))
                elif self._draw.random() < 0.02:
                    with suppress(asyncio.CancelledError):
                        await self.cut(self._store.flush())
                else:
                    await kind()
            self.ends["calls"] += 1

    async def cut(self, call: Coroutine[Any, Any, Any]) -> Any:
        """The call's result. Some are to be cancelled, in one way or another, and about half of
        those have ended by then."""
        if self._draw.random() >= self._cut:
            return await call
        pause_s = self._draw.choice([0.0, self._draw.random() * 0.02])
        way = self._draw.randrange(3)
        try:
            if way == 0:
                return await asyncio.wait_for(call, pause_s or None)
            if way == 1:
                async with asyncio.timeout(pause_s):
                    return await call
            task = asyncio.ensure_future(call)
            for _ in range(self._draw.randrange(1, 4)):
                await asyncio.sleep(pause_s)
                task.cancel()
            return await task
        except (TimeoutError, asyncio.CancelledError):
            self.ends["cancelled"] += 1
            raise asyncio.CancelledError from None

    async def put(self) -> None:
        number = self._draw.randrange(BLOCKS)
        tensors = {name: tensor.clone() for name, tensor in CONTENT[number].items()}
        wait = self._draw.random() < 0.5
        try:
            await self.cut(self._store.put(hash_of(number), tensors, wait=wait))
        except asyncio.CancelledError:
            self.ends["put cancelled"] += 1
        for tensor in tensors.values():
            tensor.fill_(OVERWRITTEN)

    async def get(self) -> None:
        number = self._draw.randrange(BLOCKS)
        into = {name: torch.zeros_like(tensor) for name, tensor in CONTENT[number].items()}
        try:
            hit = await self.cut(self._store.get(hash_of(number), into))
        except asyncio.CancelledError:
            self.ends["get cancelled"] += 1
            for tensor in into.values():
                tensor.fill_(OVERWRITTEN)
            self.mine.append(into)
            return
        if hit:
            assert same(into, CONTENT[number])
            self.ends["hits"] += 1

    async def block(self) -> None:
        number = self._draw.randrange(BLOCKS)
        try:
            block = await self.cut(self._store.acquire(hash_of(number)))
        except asyncio.CancelledError:
            self.ends["acquire cancelled"] += 1
            return
        if block is None:
            block = self._store.allocate()
            if block is None:
                return
            for name, tensor in CONTENT[number].items():
                self._pools[name][block] = tensor
            self._store.put_block(hash_of(number), block)
        else:
            self.ends["acquired"] += 1
        await asyncio.sleep(self._draw.choice([0.0, 0.002]))
        assert same({name: pool[block] for name, pool in self._pools.items()}, CONTENT[number])
        self._store.release(block)


async def soak(config: Config, seed: int, calls: int, cut: float) -> Counter[str]:
    draw = random.Random(seed)
    pools = {n: torch.zeros((POOL, *shape), dtype=dtype) for n, (shape, dtype) in SHAPES.items()}
    ends: Counter[str] = Counter()
    async with opening(config, shapes=SHAPES, pools=pools) as store:
        # Half of the copies begin a little later, so that cancellations strike them.
        store._host.pump.copy_threads = SlowThreads(
            lambda: partial(time.sleep, draw.choice([0.0, draw.random() * 0.004]))
        )
        callers = [Caller(store, pools, seed * TASKS + n, cut) for n in range(TASKS)]
        async with asyncio.TaskGroup() as group:
            for caller in callers:
                group.create_task(caller.calls(calls // TASKS))
        async with asyncio.timeout(LONGEST_S):
            assert not await store.flush()
        for caller in callers:
            ends += caller.ends
            for tensors in caller.mine:
                assert all((tensor == OVERWRITTEN).all() for tensor in tensors.values())
        await nothing_is_held(store)
        ends["evictions"] = store.counters["evictions"]
    async with opening(config, shapes=SHAPES, pools=pools) as store:
        await compare_the_bucket(store)
    return ends


async def nothing_is_held(store: TieredStore) -> None:
    ledger = store._host.ledger
    async with asyncio.timeout(LONGEST_S):
        await until(lambda: not store._tiers._loading)
        await until(lambda: not (ledger.fetches_inflight or ledger.table.statistics().reserved))
        check(ledger)
        held = ledger.table.statistics()
        assert (held.reserved, held.dirty, held.pinned) == (0, 0, 0)
    assert None not in [store.allocate() for _ in range(POOL)]


async def compare_the_bucket(store: TieredStore) -> None:
    async def compare(number: int) -> bool:
        into = {name: torch.zeros_like(tensor) for name, tensor in CONTENT[number].items()}
        hit = await store.get(hash_of(number), into)
        assert not hit or same(into, CONTENT[number]), "sealed in the bucket"
        return hit

    hits = [await compare(number) for number in range(BLOCKS)]
    # The seed decides how many were put: with 200 calls more than 40 of 60.
    assert sum(hits) > BLOCKS // 4


@pytest.mark.parametrize(
    ("calls", "cut"),
    [(200, 0.3), pytest.param(5_000, 0.6, marks=[pytest.mark.long, pytest.mark.timeout(900)])],
    ids=["200", "5000"],
)
def test_calls_cancelled_at_any_moment_leave_the_store_right(
    monkeypatch: pytest.MonkeyPatch, calls: int, cut: float
) -> None:
    seed = int(os.environ.get("S3KV_SEED", random.SystemRandom().randrange(2**31)))
    print(f"S3KV_SEED={seed}")
    with fresh_bucket(monkeypatch) as config:
        ends = asyncio.run(soak(config, seed, calls, cut))
    print(dict(ends))
    assert ends["calls"] == calls // TASKS * TASKS, "nobody was cancelled by mistake"
    wanted = ("put cancelled", "get cancelled", "acquire cancelled", "hits")
    if calls >= 5_000:  # what 200 come upon is left to chance
        for end in (*wanted, "acquired", "evictions"):
            assert ends[end] > calls // 200, end
    assert ends["hits"] + ends["acquired"] > 0
