"""`Workers` in virtual time: functions that block run beside the loop, and die with the process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tests.system.sim.memory_disk import BlockingCall, Kernel
from tests.system.sim.store import Connection

_T = TypeVar("_T")


class VirtualWorkers:
    """Of one process. connection: knows whether it is alive, and stopped."""

    def __init__(self, kernel: Kernel, connection: Connection) -> None:
        self._kernel = kernel
        self._connection = connection
        self._closed = False
        self._last: asyncio.Task[None] | None = None

    def read(self, work: Callable[[], _T]) -> Awaitable[_T]:
        return self._begin(work, None)[0]

    def write(self, work: Callable[[], _T]) -> Awaitable[_T]:
        future, self._last = self._begin(work, self._last)
        return future

    copy = read

    def close(self) -> None:
        self._closed = True

    def _begin(
        self, work: Callable[[], _T], before: asyncio.Task[None] | None
    ) -> tuple[asyncio.Future[_T], asyncio.Task[None]]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()
        return future, loop.create_task(self._run(work, future, before))

    async def _run(
        self,
        work: Callable[[], Any],
        future: asyncio.Future[Any],
        before: asyncio.Task[None] | None,
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        await self._connection._sleep(0.0)
        if self._closed or future.cancelled():
            future.cancel()
            return
        call = BlockingCall(work, self._kernel)
        try:
            while (pause_s := call.step()) is not None:
                await self._connection._sleep(pause_s)
        except asyncio.CancelledError:
            self._kernel.die()
            while call.step() is not None:
                pass
            raise
        if future.done():
            return
        if call.error is None:
            future.set_result(call.result)
        else:
            future.set_exception(call.error)
