"""Lanes: a bounded number of requests at once over an iterator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

_T = TypeVar("_T")


async def in_turn(items: Iterable[_T]) -> AsyncIterator[_T]:
    """An asynchronous iterator over what is there already."""
    for item in items:
        yield item


async def in_lanes(
    lanes: int, items: AsyncIterator[_T], work: Callable[[int, _T], Awaitable[None]]
) -> None:
    """Do `work(lane, item)` for each item, as many at once as there are lanes. If one fails, or
    this is cancelled, none goes on."""
    taking = asyncio.Lock()

    async def run(lane: int) -> None:
        while True:
            async with taking:  # an iterator allows one `anext` at a time
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
            await work(lane, item)

    tasks = [asyncio.ensure_future(run(lane)) for lane in range(lanes)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
