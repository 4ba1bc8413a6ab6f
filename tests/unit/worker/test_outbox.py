"""The outbox, with a real I/O process and an S3 server."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from s3kv.config import Config
from s3kv.host.slab import Slab
from s3kv.io.client import IoClient
from s3kv.io.wire import Handshake
from s3kv.objects.item_format import HEADER_BYTES, SHARD, ItemFormat, object_bytes
from s3kv.objects.keys import Namespace
from s3kv.place import Place
from s3kv.types import ChunkKey, ItemShape, Outcome, Span
from s3kv.worker.outbox import Outbox
from tests.servers import BUCKET, KEYS, boto_client, set_credentials

MIB = 2**20
NAMESPACE = Namespace("s3kv", "0123456789abcdef" * 2)
WAIT_S = 250.0


class Copied:
    def synchronize(self) -> None:
        return


class Held:
    """A copy that is over when the test says so."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def synchronize(self) -> None:
        assert self.over.wait(WAIT_S)


class Broken:
    def synchronize(self) -> None:
        raise RuntimeError("the device failed")


@pytest.fixture
def open_outbox(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Outbox]]:
    set_credentials(monkeypatch)
    opened: list[Outbox] = []

    def open_outbox(nbytes: int = MIB, **settings: Any) -> Outbox:
        config = Config(**{"bucket": BUCKET, "endpoint_url": moto_url, **settings})
        slab = Slab.create(nbytes)
        handshake = Handshake(
            config, NAMESPACE.prefix, NAMESPACE.digest, SHARD, {}, item_dtype="BF16"
        )
        client = IoClient(handshake, slab)
        client.start()
        client.wait_ready(WAIT_S)
        opened.append(Outbox(client, slab, time.monotonic))
        return opened[-1]

    yield open_outbox
    for outbox in opened:
        outbox.close(0.0)


def key(number: int) -> ChunkKey:
    return ChunkKey(0, number.to_bytes(32, "big"))


def put(outbox: Outbox, number: int, rows: int = 10, copy: Any = None) -> Span | None:
    shape = ItemShape(rows, object_bytes("BF16", rows, 64))
    span = outbox.place(shape.nbytes)
    if span is not None:
        payload = random.Random(number).randbytes(shape.nbytes - HEADER_BYTES)
        outbox.view[span.offset + HEADER_BYTES : span.offset + shape.nbytes] = payload
        outbox.send(key(number), span, shape, copy or Copied())
    return span


def ends(outbox: Outbox, count: int) -> tuple[Counter[str], set[ChunkKey]]:
    counters: Counter[str] = Counter()
    uploaded: set[ChunkKey] = set()
    ended_as = [f"upload_{outcome.name.lower()}" for outcome in Outcome]
    while sum(counters[name] for name in ended_as) < count:
        ended = outbox.take_ends()
        counters.update(ended.counters)
        uploaded.update(ended.uploaded)
        time.sleep(0.005)
    return counters, uploaded


def test_items_reach_the_bucket_without_anybody_asking(
    open_outbox: Callable[..., Outbox], moto_url: str
) -> None:
    outbox, bucket = open_outbox(), boto_client(moto_url, KEYS)
    for number in range(5):
        assert put(outbox, number, rows=10 + number) is not None
    counters, uploaded = ends(outbox, 5)
    assert counters["upload_ok"] == 5
    assert uploaded == {key(n) for n in range(5)}
    for number in range(5):
        name = NAMESPACE.chunk(key(number), SHARD)
        data = bytearray(bucket.get_object(Bucket=BUCKET, Key=name)["Body"].read())
        form = ItemFormat(NAMESPACE.digest, "BF16", ItemShape(10 + number, len(data)))
        assert (
            form.check(Place.of(data, form.header_bytes), len(data), key(number).block_hash) is None
        )
        assert data[HEADER_BYTES:] == random.Random(number).randbytes(len(data) - HEADER_BYTES)
    assert put(outbox, 0, rows=10) is not None
    assert ends(outbox, 1)[0]["upload_exists"] == 1


def test_what_finds_no_room_is_dropped_and_room_comes_back(
    open_outbox: Callable[..., Outbox],
) -> None:
    outbox, held = open_outbox(), Held()
    count = 0
    while put(outbox, 100 + count, rows=1_000, copy=held) is not None:
        count += 1
    assert count > 1
    assert outbox.take_ends().counters == {}, "an item whose copy is not over is not sent"
    held.over.set()
    ends(outbox, count)
    assert put(outbox, 200, rows=1_000) is not None
    ends(outbox, 1)
    assert outbox.place(2 * MIB) is None


def test_a_copy_that_fails_is_not_sent(open_outbox: Callable[..., Outbox]) -> None:
    outbox = open_outbox()
    put(outbox, 300, copy=Broken())
    put(outbox, 301)
    counters, uploaded = ends(outbox, 2)
    assert (counters["upload_failed"], counters["upload_ok"]) == (1, 1)
    assert uploaded == {key(301)}


def test_closing_finishes_what_was_sent(open_outbox: Callable[..., Outbox], moto_url: str) -> None:
    outbox = open_outbox()
    for number in range(400, 410):
        put(outbox, number)
    assert outbox.close(WAIT_S) == 0
    bucket = boto_client(moto_url, KEYS)
    for number in range(400, 410):
        bucket.head_object(Bucket=BUCKET, Key=NAMESPACE.chunk(key(number), SHARD))
    assert outbox.place(5_000) is None, "it is closed"


def test_an_io_process_that_dies_gives_the_room_back(open_outbox: Callable[..., Outbox]) -> None:
    outbox = open_outbox()
    pid = outbox._client.pid
    held = Held()
    put(outbox, 600, copy=held)
    os.kill(pid, signal.SIGKILL)
    held.over.set()
    counters, _ = ends(outbox, 1)
    assert counters["upload_failed"] + counters["upload_ok"] == 1
    while put(outbox, 601) is not None and not ends(outbox, 1)[0]["upload_ok"]:
        time.sleep(0.1)
