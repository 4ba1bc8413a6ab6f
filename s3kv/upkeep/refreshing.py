"""Refreshing: rewrites objects in use, so rules that delete by age delete only unused ones.

A hit on an object last written long ago rewrites it in place: the store copies it onto itself, and
no bytes move here. Nothing waits for the copy. Copies are sent while no fetch waits, ten per second
at most. They affect neither breaker nor window, and are dropped when the process ends.

A use in host memory or on the device does not read the object at all. The end of each fetch and
upload carries the time for which such uses need not be reported: until the object is due. A later
use is checked by a HEAD, and counts as a hit. If the object is gone, the planner uploads it
again. An upload that finds its object already there is such a use: its answer has no age.

Each object is refreshed once per fleet, as far as possible: if it was written since it was read,
the store refuses the copy. A refusal costs as much as a copy. So just past the age a replica tries
only sometimes, and the first one to succeed spares the others. Uses are reported at similarly
random times. See docs/decisions/0005-refresh-by-copy.md.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable

from s3kv.config import Config
from s3kv.errors import StoreError, StoreUnavailable
from s3kv.stores.s3.address import is_refreshable
from s3kv.stores.store import ObjectInfo, ObjectStore
from s3kv.types import Outcome
from s3kv.upkeep.cleaner import LEASE_S, REFRESHED

_log = logging.getLogger("s3kv.io")

CERTAIN_AT = 1.25
"""Age above which every hit refreshes, in units of `refresh_after_s`. An object's last write is
never further than this behind its last use."""
LOOK_S = 3600.0
"""Longest time between two checks of an object in use. Other programs may delete objects, or begin
to do so. A HEAD per object and hour costs $0.0003 a month."""
MAX_WAITING = 1024
PAUSE_S = 0.1
"""Pause before each copy. Objects that find the queue full are refreshed on a later hit."""
_UNAVAILABLE_PAUSE_S = 10.0
_REFUSED_PAUSE_S = 3600.0
"""Pause after an error that only a person can fix. Refreshing is not urgent."""


class RefreshRule:
    """Rule that decides whether a hit refreshes an object, by its age. Pure but for `rng`.

    refresh_after_s: `math.inf`: no hit refreshes. follows_cleaner: the cleaner sets it, to most_s
    while it deletes nothing, and never higher.
    """

    def __init__(
        self,
        refresh_after_s: float,
        rng: random.Random,
        *,
        follows_cleaner: bool = False,
        most_s: float = math.inf,
    ) -> None:
        self.refresh_after_s, self._most_s = refresh_after_s, most_s
        self.follows_cleaner, self._rng = follows_cleaner, rng
        self._deletes_nothing = follows_cleaner and refresh_after_s == math.inf

    @classmethod
    def of(cls, config: Config, rng: random.Random) -> RefreshRule:
        """The rule of the settings: the earlier of `refresh_after_s` and the cleaner's age, which
        follows from `bucket_idle_s` until the cleaner has decided."""
        own_s = config.refresh_after_s or math.inf
        idle_s = config.bucket_idle_s / REFRESHED or math.inf
        keeps = config.bucket_bytes > 0 or config.bucket_idle_s > 0
        if is_refreshable(config.bucket):
            return cls(min(own_s, idle_s), rng, follows_cleaner=keeps, most_s=own_s)
        if keeps or own_s < math.inf:
            _log.warning(
                "objects in directory buckets and behind multi-region access points are not "
                "refreshed: refresh_after_s has no effect, and bucket_bytes and bucket_idle_s "
                "delete by the age of the first write"
            )
        return cls(math.inf, rng)

    def follow(self, refresh_after_s: float) -> None:
        """Adopt the age that the cleaner has decided on, unless that of the settings is lower."""
        if self.follows_cleaner:
            self._deletes_nothing = refresh_after_s == math.inf
            self.refresh_after_s = min(refresh_after_s, self._most_s)

    @property
    def refreshes(self) -> bool:
        return self.refresh_after_s < math.inf

    @property
    def _look_s(self) -> float:
        # The cleaner's decision may change within the time for which a lease is valid.
        return LEASE_S if self._deletes_nothing else LOOK_S

    def fresh_s(self, age_s: float) -> float:
        """Time for which uses of an object of this age need not be reported: until a random age
        between `refresh_after_s` and `CERTAIN_AT` times that, but `LOOK_S` at most."""
        longest_s = self._look_s * self._rng.uniform(0.8, 1.0)
        if not self.refreshes:
            return longest_s
        first_s, last_s = (max(age_s, factor * self.refresh_after_s) for factor in (1, CERTAIN_AT))
        return min(longest_s, self._rng.uniform(first_s, last_s) - age_s)

    def spares(self) -> bool:
        """Decide by chance whether a reported use needs no check of its object. While the cleaner
        deletes nothing, uses are reported more often than once per `LOOK_S`, to detect a change,
        but not checked more often."""
        return self._rng.random() >= self._look_s / LOOK_S

    def wants(self, age_s: float) -> bool:
        """Decide by chance whether to refresh: the probability rises from 0 at `refresh_after_s` to
        1 at `CERTAIN_AT` times that."""
        beyond = age_s / self.refresh_after_s - 1
        return beyond > 0 and self._rng.random() < beyond / (CERTAIN_AT - 1)


UseAnswer = Callable[[Outcome, float], None]
"""Receives the answer to a use: EXISTS, MISSING, or CANCELLED (not known), and
`JobEnd.fresh_s`."""


class Refresher:
    """Records the objects to refresh, and refreshes them while `is_idle()`. Answers reported uses,
    one at a time. Belongs to one asyncio loop.

    Counters: `done`: copies. `failed`: attempts, and checks. `skipped`: objects that another engine
    refreshed, that were gone, that were dropped after a failure, or that found a queue full.
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
        self._store, self._rule = store, rule
        self._is_idle, self._sleep = is_idle, sleep
        self._waiting: dict[str, ObjectInfo] = {}
        """Objects to refresh, by key."""
        self._has_work = asyncio.Event()
        self._uses: deque[tuple[str, UseAnswer]] | None = deque()
        """Reported uses without an answer; None from `give_up` until the next `look`."""
        self._has_uses = asyncio.Event()
        self._was_refused = False

    def hit(self, info: ObjectInfo) -> float:
        """Note that the object was read and verified. Returns `JobEnd.fresh_s`."""
        age_s = info.age_s or 0.0
        if not self._rule.wants(age_s):
            return self._rule.fresh_s(age_s)
        if len(self._waiting) < MAX_WAITING or info.key in self._waiting:
            self._waiting.setdefault(info.key, info)
            self._has_work.set()
        else:
            self.skipped += 1
        return self.written()

    def written(self) -> float:
        """`JobEnd.fresh_s` of an object that was written just now."""
        return self._rule.fresh_s(0.0)

    def exists(self, key: str) -> float:
        """Note that the object exists and is in use. Its age is unknown. Returns `JobEnd.fresh_s`,
        as if it were new, and queues a check of its age."""
        if self._rule.refreshes:
            self.use(key, lambda outcome, fresh_s: None)
        return self.written()

    def use(self, key: str, answer: UseAnswer) -> None:
        """Note a use of an object that was not read. answer: called once, by `look` or here."""
        if self._rule.spares():
            answer(Outcome.EXISTS, self.written())
        elif self._uses is None or len(self._uses) >= MAX_WAITING:
            self.skipped += 1
            answer(Outcome.CANCELLED, 0.0)
        else:
            self._uses.append((key, answer))
            self._has_uses.set()

    def give_up(self) -> None:
        """Answer all uses with CANCELLED, now and until the next `look`. Idempotent."""
        given_up, self._uses = self._uses or (), None
        for _, answer in given_up:
            answer(Outcome.CANCELLED, 0.0)

    async def look(self) -> None:
        """Answer reported uses until cancelled; then give up. Raises no `StoreError`, and may be
        called again after any other error."""
        if self._uses is None:
            self._uses = deque()
        try:
            while self._uses is not None:
                if not self._uses:
                    self._has_uses.clear()
                    await self._has_uses.wait()
                    continue
                outcome, fresh_s = await self._looked_at(self._uses[0][0])
                if self._uses:
                    self._uses.popleft()[1](outcome, fresh_s)
        finally:
            self.give_up()

    async def _looked_at(self, key: str) -> tuple[Outcome, float]:
        try:
            info = await self._store.head(key)
        except StoreError:
            self.failed += 1
            return Outcome.CANCELLED, 0.0
        return (Outcome.MISSING, 0.0) if info is None else (Outcome.EXISTS, self.hit(info))

    async def run(self) -> None:
        """Refresh recorded objects until cancelled. Raises no `StoreError`."""
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
                if await self._store.refresh(key, info.modified_s):
                    self.done += 1
                    self._was_refused = False
                else:
                    self.skipped += 1
            except StoreError as error:
                self.failed += 1
                await self._rest(error)

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
