"""The window on requests, and the pacing of a store."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable
from typing import Any

import pytest

from lab.memory_store import MemoryStore
from s3kv.errors import StoreThrottled
from s3kv.io.sources.hedging import Arrival, Claim
from s3kv.io.sources.pacing import Pacing, Window
from s3kv.place import Place
from s3kv.stores.store import ObjectInfo


def test_one_overload_halves_it_once_and_it_never_closes() -> None:
    """All requests that were under way then are refused; only the first says something new."""
    window = Window(32)
    for i in range(32):
        window.throttled(0.0, 1.0 + i / 100)
    assert (window.size, window.is_cut, window.cuts) == (16, True, 1)
    for i in range(1, 50):
        window.throttled(float(i), float(i + 1))
    assert (window.size, window.cuts) == (1, 5)


def test_it_grows_by_one_per_round_of_answers() -> None:
    window = Window(32)
    window.throttled(0.0, 1.0)
    for _ in range(17):
        window.answered()
    assert window.size == 17
    for _ in range(10_000):
        window.answered()
    assert (window.size, window.is_cut) == (32, False)


@pytest.mark.parametrize("seed", range(10))
def test_it_settles_where_the_store_can_bear_it(seed: int) -> None:
    """A store that throttles whatever is above `capacity`; rounds of a second."""
    rng = random.Random(seed)  # replay: the seed is the test's parameter
    capacity = rng.randint(2, 60)
    window, now_s, sizes = Window(64), 0.0, []
    for turn in range(2000):
        size = window.size
        for _ in range(size):
            if rng.random() < max(0.0, 1 - capacity / size):
                window.throttled(now_s, now_s + 1.0)
            else:
                window.answered()
        now_s += 1.0
        if turn >= 500:
            sizes.append(size)
    assert 0.45 * capacity <= sum(sizes) / len(sizes) <= 1.05 * capacity + 1


class LateStore(MemoryStore):
    """The first read of a key is never answered."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    async def begin(self, verb: str, key: str) -> None:
        if verb == "get_into":
            self.reads.append(key)
            if self.reads.count(key) == 1:
                await asyncio.Event().wait()
        await super().begin(verb, key)


async def read(
    pacing: Pacing, store: MemoryStore, key: str, buffer: Any, **when: float
) -> ObjectInfo | None:
    place = Place.of(buffer)

    def request(claim: Claim) -> Awaitable[ObjectInfo | None]:
        return store.get_into(key, place, Arrival(claim, lambda _: place))

    return await pacing.read(request, **when)


async def paced() -> tuple[Pacing, LateStore]:
    """A pacing that knows what is late, and a store with an object."""
    store = LateStore()
    await store.put("k", Place.of(b"here"), if_absent=True)
    pacing = Pacing(8, 100.0)
    for number in range(32):
        await store.put(f"{number}", Place.of(b"here"), if_absent=True)
        store.reads.append(f"{number}")
        await read(pacing, store, f"{number}", bytearray(4))
    store.reads.clear()
    return pacing, store


async def test_a_late_read_is_sent_a_second_time() -> None:
    pacing, store = await paced()
    buffer = memoryview(bytearray(4))
    assert (await asyncio.wait_for(read(pacing, store, "k", buffer), 5)).nbytes == 4
    assert bytes(buffer) == b"here"
    assert (store.reads, pacing.hedges, pacing.hedges_won) == (["k", "k"], 1, 1)


async def throttled() -> None:
    raise StoreThrottled("slow down")


@pytest.mark.parametrize("throttles", [True, False])
async def test_no_second_request_when_nobody_waits_or_the_store_throttles(throttles: bool) -> None:
    pacing, store = await paced()
    if throttles:
        with pytest.raises(StoreThrottled):
            await pacing.send(throttled)
        assert (pacing.throttled, pacing.window.size) == (1, 4)
    until_s = math.inf if throttles else asyncio.get_running_loop().time()
    late = read(pacing, store, "k", bytearray(4), until_s=until_s)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(late, 0.3)
    assert (store.reads, pacing.hedges) == (["k"], 0)


async def test_answers_open_the_window_again() -> None:
    """One request at a time, as few as an engine that only uploads may have."""

    async def answered() -> None:
        await asyncio.sleep(0)

    pacing = Pacing(8, 0.0)
    with pytest.raises(StoreThrottled):
        await pacing.send(throttled)
    for _ in range(100):
        await pacing.send(answered)
    assert pacing.window.size == 8
