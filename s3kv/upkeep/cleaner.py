"""Cleaner: keeps all objects under a prefix within a budget of bytes and of idle time.

Of all I/O processes of a fleet, one at a time sweeps the bucket: the holder of a lease, which is
one object. The holder rewrites it every `RENEW_S`. A lease that was not rewritten for `LEASE_S`, by
the store's clock, is free. Two holders at once do no harm: each deletes only what exceeds the
budget, and a deleted object is a miss. So a lease may be lost at any time, and a store without
conditional writes suffices.

A sweep leaves `LEFT` of the budget. The next one starts before the bucket has grown by the rest, at
the rate of growth since the last one. The lease also gives the other engines the age at which they
refresh objects in use, a quarter of the time for which objects stay: otherwise an object would be
deleted by the age of its first write.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from typing import Annotated

import msgspec

from s3kv.errors import StoreError, StoreUnavailable
from s3kv.objects import keys
from s3kv.place import Place
from s3kv.stores.store import ObjectInfo, ObjectStore, read_small
from s3kv.upkeep.sweep import Sweep

_log = logging.getLogger("s3kv.io")

LEASE_S = 300.0
RENEW_S = LEASE_S / 3
LEFT = 0.95
"""Share of the budget that a sweep leaves."""
SWEEP_MIN_S, SWEEP_MAX_S = 10.0, 3600.0
"""Shortest and longest time from the end of a sweep to the next one."""
MIN_AGE_S = 60.0
"""Age below which no object is deleted. An object that is refreshed between its listing and its
deletion counts as listed."""
REFRESHED = 4
"""Refreshes of an object in use within the time for which unused objects stay."""
MIN_REFRESH_S = MIN_AGE_S / REFRESHED
"""Lowest age at which objects are refreshed: younger ones stay, and each refresh is billed."""
_FULL = 0.8
"""Share of the budget above which objects in use are refreshed: deletions are near."""
_SWEEPS_PER_IDLE = 10
_SETTLE_S = 5.0
"""Pause after taking a lease, to detect a second taker: the later one holds it."""
_REFUSED_PAUSE_S = 3600.0
_MAX_LEASE_BYTES = 4096
_NO_DATE = "the store's answers have no Date"


class Lease(msgspec.Struct, frozen=True):
    """Content of the lease's object, in JSON.

    refresh_after_s: age at which all engines refresh objects in use; None: no refresh is needed.
    """

    holder: str
    refresh_after_s: Annotated[float, msgspec.Meta(ge=MIN_REFRESH_S)] | None = None


class LeaseLost(Exception):
    """Another process holds the lease, or this one did not run for longer than a lease lasts."""


@dataclass(eq=False)
class Cleaner:
    """Takes the lease when it is free, and sweeps while it holds it. Belongs to one asyncio loop.

    prefix: s3kv's objects under it count towards the budget. max_bytes: the budget; 0 for none.
    idle_s: objects unused for longer are deleted; 0 for no limit. min_age_s: younger objects stay.
    holder: unique name of this process. on_refresh_after: called with the age in seconds at which
    objects in use are refreshed (`math.inf`: never), whenever the lease was read.

    Counters: `sweeps`, `deleted_objects`, `deleted_bytes`; `failed`: attempts.
    """

    store: ObjectStore
    prefix: str
    _: KW_ONLY
    max_bytes: int
    idle_s: float
    min_age_s: float
    holder: str
    on_refresh_after: Callable[[float], None]
    rng: random.Random
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def __post_init__(self) -> None:
        self.sweeps = self.deleted_objects = self.deleted_bytes = self.failed = 0
        self._refresh_after_s = max(MIN_REFRESH_S, self.idle_s / REFRESHED) if self.idle_s else None
        """Written into the lease while this process holds it."""
        self._key = keys.cleaner(self.prefix)
        self._renewed_s = self._checked_s = self._next_sweep_s = -math.inf
        self._left_bytes: int | None = None
        """Bytes that the last sweep has left, at `_left_s`; None before the first."""
        self._left_s = 0.0
        self._was_refused = False

    async def run(self) -> None:
        """Keep the bucket until cancelled. Raises no `StoreError`."""
        await self.sleep(self.rng.uniform(0.0, RENEW_S))
        while True:
            try:
                pause_s = await self._turn()
                self._was_refused = False
            except LeaseLost as lost:
                _log.info("this process no longer enforces bucket_bytes: %s", lost)
                pause_s = LEASE_S
            except StoreUnavailable:
                self.failed += 1
                pause_s = RENEW_S
            except StoreError as error:
                self.failed += 1
                pause_s = _REFUSED_PAUSE_S
                if not self._was_refused:
                    self._was_refused = True
                    _log.warning("s3kv cannot enforce bucket_bytes and bucket_idle_s: %s", error)
            await self.sleep(pause_s)

    async def _turn(self) -> float:
        """Renew or take the lease, and sweep if this process holds it and a sweep is due. Returns
        the seconds until the next turn."""
        if not await self._hold():
            self._left_bytes = None
            # Other processes check the lease rarely, and not all at once.
            return LEASE_S * self.rng.uniform(1.0, 1.5)
        if self.clock() >= self._next_sweep_s:
            await self._sweep()
        return min(RENEW_S, max(0.0, self._next_sweep_s - self.clock()))

    async def _hold(self) -> bool:
        """Renew the lease, or take it if it is free. Returns whether this process holds it."""
        info, lease = await self._read()
        if info is not None and (lease is None or lease.holder != self.holder):
            if info.age_s is None:  # otherwise it would be held for ever
                raise StoreError(_NO_DATE)
            if info.age_s <= LEASE_S:
                self._tell(lease)
                return False
            if not await self.store.delete(self._key, if_etag=info.etag or None):
                return False
            info = None
        ours = Lease(self.holder, self._refresh_after_s)
        place = Place.of(msgspec.json.encode(ours))
        written = await self.store.put(self._key, place, if_absent=info is None)
        if info is None:
            if not written:
                return False
            await self.sleep(_SETTLE_S)
            _, lease = await self._read()
            if lease is None or lease.holder != self.holder:
                return False
            _log.info("this process now enforces bucket_bytes under %s/", self.prefix)
            self._next_sweep_s = self.clock()
        self._tell(ours)
        self._renewed_s = self.clock()
        return True

    async def _read(self) -> tuple[ObjectInfo | None, Lease | None]:
        """The lease's object, if there is one, and its content, if it can be read."""
        came = await read_small(self.store, self._key, _MAX_LEASE_BYTES)
        if came is None:
            return None, None
        try:
            return came[0], msgspec.json.decode(came[1], type=Lease)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return came[0], None

    def _tell(self, lease: Lease | None) -> None:
        self.on_refresh_after((lease and lease.refresh_after_s) or math.inf)

    async def _sweep(self) -> None:
        """Sweep once, and set the time of the next sweep. Raises `LeaseLost` and `StoreError`."""
        now_s = await self._store_now_s()
        self._checked_s = self.clock()
        run = Sweep(
            self.store,
            self.prefix,
            max_bytes=int(LEFT * self.max_bytes) if self.max_bytes else None,
            before_s=now_s - self.idle_s if self.idle_s else 0.0,
            spare_s=now_s - self.min_age_s,
            look_again=False,
            checkpoint=self._checkpoint,
        )
        try:
            await run.run()
        finally:
            total = run.total
            self.deleted_objects += total.deleted_objects
            self.deleted_bytes += total.deleted_bytes
        self.sweeps += 1
        left_bytes = total.kept_bytes
        stays_s = [self.idle_s] if self.idle_s else []
        if self.max_bytes and left_bytes > _FULL * self.max_bytes and run.oldest_s is not None:
            stays_s.append(now_s - run.oldest_s)
        self._refresh_after_s = max(MIN_REFRESH_S, min(stays_s) / REFRESHED) if stays_s else None
        self._next_sweep_s = self.clock() + self._pause_s(left_bytes + total.deleted_bytes)
        self._left_bytes, self._left_s = left_bytes, self.clock()
        if not await self._hold():
            raise LeaseLost("another process holds the lease")

    def _pause_s(self, found_bytes: int) -> float:
        """Time until the next sweep, from the bytes that this one found."""
        pauses_s = [self.idle_s / _SWEEPS_PER_IDLE] if self.idle_s else []
        if self.max_bytes and self._left_bytes is None:
            pauses_s.append(SWEEP_MIN_S)
        elif self.max_bytes and found_bytes > (left_bytes := self._left_bytes or 0):
            per_s = (found_bytes - left_bytes) / max(1.0, self.clock() - self._left_s)
            pauses_s.append((1 - LEFT) * self.max_bytes / per_s)
        return min(SWEEP_MAX_S, max(SWEEP_MIN_S, min(pauses_s, default=SWEEP_MAX_S)))

    async def _checkpoint(self) -> None:
        """Renew the lease in time. Raises `LeaseLost` if another process has it, or if this one
        has not run for so long that its listing is out of date."""
        now_s, checked_s = self.clock(), self._checked_s
        self._checked_s = now_s
        if now_s - checked_s > LEASE_S:
            raise LeaseLost(f"this process did not run for {now_s - checked_s:.0f} s")
        if now_s - self._renewed_s > RENEW_S and not await self._hold():
            raise LeaseLost("another process holds the lease")

    async def _store_now_s(self) -> float:
        """Now by the store's clock, in seconds since the epoch."""
        info = await self.store.head(self._key)
        if info is None:
            raise LeaseLost("its object is gone")
        if info.age_s is None:
            raise StoreError(_NO_DATE)
        return info.modified_s + info.age_s
