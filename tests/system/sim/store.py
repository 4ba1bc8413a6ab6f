"""A bucket that fails in every way a bucket can, over the reference store in memory.

`Bucket` is the server: its objects, its weather, and what it remembers for the oracle.
`Connection` is one I/O process's client of it, and keeps the promises of `ObjectStore`, though
none that it does not make: a cancelled read goes on writing to its buffer until it has ended, a
request whose process has died may still be carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from lab.memory_store import MemoryStore
from s3kv.errors import StoreDenied, StoreMissing, StoreThrottled, StoreUnavailable, StoreUnranged
from s3kv.objects.store import Claim, ObjectInfo
from s3kv.objects.traffic import Traffic
from tests.system.sim.weather import CALM, Weather

SECOND_LOOK_S = 120.0
"""After one bad reading, nobody reads the object for so long; after two, nobody does."""
HANG_S = 10.0
"""After so long without a byte the S3 client gives up by itself (`request_timeout_ms`)."""


class PlannedDefect(Exception):
    """Stands for a defect of a library: nobody expects it, and it must hurt one job only."""


_ERRORS: dict[str, type[Exception]] = {
    "unavailable": StoreUnavailable,
    "throttled": StoreThrottled,
    "denied": StoreDenied,
    "no bucket": StoreMissing,
    "defect": PlannedDefect,
    "hang": StoreUnavailable,
}


@dataclass
class Bucket:
    """accuse: is told of what must not be. check_put: sees every object that is written."""

    rng: random.Random
    accuse: Callable[[str], None]
    check_put: Callable[[str, bytes], None]
    objects: MemoryStore = field(default_factory=lambda: MemoryStore(clock=lambda: 0.0))
    weather: Weather = CALM
    written: dict[str, bytes] = field(default_factory=dict)
    """What was put last under each key; the object differs from it when it has been damaged."""
    seen: Counter[str] = field(default_factory=Counter)

    def keys(self) -> list[str]:
        return list(self.objects._objects)

    def lose(self, key: str) -> None:
        """Lifecycle, or a person with a broom."""
        self.objects._objects.pop(key, None)

    def damage(self, key: str, data: bytes) -> None:
        self.objects._objects[key] = (data, 0.0)

    def has(self, key: str) -> bool:
        return key in self.objects._objects

    def publish(self, key: str, data: bytes) -> None:
        """Another replica, which is not simulated, has saved this."""
        self.written[key] = data
        self.objects._objects.setdefault(key, (data, 0.0))

    async def put(self, key: str, data: bytes, if_absent: bool) -> bool:
        self.check_put(key, data)
        created = await self.objects.put(key, memoryview(data), if_absent=if_absent)
        if created:
            self.written[key] = data
        return created

    def tamper(self, data: bytes, fate: str) -> bytes:
        at = self.rng.randrange(len(data))
        if fate == "short":
            return data[:at]
        if fate == "long":
            return data + bytes(self.rng.randrange(1, 100))
        if fate == "flip":
            # Half of them in the payload, which is short.
            at = self.rng.choice([at, len(data) - 1 - at % 64])
            return data[:at] + bytes([data[at] ^ 1 << self.rng.randrange(8)]) + data[at + 1 :]
        if fate == "swap":
            return self.objects._objects[self.rng.choice(self.keys())][0]
        return data


class Connection:
    """An `ObjectStore`. alive: False once its process is dead; then it touches nothing more."""

    def __init__(self, bucket: Bucket) -> None:
        self.alive = True
        self.traffic = Traffic()
        self.answers: defaultdict[str, list[str]] = defaultdict(list)
        """What the bucket said of each key, for the oracle, which clears it."""
        self.busy: Counter[str] = Counter()
        """Operations under way, by key: they may still use their buffer."""
        self.bad: set[str] = set()
        """Keys whose object was bad, until one of ours is put there."""
        self.quarantined: dict[str, float] = {}
        """Keys that must not be asked for, and until when, as far as the oracle has been told."""
        self._bucket = bucket
        self._running = asyncio.Event()
        self._running.set()

    def ended(self, key: str, end: str) -> None:
        """A job has found the object "bad", "good" or "missing", or that it "exists"."""
        again = key in self.quarantined
        if end == "bad":
            now_s = asyncio.get_running_loop().time()
            self.quarantined[key] = math.inf if again else now_s + SECOND_LOOK_S
        elif again and end == "exists":
            if self.quarantined[key] < math.inf:
                self.quarantined[key] = -math.inf
        elif again:
            self._bucket.seen["bad once, and not again"] += 1
            del self.quarantined[key]

    def freeze(self) -> None:
        """The process is stopped: nothing of it goes on until `thaw`."""
        self._running.clear()

    def thaw(self) -> None:
        self._running.set()

    @contextlib.contextmanager
    def _using(self, key: str) -> Iterator[None]:
        self.busy[key] += 1
        if self.busy[key] > 1:
            self._bucket.seen["second requests"] += 1
        try:
            yield
        finally:
            self.busy[key] -= 1

    async def get_into(
        self, key: str, buffer: memoryview, claim: Claim | None = None
    ) -> ObjectInfo | None:
        with self._using(key):
            return await self._get_into(key, buffer, claim)

    async def _get_into(
        self, key: str, buffer: memoryview, claim: Claim | None
    ) -> ObjectInfo | None:
        until_s = self.quarantined.get(key, -math.inf)
        if asyncio.get_running_loop().time() < until_s:
            self._bucket.accuse(f"{key} was bad, and is asked for before {until_s}")
        fate = await self._begin("get", key)
        scratch = bytearray(2 * len(buffer))
        info = await self._bucket.objects.get_into(key, memoryview(scratch))
        if info is None:
            self.answers[key].append("missing")
            return None
        data = self._bucket.tamper(bytes(scratch[: info.nbytes]), fate)
        info = dataclasses.replace(info, nbytes=len(data))
        if claim is not None and not claim():
            return info
        await self._receive(data, buffer)
        if fate == "cut":
            self.answers[key].append("error")
            raise StoreUnavailable("the body ended early")
        good = data == self._bucket.written[key]
        self.answers[key].append("good" if good else "bad")
        if not good:
            self.bad.add(key)
        return info

    async def get_range(
        self, key: str, first: int, buffer: memoryview, claim: Claim | None = None
    ) -> ObjectInfo | None:
        with self._using(key):
            return await self._get_range(key, first, buffer, claim)

    async def _get_range(
        self, key: str, first: int, buffer: memoryview, claim: Claim | None
    ) -> ObjectInfo | None:
        fate = await self._begin("get", key)
        self._bucket.seen["ranges"] += 1
        scratch = bytearray(2**16)
        info = await self._bucket.objects.get_into(key, memoryview(scratch))
        if info is None:
            self.answers[key].append("missing")
            return None
        bounds = slice(first, first + len(buffer))
        data = self._bucket.tamper(bytes(scratch[: info.nbytes]), fate)
        if len(data) < bounds.stop:
            raise StoreUnranged("the object ends before")
        info = dataclasses.replace(info, nbytes=len(data))
        if claim is not None and not claim():
            return info
        await self._receive(data[bounds], buffer)
        if fate == "cut":
            self.answers[key].append("error")
            raise StoreUnavailable("the body ended early")
        written = self._bucket.written[key]
        good = data[bounds] == written[bounds] and len(data) == len(written)
        self.answers[key].append("good range" if good else "bad range")
        if not good:
            self.bad.add(key)
        return info

    async def _receive(self, data: bytes, buffer: memoryview) -> None:
        """In two pieces. Whoever cancels between them hears the second one arrive."""
        data = data[: len(buffer)]
        half = self._bucket.rng.randrange(len(data) + 1)
        self._write(buffer, data[:half])
        try:
            await self._sleep(self._bucket.weather.latency(self._bucket.rng))
        except asyncio.CancelledError:
            if self.alive:
                await asyncio.sleep(self._bucket.rng.choice([0.0, 0.05, 0.5]))
                self._write(buffer, data)
            raise
        self._write(buffer, data)

    def _write(self, buffer: memoryview, data: bytes) -> None:
        if self.alive:
            buffer[: len(data)] = data

    async def put(self, key: str, data: memoryview, *, if_absent: bool) -> bool:
        with self._using(key):
            return await self._put(key, data, if_absent)

    async def _put(self, key: str, data: memoryview, if_absent: bool) -> bool:
        sent = bytes(data)
        try:
            fate = await self._begin("put", key)
        except asyncio.CancelledError:
            if self._bucket.rng.random() < 0.5:
                self._arrives_later(key, sent, if_absent)
            raise
        if self.alive and bytes(data) != sent:
            self._bucket.accuse(f"{key} changed while it was sent")
        created = await self._bucket.put(key, sent, if_absent)
        if fate == "lost":
            self.answers[key].append("error")
            raise StoreUnavailable("the answer was lost")
        self.answers[key].append("created" if created else "exists")
        if created:
            self.bad.discard(key)
            self.quarantined.pop(key, None)
        return created

    def _arrives_later(self, key: str, data: bytes, if_absent: bool) -> None:
        """The server has had the whole request by then, whatever became of the client."""
        loop = asyncio.get_running_loop()
        put = self._bucket.put
        task = asyncio.Task(put(key, data, if_absent), loop=loop)  # not the process's
        task.add_done_callback(lambda task: task.result())

    async def head(self, key: str) -> ObjectInfo | None:
        with self._using(key):
            await self._begin("get", key)
            return await self._bucket.objects.head(key)

    async def delete(self, key: str, *, if_etag: str | None = None) -> bool:
        with self._using(key):
            await self._begin("put", key)
            said = self.answers[key]
            if said.count("bad") + ("bad range" in said) < 2:
                self._bucket.accuse(f"{key} is deleted, and was not bad twice")
            return await self._bucket.objects.delete(key, if_etag=if_etag)

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[ObjectInfo]:
        await self._begin("get", prefix)
        async for info in self._bucket.objects.list(prefix):
            yield info

    async def check(self) -> None:
        try:
            await self._begin("get", "")
        except PlannedDefect as error:
            # At start a defect ends the process, which is right: somebody is there to read it.
            raise StoreUnavailable("the bucket is away") from error

    async def close(self) -> None:
        await self._sleep(0.0)

    async def _begin(self, direction: str, key: str) -> str:
        """Wait for the server, and raise what it says if that is an error."""
        weather, rng = self._bucket.weather, self._bucket.rng
        fate = weather.fate(direction, rng)
        await self._sleep(HANG_S if fate == "hang" else weather.latency(rng))
        error = _ERRORS.get(fate)
        if error is not None:
            self.answers[key].append("denied" if fate == "denied" else "error")
            raise error(f"the bucket is {fate}")
        return fate

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._running.wait()
        if not self.alive:
            raise asyncio.CancelledError
