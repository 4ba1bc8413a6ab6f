"""What is a job and what is none; items of unequal length, beside each other in one slab."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lab.memory_store import MemoryStore
from s3kv.config import Config
from s3kv.host.slab import Slab
from s3kv.io import wire
from s3kv.io.client import IoClient
from s3kv.io.formats import Formats
from s3kv.io.server.process import serve
from s3kv.objects.item_format import HEADER_BYTES, SHARD, object_bytes
from s3kv.types import ChunkKey, ItemShape, Outcome
from tests.unit.io import rig
from tests.unit.io.rig import NAMESPACE, Worker

ROOM = 2**18


@pytest.fixture
async def worker(slab: Slab, store: MemoryStore) -> AsyncIterator[Worker]:
    ours, theirs = socket.socketpair()
    serving = asyncio.ensure_future(serve(theirs, slab, lambda _: store, rng=random.Random(0)))
    worker = Worker(*await asyncio.open_unix_connection(sock=ours))
    prefix, digest = NAMESPACE.prefix, NAMESPACE.digest
    worker.say(wire.Handshake(Config(bucket="bkt"), prefix, digest, SHARD, {}, item_dtype="BF16"))
    assert (await worker.hear()).serving
    yield worker
    worker.hang_up()
    await asyncio.wait_for(asyncio.wait([serving]), 5)


@pytest.fixture
def slab() -> Slab:
    return Slab.create(8 * ROOM)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def item(number: int) -> tuple[bytes, ItemShape, bytes]:
    rows = 10 + number
    shape = ItemShape(rows, object_bytes("BF16", rows, 40 + 8 * number))
    payload = random.Random(number).randbytes(shape.nbytes - HEADER_BYTES)
    return number.to_bytes(32, "big"), shape, payload


async def test_items_of_all_sizes_go_and_come_back(worker: Worker, slab: Slab) -> None:
    items = [item(number) for number in range(4)]
    for number, (block_hash, shape, payload) in enumerate(items):
        at = number * ROOM
        slab.view[at + HEADER_BYTES : at + shape.nbytes] = payload
        worker.say(wire.Upload(number, 0, block_hash, at, shape))
    assert {d.outcome for d in (await worker.done(4)).values()} == {Outcome.OK}
    slab.view[:] = bytes(slab.nbytes)
    for number, (block_hash, shape, _) in enumerate(items):
        most = ItemShape(shape.rows, ROOM)  # the width is not known
        worker.say(wire.Fetch(number, 0, block_hash, number * ROOM, most))
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
    worker.say(wire.Upload(1, 0, block_hash, 0, shape))
    await worker.done(1)
    assert await store.head(NAMESPACE.chunk(ChunkKey(0, block_hash), SHARD)) is not None
    guard = bytes(slab.view[3 * ROOM :])
    worker.say(wire.Fetch(2, 0, block_hash, ROOM, ItemShape(shape.rows + 1, ROOM)))
    assert (await worker.done(1))[2].outcome is Outcome.CORRUPT
    worker.say(wire.Fetch(3, 0, block_hash, 2 * ROOM, ItemShape(shape.rows, shape.nbytes - 1)))
    assert (await worker.done(1))[3].outcome is not Outcome.OK
    assert slab.view[3 * ROOM :] == guard, "nothing is written behind the room"
    worker.say(wire.Fetch(4, 0, block_hash, slab.nbytes - 4096, ItemShape(shape.rows, ROOM)))
    assert (await worker.done(1))[4].outcome is Outcome.INVALID


# ---- what is checked at the call


NOT_JOBS: dict[str, tuple[type[Exception], tuple[Any, ...]]] = {
    "a string": (TypeError, (1, ChunkKey(0, "a string"), 0)),  # type: ignore[arg-type]
    "a bytearray": (TypeError, (1, ChunkKey(0, bytearray(32)), 0)),  # type: ignore[arg-type]
    "nothing": (ValueError, (1, ChunkKey(0, b""), 0)),
    "65 bytes": (ValueError, (1, ChunkKey(0, b"x" * 65), 0)),
    "no such group": (ValueError, (1, ChunkKey(1, b"x" * 32), 0)),
    "before the slab": (ValueError, (1, ChunkKey(0, b"x" * 32), -4096)),
    "beyond the slab": (ValueError, (1, ChunkKey(0, b"x" * 32), 8 * ROOM - 4096)),
    "no number": (TypeError, (1, ChunkKey(0, b"x" * 32), 0.5)),
    "no job id": (TypeError, ("1", ChunkKey(0, b"x" * 32), 0)),
    "an item": (ValueError, (1, ChunkKey(0, b"x" * 32), 0, ItemShape(1, 8192))),
}


@pytest.mark.parametrize("what", NOT_JOBS)
def test_what_is_no_job_is_refused_at_the_call(what: str, slab: Slab) -> None:
    error, arguments = NOT_JOBS[what]
    client = IoClient(rig.handshake(Config(bucket="bkt")), slab)
    for order in (client.fetch, client.upload):
        with pytest.raises(error):
            order(*arguments)
    assert client.outstanding == 0
    client.close()


ITEMS = wire.Handshake(Config(bucket="bkt"), "s3kv", "0" * 32, "encoder", {}, item_dtype="BF16")


@pytest.mark.parametrize(
    ("shape", "is_fetchable"),
    [((0, 8192), False), ((1, 4096), False), ((-1, 8192), False), ((3, 4096 + 7), True)],
)
def test_what_is_no_item_is_refused_at_the_call(shape: tuple[int, int], is_fetchable: bool) -> None:
    formats = Formats(ITEMS, 2**20)
    with pytest.raises(ValueError, match="item"):
        formats.of(wire.Upload(1, 0, b"x" * 32, 0, ItemShape(*shape)))
    fetch = wire.Fetch(1, 0, b"x" * 32, 0, ItemShape(*shape))
    if is_fetchable:
        assert formats.of(fetch).object_bytes == shape[1], "so long at most"
    else:
        with pytest.raises(ValueError, match="item"):
            formats.of(fetch)
