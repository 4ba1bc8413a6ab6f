"""How fast this host reads and writes this bucket, through the very client of the cache.

As many requests at once as one worker makes, of objects of one size, under a key of their own
beside the namespaces; whatever was written is deleted, however the measurement ends.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass

from s3kv.config import Config
from s3kv.errors import StoreError
from s3kv.objects.store import ObjectStore

Report = Callable[[str, int, int | None], None]
Floor = Callable[[Sequence[str], int, int], Awaitable[float]]
"""Seconds for so many GETs of these keys, each of so many bytes."""
_CLEANING_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one direction. seconds: from the first request to the last answer."""

    requests: int
    nbytes: int
    seconds: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds


@dataclass(frozen=True, slots=True)
class Speeds:
    """object_bytes: of each. at_once: requests. small: GETs of 1 KiB one after another.
    floor_s: the time that plain sockets took for the same GETs."""

    object_bytes: int
    at_once: int
    put: Speed
    get: Speed
    small: Speed
    floor_s: float


class Measurement:
    """One measurement. Belongs to one asyncio loop.

    prefix: what no other measurement uses; all keys begin with it. clock_s: a monotonic clock.
    """

    def __init__(
        self,
        store: ObjectStore,
        config: Config,
        prefix: str,
        *,
        object_bytes: int,
        floor: Floor,
        clock_s: Callable[[], float],
        on_progress: Report,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._object_bytes = object_bytes
        self._at_once = config.fetches_at_once(object_bytes)
        self._floor = floor
        self._clock_s = clock_s
        self._on_progress = on_progress
        self._written: set[str] = set()

    async def run(self, requests: int, small_requests: int) -> Speeds:
        """requests: of each direction. Raises `StoreError`, also when what was written could not be
        deleted."""
        try:
            return await self._run(requests, small_requests)
        finally:
            # Also when it is cancelled, as by Ctrl-C: what has begun is waited for.
            await asyncio.shield(asyncio.wait_for(self._clean(), _CLEANING_TIMEOUT_S))

    async def _run(self, requests: int, small_requests: int) -> Speeds:
        # One buffer for each request under way, filled, so that its pages exist beforehand.
        at_once = min(self._at_once, requests)
        buffers = [memoryview(bytearray(b"\x5a") * self._object_bytes) for _ in range(at_once)]

        async def put(lane: int) -> None:
            await self._put(f"{self._prefix}/{lane}", buffers[lane])

        async def get(lane: int) -> None:
            info = await self._store.get_into(f"{self._prefix}/{lane}", buffers[lane])
            nbytes = None if info is None else info.nbytes
            _require(nbytes == self._object_bytes, f"{self._prefix}/{lane}", nbytes)

        written = await self._timed("PUT", put, requests, at_once, self._object_bytes)
        read = await self._timed("GET", get, requests, at_once, self._object_bytes)
        keys = [f"{self._prefix}/{lane}" for lane in range(at_once)]
        floor_s = await self._floor(keys, requests, self._object_bytes)
        few = memoryview(bytearray(1024))
        await self._put(f"{self._prefix}/small", few)

        async def get_small(lane: int) -> None:
            info = await self._store.get_into(f"{self._prefix}/small", few)
            nbytes = None if info is None else info.nbytes
            _require(nbytes == len(few), f"{self._prefix}/small", nbytes)

        small = await self._timed("small GET", get_small, small_requests, 1, len(few))
        return Speeds(self._object_bytes, at_once, written, read, small, floor_s)

    async def _put(self, key: str, data: memoryview) -> None:
        self._written.add(key)  # before: what is interrupted may have been written
        await self._store.put(key, data, if_absent=False)

    async def _timed(
        self,
        what: str,
        call: Callable[[int], Awaitable[None]],
        requests: int,
        at_once: int,
        nbytes: int,
    ) -> Speed:
        took_s: list[float] = []
        turns = iter(range(requests))

        async def lane(number: int) -> None:
            for _ in turns:
                begin_s = self._clock_s()
                await call(number)
                took_s.append(self._clock_s() - begin_s)
                self._on_progress(what, len(took_s), requests)

        begin_s = self._clock_s()
        await _together([lane(number) for number in range(at_once)])
        seconds = max(self._clock_s() - begin_s, 1e-9)
        p50, p95, p99, most = (1e3 * percentile(took_s, p) for p in (50, 95, 99, 100))
        return Speed(requests, requests * nbytes, seconds, p50, p95, p99, most)

    async def _clean(self) -> None:
        for key in sorted(self._written):
            await self._store.delete(key)


async def _together(calls: Sequence[Coroutine[None, None, None]]) -> None:
    """All of them at once; when one fails, or this is cancelled, none goes on."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _require(right: bool, key: str, nbytes: int | None) -> None:
    if not right:
        raise StoreError(
            f"{key} was written, and {nbytes} bytes came back: is something else here?"
        )


def percentile(values: Sequence[float], percent: float) -> float:
    """By the nearest rank."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]
