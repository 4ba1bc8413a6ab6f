"""Refreshing: rewrites objects in use, so that rules which delete by age delete only unused ones.

A hit on an object that was last written long ago rewrites it in place: the store copies it onto
itself, and no bytes move here. Nothing waits for the copy. Copies are sent only while no job waits,
one at a time and at most ten per second. They affect neither breaker nor window, and are dropped
when the process ends. An upload that finds its object already there is a use, too, but does not
tell the object's age, so a HEAD asks for it first.

Each object is refreshed once per fleet, as far as possible. The copy is conditional on the object
being unchanged since it was read: of many replicas that read an old object, one rewrites it, and
the others are refused. A refusal costs as much as a copy. So just past the age a replica asks only
sometimes, and the first one spares the others. See docs/decisions/0005-refresh-by-copy.md.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from s3kv.errors import StoreError, StoreUnavailable
from s3kv.objects.store import ObjectInfo, ObjectStore

_log = logging.getLogger("s3kv.io")

CERTAIN_AT = 1.25
"""Age from which every hit refreshes, in units of `refresh_after_s`. An object's last write is
never further than this behind its last use."""
MAX_WAITING = 1024
PAUSE_S = 0.1
"""Pause before each copy. Objects that find the queue full are refreshed on a later hit."""
_UNAVAILABLE_PAUSE_S = 10.0
_REFUSED_PAUSE_S = 3600.0
"""Pause after an error that only a person can fix. Refreshing is not urgent, and resumes without a
restart of the engine."""


class RefreshRule:
    """Rule that decides whether a hit refreshes an object, by its age. Pure but for `rng`.

    refresh_after_s may be set at any time; `math.inf`: no hit refreshes.
    """

    def __init__(self, refresh_after_s: float, rng: random.Random) -> None:
        self.refresh_after_s = refresh_after_s
        self._rng = rng

    def wants(self, age_s: float) -> bool:
        """Decide by chance whether to refresh: the probability rises from 0 at `refresh_after_s` to
        1 at `CERTAIN_AT` times that.
        """
        beyond = age_s / self.refresh_after_s - 1
        return beyond > 0 and self._rng.random() < beyond / (CERTAIN_AT - 1)


class Refresher:
    """Notes the objects to refresh, and refreshes them while `is_idle()`. Belongs to one asyncio
    loop.

    Counters: `done`: copies. `failed`: attempts. `skipped`: objects that another engine refreshed,
    that were gone, that were forgotten after a failure, or that found the queue full.
    """

    def __init__(
        self,
        store: ObjectStore,
        rule: RefreshRule,
        is_idle: Callable[[], bool],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.done = self.failed = self.skipped = 0
        self._store = store
        self._rule = rule
        self._is_idle = is_idle
        self._sleep = sleep
        self._waiting: dict[str, ObjectInfo | None] = {}
        """Keys to refresh, with the object's metadata if known."""
        self._has_work = asyncio.Event()
        self._was_refused = False

    def hit(self, info: ObjectInfo) -> None:
        """Note that the object was read and verified."""
        if info.age_s is not None and self._rule.wants(info.age_s):
            self._note(info.key, info)

    def exists(self, key: str) -> None:
        """Note that the object exists and is in use. Its age is unknown."""
        self._note(key, None)

    def _note(self, key: str, info: ObjectInfo | None) -> None:
        if key in self._waiting:
            return
        if len(self._waiting) >= MAX_WAITING:
            self.skipped += 1
            return
        self._waiting[key] = info
        self._has_work.set()

    async def run(self) -> None:
        """Refresh noted objects until cancelled. Raises no `StoreError`."""
        while True:
            await self._has_work.wait()
            await self._sleep(PAUSE_S)
            if not self._is_idle():
                continue
            key = next(iter(self._waiting))
            info = self._waiting.pop(key)
            if not self._waiting:
                self._has_work.clear()
            try:
                await self._refresh(key, info)
            except StoreError as error:
                self.failed += 1
                await self._rest(error)

    async def _refresh(self, key: str, info: ObjectInfo | None) -> None:
        if info is None:
            info = await self._store.head(key)
            if info is None or info.age_s is None or not self._rule.wants(info.age_s):
                return
        if await self._store.refresh(key, info.modified_s):
            self.done += 1
            self._was_refused = False
        else:
            self.skipped += 1

    async def _rest(self, error: StoreError) -> None:
        """Drop the waiting objects, which would be stale, and pause."""
        self.skipped += len(self._waiting)
        self._waiting.clear()
        self._has_work.clear()
        if isinstance(error, StoreUnavailable):
            await self._sleep(_UNAVAILABLE_PAUSE_S)
            return
        if not self._was_refused:
            self._was_refused = True
            _log.warning(
                "s3kv refreshes no objects (refresh_after_s) for now; lifecycle rules delete them "
                "by the age of their last write: %s",
                error,
            )
        await self._sleep(_REFUSED_PAUSE_S)
