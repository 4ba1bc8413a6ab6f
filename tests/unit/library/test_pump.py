"""The rules for cancelled calls, and the end of a store."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from s3kv.errors import ClosedError
from s3kv.library.pump import Pump, carried, claimed, in_thread, succeeded
from s3kv.messages import BucketJob, JobEnd, JobKind
from s3kv.types import ChunkKey, Outcome
from tests.unit.library.hand_client import HandClient, tier_of
from tests.unit.library.stores import gated_threads
from tests.waiting import until

KEY = ChunkKey(0, b"key")


@pytest.mark.parametrize("text", ["5", "no number"])
async def test_a_cancelled_call_ends_after_its_thread_however_often_it_is_cancelled(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An error in the thread is logged."""
    gate, threads = gated_threads()
    work = in_thread(partial(int, text), threads)
    call = asyncio.create_task(carried(work))
    for _ in range(3):
        await asyncio.sleep(0.001)
        call.cancel("enough")
    await asyncio.sleep(0.001)
    assert not call.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError, match="enough"):
        await call
    assert succeeded(work) == (text == "5")
    assert ("no number" in caplog.text) == (text == "no number")


@pytest.mark.parametrize(("result", "given_back"), [(7, [7]), (None, [])])
async def test_what_nobody_claims_is_given_back(result: int | None, given_back: list[int]) -> None:
    coming: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
    back: list[int] = []
    stays, gone = (asyncio.create_task(claimed(coming, back.append)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert not coming.done(), "the other call still waits for it"
    coming.set_result(result)
    assert await stays == result
    await until(lambda: back == given_back)


async def test_it_polls_while_there_is_something_to_wait_for() -> None:
    client, ends = HandClient(), list[JobEnd]()
    pump = Pump(tier_of(client, 4096), ends.append, lambda: bool(client.sent or client.ended))
    pump.submit(BucketJob(1, JobKind.UPLOAD, KEY))
    client.end(1, Outcome.OK)
    await until(lambda: ends)
    loop = asyncio.get_running_loop()
    await until(lambda: pump._next_look and pump._next_look.when() > loop.time() + 0.5)
    await pump.close(0.0)


async def test_one_timer_runs_however_often_a_look_orders_a_job() -> None:
    client = HandClient()
    looks, orders = 0, iter(range(1, 6))

    def order_one() -> bool:
        nonlocal looks
        looks += 1
        if (job_id := next(orders, None)) is not None:
            pump.submit(BucketJob(job_id, JobKind.UPLOAD, KEY))
        return True

    pump = Pump(tier_of(client, 4096), lambda end: None, order_one)
    pump.wake()
    await until(lambda: looks > 5)
    loop: Any = asyncio.get_running_loop()
    handles = [*loop._scheduled, *loop._ready]  # a timer that is due is among the latter
    timers = [each for each in handles if not each.cancelled() and "Pump._look" in repr(each)]
    await pump.close(0.0)
    assert len(timers) == 1


async def test_close_cancels_fetches_waits_for_calls_and_gives_back_in_order() -> None:
    client, ends = HandClient(), list[JobEnd]()
    tier = tier_of(client, 4096, drain_timeout_s=3.0)
    pump = Pump(tier, ends.append, lambda: bool(client.sent or client.ended))
    pump.before_slab(lambda: client.told.append(f"user, slab {tier.slab.fd >= 0}"))
    may_end = asyncio.Event()
    call = asyncio.create_task(pump.call(may_end.wait()))
    pump.submit(BucketJob(1, JobKind.FETCH, KEY))
    await asyncio.sleep(0)
    closing = [asyncio.create_task(pump.close()) for _ in range(2)]
    closing[0].cancel()
    await until(lambda: ends)
    assert ends[0].outcome is Outcome.CANCELLED
    with pytest.raises(ClosedError):
        pump.check_open()
    assert not closing[1].done(), "a call is under way"
    may_end.set()
    assert await call
    await closing[1]
    with pytest.raises(asyncio.CancelledError):
        await closing[0]
    assert [one for one in client.told if one != "flush"] == ["drain 3", "close", "user, slab True"]
    assert tier.slab.fd < 0
