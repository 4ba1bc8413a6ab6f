"""The loop without a clock."""

from __future__ import annotations

import asyncio

import pytest

from tests.system.sim.loop import OWNER, Owner, VirtualLoop


def test_time_jumps_and_order_stays() -> None:
    loop, log = VirtualLoop(), []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        log.append((name, loop.time()))

    async def start() -> None:
        for name, seconds in (("a", 3_600.0), ("b", 1.0), ("c", 1.0)):
            loop.create_task(sleeper(name, seconds))

    loop.create_task(start())
    loop.run_until(10.0)
    assert log == [("b", 1.0), ("c", 1.0)]
    assert loop.time() == 10.0
    loop.run_until(4_000.0)
    assert log[2:] == [("a", 3_600.0)]


def test_timeouts_and_events_are_those_of_asyncio() -> None:
    loop, log = VirtualLoop(), []

    async def waiter() -> None:
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 5.0)
        except asyncio.TimeoutError:
            log.append(loop.time())

    loop.create_task(waiter())
    loop.run_until(60.0)
    assert log == [5.0]


def test_what_nobody_catches_is_kept() -> None:
    loop = VirtualLoop()
    loop.call_soon(lambda: 1 / 0)
    loop.run_until(1.0)
    assert "ZeroDivisionError" in loop.failures[0]


def test_a_loop_that_spins_is_stopped() -> None:
    loop = VirtualLoop()

    def spin() -> None:
        loop.call_soon(spin)

    spin()
    with pytest.raises(AssertionError, match="no time passes"):
        loop.run_until(1.0)


def test_tasks_of_a_dead_owner_never_run() -> None:
    loop, owner, log = VirtualLoop(), Owner(), []

    async def work(name: str) -> None:
        log.append(name)
        await asyncio.sleep(1.0)
        log.append(f"{name} again")

    OWNER.set(owner)
    try:
        loop.create_task(work("a"))
        loop.run_until(0.5)
        owner.die()
        loop.create_task(work("b"))
        loop.run_until(5.0)
    finally:
        OWNER.set(None)
    assert log == ["a"]
