"""The store as the I/O process uses it: every request watched, late reads sent a second time.

A wrapper of any `ObjectStore`, below the retries, so that every attempt counts. It decides nothing
by itself: `Window` says how many requests run at once, `Lateness` what is late.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TypeVar

from s3kv.errors import StoreThrottled
from s3kv.io.hedging import Lateness, hedged
from s3kv.io.jobs import JobQueue
from s3kv.io.window import Window
from s3kv.objects.store import Claim, ObjectInfo, ObjectStore
from s3kv.objects.traffic import Traffic

T = TypeVar("T")


class PacedStore:
    """`store`, with what its answers tell passed on to `window` and `lateness`.

    queue: gives a second request its place, or does not. One loop.
    """

    def __init__(
        self, store: ObjectStore, window: Window, lateness: Lateness, queue: JobQueue
    ) -> None:
        self.throttled = 0
        self.hedges_won = 0
        self._store = store
        self._window = window
        self._lateness = lateness
        self._queue = queue

    @property
    def traffic(self) -> Traffic:
        return self._store.traffic

    def __repr__(self) -> str:
        return f"PacedStore({self._store!r})"

    async def get_into(
        self, key: str, buffer: memoryview, claim: Claim | None = None
    ) -> ObjectInfo | None:
        """As `ObjectStore`. A `claim` of the caller's own is asked by the request that wins."""
        self._lateness.sent()
        late_s = self._lateness.late_s
        if late_s is None:
            return await self._read(key, buffer, claim)
        has_place = False

        def may_hedge() -> bool:
            nonlocal has_place
            if self._window.is_cut or not self._queue.has_spare or not self._lateness.take():
                return False
            self._queue.take_spare()
            has_place = True
            return True

        async def read(winning: Claim) -> ObjectInfo | None:
            return await self._read(key, buffer, lambda: winning() and (claim is None or claim()))

        try:
            info, by_second = await hedged(read, late_s, may_hedge)
        finally:
            if has_place:
                self._queue.give_back_spare()
        self.hedges_won += by_second
        return info

    async def _read(self, key: str, buffer: memoryview, claim: Claim | None) -> ObjectInfo | None:
        sent_s = _now_s()

        def begin() -> bool:
            self._lateness.began(_now_s() - sent_s)
            self._window.began(sent_s, _now_s())
            return claim is None or claim()

        return await self._watched(self._store.get_into(key, buffer, begin))

    async def put(self, key: str, data: memoryview, *, if_absent: bool) -> bool:
        return await self._watched(self._store.put(key, data, if_absent=if_absent))

    async def refresh(self, key: str, modified_s: float) -> bool:
        return await self._watched(self._store.refresh(key, modified_s))

    async def head(self, key: str) -> ObjectInfo | None:
        return await self._watched(self._store.head(key))

    async def delete(self, key: str, *, if_etag: str | None = None) -> bool:
        return await self._watched(self._store.delete(key, if_etag=if_etag))

    def list(self, prefix: str, after: str = "") -> AsyncIterator[ObjectInfo]:
        return self._store.list(prefix, after)

    async def folders(self, prefix: str, limit: int) -> Sequence[str]:
        return await self._watched(self._store.folders(prefix, limit))

    async def check(self) -> None:
        await self._watched(self._store.check())

    async def close(self) -> None:
        await self._store.close()

    async def _watched(self, call: Awaitable[T]) -> T:
        sent_s = _now_s()
        try:
            answer = await call
        except StoreThrottled:
            self.throttled += 1
            self._window.throttled(sent_s, _now_s())
            raise
        self._window.answered(running=self._queue.running)
        return answer


def _now_s() -> float:
    return asyncio.get_running_loop().time()
