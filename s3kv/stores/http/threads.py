"""A pool whose connections are served by several threads, each with an event loop of its own.

One event loop moves 2.4 GB/s, and less with TLS, while the network of a host with GPUs may carry
ten times that. Loops receive and send without the GIL, so the rates of several add up: four moved
5.6 GB/s (decision 30). Retries, hedging, window and digests stay on the caller's loop.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from s3kv.errors import StoreError
from s3kv.stores.http.exchange import Request, Response
from s3kv.stores.http.pool import Pool
from s3kv.stores.lanes import ended

_T = TypeVar("_T")

_MOST_THREADS = 4
"""Eight moved no more than four."""
_CORES_OF_A_THREAD = 4
"""Cores per thread of ours: the engine needs most cores."""


def threads_on(cores: int) -> int:
    """Number of threads that move bodies, for this number of cores; 1: the caller's own. Pure."""
    return max(1, min(_MOST_THREADS, cores // _CORES_OF_A_THREAD))


_ON_LINUX = hasattr(os, "sched_getaffinity")
NETWORK_THREADS = threads_on(len(os.sched_getaffinity(0)) if _ON_LINUX else os.cpu_count() or 1)


class ThreadedPool:
    """Pools to one origin, each on a thread of its own. Belongs to the asyncio loop that makes it;
    the threads have loops of the same class."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        new_loop = type(asyncio.get_running_loop())
        self._threads = [_Thread(pool, new_loop()) for pool in pools]

    async def request(self, request: Request) -> Response:
        """Send `request` through the pool with the fewest requests, as `Pool.request` does. Its
        receiver is called in the thread of that pool."""
        if not self._threads:
            raise StoreError("this store has been closed")
        thread = min(self._threads, key=lambda thread: thread.requests)
        thread.requests += 1
        try:
            return await thread.run(thread.pool.request(request))
        finally:
            thread.requests -= 1

    async def close(self) -> None:
        """End all connections and threads. Requests in progress raise. Idempotent."""
        threads, self._threads = self._threads, []
        await asyncio.gather(*(thread.close() for thread in threads))


class _Thread:
    """An event loop on a daemon thread, and the pool that it serves. requests: in progress."""

    def __init__(self, pool: Pool, loop: asyncio.AbstractEventLoop) -> None:
        self.pool, self._loop = pool, loop
        self.requests = 0
        self._thread = threading.Thread(target=loop.run_forever, name="s3kv-network", daemon=True)
        self._thread.start()

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Await `work` on this thread's loop. `work` has always ended when this returns or raises.
        Cancelling this cancels `work`."""
        here = asyncio.get_running_loop()
        over: asyncio.Future[None] = here.create_future()
        tasks: list[asyncio.Task[_T]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda _: here.call_soon_threadsafe(over.set_result, None))

        self._loop.call_soon_threadsafe(begin)
        try:
            await asyncio.shield(over)
        except asyncio.CancelledError:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            await ended([over])
            raise
        return tasks[0].result()

    async def close(self) -> None:
        await self.run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        """Close the pool, and cancel the requests that have no connection yet: after the loop has
        stopped they would never end."""
        await self.pool.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
