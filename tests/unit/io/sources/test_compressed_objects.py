"""Compressed objects between a worker, its disk and a bucket that waits, fails, or lies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lab.memory_store import MemoryStore
from s3kv.errors import StoreUnavailable, StoreUnranged
from s3kv.io import wire
from s3kv.messages import JobEnd
from s3kv.objects import compression
from s3kv.place import Place
from s3kv.stores.disk import Directory
from s3kv.stores.store import ObjectInfo, Receiver, landing
from s3kv.types import Outcome
from tests.unit.io import compressed, rig
from tests.unit.io.compressed import FORMAT
from tests.unit.io.rig import Worker
from tests.waiting import until

KEY = rig.object_key(1)
DATA, OTHER_DATA = compressed.payload(1), compressed.payload(2)
PLAIN, STORED = compressed.plain(DATA), compressed.stored(DATA)
OTHER = compressed.stored(OTHER_DATA)
HASH_2 = rig.chunk(2).block_hash
BAD = STORED[:-1] + bytes([STORED[-1] ^ 1])
PART_BYTES = FORMAT.object_bytes // 4


class Bucket(MemoryStore):
    """Delivers every body in two halves. reads: by first byte; None: whole objects.

    gate: of second halves. halves: number of first halves delivered. failures: what the next reads
    raise after the first half. late: number of the next reads that do not begin until they are
    cancelled, and then try to. landed: what these got. after: what the object is replaced with
    after the next reads. serves_ranges: as it says. lengths: told by the next answers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[int | None] = Counter()
        self.gate = asyncio.Event()
        self.gate.set()
        self.halves = self.late = 0
        self.failures: list[Exception] = []
        self.landed: list[Place | None] = []
        self.after: list[bytes] = []
        self.serves_ranges = True
        self.lengths: list[int] = []

    def held(self, number: int = 1) -> bytes | None:
        found = self._objects.get(rig.object_key(number))
        return found and found[0]

    async def get_into(
        self, key: str, place: Place, receiver: Receiver | None = None, first: int | None = None
    ) -> ObjectInfo | None:
        self.reads[first] += 1
        if first is not None and not self.serves_ranges:
            raise StoreUnranged("200")
        await self.begin("get", key)
        if key not in self._objects:
            return None
        info = self._told(key)
        if self.lengths:
            info = dataclasses.replace(info, nbytes=self.lengths.pop(0))
        data = self._objects[key][0][first or 0 :][: place.nbytes if first is not None else None]
        if not data:
            raise StoreUnranged("416")
        if self.late:
            self.late -= 1
            try:
                await asyncio.Event().wait()
            finally:
                self.landed.append(receiver.begin(info.nbytes))
        memory = landing(place, receiver, len(data), info.nbytes)
        if memory is not None:
            await self._deliver(data, memory, receiver)
        self._replace()
        return info

    def _replace(self) -> None:
        if self.after:
            self.hold(KEY, self.after.pop(0))

    async def _deliver(self, data: bytes, memory: Place, receiver: Receiver | None) -> None:
        half = len(data) // 2
        memory.write(data[:half])
        if receiver is not None:
            receiver.arrived(half)
        self.halves += 1
        if self.failures:
            self._replace()
            raise self.failures.pop(0)
        await self.gate.wait()
        memory.write(data[half:], half)


@contextlib.asynccontextmanager
async def serving(
    bucket: MemoryStore, range_bytes: int = 0, hedge_percent: float = 0.0, **settings: Any
) -> AsyncIterator[Worker]:
    greeting = compressed.greeting(**{"compress": "on", **settings})
    how = {"range_bytes": range_bytes, "hedge_percent": hedge_percent}
    slab_bytes = 8 * compressed.SLOT_BYTES
    async with rig.serving(bucket, greeting=greeting, slab_bytes=slab_bytes, **how) as (worker, _):
        yield worker
        assert (await worker.settled()).running == 0


async def fetched(worker: Worker, number: int = 1, data: bytes = b"") -> JobEnd:
    """The end of a fetch, with this payload (or that of the chunk) in its slot if it is a hit."""
    slot = compressed.slot(worker, number)
    slot[:] = bytes(len(slot))
    end = await worker.end_of(rig.fetch(number))
    is_right = slot[FORMAT.header_bytes :] == (data or compressed.payload(number))
    assert is_right == (end.outcome is Outcome.OK)
    assert end.nbytes == (FORMAT.object_bytes if is_right else 0)
    return end


def fill(worker: Worker, number: int) -> None:
    compressed.slot(worker, number)[FORMAT.header_bytes :] = compressed.payload(number)


async def uploaded(worker: Worker, number: int = 1) -> JobEnd:
    fill(worker, number)
    return await worker.end_of(rig.upload(number))


async def check_replaced(worker: Worker, bucket: Bucket, reason: str) -> None:
    """A bad object is a miss for this reason and not read again, until an upload replaces it."""
    end = await fetched(worker)
    assert (end.outcome, end.reason) == (Outcome.CORRUPT, reason)
    reads = bucket.reads.total()
    end = await fetched(worker)
    assert (end.outcome, end.reason) == (Outcome.MISSING, "quarantined")
    assert bucket.reads.total() == reads
    assert (await uploaded(worker)).outcome is Outcome.OK
    assert (await fetched(worker)).outcome is Outcome.OK


async def compressing_of(worker: Worker) -> dict[str, int]:
    """Counters of compressing, without those that are zero; by name without its prefix."""
    names = ("io_encoded", "io_decoded", "io_left_plain")
    found = (await worker.settled()).counters.items()
    return {name.removeprefix("io_"): n for name, n in found if n and name.startswith(names)}


# --- a process ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "on"])
async def test_a_chunk_is_stored_compressed_and_comes_back(bucket: Bucket, mode: Any) -> None:
    async with serving(bucket, compress=mode) as worker:
        end = await uploaded(worker)
        assert (end.outcome, end.nbytes) == (Outcome.OK, FORMAT.object_bytes)
        assert bucket.held() == STORED
        assert (await fetched(worker)).outcome is Outcome.OK
        assert (await uploaded(worker)).outcome is Outcome.EXISTS
        assert await compressing_of(worker) == {
            "encoded": 1,
            "encoded_bytes": FORMAT.object_bytes,
            "encoded_stored_bytes": len(STORED),
            "decoded": 1,
            "decoded_bytes": FORMAT.object_bytes,
            "decoded_stored_bytes": len(STORED),
        }


async def test_off_stores_plain_objects_and_reads_both(bucket: Bucket) -> None:
    async with serving(bucket, compress="off") as worker:
        assert (await uploaded(worker)).outcome is Outcome.OK
        assert bucket.held() == PLAIN
        bucket.hold(rig.object_key(2), compressed.stored(OTHER_DATA, block_hash=HASH_2))
        for number in (1, 2):
            assert (await fetched(worker, number)).outcome is Outcome.OK
        assert (await compressing_of(worker))["decoded"] == 1


async def test_without_the_package_compressed_objects_are_misses(
    bucket: Bucket, range_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "codec", lambda: None)
    bucket.hold(KEY, STORED)
    async with serving(bucket, range_bytes, compress="auto") as worker:
        for _ in range(2):
            end = await fetched(worker)
            assert (end.outcome, end.reason, end.source) == (Outcome.MISSING, "codec", "bucket")
            assert "pip install" in end.detail
        assert bucket.reads[None] == (0 if range_bytes else 2)
        assert (await uploaded(worker)).outcome is Outcome.EXISTS
        assert (await uploaded(worker, 2)).outcome is Outcome.OK
        assert bucket.held() == STORED
        assert bucket.held(2) == compressed.plain(OTHER_DATA, block_hash=HASH_2)
        assert not {name for name in (await worker.settled()).counters if "coded" in name}


async def test_a_worker_of_items_compresses_nothing(bucket: Bucket) -> None:
    greeting = msgspec.structs.replace(compressed.greeting(compress="on"), item_dtype="BF16")
    async with rig.serving(bucket, greeting=greeting) as (worker, _):
        assert not {name for name in (await worker.settled()).counters if "coded" in name}


async def test_a_drain_uploads_the_rest_plain() -> None:
    class Gated(Bucket):
        putting = 0

        async def put(self, key: str, place: Place, *, if_absent: bool) -> bool:
            self.putting += 1
            await self.gate.wait()
            return await super().put(key, place, if_absent=if_absent)

    bucket = Gated()
    bucket.gate.clear()
    async with serving(bucket, max_inflight_requests=2) as worker:
        for number in (1, 2, 3):
            fill(worker, number)
        worker.say(*map(rig.upload, (1, 2, 3)))
        await until(lambda: bucket.putting)
        worker.say(wire.Drain(60.0))
        await worker.settled()
        bucket.gate.set()
        assert {end.outcome for end in (await worker.done(3)).values()} == {Outcome.OK}
        assert await worker.hear() == wire.Drained(0)
        assert bucket.held() == STORED
        assert bucket.held(2) == compressed.plain(OTHER_DATA, block_hash=HASH_2)
        assert (await compressing_of(worker))["left_plain|busy"] == 2


async def test_borrowed_memory_holds_payloads_alone(bucket: Bucket, range_bytes: int) -> None:
    greeting = msgspec.structs.replace(
        compressed.greeting(compress="on"), is_borrowed=True, slot_bytes=FORMAT.payload_bytes
    )
    slab_bytes = 4 * FORMAT.payload_bytes
    how = {"greeting": greeting, "slab_bytes": slab_bytes, "range_bytes": range_bytes}
    async with rig.serving(bucket, **how) as (worker, _):
        rows = worker.slab.view[:slab_bytes]
        margins = bytes(range(1, 256)) * (slab_bytes // 255 + 1)
        rows[:] = margins[:slab_bytes]
        one = slice(FORMAT.payload_bytes, 2 * FORMAT.payload_bytes)
        rows[one] = DATA
        assert (await worker.end_of(rig.upload(1))).outcome is Outcome.OK
        assert bucket.held() == STORED
        for _ in range(2):
            rows[one] = bytes(FORMAT.payload_bytes)
            end = await worker.end_of(rig.fetch(1))
            assert (end.outcome, end.nbytes) == (Outcome.OK, FORMAT.object_bytes)
            assert rows[one] == DATA
        assert rows[: one.start] == margins[: one.start]
        assert rows[one.stop :] == margins[one.stop : slab_bytes]


async def test_the_disk_keeps_the_plain_object(
    bucket: Bucket, tmp_path: Path, range_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which a second process reads, even one that has no codec."""
    bucket.hold(KEY, STORED)
    where = {"disk_path": str(tmp_path / "cache"), "disk_bytes": 2**30, "range_bytes": range_bytes}
    file = Directory(tmp_path / "cache", "s3kv", 0).file_of(KEY)
    async with serving(bucket, **where) as worker:
        await rig.counted(file.parents[3])
        assert (await fetched(worker)).source == "bucket"
        await until(file.exists)
        assert file.read_bytes() == PLAIN
        assert (await fetched(worker)).source == "disk"
    monkeypatch.setattr(compression, "codec", lambda: None)
    async with serving(Bucket(), compress="auto", **where) as worker:
        assert (await fetched(worker)).source == "disk"


async def test_the_disk_keeps_the_plain_object_of_an_upload(bucket: Bucket, tmp_path: Path) -> None:
    where = {"disk_path": str(tmp_path / "cache"), "disk_bytes": 2**30, "disk_writes": "all"}
    file = Directory(tmp_path / "cache", "s3kv", 0).file_of(KEY)
    async with serving(bucket, **where) as worker:
        await rig.counted(file.parents[3])
        assert (await uploaded(worker)).outcome is Outcome.OK
        await until(file.exists)
    assert (file.read_bytes(), bucket.held()) == (PLAIN, STORED)


# --- bad objects and bad reads -----------------------------------------------------------------


async def test_a_damaged_object_is_a_miss_until_it_is_replaced(
    bucket: Bucket, range_bytes: int
) -> None:
    bucket.hold(KEY, BAD)
    async with serving(bucket, range_bytes) as worker:
        await check_replaced(worker, bucket, "digest")
        assert bucket.held() == STORED


@pytest.mark.parametrize("times", [1, 2])
async def test_a_read_that_fails_after_half_of_the_body_is_sent_again(
    bucket: Bucket, range_bytes: int, times: int
) -> None:
    bucket.hold(KEY, STORED)
    async with serving(bucket, range_bytes) as worker:
        for _ in range(3):
            bucket.failures = [StoreUnavailable("cut off") for _ in range(times)]
            assert (await fetched(worker)).outcome is Outcome.OK
            assert not bucket.failures
        bucket.failures = [StoreUnavailable("cut off") for _ in range(30)]
        assert (await fetched(worker)).outcome is Outcome.FAILED


FORMS = {PLAIN: DATA, STORED: DATA, OTHER: OTHER_DATA, compressed.plain(OTHER_DATA): OTHER_DATA}


@pytest.mark.parametrize("answered", range(1, 4))
@pytest.mark.parametrize("first", FORMS, ids=range(4))
async def test_an_object_that_is_replaced_between_ranges_is_never_mixed(
    bucket: Bucket, answered: int, first: bytes
) -> None:
    for then, data in FORMS.items():
        bucket.hold(KEY, first)
        bucket.reads.clear()
        bucket.after = [first] * (answered - 1) + [then]
        has_fourth = FORMAT.object_bytes in (len(first), len(then))
        is_mixed = then != first and (answered < 3 or has_fourth)
        async with serving(bucket, PART_BYTES) as worker:
            expected = data if is_mixed else FORMS[first]
            assert (await fetched(worker, data=expected)).outcome is Outcome.OK
            assert bucket.reads[None] == is_mixed


@pytest.mark.parametrize("data", [PLAIN, STORED], ids=["plain", "compressed"])
@pytest.mark.parametrize("answer", range(3))
async def test_ranges_that_name_different_lengths_are_not_used(
    bucket: Bucket, data: bytes, answer: int
) -> None:
    """Although they have one ETag. The object is not blamed."""
    bucket.hold(KEY, data)
    bucket.lengths = [len(data)] * answer + [len(data) - 1]
    async with serving(bucket, PART_BYTES) as worker:
        assert (await fetched(worker)).outcome is Outcome.OK
        assert bucket.reads[None] == 1


class Reads:
    """Reads that are repeated, sent twice or cancelled, of buckets in which objects are encrypted
    or not. serving: as the function of this module."""

    serving: Any

    @pytest.mark.parametrize("first", FORMS, ids=range(4))
    async def test_a_second_attempt_may_find_another_object(
        self, bucket: Bucket, range_bytes: int, first: bytes
    ) -> None:
        for then, data in FORMS.items():
            bucket.hold(KEY, first)
            bucket.after = [then]
            bucket.failures = [StoreUnavailable("cut off")]
            async with self.serving(bucket, range_bytes) as worker:
                assert (await fetched(worker, data=data)).outcome is Outcome.OK

    @pytest.mark.parametrize("data", [PLAIN, STORED], ids=["plain", "compressed"])
    async def test_a_late_request_writes_nothing_once_another_has_the_place(
        self, bucket: Bucket, range_bytes: int, data: bytes
    ) -> None:
        """Nor into the memory of the other."""
        bucket.hold(KEY, data)
        async with self.serving(bucket, range_bytes, hedge_percent=100.0) as worker:
            for _ in range(8):
                assert (await fetched(worker)).outcome is Outcome.OK
            bucket.late = 1
            assert (await fetched(worker)).outcome is Outcome.OK
            assert bucket.landed == [None]
            assert (await worker.settled()).counters["io_hedges_won"] == 1

    @pytest.mark.parametrize("data", [PLAIN, STORED], ids=["plain", "compressed"])
    async def test_nothing_is_written_after_a_fetch_has_been_cancelled(
        self, bucket: Bucket, range_bytes: int, data: bytes
    ) -> None:
        bucket.hold(KEY, data)
        async with self.serving(bucket, range_bytes) as worker:
            for number in range(4):
                bucket.gate.clear()
                bucket.halves = 0
                worker.say(rig.fetch(1))
                await until(lambda: bucket.halves)
                for _ in range(number):
                    await asyncio.sleep(0.001)
                worker.say(wire.Cancel(1))
                assert (await worker.done(1))[1].outcome is Outcome.CANCELLED
                left = bytes(worker.slab.view)
                bucket.gate.set()
                await asyncio.sleep(0.005)
                assert worker.slab.view == left
                assert (await fetched(worker)).outcome is Outcome.OK


class TestReads(Reads):
    serving = staticmethod(serving)


async def test_a_cancelled_fetch_ends_after_its_thread(
    bucket: Bucket, range_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = compressed.Held()
    bucket.hold(KEY, STORED)
    async with serving(bucket, range_bytes) as worker:
        assert (await fetched(worker)).outcome is Outcome.OK
    monkeypatch.setattr(compression, "codec", lambda: held)
    monkeypatch.setattr(compression, "decoding_speed", lambda codec, clock: 1e9)
    async with serving(bucket, range_bytes) as worker:
        worker.say(rig.fetch(1))
        await until(held.begun.is_set)
        worker.say(wire.Cancel(1))
        for _ in range(20):
            assert (await worker.settled()).running > 0
        held.gate.set()
        assert (await worker.done(1))[1].outcome is Outcome.CANCELLED


async def test_a_store_without_ranges_is_asked_for_none_again(bucket: Bucket) -> None:
    """Although none of its objects is as long as a plain one."""
    bucket.hold(KEY, STORED)
    bucket.serves_ranges = False
    async with serving(bucket, PART_BYTES) as worker:
        for _ in range(3):
            assert (await fetched(worker)).outcome is Outcome.OK
        assert bucket.reads.pop(None) == 3
        assert set(bucket.reads.values()) <= {1}
