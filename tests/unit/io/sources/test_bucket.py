"""Objects that are not what their key says: a miss, told by reason, and replaced.

And objects whose header and payload lie apart."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, get_args

import pytest

from lab.memory_store import MemoryStore
from s3kv.config import Config
from s3kv.io.sources import bucket as source
from s3kv.io.sources.quarantine import BARRED_S
from s3kv.io.sources.transfer_job import TransferJob
from s3kv.messages import JobEnd, JobKind
from s3kv.objects.codec import SEGMENT_BYTES, ChunkFormat
from s3kv.objects.headers import Mismatch
from s3kv.objects.item_format import ItemFormat, object_bytes
from s3kv.place import Place
from s3kv.stores.s3.s3_store import open_store
from s3kv.stores.store import ObjectInfo, ObjectStore, Receiver, landing
from s3kv.types import ItemShape, Outcome, TensorSpec
from tests import servers
from tests.unit.io import compressed, rig
from tests.unit.io.rig import Worker

KEY = rig.object_key(1)
GOOD = rig.sealed(1)
BAD = GOOD[:-1] + bytes([GOOD[-1] ^ 1])
ANOTHER = rig.sealed(2)
"""A good object, of another chunk."""


class Bucket(MemoryStore):
    """lies: answers to the next reads, instead of the object."""

    def __init__(self) -> None:
        super().__init__()
        self.lies: list[bytes] = []

    def held(self) -> bytes | None:
        return self._objects[KEY][0] if KEY in self._objects else None

    async def get_into(
        self, key: str, place: Place, receiver: Receiver | None = None, first: int | None = None
    ) -> ObjectInfo | None:
        if self.lies:
            await self.begin("get_into", key)
            lie = self.lies.pop(0)
            memory = landing(place, receiver, len(lie), len(lie))
            if memory is not None:
                memory.write(lie)
            return ObjectInfo(key, len(lie), 0.0)
        return await super().get_into(key, place, receiver, first)

    @property
    def objects_asked(self) -> dict[str, int]:
        """Calls for objects, by verb."""
        return {verb: n for verb, n in self.asked.items() if verb not in ("check", "close")}


@pytest.fixture
async def worker(bucket: Bucket) -> AsyncIterator[Worker]:
    async with rig.serving(bucket) as (worker, _):
        yield worker


ITEM = ItemFormat("0" * 32, "BF16", ItemShape(9, object_bytes("BF16", 9, 40_000)))
LARGE = ChunkFormat("0" * 32, (TensorSpec("g0", "U8", (SEGMENT_BYTES + 5,)),), 0, "whole")


def payload(form: ChunkFormat | ItemFormat) -> bytes:
    """Bytes that shrink, if the format has a compressed form."""
    make = compressed.payload if form is compressed.FORMAT else random.Random(1).randbytes
    return make(form.object_bytes - form.header_bytes)


@contextlib.asynccontextmanager
async def opened(
    url: str, client: Any, **how: Any
) -> AsyncIterator[tuple[ObjectStore, source.BucketSource]]:
    """The bucket of a server. how: of `compressed.source_of`."""
    config = Config(bucket=servers.BUCKET, endpoint_url=url, client=client)
    store = open_store(config)
    async with compressed.source_of(store, config, **how) as bucket:
        yield store, bucket


FORMS = [rig.FORMAT, LARGE, ITEM, compressed.FORMAT]
CLIENTS = pytest.mark.parametrize("client", ["fast", "aiobotocore"])


@CLIENTS
@pytest.mark.parametrize("form", FORMS, ids=["chunk", "segments", "item", "compressed"])
@pytest.mark.parametrize("range_bytes", [0, 2**17, 2**20])
async def test_header_and_payload_in_memory_of_their_own(
    client: Any,
    form: ChunkFormat | ItemFormat,
    range_bytes: int,
    moto_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From two buffers into two others, as one object between them, and whole or in ranges."""
    servers.set_credentials(monkeypatch)
    monkeypatch.setattr(source, "RANGE_BYTES", range_bytes)
    async with opened(moto_url, client) as (store, bucket):
        key = f"apart/{client}-{range_bytes}-{form.object_bytes}"
        written, read = compressed.apart(form), compressed.apart(form)
        written.payload[:] = payload(form)
        job = TransferJob(1, JobKind.UPLOAD, key, b"hash", form, written)
        end = await bucket.upload(job)
        assert (end.outcome, end.nbytes) == (Outcome.OK, form.object_bytes)
        info = await store.head(key)
        assert (info.nbytes < form.object_bytes) == (form is compressed.FORMAT)
        end = await bucket.fetch(replace(job, kind=JobKind.FETCH, place=read))
        assert (end.outcome, end.nbytes) == (Outcome.OK, form.object_bytes)
        assert bytes(read.payload) == bytes(written.payload)
        if form is not compressed.FORMAT:  # its header is not asked for
            assert bytes(read) == bytes(written)
            whole = Place.of(bytes(read), form.header_bytes)
            assert form.check(whole, read.nbytes, b"hash") is None
            read.payload[0] ^= 1
            assert form.check(read, read.nbytes, b"hash") == "digest"


@CLIENTS
@pytest.mark.parametrize("places", range(1, 6))
async def test_objects_of_both_forms_in_any_order(
    client: Any, places: int, moto_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranges are those of the last one's length. Some begin beyond the end of this one."""
    servers.set_credentials(monkeypatch)
    monkeypatch.setattr(source, "HEDGE_PERCENT", 0.0)
    monkeypatch.setattr(source, "RANGE_BYTES", 2**16)
    async with opened(moto_url, client, places=places) as (store, bucket):
        for number in range(8):
            data = compressed.payload(number)
            form = compressed.stored if number in (1, 2, 5, 6) else compressed.plain
            key = f"forms/{client}-{places}-{number}"
            await store.put(key, Place.of(form(data)), if_absent=True)
            place, block_hash = compressed.apart(compressed.FORMAT), rig.chunk(1).block_hash
            job = TransferJob(1, JobKind.FETCH, key, block_hash, compressed.FORMAT, place)
            for _ in range(2 if number == 6 else 1):
                end = await bucket.fetch(job)
                assert (end.outcome, end.nbytes) == (Outcome.OK, compressed.FORMAT.object_bytes)
                assert bytes(place.payload) == data
        requests = store.traffic.requests
        assert requests["GET|2xx"] + requests["GET|4xx"] == 9 * (1 + places), "all in ranges"
        assert (requests["GET|4xx"] > 0) == (places > 2)


async def fetch(worker: Worker) -> JobEnd:
    return await worker.end_of(rig.fetch(3, number=1))


async def upload(worker: Worker) -> Outcome:
    worker.fill(1, number=1)
    return (await worker.end_of(rig.upload(1))).outcome


BAD_OBJECTS: dict[str, bytes] = {
    "length": GOOD[:-1],
    "header": b"\xff" * len(GOOD),
    "version": GOOD.replace(b'"s3kv.format":"3"', b'"s3kv.format":"9"'),
    "namespace": GOOD.replace(rig.NAMESPACE.digest.encode(), b"f" * 32),
    "coverage": GOOD.replace(b'"s3kv.coverage":"0"', b'"s3kv.coverage":"1"'),
    "shard": GOOD.replace(b"h0-7of8-l0-31of32", b"h4-7of8-l0-31of32"),
    "block_hash": ANOTHER,
    "blocks": GOOD.replace(b'"s3kv.first_block":"0"', b'"s3kv.first_block":"7"'),
    "tensors": GOOD.replace(b"layer.0", b"layer.9"),
    "algorithm": GOOD.replace(b"xxh3-128", b"xxh3-999"),
    "digest": BAD,
}


def test_every_reason_is_tried() -> None:
    others = {"codec", "encryption"}  # not bad; and bad to a store that decrypts alone
    assert set(BAD_OBJECTS) == set(get_args(Mismatch)) - others


@pytest.mark.parametrize("reason", BAD_OBJECTS)
async def test_a_bad_object_is_a_miss_with_its_reason_and_not_read_again(
    worker: Worker, bucket: Bucket, reason: str
) -> None:
    bucket.hold(KEY, BAD_OBJECTS[reason])
    end = await fetch(worker)
    assert (end.outcome, end.nbytes, end.reason) == (Outcome.CORRUPT, 0, reason)
    assert KEY in end.detail
    for _ in range(3):
        end = await fetch(worker)
        assert (end.outcome, end.nbytes, end.reason) == (Outcome.MISSING, 0, "quarantined")
    assert bucket.objects_asked == {"get_into": 1}
    assert bucket.held() == BAD_OBJECTS[reason]


@pytest.mark.parametrize("reason", BAD_OBJECTS)
async def test_the_next_upload_replaces_it(worker: Worker, bucket: Bucket, reason: str) -> None:
    bucket.hold(KEY, BAD_OBJECTS[reason])
    await fetch(worker)
    assert await upload(worker) is Outcome.OK
    assert (await fetch(worker)).outcome is Outcome.OK
    assert bytes(worker.slot(3)) == GOOD == bucket.held()
    assert bucket.objects_asked == {"get_into": 2, "put": 1}


async def test_a_good_reading_after_a_while_clears_it(
    worker: Worker, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.hold(KEY, GOOD)
    bucket.lies = [BAD]
    assert (await fetch(worker)).outcome is Outcome.CORRUPT
    now_s = source.now_s
    monkeypatch.setattr(source, "now_s", lambda: now_s() + BARRED_S - 10.0)
    assert (await fetch(worker)).reason == "quarantined"
    monkeypatch.setattr(source, "now_s", lambda: now_s() + BARRED_S)
    assert (await fetch(worker)).outcome is Outcome.OK
    assert await upload(worker) is Outcome.EXISTS


async def test_one_that_is_gone_is_written_as_a_new_one(
    worker: Worker, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.lies = [BAD]
    assert (await fetch(worker)).outcome is Outcome.CORRUPT
    now_s = source.now_s
    monkeypatch.setattr(source, "now_s", lambda: now_s() + BARRED_S)
    assert (await fetch(worker)).reason == ""
    bucket.hold(KEY, GOOD)
    assert await upload(worker) is Outcome.EXISTS
