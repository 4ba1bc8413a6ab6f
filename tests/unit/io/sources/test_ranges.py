"""Large objects are read in ranges, and whatever happens to one of them, no two objects mix."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from lab.memory_store import MemoryStore
from s3kv.config import Config
from s3kv.errors import StoreDenied, StoreThrottled, StoreUnavailable, StoreUnranged
from s3kv.io import wire
from s3kv.io.sources.ranges import cut
from s3kv.messages import JobEnd
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.integrity import Integrity
from s3kv.place import Place
from s3kv.stores.store import ObjectInfo, Receiver, landing
from s3kv.types import Outcome
from tests.unit.io import rig
from tests.unit.io.rig import Worker
from tests.waiting import until

RANGE_BYTES = 4096
RANGES = rig.FORMAT.object_bytes // RANGE_BYTES
KEY = rig.object_key(1)


class Bucket(MemoryStore):
    """Counts requests, and the ranges under way. reads: by first byte; None: whole objects.

    gate: ranges wait for it. failures: the next of each range, by first byte, which nothing fills
    then. unwound: what a cancelled range waits for, and then writes a last time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[int | None] = Counter()
        self.running = self.most = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.unwound = asyncio.Event()
        self.unwound.set()
        self.failures: dict[int, list[Exception]] = {}
        self.after: list[bytes] = []
        """What the object is replaced with after the next ranges have been answered."""

    async def get_into(
        self, key: str, place: Place, receiver: Receiver | None = None, first: int | None = None
    ) -> ObjectInfo | None:
        self.reads[first] += 1
        if first is None:
            return await super().get_into(key, place, receiver)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.gate.wait()
            if self.failures.get(first):
                raise self.failures[first].pop(0)
            return await super().get_into(key, place, receiver, first)
        except asyncio.CancelledError:
            await self.unwound.wait()
            memory = landing(place, receiver, place.nbytes, rig.FORMAT.object_bytes)
            if memory is not None:
                memory.write(bytes(memory.nbytes))
            raise
        finally:
            self.running -= 1
            if self.after:
                self.hold(KEY, self.after.pop(0))  # at once, before the next answer


@contextlib.asynccontextmanager
async def fetching(bucket: Bucket, **settings: Any) -> AsyncIterator[Worker]:
    """A process that reads in ranges; it has given back all places in the end."""
    settings = {"range_bytes": RANGE_BYTES} | settings
    async with rig.serving(bucket, **settings) as (worker, _):
        yield worker
        assert bucket.running == 0
        assert (await worker.settled()).running == 0


async def fetched(worker: Worker) -> JobEnd:
    return await worker.end_of(rig.fetch(3, number=1))


@pytest.mark.parametrize("unit", [1, 4096])
@pytest.mark.parametrize(("nbytes", "count"), [(8192, 2), (rig.FORMAT.object_bytes, 6), (10**7, 7)])
def test_ranges_are_the_whole_object(nbytes: int, count: int, unit: int) -> None:
    ranges = cut(nbytes, count, unit)
    assert [at for bounds in ranges for at in bounds] == list(range(nbytes))
    assert len(ranges) == count
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 2 * unit
    assert all(bounds.start % unit == 0 for bounds in ranges)


async def test_a_large_object_comes_in_ranges(bucket: Bucket) -> None:
    bucket.hold(KEY, rig.sealed(1))
    async with fetching(bucket) as worker:
        end = await fetched(worker)
        assert (end.outcome, end.nbytes) == (Outcome.OK, rig.FORMAT.object_bytes)
        assert bytes(worker.slot(3)) == rig.sealed(1)
        assert len(bucket.reads) == bucket.reads.total() == bucket.most == RANGES
        assert None not in bucket.reads


@pytest.mark.parametrize("range_bytes", [0, rig.FORMAT.object_bytes // 2 + 1])
async def test_a_small_object_comes_whole(bucket: Bucket, range_bytes: int) -> None:
    bucket.hold(KEY, rig.sealed(1))
    async with fetching(bucket, range_bytes=range_bytes) as worker:
        assert (await fetched(worker)).outcome is Outcome.OK
        assert bucket.reads == {None: 1}


@pytest.mark.parametrize("mode", ["xxh3", "none"])
@pytest.mark.parametrize("answered", range(1, RANGES))
async def test_an_object_that_is_replaced_meanwhile_is_never_mixed(
    bucket: Bucket, mode: Any, answered: int
) -> None:
    """With digests, and without: the two have one header then."""
    layout = ChunkFormat(rig.NAMESPACE.digest, rig.TENSORS, 0, rig.SHARD, Integrity(mode))

    def sealed(number: int) -> bytes:
        data = bytearray(layout.header_bytes) + rig.payload(number)
        layout.seal(Place.of(data, layout.header_bytes), rig.chunk(1).block_hash)
        return bytes(data)

    old, new = sealed(1), sealed(2)
    bucket.hold(KEY, old)
    bucket.after = [old] * (answered - 1) + [new]
    greeting = rig.handshake(Config(bucket="bkt"))
    greeting = msgspec.structs.replace(greeting, integrity=Integrity(mode))
    async with fetching(bucket, greeting=greeting) as worker:
        end = await fetched(worker)
        assert end.outcome is Outcome.OK, end.detail
        assert bytes(worker.slot(3)[: layout.object_bytes]) == new
        assert bucket.reads[None] == 1


@pytest.mark.parametrize("error", [StoreUnavailable("away"), StoreThrottled("SlowDown")])
async def test_a_range_that_fails_is_sent_again_alone(bucket: Bucket, error: Exception) -> None:
    bucket.hold(KEY, rig.sealed(1))
    first = cut(rig.FORMAT.object_bytes, RANGES, RANGE_BYTES)[2].start
    bucket.failures = {first: [error, error]}
    async with fetching(bucket) as worker:
        assert (await fetched(worker)).outcome is Outcome.OK
        assert bytes(worker.slot(3)) == rig.sealed(1)
        assert bucket.reads.pop(first) == 3
        assert set(bucket.reads.values()) == {1}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(StoreUnavailable("away"), Outcome.FAILED), (StoreDenied("no"), Outcome.DENIED)],
)
async def test_a_range_that_stays_away_ends_the_fetch(
    bucket: Bucket, error: Exception, outcome: Outcome
) -> None:
    bucket.hold(KEY, rig.sealed(1))
    bucket.failures = {0: [error] * 3}
    async with fetching(bucket) as worker:
        assert (await fetched(worker)).outcome is outcome
        bucket.failures.clear()
        assert (await fetched(worker)).outcome is Outcome.OK


async def test_a_server_that_tells_no_etag_is_not_read_twice_each_time(
    bucket: Bucket, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.hold(KEY, rig.sealed(1))
    told = bucket._told
    monkeypatch.setattr(bucket, "_told", lambda key: dataclasses.replace(told(key), etag=""))
    async with fetching(bucket) as worker:
        for _ in range(3):
            assert (await fetched(worker)).outcome is Outcome.OK
    assert (bucket.reads.pop(None), bucket.reads.total()) == (3, RANGES)
    assert "has no ETag" in caplog.text


LENGTHS = [3, 4096 * 3, rig.FORMAT.object_bytes - 1, rig.FORMAT.object_bytes + 1]


@pytest.mark.parametrize("nbytes", LENGTHS)
async def test_an_object_of_another_length(bucket: Bucket, nbytes: int) -> None:
    """That is not the fault of the store's ranges: the next object comes in some again."""
    bucket.hold(KEY, (rig.sealed(1) + b"x")[:nbytes])
    async with fetching(bucket) as worker:
        end = await fetched(worker)
        assert (end.outcome, end.reason) == (Outcome.CORRUPT, "length")
        bucket.reads.clear()
        assert (await worker.end_of(rig.fetch(4, number=4))).outcome is Outcome.MISSING
        assert None not in bucket.reads


@pytest.mark.parametrize("at", [100, rig.FORMAT.header_bytes, rig.FORMAT.object_bytes - 1])
async def test_the_second_reading_of_a_bad_object_is_whole(
    bucket: Bucket, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3kv.io.sources.quarantine.BARRED_S", 0.0)
    good = rig.sealed(1)
    bucket.hold(KEY, good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    async with fetching(bucket) as worker:
        for times in range(2):
            assert (await fetched(worker)).outcome is Outcome.CORRUPT
            assert bucket.reads[None] == times


def refuse_ranges(bucket: Bucket) -> None:
    firsts = [bounds.start for bounds in cut(rig.FORMAT.object_bytes, RANGES, RANGE_BYTES)]
    bucket.failures = {first: [StoreUnranged("200")] * 9 for first in firsts}


async def test_a_store_without_ranges_is_asked_for_none_again(bucket: Bucket) -> None:
    bucket.hold(KEY, rig.sealed(1))
    refuse_ranges(bucket)
    async with fetching(bucket) as worker:
        for _ in range(3):
            assert (await fetched(worker)).outcome is Outcome.OK
        assert bytes(worker.slot(3)) == rig.sealed(1)
        assert bucket.reads.pop(None) == 3
        assert set(bucket.reads.values()) <= {1}


@pytest.mark.parametrize("nbytes", [0, 1, rig.FORMAT.object_bytes])
async def test_a_bad_object_tells_of_a_store_without_ranges(bucket: Bucket, nbytes: int) -> None:
    """An empty one does not: it ends before the first range."""
    bucket.hold(KEY, (rig.sealed(1)[:-2] + b"xx")[:nbytes])
    refuse_ranges(bucket)
    async with fetching(bucket) as worker:
        assert (await fetched(worker)).outcome is Outcome.CORRUPT
        bucket.reads.clear()
        bucket.failures.clear()
        assert (await worker.end_of(rig.fetch(4, number=4))).outcome is Outcome.MISSING
        assert (None in bucket.reads) is (nbytes > 0)


async def test_a_cancelled_fetch_ends_after_its_ranges(bucket: Bucket) -> None:
    bucket.hold(KEY, rig.sealed(1))
    bucket.gate.clear()
    bucket.unwound.clear()
    async with fetching(bucket) as worker:
        worker.say(rig.fetch(3, number=1))
        await until(lambda: bucket.running == RANGES)
        worker.say(wire.Cancel(3))
        assert (await worker.settled()).running == RANGES
        bucket.unwound.set()
        assert (await worker.done(1))[3].outcome is Outcome.CANCELLED


async def test_ranges_take_places_of_the_window(bucket: Bucket) -> None:
    """Three fetches share eight of them. A fourth waits for the first range that ends."""
    bucket.gate.clear()
    async with fetching(bucket, max_inflight_requests=8) as worker:
        worker.say(*(rig.fetch(number) for number in range(3)))
        await until(lambda: bucket.running == 6)
        assert (await worker.settled()).running == 6
        worker.say(*(rig.fetch(number) for number in range(3, 7)))
        stats = await worker.settled()
        assert (stats.running, stats.waiting) == (8, 2)
        bucket.gate.set()
        assert {end.outcome for end in (await worker.done(7)).values()} == {Outcome.MISSING}
        assert bucket.most <= 8


async def test_a_late_range_is_hedged(bucket: Bucket) -> None:
    bucket.hold(KEY, rig.sealed(1))
    async with fetching(bucket, hedge_percent=100.0) as worker:
        for _ in range(8):  # until it is known what is late
            assert (await fetched(worker)).outcome is Outcome.OK
        worker.slot(3)[:] = bytes(rig.FORMAT.object_bytes)
        bucket.reads.clear()
        bucket.gate.clear()
        worker.say(rig.fetch(3, number=1))
        await until(lambda: bucket.reads.total() > RANGES)
        bucket.gate.set()
        assert (await worker.done(1))[3].outcome is Outcome.OK
        assert bytes(worker.slot(3)) == rig.sealed(1)
        assert (await worker.settled()).counters["io_hedges"] > 0
