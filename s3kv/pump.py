"""An I/O process for callers on an asyncio loop.

What an engine's step loop does for the connectors, a task does here: it looks every millisecond
for jobs that have ended, as long as there are any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from s3kv.host.slab import Slab
from s3kv.io.client import IoClient
from s3kv.io.wire import Done, Hello

_POLL_S = 0.001

T = TypeVar("T")


async def started(hello: Hello, slab: Slab) -> IoClient:
    """A client that has tried the bucket. Raises what `IoClient.wait_ready` raises; then the slab
    is closed, too.
    """
    client = IoClient(hello, slab)
    try:
        client.start()
        await asyncio.to_thread(client.wait_ready, hello.config.start_timeout_ms / 1000)
    except BaseException:
        client.close()
        slab.close()
        raise
    return client


class Pump:
    """Polls `client` while there is something to wait for. All methods are for the loop's thread.

    on_done: takes every job that has ended. is_busy: asked before each look, and may order more;
    when it says no, the polling stops until the next `wake`. client and slab are closed by `close`.
    """

    def __init__(
        self,
        client: IoClient,
        slab: Slab,
        on_done: Callable[[Done], None],
        is_busy: Callable[[], bool],
    ) -> None:
        self._client = client
        self._slab = slab
        self._on_done = on_done
        self._is_busy = is_busy
        self._calls: set[asyncio.Future[Any]] = set()
        self._polling: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    async def whole(self, call: Awaitable[T]) -> T:
        """Carry `call` through even if its caller is cancelled: memory in use stays in use."""
        return await asyncio.shield(self.start(call))

    def start(self, call: Awaitable[T]) -> asyncio.Future[T]:
        """As `whole`, without waiting for it."""
        task = asyncio.ensure_future(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    def wake(self) -> None:
        """Jobs have been given to the client: send them, and look for their ends."""
        self._client.flush()
        if self._polling is None or self._polling.done():
            self._polling = asyncio.get_running_loop().create_task(self._poll())

    def announce(self) -> None:
        """Something has ended: wake those in `next_end`."""
        self._ended.set()
        self._ended.clear()

    async def next_end(self) -> None:
        """Wait for the next `announce`."""
        await self._ended.wait()

    async def close(self, drain_timeout_s: float) -> None:
        """Let calls end, give uploads that much time, give everything back. Idempotent."""
        while self._calls:
            await asyncio.wait(self._calls)
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.wait([self._polling])
            self._polling = None
        await asyncio.to_thread(self._client.drain, drain_timeout_s)
        await asyncio.to_thread(self._client.close)
        self._slab.close()

    async def _poll(self) -> None:
        while self._is_busy():
            for done in self._client.poll():
                self._on_done(done)
            await asyncio.sleep(_POLL_S)
