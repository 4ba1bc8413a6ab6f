"""Objects that are not what their key says: a miss, told by reason, and replaced.

And objects whose header and payload lie apart."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
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
from s3kv.stores.store import Claim, ObjectInfo
from s3kv.types import ItemShape, Outcome, TensorSpec
from s3kv.upkeep.refreshing import Refresher, RefreshRule
from tests import servers
from tests.unit.io import rig
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
        self, key: str, place: Place, claim: Claim | None = None
    ) -> ObjectInfo | None:
        if self.lies:
            await self.begin("get_into", key)
            lie = self.lies.pop(0)
            place.write(lie[: place.nbytes])
            return ObjectInfo(key, len(lie), 0.0)
        return await super().get_into(key, place, claim)

    @property
    def objects_asked(self) -> dict[str, int]:
        """Calls for objects, by verb."""
        return {verb: n for verb, n in self.asked.items() if verb not in ("check", "close")}


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


@pytest.fixture
async def worker(bucket: Bucket) -> AsyncIterator[Worker]:
    async with rig.serving(bucket) as (worker, _):
        yield worker


@pytest.fixture(scope="module")
def moto_url() -> Iterator[str]:
    with servers.moto_server() as url:
        yield url


def apart(form: ChunkFormat | ItemFormat) -> Place:
    """Memory for an object of this format that is not the slab's, in two pieces."""
    payload_bytes = form.object_bytes - form.header_bytes
    return Place(memoryview(bytearray(form.header_bytes)), memoryview(bytearray(payload_bytes)))


ITEM = ItemFormat("0" * 32, "BF16", ItemShape(9, object_bytes("BF16", 9, 40_000)))
LARGE = ChunkFormat("0" * 32, (TensorSpec("g0", "U8", (SEGMENT_BYTES + 5,)),), 0, "whole")


@pytest.mark.parametrize("client", ["fast", "aiobotocore"])
@pytest.mark.parametrize("form", [rig.FORMAT, LARGE, ITEM], ids=["chunk", "segments", "item"])
@pytest.mark.parametrize("range_bytes", [0, 2**20])
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
    config = Config(bucket=servers.BUCKET, endpoint_url=moto_url, client=client)
    store, rng = open_store(config), random.Random(1)
    refresher = Refresher(store, RefreshRule(math.inf, rng), lambda: False)
    bucket = source.BucketSource(
        store, config, refresher, lambda count: nullcontext((max(0, count), lambda: None)), rng
    )
    key = f"apart/{client}-{range_bytes}-{form.object_bytes}"
    written, read = apart(form), apart(form)
    written.payload[:] = rng.randbytes(len(written.payload))
    job = TransferJob(1, JobKind.UPLOAD, key, b"hash", form, written)
    assert (await bucket.upload(job)).outcome is Outcome.OK
    end = await bucket.fetch(replace(job, kind=JobKind.FETCH, place=read))
    assert (end.outcome, end.nbytes) == (Outcome.OK, form.object_bytes)
    assert bytes(read) == bytes(written)
    assert form.check(Place.of(bytes(read), form.header_bytes), read.nbytes, b"hash") is None
    read.payload[0] ^= 1
    assert form.check(read, read.nbytes, b"hash") == "digest"
    await store.close()


async def fetch(worker: Worker) -> JobEnd:
    worker.say(rig.fetch(3, number=1))
    return (await worker.done(1))[3]


async def upload(worker: Worker) -> Outcome:
    worker.fill(1, number=1)
    worker.say(rig.upload(1))
    return (await worker.done(1))[1].outcome


BAD_OBJECTS: dict[str, bytes] = {
    "length": GOOD[:-1],
    "header": b"\xff" * len(GOOD),
    "version": GOOD.replace(b'"s3kv.format":"2"', b'"s3kv.format":"9"'),
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
    assert set(BAD_OBJECTS) == set(get_args(Mismatch))


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
