"""What is a job and what is none; items of unequal length, beside each other in one slab."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lab.memory_store import MemoryStore
from s3kv.config import Config
from s3kv.host.room import PAGE_BYTES
from s3kv.host.slab import Slab
from s3kv.io import wire
from s3kv.io.formats import Formats
from s3kv.messages import BucketJob, JobKind
from s3kv.objects.item_format import HEADER_BYTES, SHARD, object_bytes
from s3kv.types import ChunkKey, ItemShape, Outcome
from tests.unit.io.rig import NAMESPACE, Worker, serving

ROOM = 2**18


def worker_greeting(**settings: Any) -> wire.Handshake:
    config = Config(bucket="bkt", **settings)
    return wire.Handshake(config, NAMESPACE.prefix, NAMESPACE.digest, SHARD, {}, item_dtype="BF16")


@pytest.fixture
async def worker(store: MemoryStore) -> AsyncIterator[Worker]:
    async with serving(store, greeting=worker_greeting(), slab_bytes=8 * ROOM) as (worker, _):
        yield worker


@pytest.fixture
def slab(worker: Worker) -> Slab:
    return worker.slab


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def item(number: int) -> tuple[bytes, ItemShape, bytes]:
    rows = 10 + number
    shape = ItemShape(rows, object_bytes("BF16", rows, 40 + 8 * number))
    payload = random.Random(number).randbytes(shape.nbytes - HEADER_BYTES)
    return number.to_bytes(32, "big"), shape, payload


def job(kind: JobKind, job_id: int, block_hash: bytes, offset: int, shape: ItemShape) -> BucketJob:
    return BucketJob(job_id, kind, ChunkKey(0, block_hash), offset // PAGE_BYTES, shape)


async def test_items_of_all_sizes_go_and_come_back(worker: Worker, slab: Slab) -> None:
    items = [item(number) for number in range(4)]
    for number, (block_hash, shape, payload) in enumerate(items):
        at = number * ROOM
        slab.view[at + HEADER_BYTES : at + shape.nbytes] = payload
        worker.say(job(JobKind.UPLOAD, number, block_hash, at, shape))
    assert {d.outcome for d in (await worker.done(4)).values()} == {Outcome.OK}
    slab.view[:] = bytes(slab.nbytes)
    for number, (block_hash, shape, _) in enumerate(items):
        most = ItemShape(shape.rows, ROOM)  # the width is not known
        worker.say(job(JobKind.FETCH, number, block_hash, number * ROOM, most))
    for number, done in (await worker.done(4)).items():
        _, shape, payload = items[number]
        assert (done.outcome, done.nbytes) == (Outcome.OK, shape.nbytes)
        at = number * ROOM
        assert slab.view[at + HEADER_BYTES : at + shape.nbytes] == payload


async def test_an_item_with_other_rows_or_no_room_is_refused(
    worker: Worker, slab: Slab, store: MemoryStore
) -> None:
    block_hash, shape, payload = item(1)
    slab.view[HEADER_BYTES : shape.nbytes] = payload
    await worker.end_of(job(JobKind.UPLOAD, 1, block_hash, 0, shape))
    assert await store.head(NAMESPACE.chunk(ChunkKey(0, block_hash), SHARD)) is not None
    guard = bytes(slab.view[3 * ROOM :])
    more_rows = job(JobKind.FETCH, 2, block_hash, ROOM, ItemShape(shape.rows + 1, ROOM))
    assert (await worker.end_of(more_rows)).outcome is Outcome.CORRUPT
    short = job(JobKind.FETCH, 3, block_hash, 2 * ROOM, ItemShape(shape.rows, shape.nbytes - 1))
    assert (await worker.end_of(short)).outcome is not Outcome.OK
    assert slab.view[3 * ROOM :] == guard, "nothing is written behind the room"
    last = job(JobKind.FETCH, 4, block_hash, slab.nbytes - 4096, ItemShape(shape.rows, ROOM))
    assert (await worker.end_of(last)).outcome is Outcome.INVALID


@pytest.mark.parametrize(
    ("shape", "is_fetchable"),
    [((0, 8192), False), ((1, 4096), False), ((-1, 8192), False), ((3, 4096 + 7), True)],
)
def test_what_is_no_item_is_refused(shape: tuple[int, int], is_fetchable: bool) -> None:
    formats = Formats(worker_greeting(), 2**20)
    with pytest.raises(ValueError, match="item"):
        formats.of(job(JobKind.UPLOAD, 1, b"x" * 32, 0, ItemShape(*shape)))
    fetch = job(JobKind.FETCH, 1, b"x" * 32, 0, ItemShape(*shape))
    if is_fetchable:
        assert formats.of(fetch)[1] == slice(0, shape[1]), "so long at most"
    else:
        with pytest.raises(ValueError, match="item"):
            formats.of(fetch)
