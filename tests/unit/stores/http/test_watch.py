"""The watch over slow requests, in virtual time: when it gives up, and when it waits on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from s3kv.stores.http.watch import Patience, Stalled, Watch, watched
from tests.system.sim.loop import VirtualLoop

PATIENCE = Patience(connect_ms=1_000, first_byte_ms=2_000, progress_ms=4_000, min_bytes_per_s=100)


def play(
    act: Callable[[Watch], Coroutine[Any, Any, None]],
    is_draining: Callable[[int], bool] = lambda _: False,
) -> list[tuple[float, str]]:
    """When the watch gave up, and what it said, while `act` used it."""
    loop = VirtualLoop()
    given_up: list[tuple[float, str]] = []

    async def run() -> None:
        watch = Watch(PATIENCE, lambda e: given_up.append((loop.time(), str(e))), is_draining)
        await act(watch)

    task = loop.create_task(run())
    loop.run_until(100.0)
    task.result()
    return given_up


Act = list[tuple[float, Callable[[Watch], None]]]
"""Calls, and the time of each since the one before."""


@pytest.mark.parametrize(
    ("calls", "ends"),
    [
        ([(0, lambda w: w.wait(2_000, for_answer=True))], (2.0, "got no answer within 2000 ms")),
        ([(0, lambda w: w.wait(4_000))], (4.0, "fewer than 100 bytes a second for 4000 ms")),
        # Bytes extend the wait by their share, and no further than progress.
        ([(0, lambda w: w.wait(4_000)), (3, lambda w: w.moved(200))], (6.0, "")),
        ([(0, lambda w: w.wait(4_000)), (3, lambda w: w.moved(1_000_000))], (7.0, "")),
        ([(0, lambda w: w.wait(4_000)), (1, lambda w: w.wait(500))], (1.5, "")),
        ([(0, lambda w: w.wait(1_000)), (0.5, lambda w: w.stop())], None),
    ],
    ids=["no answer", "no movement", "slow", "fast", "a shorter wait", "the end"],
)
def test_when_a_request_is_given_up(calls: Act, ends: tuple[float, str] | None) -> None:
    async def act(watch: Watch) -> None:
        for after_s, call in calls:
            await asyncio.sleep(after_s)
            call(watch)

    given_up = play(act)
    assert len(given_up) == (ends is not None)
    if ends is not None:
        assert given_up[0][0] == ends[0]
        assert ends[1] in given_up[0][1]


def test_a_request_that_drains_is_waited_for() -> None:
    drains = iter([True, True, False])

    async def act(watch: Watch) -> None:
        watch.wait(1_000, for_answer=True)

    asked: list[int] = []
    given_up = play(act, lambda wait_ms: asked.append(wait_ms) or next(drains))
    assert [when_s for when_s, _ in given_up] == [3.0]
    assert asked == [1_000] * 3


def test_a_loop_that_did_not_run_gives_the_peer_as_much_time_again() -> None:
    loop = VirtualLoop()
    given_up: list[float] = []

    async def run() -> None:
        Watch(PATIENCE, lambda _: given_up.append(loop.time())).wait(1_000)
        loop._now_s += 1.5  # nobody had a core for so long

    loop.create_task(run())
    loop.run_until(10.0)
    assert given_up == [pytest.approx(2.0)]


def test_work_that_stands_still_is_cancelled_and_has_ended() -> None:
    loop = VirtualLoop()
    ended: list[float] = []

    async def stuck(watch: Watch) -> int:
        try:
            await asyncio.sleep(50.0)
        finally:
            ended.append(loop.time())
        return 1

    async def quick(watch: Watch) -> int:
        await asyncio.sleep(1.0)
        return 2

    late, early = (loop.create_task(watched(PATIENCE, work)) for work in (stuck, quick))
    loop.run_until(100.0)
    assert early.result() == 2
    assert isinstance(late.exception(), Stalled)
    assert ended == [3.0]  # connecting and answering together
