"""Concurrent coroutines that end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

_T = TypeVar("_T")


async def in_turn(items: Iterable[_T]) -> AsyncIterator[_T]:
    """An asynchronous iterator over the items of an ordinary iterable."""
    for item in items:
        yield item


async def in_lanes(
    lanes: int, items: AsyncIterator[_T], work: Callable[[int, _T], Awaitable[None]]
) -> None:
    """Await `work(lane, item)` for each item, as many at once as there are lanes. If one fails, or
    this is cancelled, all others are cancelled."""
    taking = asyncio.Lock()

    async def run(lane: int) -> bool:
        while True:
            async with taking:  # an iterator allows one `anext` at a time
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return True
            await work(lane, item)

    await all_of(run(lane) for lane in range(lanes))


async def all_of(coroutines: Iterable[Coroutine[Any, Any, _T | None]]) -> list[_T] | None:
    """The results of concurrent coroutines, in order; None if one of them returned None. Raises
    the first error. All have ended when this returns, raises or is cancelled."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    running = set(tasks)
    try:
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if any(task.result() is None for task in done):
                return None
    finally:
        for task in running:
            task.cancel()
        await ended(tasks)
    return [found for task in tasks if (found := task.result()) is not None]


async def ended(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Wait until cancelled tasks have ended. If this is cancelled meanwhile, it raises that only
    afterwards: a second cancellation would interrupt the cleanup of the tasks."""
    interrupted = False
    while running := {task for task in tasks if not task.done()}:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError:
            interrupted = True
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieved: asyncio logs errors that are not
    if interrupted:
        raise asyncio.CancelledError
