"""What the tests of the I/O process share: a small format, a filled slab, a worker's end."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from lab import constants
from lab.memory_store import MemoryStore
from s3kv.config import Config
from s3kv.host.slab import Slab
from s3kv.io import wire
from s3kv.io.server.process import serve
from s3kv.messages import BucketJob, JobEnd, JobKind
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.keys import Namespace
from s3kv.place import Place
from s3kv.stores.store import ObjectStore
from s3kv.types import ChunkKey, TensorSpec
from tests.waiting import until

NAMESPACE = Namespace("s3kv", "0123456789abcdef" * 2)
SHARD = "h0-7of8-l0-31of32"
TENSORS = (TensorSpec("layer.0", "BF16", (2, 64, 64)), TensorSpec("layer.1", "U8", (5000,)))
FORMAT = ChunkFormat(NAMESPACE.digest, TENSORS, 0, SHARD)
SLOT_BYTES = -(-FORMAT.object_bytes // 4096) * 4096


def handshake(config: Config) -> wire.Handshake:
    return wire.Handshake(
        config, NAMESPACE.prefix, NAMESPACE.digest, SHARD, {0: TENSORS}, slot_bytes=SLOT_BYTES
    )


def chunk(number: int) -> ChunkKey:
    # All bytes differ, as those of real hashes do: the bucket index knows chunks by the first few.
    return ChunkKey(0, hashlib.sha256(number.to_bytes(8, "big")).digest())


def object_key(number: int) -> str:
    return NAMESPACE.chunk(chunk(number), SHARD)


def payload(number: int) -> bytes:
    return random.Random(number).randbytes(FORMAT.payload_bytes)


def sealed(number: int) -> bytes:
    """The whole object of a chunk."""
    data = bytearray(FORMAT.header_bytes) + payload(number)
    FORMAT.seal(Place.of(data, FORMAT.header_bytes), chunk(number).block_hash)
    return bytes(data)


def hold(bucket: MemoryStore, *numbers: int) -> None:
    """Put the objects of chunks into a bucket."""
    for number in numbers:
        bucket.hold(object_key(number), sealed(number))


def slot(slab: Slab, index: int) -> memoryview:
    return slab.view[index * SLOT_BYTES :][: FORMAT.object_bytes]


def fill(slab: Slab, index: int, number: int) -> None:
    """Put the payload of a chunk into a slot, as a save does."""
    slot(slab, index)[FORMAT.header_bytes :] = payload(number)


def fetch(job_id: int, number: int | None = None, *, slot: int | None = None) -> BucketJob:
    """Fetch chunk `number` into a slot; both are `job_id` unless told."""
    return _job(JobKind.FETCH, job_id, number, slot)


def upload(job_id: int, number: int | None = None, *, slot: int | None = None) -> BucketJob:
    return _job(JobKind.UPLOAD, job_id, number, slot)


def _job(kind: JobKind, job_id: int, number: int | None, slot: int | None) -> BucketJob:
    key = chunk(job_id if number is None else number)
    return BucketJob(job_id, kind, key, job_id if slot is None else slot)


class Worker:
    """The worker's end of the wire, for a process served in the test's own loop."""

    def __init__(
        self, slab: Slab, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.slab = slab
        self._reader = reader
        self._writer = writer
        self._frames = wire.FrameReader(wire.Up)
        self._received: list[Any] = []

    def slot(self, index: int) -> memoryview:
        return slot(self.slab, index)

    def fill(self, index: int, number: int) -> None:
        fill(self.slab, index, number)

    def say(self, *messages: wire.Down) -> None:
        self._writer.write(wire.encode(list(messages)))

    async def hear(self) -> Any:
        """The next message; None at the end of the stream."""
        while not self._received:
            data = await self._reader.read(65536)
            if not data:
                return None
            self._received += self._frames.feed(data)
        return self._received.pop(0)

    async def ready(self) -> None:
        """Come back when the process has tried the bucket, which it can use."""
        answer = await self.hear()
        assert isinstance(answer, wire.Ready)
        assert answer == wire.Ready(True, None, "", answer.known)

    async def done(self, count: int) -> dict[int, JobEnd]:
        """The next `count` messages, all of them `JobEnd`, by job."""
        ends = [await self.hear() for _ in range(count)]
        assert all(isinstance(end, JobEnd) for end in ends), ends
        return {end.job_id: end for end in ends}

    async def end_of(self, job: BucketJob) -> JobEnd:
        """How a job ends, if nothing else is heard before."""
        self.say(job)
        return (await self.done(1))[job.job_id]

    async def settled(self) -> wire.Stats:
        """Come back when everything said so far has been acted upon."""
        self.say(wire.Ping())
        answer = await self.hear()
        assert isinstance(answer, wire.Stats)
        return answer

    def hang_up(self) -> None:
        self._writer.close()


@contextlib.asynccontextmanager
async def served(
    make_store: Callable[[Config], ObjectStore],
    *,
    greeting: wire.Handshake | None = None,
    slab_bytes: int = 64 * SLOT_BYTES,
    **settings: Any,
) -> AsyncIterator[tuple[Worker, asyncio.Task[None]]]:
    """A process served in this loop, with a slab of its own, greeted (with `handshake` and these
    settings, unless told otherwise), not yet heard. settings: constants, too (`lab.constants`)."""
    settings, others = constants.split(settings)
    ours, theirs = socket.socketpair()
    with contextlib.closing(Slab.create(slab_bytes)) as slab:
        serving = asyncio.ensure_future(serve(theirs, slab, make_store, rng=random.Random(0)))
        worker = Worker(slab, *await asyncio.open_unix_connection(sock=ours))
        worker.say(greeting or handshake(Config(bucket="bkt", **settings)))
        with constants.changed(**others):
            try:
                yield worker, serving
            finally:
                worker.hang_up()
                await asyncio.wait_for(asyncio.wait([serving]), 100)


@contextlib.asynccontextmanager
async def serving(
    store: ObjectStore, **how: Any
) -> AsyncIterator[tuple[Worker, asyncio.Task[None]]]:
    """The same, once it has tried the bucket `store`."""
    async with served(lambda _: store, **how) as (worker, task):
        await worker.ready()
        yield worker, task


async def counted(disk: Path) -> None:
    """Come back when the files of a disk have been counted: before that, none is written."""
    await until(lambda: (disk / "used").exists() and (disk / "used").stat().st_size)
