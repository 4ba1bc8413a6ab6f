"""Keeping what is in use young, so that rules which delete by age delete what nobody asks for.

A hit on an object that was last written long ago writes it anew in place: a copy onto itself within
the store, which moves no bytes here. Nobody waits for that. It is asked for only while no job
waits, one object at a time and a few per second; it counts for no breaker and no window, and is
dropped at the end of the process. An upload that finds its object there already is a use like a
hit, but does not say how old the object is; that is asked for first.

Once per fleet, as far as possible: the copy depends on the object's not having been written since
it was read, so of many replicas that read it while it was old one writes it, and the others are
refused. A refusal costs what a copy costs, so just past the age a replica asks only now and then,
and the first one to do so spares the others. docs/decisions/0005-refresh-by-copy.md.
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
"""In units of `refresh_after_s`: the age from which on every hit refreshes. What a bucket takes for
an object's last use is never earlier by more than that."""
MAX_WAITING = 1024
PAUSE_S = 0.1
"""Between two copies. A process that reads faster than this refreshes what it reads next time."""
_UNAVAILABLE_PAUSE_S = 10.0
_REFUSED_PAUSE_S = 3600.0
"""Until it is tried again after what only a person can change: nothing is urgent here, and nobody
should have to restart an engine."""


class RefreshRule:
    """Whether a hit on an object of some age refreshes it. Pure but for `rng`."""

    def __init__(self, refresh_after_s: float, rng: random.Random) -> None:
        self._refresh_after_s = refresh_after_s
        self._rng = rng

    def wants(self, age_s: float) -> bool:
        """The probability rises from 0 at `refresh_after_s` to 1 at `CERTAIN_AT` times that."""
        beyond = age_s / self._refresh_after_s - 1
        return beyond > 0 and self._rng.random() < beyond / (CERTAIN_AT - 1)


class Refresher:
    """Notes what is to be refreshed, and does it when nothing else is to be done. One loop.

    is_idle: whether no job waits. Counters: `done` copies, `failed` ones, and `skipped`: objects
    somebody else had refreshed, that were gone, or that found no room while others waited.
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
        """By key, what is known of the object; None: nothing yet."""
        self._has_work = asyncio.Event()
        self._was_refused = False

    def hit(self, info: ObjectInfo) -> None:
        """The object was read, and is what it should be."""
        if info.age_s is not None and self._rule.wants(info.age_s):
            self._note(info.key, info)

    def exists(self, key: str) -> None:
        """There is such an object, and somebody has use for it."""
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
        """Until it is cancelled. Raises nothing the store does."""
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
        """Leave the store alone for a while, and forget what waited: it would be late."""
        self.skipped += len(self._waiting)
        self._waiting.clear()
        self._has_work.clear()
        if isinstance(error, StoreUnavailable):
            await self._sleep(_UNAVAILABLE_PAUSE_S)
            return
        if not self._was_refused:
            self._was_refused = True
            _log.warning(
                "objects are not refreshed (refresh_after_s) for now, and lifecycle rules delete "
                "them by the age of their first write: %s",
                error,
            )
        await self._sleep(_REFUSED_PAUSE_S)
