"""Encrypted objects between a worker, and a bucket that waits, fails, or lies."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab import constants
from lab.memory_store import MemoryStore
from s3kv.config import KEYS_VARIABLE, Config
from s3kv.io.sources.bucket import RANGE_BYTES, BucketSource
from s3kv.io.sources.encrypted_store import EncryptedStore, encrypting
from s3kv.io.sources.transfer_job import TransferJob
from s3kv.messages import JobKind
from s3kv.objects import encryption, envelope
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.encryption import HEADER_BYTES, Keyring, encrypted_bytes
from s3kv.place import Place
from s3kv.stores.disk import Directory
from s3kv.stores.s3.s3_store import open_store
from s3kv.stores.store import ObjectStore
from s3kv.types import ItemShape, Outcome, TensorSpec
from s3kv.upkeep.refreshing import Refresher, RefreshRule
from tests import servers
from tests.system.forms import flipped
from tests.unit.io import compressed, rig, test_formats
from tests.unit.io.compressed import FORMAT
from tests.unit.io.rig import Worker
from tests.unit.io.sources import test_compressed_objects as objects
from tests.unit.io.sources import test_other_shards as shards
from tests.unit.io.sources.test_compressed_objects import fetched, uploaded
from tests.waiting import until

MASTER, OLD = bytes(range(32)), bytes(range(1, 33))
RING = Keyring([MASTER])
KEY = rig.object_key(1)
SEGMENT_BYTES = 2**14
PART_BYTES = 2**17
FORMS = objects.FORMS
PLAIN, STORED = objects.PLAIN, objects.STORED


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The master key of the processes, and segments of which these objects have many."""
    monkeypatch.setenv(KEYS_VARIABLE, MASTER.hex())
    with constants.changed(encrypted_segment_bytes=SEGMENT_BYTES):
        yield


def name_of(key: str, ring: Keyring = RING) -> str:
    return ring.forms(key)[0].key


def encrypted(data: bytes, key: str = KEY, ring: Keyring = RING) -> bytes:
    buffer = memoryview(bytearray(encrypted_bytes(len(data))))
    for _ in encrypting(ring.forms(key)[0], Place.of(data), buffer):
        pass
    return bytes(buffer)


class Bucket(objects.Bucket):
    """Holds objects encrypted; `after` as they are."""

    def hold(self, key: str, data: bytes) -> None:
        super().hold(name_of(key), encrypted(data, key))

    def raw(self, key: str = KEY) -> bytes:
        return self._objects[name_of(key)][0]

    def spoil(self, data: bytes, key: str = KEY) -> None:
        super().hold(name_of(key), data)


@contextlib.asynccontextmanager
async def serving(
    bucket: MemoryStore, range_bytes: int = 0, hedge_percent: float = 0.0, **settings: Any
) -> AsyncIterator[Worker]:
    settings = {"encryption": "aes-gcm", **settings}
    async with objects.serving(bucket, range_bytes, hedge_percent, **settings) as worker:
        yield worker


@pytest.mark.parametrize("mode", ["on", "off"])
async def test_a_chunk_is_stored_encrypted_and_comes_back(
    bucket: Bucket, mode: Any, range_bytes: int
) -> None:
    async with serving(bucket, range_bytes, compress=mode) as worker:
        assert (await uploaded(worker)).outcome is Outcome.OK
        assert [*bucket._objects] == [name_of(KEY)]
        assert (len(bucket.raw()) > FORMAT.object_bytes) == (mode == "off")
        assert PLAIN[-1000:] not in bucket.raw()
        for _ in range(3):
            assert (await fetched(worker)).outcome is Outcome.OK
        assert (await uploaded(worker)).outcome is Outcome.EXISTS
        assert (bucket.reads[None] == 0) == bool(range_bytes)
    async with serving(bucket, encryption="off") as worker:
        assert (await fetched(worker)).outcome is Outcome.MISSING


async def test_after_a_rotation_objects_of_both_keys_are_read(
    bucket: Bucket, range_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an object of the old key that is bad is replaced by one of the new key."""
    old = Keyring([OLD])
    bucket._objects[name_of(KEY, old)] = encrypted(STORED, ring=old), 0.0
    monkeypatch.setenv(KEYS_VARIABLE, f"{MASTER.hex()}\n{OLD.hex()}")
    async with serving(bucket, range_bytes) as worker:
        assert (await fetched(worker)).outcome is Outcome.OK
        bucket._objects[name_of(KEY, old)] = flipped(encrypted(STORED, ring=old)), 0.0
        assert (await fetched(worker)).reason == "encryption"
        assert (await uploaded(worker)).outcome is Outcome.OK
        assert (await fetched(worker)).outcome is Outcome.OK
        assert len(bucket._objects) == 2


async def test_the_disk_is_asked_first_and_holds_objects_encrypted(
    bucket: Bucket, tmp_path: Path, range_bytes: int
) -> None:
    """A bad file is deleted, the bucket is asked, and the file is written anew."""
    bucket.hold(KEY, STORED)
    where = {"disk_path": str(tmp_path / "cache"), "disk_bytes": 2**30}
    plain = Directory(tmp_path / "cache", "s3kv", 0)
    file = plain.file_of(name_of(KEY))
    async with serving(bucket, range_bytes, **where) as worker:
        await rig.counted(tmp_path / "cache")
        assert (await fetched(worker)).source == "bucket"
        await until(file.exists)
        right = file.read_bytes()
        assert (len(right), PLAIN[-100:] in right) == (encrypted_bytes(len(PLAIN)), False)
        assert (await fetched(worker)).source == "disk"
    async with serving(Bucket(), **where) as worker:
        assert (await fetched(worker)).source == "disk"
    bad = flipped(right)
    file.write_bytes(bad)
    async with serving(bucket, range_bytes, **where) as worker:
        assert (await fetched(worker)).source == "bucket"
        await until(lambda: content(file) not in (b"", bad))
        assert (await fetched(worker)).source == "disk"
        assert (await worker.settled()).counters["io_disk_corrupt"] == 1
    assert not plain.file_of(KEY).exists()


def content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:  # between two writings
        return b""


BAD: dict[str, Callable[[bytes], bytes]] = {
    "the header": lambda data: b"\xff" + data[1:],
    "the first segment": lambda data: (
        flipped(data[: HEADER_BYTES + 20]) + data[HEADER_BYTES + 20 :]
    ),
    "the last segment": lambda data: flipped(data[:-16]) + data[-16:],
    "another object": lambda data: encrypted(STORED, rig.object_key(2)),
    "another key": lambda data: encrypted(STORED, ring=Keyring([OLD])),
    "cut off": lambda data: data[: HEADER_BYTES + 2 * (SEGMENT_BYTES + 28)],
    "damaged inside": lambda data: encrypted(objects.BAD),
    "a length that none has": lambda data: data[: HEADER_BYTES + 10],
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("data", [PLAIN, STORED], ids=["plain", "compressed"])
async def test_a_bad_object_is_a_miss_until_it_is_replaced(
    bucket: Bucket, range_bytes: int, bad: str, data: bytes
) -> None:
    bucket.hold(KEY, data)
    bucket.spoil(BAD[bad](bucket.raw()))
    async with serving(bucket, range_bytes) as worker:
        # A damaged object inside has the reason of any other.
        reason = "digest" if bad == "damaged inside" else "encryption"
        await objects.check_replaced(worker, bucket, reason)
        bucket.reads.clear()
        assert (await fetched(worker)).outcome is Outcome.OK
        assert (bucket.reads[None] == 0) == bool(range_bytes), "ranges are given up for no reason"


class TestReads(objects.Reads):
    serving = staticmethod(serving)


@pytest.mark.parametrize("answered", [1, 3, 5])
@pytest.mark.parametrize("first", FORMS, ids=range(4))
async def test_an_object_that_is_replaced_between_ranges_is_never_mixed(
    bucket: Bucket, answered: int, first: bytes
) -> None:
    """`fetched` compares the slot with one of the two."""
    for then, data in FORMS.items():
        bucket.hold(KEY, first)
        bucket.reads.clear()
        bucket.after = [first] * (answered - 1) + [then]
        async with serving(bucket, PART_BYTES) as worker:
            assert (await worker.end_of(rig.fetch(1))).outcome is Outcome.OK
            assert compressed.slot(worker, 1)[FORMAT.header_bytes :] in (data, FORMS[first])


async def test_a_bad_object_is_no_answer_to_a_second_request(
    bucket: Bucket, range_bytes: int
) -> None:
    """It takes the place, and keeps it. The read that is late has no say."""
    bucket.hold(KEY, STORED)
    bucket.spoil(flipped(bucket.raw()))
    async with serving(bucket, range_bytes, hedge_percent=100.0) as worker:
        bucket.late = 1
        assert (await fetched(worker)).reason == "encryption"
        assert bucket.landed == [None]


LARGE = ChunkFormat(
    rig.NAMESPACE.digest, (TensorSpec("g0", "BF16", (5 * 2**20 + 77,)),), 0, rig.SHARD
)
"""Of ten segments and some bytes, in up to two ranges."""
LARGE_DATA = compressed.payload(3, LARGE.payload_bytes)


@contextlib.asynccontextmanager
async def opened(url: str, mode: Any) -> AsyncIterator[tuple[ObjectStore, BucketSource]]:
    """The bucket of a server behind three network threads, encrypted."""
    config = Config(bucket=servers.BUCKET, endpoint_url=url)
    with constants.changed(network_threads=3, hedge_percent=100.0):
        store = EncryptedStore(open_store(config), RING)
        async with compressed.source_of(store, config, mode, pads=True) as source:
            yield store, source


@pytest.mark.parametrize("mode", ["on", "off"])
@pytest.mark.parametrize("adjoins", [True, False], ids=["one buffer", "two buffers"])
async def test_ranges_of_four_mebibytes_by_network_threads(
    moto_url: str, mode: Any, monkeypatch: pytest.MonkeyPatch, *, adjoins: bool
) -> None:
    """They are written and read whole, and broken off at any moment."""
    servers.set_credentials(monkeypatch)
    assert LARGE.object_bytes // RANGE_BYTES == 2
    with constants.changed(encrypted_segment_bytes=2**20):
        async with opened(moto_url, mode) as (store, source):
            place = place_of(LARGE, adjoins=adjoins)
            place.payload[:] = LARGE_DATA
            key, block_hash = rig.object_key(4 + 2 * adjoins + (mode == "on")), b"hash"
            job = TransferJob(1, JobKind.UPLOAD, key, block_hash, LARGE, place)
            assert (await source.upload(job)).outcome is Outcome.OK
            info = await store.head(key)
            assert (info.nbytes < LARGE.object_bytes) == (mode == "on")
            job = replace(job, kind=JobKind.FETCH)
            before = store.traffic.requests["GET|2xx"]
            await check_fetch(source, job)
            assert 2 <= store.traffic.requests["GET|2xx"] - before <= 4  # two may be late
            for pause_ms in (0, 1, 2, 4, 7, 11, 16, 22, 30):
                task = asyncio.ensure_future(source.fetch(job))
                await asyncio.sleep(pause_ms / 1e3)
                task.cancel()
                await asyncio.wait([task])
                place.payload[:] = bytes(len(place.payload))
                await asyncio.sleep(0.002)
                assert not any(bytes(place.payload)), f"written after {pause_ms} ms"
            await check_fetch(source, job)


def place_of(form: ChunkFormat, *, adjoins: bool) -> Place:
    if adjoins:
        return Place.of(bytearray(form.object_bytes), form.header_bytes)
    return compressed.apart(form)


async def check_fetch(source: BucketSource, job: TransferJob) -> None:
    job.place.payload[:] = bytes(len(job.place.payload))
    end = await source.fetch(job)
    assert (end.outcome, end.nbytes) == (Outcome.OK, LARGE.object_bytes), end.detail
    assert job.place.payload == LARGE_DATA


@pytest.mark.parametrize("range_bytes", [0, SEGMENT_BYTES])
@pytest.mark.parametrize(("shard", "others"), shards.SIZES)
async def test_it_is_put_together_of_what_others_have_stored(
    shard: Any, others: Any, range_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envelope, "LEAST_PAYLOAD_BYTES", 0)
    bucket = shards.Bucket()
    store = EncryptedStore(bucket, RING)
    for other in others:
        key = shards.key(other)
        data = shards.stored(other, shrunk=other is others[0])
        await store.put(key, Place.of(data), if_absent=True)
        await bucket.mark(other)
    how = {"range_bytes": range_bytes, "encryption": "aes-gcm"}
    async with shards.reading(bucket, shard, **how) as reader:
        end = await reader.fetch()
        assert (end.outcome, end.source) == (Outcome.OK, "other_shards")
        assert bytes(reader.slot(0)) == shards.stored(shard)
        name = name_of(key)
        bucket.hold(name, flipped(bucket._objects[name][0]))
        for _ in range(2):
            assert (await reader.fetch()).outcome is Outcome.MISSING
            assert reader.is_untouched()
        assert name in bucket._objects


async def test_items_come_back_shorter_than_their_places() -> None:
    bucket = MemoryStore()
    greeting = test_formats.worker_greeting(encryption="aes-gcm")
    block_hash, shape, payload = test_formats.item(1)
    most = ItemShape(shape.rows, test_formats.ROOM)
    begin = shape.nbytes - len(payload)
    how = {"greeting": greeting, "slab_bytes": 8 * test_formats.ROOM}
    async with rig.serving(bucket, **how) as (worker, _):
        worker.slab.view[begin : shape.nbytes] = payload
        upload = test_formats.job(JobKind.UPLOAD, 1, block_hash, 0, shape)
        assert (await worker.end_of(upload)).outcome is Outcome.OK
        ((name, (data, _)),) = bucket._objects.items()
        assert encryption.decrypted_bytes(len(data)) == shape.nbytes
        for stored, outcome in ((data, Outcome.OK), (flipped(data), Outcome.CORRUPT)):
            bucket.hold(name, stored)
            worker.slab.view[:] = bytes(worker.slab.nbytes)
            end = await worker.end_of(test_formats.job(JobKind.FETCH, 2, block_hash, 0, most))
            assert end.outcome is outcome
            assert end.reason == ("" if outcome is Outcome.OK else "encryption")
            assert (worker.slab.view[begin : shape.nbytes] == payload) or end.reason


@pytest.mark.parametrize("is_old", [False, True], ids=["new key", "old key"])
async def test_uses_renew_the_encrypted_object(*, is_old: bool) -> None:
    now_s = 1e9
    bucket = MemoryStore(lambda: now_s)
    store = EncryptedStore(bucket, Keyring([MASTER, OLD]))
    ring = Keyring([OLD]) if is_old else RING
    bucket.hold(name_of(KEY, ring), encrypted(STORED, ring=ring))
    now_s += 2000.0

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(0)

    refresher = Refresher(store, RefreshRule(1000.0, random.Random(0)), lambda: True, sleep=sleep)
    answers: list[Outcome] = []
    for number in (1, 2):
        refresher.use(rig.object_key(number), lambda outcome, fresh_s: answers.append(outcome))
    tasks = [asyncio.ensure_future(work()) for work in (refresher.look, refresher.run)]
    await until(lambda: refresher.done and len(answers) == 2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert answers == [Outcome.EXISTS, Outcome.MISSING]
    assert (refresher.done, refresher.failed, refresher.skipped) == (1, 0, 0)
    assert [modified_s for _, modified_s in bucket._objects.values()] == [now_s]
