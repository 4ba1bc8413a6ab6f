"""Housekeeping: the tasks by which an I/O process maintains the bucket, beside its jobs.

Objects in use are checked and refreshed. With a budget the bucket is kept within it; without one
its growth is watched. One rank registers the namespace. No job waits for any of this.

    running ──defect: counted, logged──▶ paused for `_DEFECT_PAUSE_S` ──▶ running
       └───────────────┴──drained, cancelled──▶ ended
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from s3kv.config import Config
from s3kv.errors import StoreError, StoreUnavailable
from s3kv.stores.store import ObjectStore
from s3kv.upkeep.cleaner import MIN_AGE_S, Cleaner
from s3kv.upkeep.costs import growth_warning, nanodollars, prices_of
from s3kv.upkeep.refreshing import Refresher, RefreshRule
from s3kv.upkeep.registration import Registration, introduce

_log = logging.getLogger("s3kv.io")

_INTRODUCTION_PAUSE_S = 60.0
_INTRODUCED_AGAIN_S = 3600.0
"""Time between two checks of the manifest while the cleaner decides when objects are refreshed,
and after an error that only a person can fix."""
_GROWTH_LOOK_S = 60.0
_DEFECT_PAUSE_S = 600.0
"""Pause of a task after a defect. One unforeseen answer must not stop it for good: objects in use
that are no longer refreshed get deleted. A sweep that fails each time costs money each time."""

_Work = Callable[[], Coroutine[Any, Any, None]]


class Housekeeping:
    """Starts and ends the work. Belongs to one asyncio loop. registration: of the namespace; empty
    if another rank registers it. is_idle: whether no job needs the network now."""

    def __init__(
        self,
        store: ObjectStore,
        config: Config,
        registration: Registration,
        is_idle: Callable[[], bool],
        rng: random.Random,
    ) -> None:
        self.defects = 0
        self._rule = RefreshRule.of(config, rng)
        self.refresher = Refresher(store, self._rule, is_idle)
        self._store, self._config, self._registration = store, config, registration
        self._cleaner = self._make_cleaner(rng)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_over = False

    def _make_cleaner(self, rng: random.Random) -> Cleaner | None:
        config = self._config
        if not (config.bucket_bytes or config.bucket_idle_s):
            return None
        return Cleaner(
            self._store,
            config.prefix,
            max_bytes=config.bucket_bytes,
            idle_s=config.bucket_idle_s,
            min_age_s=MIN_AGE_S,
            holder=f"{rng.getrandbits(128):032x}",
            on_refresh_after=self._rule.follow,
            rng=rng,
        )

    def start(self) -> None:
        """Begin, once the bucket has answered. Does nothing after `drain` or `cancel`."""
        if self._is_over:
            return
        self._run("refreshing", self.refresher.run)
        self._run("refreshing objects in use", self.refresher.look)
        if self._cleaner is not None:
            self._run("enforcing bucket_bytes", self._cleaner.run)
        elif self._config.refresh_after_s == 0:
            self._run("watching the bucket's growth", self._watch_growth)
        if self._registration.manifest:
            self._run("the manifest of the namespace", self._introduce)

    def drain(self) -> None:
        """Send no more refreshes and deletions, and answer all uses."""
        self._is_over = True
        self.refresher.give_up()
        for what in ("refreshing", "refreshing objects in use", "enforcing bucket_bytes"):
            if what in self._tasks:
                self._tasks[what].cancel()

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel all work. Returns the tasks, some of which have yet to end."""
        self._is_over = True
        for task in self._tasks.values():
            task.cancel()
        return [*self._tasks.values()]

    def counters(self) -> dict[str, int]:
        """Sums since the start, by the name of their metric."""
        refresher, cleaner, traffic = self.refresher, self._cleaner, self._store.traffic
        return {
            "io_refresh_done": refresher.done,
            "io_refresh_failed": refresher.failed,
            "io_refresh_skipped": refresher.skipped,
            "io_cleaner_sweeps": cleaner.sweeps if cleaner else 0,
            "io_cleaner_failed": cleaner.failed if cleaner else 0,
            "io_cleaner_deleted": cleaner.deleted_objects if cleaner else 0,
            "io_cleaner_deleted_bytes": cleaner.deleted_bytes if cleaner else 0,
            "cost_usd": nanodollars(prices_of(self._config, traffic), traffic),
            "io_received_bytes": traffic.received_bytes,
            "io_sent_bytes": traffic.sent_bytes,
            **{f"io_requests|{name}": count for name, count in traffic.requests.items()},
        }

    def _run(self, what: str, work: _Work, pause_s: float = 0.0) -> None:
        task = asyncio.get_running_loop().create_task(_after(pause_s, work))
        self._tasks[what] = task
        task.add_done_callback(partial(self._ended, what, work))

    def _ended(self, what: str, work: _Work, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        self.defects += 1
        _log.error("%s: %r", what, error, exc_info=error)
        if not self._is_over:
            self._run(what, work, _DEFECT_PAUSE_S)

    async def _watch_growth(self) -> None:
        """Warn once if the uploads of this process seem never to be deleted."""
        while not self._store.traffic.sent_bytes:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(_GROWTH_LOOK_S)
        began_s, warning = time.monotonic(), None
        while warning is None:
            await asyncio.sleep(_GROWTH_LOOK_S)
            traffic = self._store.traffic
            storage = prices_of(self._config, traffic).storage
            warning = growth_warning(time.monotonic() - began_s, traffic.sent_bytes, storage)
        _log.warning("%s", warning)

    async def _introduce(self) -> None:
        """Log the namespace as soon as the bucket answers. After that, restore deleted parts of its
        registration, and refresh it like objects in use, so it does not expire before them."""
        level = logging.INFO
        while True:
            try:
                _log.log(level, "%s", await introduce(self._store, self._registration))
            except StoreUnavailable:
                await asyncio.sleep(_INTRODUCTION_PAUSE_S)
                continue
            except StoreError as error:
                _log.warning("the namespace's manifest cannot be read: %s", error)
                await asyncio.sleep(_INTRODUCED_AGAIN_S)
                continue
            level = logging.DEBUG
            for key in self._registration.keys:
                self.refresher.exists(key)
            # A use refreshes only above that age, and at first only by chance.
            quarter_s = self._config.refresh_after_s / 4 or _INTRODUCED_AGAIN_S
            await asyncio.sleep(min(quarter_s, _INTRODUCED_AGAIN_S))


async def _after(pause_s: float, work: _Work) -> None:
    await asyncio.sleep(pause_s)
    await work()
