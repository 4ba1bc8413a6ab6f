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
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from lab.memory_store import MemoryStore
from s3kv.errors import StoreDenied, StoreMissing, StoreThrottled, StoreUnavailable, StoreUnranged
from s3kv.place import Place
from s3kv.stores.store import ObjectInfo, Receiver
from s3kv.stores.traffic import Traffic
from s3kv.upkeep.cleaner import LEASE_S
from tests.system.sim.encrypting import Names, Secrets
from tests.system.sim.weather import CALM, Weather

BARRED_S = 120.0
"""After a bad reading, nobody reads the object for so long."""
HANG_S = 10.0
"""After so long without a byte the S3 client gives up by itself (`request_timeout_ms`)."""
LEASE = "s3kv/v3/cleaner.json"
STALE_S = LEASE_S + 2 * HANG_S
"""A cleaner that has stood still for longer lists again before it deletes."""


class PlannedDefect(Exception):
    """Stands for a defect of a library: nobody expects it. It must hurt one job only, and pause one
    part of the housekeeping."""


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
    """accuse: is told of what must not be. check_put: sees every chunk that is written. clock: the
    server's. names: of encrypted objects. min_age_s: nobody deletes in bulk what was written since
    then. foreign: keys that nobody may touch."""

    rng: random.Random
    accuse: Callable[[str], None]
    check_put: Callable[[str, bytes], None]
    clock: Callable[[], float]
    names: Names
    min_age_s: float = 0.0
    foreign: frozenset[str] = frozenset()
    deletes_on_condition: bool = True
    weather: Weather = CALM
    written: dict[str, bytes] = field(default_factory=dict)
    """What was put last under each key; the object differs from it when it has been damaged."""
    seen: Counter[str] = field(default_factory=Counter)
    deleted: set[str] = field(default_factory=set)
    """Keys that were ever deleted in bulk."""

    def __post_init__(self) -> None:
        self.objects = MemoryStore(self.clock)
        for key in self.foreign:
            self.objects._objects[key] = (b"theirs", -1e6)

    def keys(self) -> list[str]:
        return [key for key in self.objects._objects if key not in self.foreign]

    def lose(self, key: str) -> None:
        """Lifecycle, or a person with a broom."""
        self.objects._objects.pop(key, None)

    def damage(self, key: str, data: bytes) -> None:
        self.objects._objects[key] = (data, self.clock())

    def has(self, key: str) -> bool:
        return key in self.objects._objects

    def publish(self, key: str, data: bytes, *, replaces: bool = False) -> None:
        """Another replica, which is not simulated, has saved this."""
        if replaces or not self.has(key):
            self.written[key] = data
            self.objects._objects[key] = (data, self.clock())

    async def put(self, key: str, data: bytes, if_absent: bool) -> bool:
        if key != LEASE:
            self.check_put(key, data)
        created = await self.objects.put(key, Place.of(data), if_absent=if_absent)
        if created:
            self.written[key] = data
        return created

    async def delete_listed(
        self, objects: Sequence[ObjectInfo], listed_s: float, stood_s: float
    ) -> Sequence[str]:
        """As `ObjectStore.delete_many`, by a process that has begun to list them at `listed_s` and
        has since stood still for at most `stood_s` at a time."""
        if stood_s > STALE_S:
            self.accuse(f"objects are deleted that were listed before a stop of {stood_s:.0f} s")
        for info in objects:
            held = self.objects._objects.get(info.key)
            if info.key in self.foreign or not info.key.startswith("s3kv/v3/"):
                self.accuse(f"{info.key} is deleted, and belongs to somebody else")
            elif held is not None and listed_s - self.min_age_s < held[1] < listed_s:
                age_s = listed_s - held[1]
                self.accuse(f"{info.key} is deleted, {age_s:.2f} s old when it was listed")
            self.deleted.add(info.key)
        self.seen["deleted in bulk"] += len(objects)
        encrypted = sum(".encrypted." in info.key for info in objects)
        self.seen["encrypted objects deleted in bulk"] += encrypted
        if not self.deletes_on_condition:
            objects = [dataclasses.replace(info, etag="") for info in objects]
        return await self.objects.delete_many(objects)

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


WRITE = "PUT "


class Connection:
    """An `ObjectStore`. alive: False once its process is dead; then it touches nothing more."""

    def __init__(self, bucket: Bucket) -> None:
        self.alive = True
        self.decodes = True
        """Whether its process can decode compressed objects."""
        self.secrets: Secrets = ()
        """The master keys of its process."""
        self.traffic = Traffic()
        self.answers: defaultdict[str, list[str]] = defaultdict(list)
        """What the bucket said of each key, for the oracle, which clears it. What it said of writes
        is apart, under `WRITE` and the key: both may go on at once. Here and below, the key of an
        encrypted object is that of the object inside."""
        self.frozen_s = self.stood_s = 0.0
        """How long its process has been stopped so far, and calls of its disk have hung."""
        self.looks: dict[str, str] = {}
        """What a HEAD found last under each key."""
        self.busy: Counter[str] = Counter()
        self.writing: Counter[str] = Counter()
        """Operations under way, by key: they may still use their buffer. A chunk that is computed
        while it is fetched is written beside that, from another buffer."""
        self.bad: set[str] = set()
        """Keys whose object was bad, until one of ours is put there."""
        self.undecodable: set[str] = set()
        """Keys of compressed objects that were read by a process that cannot decode them; for the
        oracle, which clears it."""
        self.unfolded: set[str] = set()
        """Keys of compressed objects that were read; for the oracle, which clears it."""
        self.fetching: Counter[str] = Counter()
        """Fetches that its process has been told and has not ended, by key."""
        self.mixed: set[str] = set()
        """Keys under which a fetch has ended beside another one, and may have taken its answers."""
        self.found: set[str] = set()
        """Keys whose last fetch was good. An upload that follows needs no answer of its own."""
        self.quarantined: dict[str, float] = {}
        """Keys that must not be asked for, and until when, as far as the oracle has been told."""
        self._bucket = bucket
        self._listed_s = -math.inf
        """When the last listing began."""
        self.interruption: tuple[str, Callable[[], None]] | None = None
        """Whether the process stops after its next "listing" or at its next "deletion", and why."""
        self._running = asyncio.Event()
        self._running.set()

    def ended(self, key: str, end: str) -> None:
        """A job has found the object "bad", "good" or "missing"."""
        if end == "bad":
            self.quarantined[key] = asyncio.get_running_loop().time() + BARRED_S
        elif self.quarantined.pop(key, None) is not None:
            self._bucket.seen["bad once, and not again"] += 1

    def hung(self, seconds: float) -> None:
        """A call of the disk hangs: a job that needs it takes longer."""
        self.frozen_s += seconds

    def freeze(self) -> None:
        """The process is stopped: nothing of it goes on until `thaw`."""
        self._running.clear()

    def thaw(self) -> None:
        self._running.set()

    @property
    def seen(self) -> Counter[str]:
        return self._bucket.seen

    @property
    def weather(self) -> Weather:
        return self._bucket.weather

    @contextlib.contextmanager
    def _using(self, key: str) -> Iterator[None]:
        self.busy[key] += 1
        if self.busy[key] > 1:
            self._bucket.seen["second requests"] += 1
        try:
            yield
        finally:
            self.busy[key] -= 1

    def _name(self, key: str) -> str:
        return self._bucket.names.object_of(key)

    async def get_into(
        self, key: str, place: Place, receiver: Receiver | None = None, first: int | None = None
    ) -> ObjectInfo | None:
        name = self._name(key)
        until_s = self.quarantined.get(name, -math.inf)
        if first is not None:
            self._bucket.seen["ranges"] += 1
        elif asyncio.get_running_loop().time() < until_s:
            self._bucket.accuse(f"{key} was bad, and is asked for before {until_s}")
        with self._using(name):
            fate = await self._begin("get", name)
            scratch = bytearray(max(2**16, 2 * place.nbytes))
            info = await self._bucket.objects.get_into(key, Place.of(scratch))
            if info is None:
                is_last = self._bucket.names.is_last(key, self.secrets)
                self.answers[name].append("missing" if is_last else "missing under a first key")
                self._bucket.seen["deleted chunks asked for"] += key in self._bucket.deleted
                return None
            data = self._bucket.tamper(bytes(scratch[: info.nbytes]), fate)
            written = self._bucket.written[key]
            plain = self._bucket.names.opened(key, written) or b""
            bounds = slice(0, len(data)) if first is None else slice(first, first + place.nbytes)
            if first is not None and len(data) <= first:
                raise StoreUnranged("the object ends before")
            info = dataclasses.replace(info, nbytes=len(data))
            memory = place if receiver is None else receiver.begin(len(data))
            if memory is None:
                if len(data) != len(written):
                    self._note(name, plain, "bad", "" if first is None else " range")
                return info
            await self._receive(data[bounds], memory, receiver)
            if fate == "cut":
                self.answers[name].append("error")
                raise StoreUnavailable("the body ended early")
            good = data[bounds] == written[bounds] and len(data) == len(written)
            self.seen["encrypted objects read"] += plain != written
            self.seen["objects under an old key read"] += key != self._first(name)
            self._note(name, plain, "good" if good else "bad", "" if first is None else " range")
            return info

    def _first(self, name: str) -> str:
        return self._bucket.names.of(name, self.secrets)[0]

    def _note(self, key: str, written: bytes, said: str, suffix: str) -> None:
        """Note the reading of the object that was `written`, or of the one inside."""
        if said == "bad":
            self.bad.add(key)
        if b'"s3kv.codec"' in written[:4096]:
            self.unfolded.add(key)
            if not self.decodes:
                self.undecodable.add(key)
                said = said.replace("good", "undecodable")
        self.answers[key].append(said + suffix)

    async def _receive(self, data: bytes, place: Place, receiver: Receiver | None) -> None:
        """In pieces. Whoever cancels between them hears the rest arrive."""
        rng, data = self._bucket.rng, data[: place.nbytes]
        ends = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice([1, 1, 3])))
        seconds = self._bucket.weather.latency(rng) / len(ends)
        begin = 0
        try:
            for end in ends:
                self._write(place, data, begin, end)
                begin = end
                if self.alive and receiver is not None:
                    receiver.arrived(end)
                await self._sleep(seconds)
        except asyncio.CancelledError:
            self._bucket.seen["arrivals cut off"] += 0 < begin < len(data)
            if self.alive:
                await asyncio.sleep(rng.choice([0.0, 0.05, 0.5]))
                self._write(place, data, begin, len(data))
            raise
        self._write(place, data, begin, len(data))

    def _write(self, place: Place, data: bytes, begin: int, end: int) -> None:
        """Every byte once: where one has been, the receiver may have decoded others."""
        if self.alive:
            place.cut(begin, end).write(data[begin:end])

    async def put(self, key: str, place: Place, *, if_absent: bool) -> bool:
        name = self._name(key)
        if self._first(name) != key:
            self._bucket.accuse(f"{key} is put by an engine whose first key has other names")
        self.writing[name] += 1
        try:
            return await self._put(key, name, place, if_absent)
        finally:
            self.writing[name] -= 1

    async def _put(self, key: str, name: str, place: Place, if_absent: bool) -> bool:
        sent = bytes(place)
        try:
            fate = await self._begin("put", name, noted=WRITE + name)
        except asyncio.CancelledError:
            if self._bucket.rng.random() < 0.5:
                self._arrives_later(key, sent, if_absent)
            raise
        if self.alive and bytes(place) != sent:
            self._bucket.accuse(f"{key} changed while it was sent")
        created = await self._bucket.put(key, sent, if_absent)
        if fate == "lost":
            self.answers[WRITE + name].append("error")
            raise StoreUnavailable("the answer was lost")
        self.answers[WRITE + name].append("created" if created else "exists")
        if created:
            self.bad.discard(name)
            self.quarantined.pop(name, None)
        return created

    def _arrives_later(self, key: str, data: bytes, if_absent: bool) -> None:
        """The server has had the whole request by then, whatever became of the client."""
        loop = asyncio.get_running_loop()
        put = self._bucket.put
        task = asyncio.Task(put(key, data, if_absent), loop=loop)  # not the process's
        task.add_done_callback(lambda task: task.result())

    async def head(self, key: str) -> ObjectInfo | None:
        """It need not belong to a job that moves the object, and so is none of its answers."""
        await self._begin("get", key, notes=False)
        info = await self._bucket.objects.head(key)
        self.looks[self._name(key)] = "missing" if info is None else "exists"
        return info

    async def delete(self, key: str, *, if_etag: str | None = None) -> bool:
        with self._using(key):
            await self._begin("put", key)
            if key != LEASE:
                self._bucket.accuse(f"{key} is deleted, and not by a sweep")
            return await self._bucket.objects.delete(key, if_etag=if_etag)

    async def refresh(self, key: str, modified_s: float) -> bool:
        await self._begin("put", self._name(key), notes=False)
        self._bucket.seen["refreshes"] += 1
        return await self._bucket.objects.refresh(key, modified_s)

    async def delete_many(self, objects: Sequence[ObjectInfo]) -> Sequence[str]:
        self._interrupt("deletion")
        if not self._running.is_set():
            await self._running.wait()
            raise StoreUnavailable("the connection was closed while the process was stopped")
        weather, rng = self._bucket.weather, self._bucket.rng
        fate = weather.fate("put", rng)
        # Once sent, a request is carried out though its process is stopped.
        await asyncio.sleep(HANG_S if fate == "hang" else weather.latency(rng))
        if fate in _ERRORS:
            raise _ERRORS[fate](f"the bucket is {fate}")
        stayed = await self._bucket.delete_listed(objects, self._listed_s, self.stood_s)
        await self._sleep(0.0)
        if fate == "lost":
            raise StoreUnavailable("the answer was lost")
        return stayed

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[ObjectInfo]:
        self._listed_s, self.stood_s = asyncio.get_running_loop().time(), 0.0
        await self._begin("get", LEASE)
        async for info in self._bucket.objects.list(prefix, after):
            yield info
        self._interrupt("listing")
        await self._sleep(0.0)

    def _interrupt(self, where: str) -> None:
        if self.interruption is not None and self.interruption[0] == where:
            stop, self.interruption = self.interruption[1], None
            self._bucket.seen[f"stopped at a {where}"] += 1
            stop()

    async def folders(self, prefix: str, limit: int) -> Sequence[str]:
        return await self._bucket.objects.folders(prefix, limit)

    async def check(self, prefix: str | None = None) -> bool:
        try:
            await self._begin("get", "")
        except PlannedDefect as error:
            # At start a defect ends the process, which is right: somebody is there to read it.
            raise StoreUnavailable("the bucket is away") from error
        return await self._bucket.objects.check(prefix)

    async def close(self) -> None:
        await self._sleep(0.0)

    async def _begin(self, direction: str, key: str, *, notes: bool = True, noted: str = "") -> str:
        """Wait for the server, and raise what it says if that is an error. noted: in whose answers
        it is noted; those of the key, unless told."""
        weather, rng = self._bucket.weather, self._bucket.rng
        fate = weather.fate(direction, rng)
        if fate == "defect" and key == LEASE:
            fate = "unavailable"  # a defect would end the fetch that lists, and is no answer to it
        await self._sleep(HANG_S if fate == "hang" else weather.latency(rng))
        error = _ERRORS.get(fate)
        if error is not None and notes:
            self.answers[noted or key].append("denied" if fate == "denied" else "error")
        if error is not None:
            raise error(f"the bucket is {fate}")
        return fate

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._running.wait()
        if not self.alive:
            raise asyncio.CancelledError
