"""What the library promises of its calls: hashes, `close`, opening, what cancelled ones leave."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest

import s3kv
from lab.faults import Fault
from lab.proxy import Proxy
from s3kv.config import Config
from s3kv.errors import ClosedError, ConfigError, CopyError
from s3kv.library.tiered_store import TieredStore
from tests.unit.library.stores import (
    SHAPES,
    big,
    block,
    gated_threads,
    gives,
    hash_of,
    new_pools,
    opening,
    opening_big,
    room,
)
from tests.waiting import until


async def test_a_hash_that_is_none_is_refused_at_the_call(config: Config) -> None:
    async with await opening(config, pools=new_pools(1)) as store:
        number = store.allocate()
        for call in (
            lambda key: store.put(key, block(1)),
            lambda key: store.get(key, room()),
            store.acquire,
            lambda key: store.prefetch([hash_of(1), key]),
            lambda key: store.put_block(key, number),
            store.where,
        ):
            for wrong in ("a text", 5, None, bytearray(b"x"), memoryview(b"x")):
                with pytest.raises(TypeError, match="allowed is bytes"):
                    await call(wrong)
            for length in (0, 65):
                with pytest.raises(ValueError, match=f"has {length} bytes: allowed are 1 to 64"):
                    await call(bytes(length))
        assert store.counters["fetches"] == 0, "not even of the good hash beside a bad one"
        for good in (bytes(64), numpy.bytes_(hash_of(1))):
            assert await store.put(good, block(1))
        assert not await store.flush()


async def test_after_close_every_method_says_so(config: Config) -> None:
    store = await opening(config, pools=new_pools(2))
    number = store.allocate()
    await asyncio.gather(store.close(), store.close())
    for call in (
        lambda: store.put(hash_of(1), block(1)),
        lambda: store.put(hash_of(1), block(1), wait=True),
        lambda: store.get(hash_of(1), room()),
        lambda: store.acquire(hash_of(1)),
        store.flush,
        lambda: store.prefetch([hash_of(1)]),
        lambda: store.where(hash_of(1)),
        store.allocate,
        lambda: store.put_block(hash_of(1), number),
        lambda: store.release(number),
    ):
        with pytest.raises(ClosedError, match="the store is closed"):
            async with asyncio.timeout(5):
                await call()
    assert store.counters["saves"] == 0
    await store.close()


def test_in_another_loop_every_method_says_so(config: Config) -> None:
    """Its timer would never run there, so that a call might wait for ever. Once the first loop is
    closed, `close` ends the store, with a call, a fetch and a copy that never end."""

    async def work(store: TieredStore) -> None:
        put, get = store.put(hash_of(1), block(1)), store.get(hash_of(1), room())
        for call in (put, get, store.flush(), store.close()):
            with pytest.raises(RuntimeError, match="the loop that opened it"):
                await call
        with pytest.raises(RuntimeError, match="the loop that opened it"):
            store.allocate()

    async def start() -> TieredStore:
        store: TieredStore = await opening(config, pools=new_pools(1))
        assert await store.put(hash_of(1), block(1))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await store.get(hash_of(2), room())
        assert store.put_block(hash_of(3), store.allocate())
        return store

    loop = asyncio.new_event_loop()
    store = loop.run_until_complete(start())
    with pytest.raises(RuntimeError, match="no running event loop"):
        store.where(hash_of(1))
    asyncio.run(work(store))
    loop.close()
    asyncio.run(asyncio.wait_for(store.close(), 60))
    asyncio.run(store.close())


async def test_close_ends_the_calls_under_way(
    behind: tuple[Proxy, Config], caplog: pytest.LogCaptureFixture
) -> None:
    """With a bucket that does not answer. Whatever they return, they return it."""
    between, config = behind
    config = dataclasses.replace(config, drain_timeout_s=0.1)
    a_half = 400_000
    store = await opening_big(config, a_half)
    between.fault(Fault(kind="black_hole", verbs=("GET", "PUT")))
    for number in (1, 2):
        assert await store.put(hash_of(number), big(number, a_half))
    room_waiter = asyncio.create_task(store.put(hash_of(3), big(3, a_half), wait=True))
    flushing = asyncio.create_task(store.flush())
    await asyncio.sleep(0.02)
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    closing.cancel()
    closing.cancel()
    async with asyncio.timeout(20):
        with pytest.raises(asyncio.CancelledError):
            await closing
        await store.close()
        for task in (room_waiter, flushing):
            with pytest.raises(ClosedError):
                await task
    assert "closed with 2 blocks that the bucket does not have" in caplog.text


async def test_a_store_is_opened_with_and_without_await(config: Config) -> None:
    async with opening(config) as store:
        assert await store.put(hash_of(1), block(1))
    async with await opening(config) as store:
        assert await store.get(hash_of(1), room())
    with pytest.raises(ClosedError):
        await store.get(hash_of(1), room())


async def test_what_cannot_be_opened_says_why_in_our_words(config: Config) -> None:
    deep: dict[str, Any] = {}
    for _ in range(5_000):
        deep = {"model": deep}
    for namespace in ({"model": object()}, {1: "model"}, 5, {"model": float("nan")}, deep):
        with pytest.raises(ConfigError, match="namespace is"):
            await TieredStore.open(config, shapes=SHAPES, namespace=namespace)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"namespace has 65\d+ bytes as JSON: allowed are at most 65536"
    ):
        await TieredStore.open(config, shapes=SHAPES, namespace={"model": "m" * 2**16})


async def test_a_device_that_cannot_be_used_or_refuses_is_told_in_our_words(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("out of memory")

    async with opening(config) as store:
        assert await store.put(hash_of(1), block(1))
        with monkeypatch.context() as broken:
            broken.setattr("s3kv.device.tensors.BlockTensors.copy_in", refuse)
            with pytest.raises(CopyError, match="out of memory"):
                await store.get(hash_of(1), room())
        assert await gives(store, 1)


def test_the_names_of_the_library_are_in_the_package_without_torch() -> None:
    code = (
        "import sys, s3kv\nfrom s3kv import Config, Location\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert s3kv.TieredStore is TieredStore
    assert set(s3kv.__all__) <= set(dir(s3kv))
    assert all(getattr(s3kv, name).__name__ == name for name in s3kv.__all__)
    with pytest.raises(AttributeError, match="Nonsense"):
        s3kv.Nonsense  # noqa: B018


async def test_a_caller_may_block_all_threads_of_the_loop(config: Config) -> None:
    gate, loop = threading.Event(), asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    blocked = loop.run_in_executor(None, gate.wait, 60)
    async with opening(config, pools=new_pools(1)) as store:
        assert await store.put(hash_of(1), block(1))
        assert await gives(store, 1)
    gate.set()
    assert await blocked, "the store has waited for them"


@pytest.mark.long
async def test_a_process_that_dies_while_nobody_calls_is_replaced(config: Config) -> None:
    async with opening(config) as store:
        assert await store.put(hash_of(1), block(1))
        assert not await store.flush()
    async with opening(config) as store:
        client = store._host.pump._client
        os.kill(client.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            await until(lambda: client.counters["io_restarts"])
        assert await gives(store, 1)


@pytest.fixture
async def store(config: Config) -> AsyncIterator[TieredStore]:
    async with await opening(config) as store:
        yield store


async def test_a_time_limit_is_told_as_one(store: TieredStore) -> None:
    """`CancelledError` arrives at the timeout that has asked for it, one or two of them."""
    gate, store._host.pump.copy_threads = gated_threads()
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
