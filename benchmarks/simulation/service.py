"""s3kv's own I/O service in simulated time, over a bucket of `simulation.s3`.

The queue, the attempts and their pauses, the request window, hedging, ranged reads, verification
and the start are the product's code. Objects in memory are a thousandth of their size; every byte
of one takes the time of a thousand. The store is a model:

- A request waits for a first byte (log-normal), then its body shares the host's network with all
  others; no connection gets more than `connection_bytes_per_s`.
- A refused request is answered after a tenth of the median first byte. A refused write has sent its
  body by then.
- Connections are there when they are needed, and none breaks.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks.simulation.s3 import Partitions
from benchmarks.simulation.wire import Link, Network, Timeline
from lab.memory_store import MemoryStore
from s3kv.config import Config
from s3kv.errors import StoreThrottled
from s3kv.host.slab import Slab
from s3kv.io import wire
from s3kv.io.server import service
from s3kv.io.server.service import Service
from s3kv.messages import FetchOrder, JobEnd, SaveOrder, UploadOrder
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.keys import Namespace
from s3kv.place import Place
from s3kv.stores.store import Claim, ObjectInfo
from s3kv.types import ChunkKey, TensorSpec
from tests.system.sim.loop import VirtualLoop

SHRINK = 1024
"""Bytes that a byte in memory stands for."""
MANIFEST = b'{"model":"simulated"}'
_REFUSAL = 0.1


class LoopTimeline(Timeline):
    """The timeline of a loop, for what is no coroutine."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    @property
    def now_s(self) -> float:  # type: ignore[override]
        return self._loop.time()

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        self._loop.call_at(time_s, action)

    def run(self) -> None:
        raise NotImplementedError("the loop runs")


class SharedBucket:
    """What the hosts share: the objects' names, the limits, and the counts of requests.

    Chunks have no content but zeros, so they are made when they are read.
    """

    def __init__(self, partitions: Partitions, layout: ChunkFormat, namespace: Namespace) -> None:
        self.partitions = partitions
        self.layout = layout
        self.namespace = namespace
        self.chunks: set[bytes] = set()
        self.requests: Counter[str] = Counter()
        self.slow_downs: Counter[str] = Counter()
        self.by_minute: Counter[tuple[int, bool]] = Counter()
        """Requests by minute, and whether they were refused."""
        self.by_key: Counter[str] = Counter()
        self._image = memoryview(bytearray(layout.object_bytes))

    def key(self, block_hash: bytes) -> str:
        return self.namespace.chunk(ChunkKey(0, block_hash), self.layout.shard)

    def take(self, verb: str, key: str, now_s: float) -> bool:
        served = self.partitions.take(key, now_s, write=verb == "put")
        self.requests[verb] += 1
        self.slow_downs[verb] += not served
        self.by_minute[int(now_s // 60), not served] += 1
        if verb != "list":
            self.by_key[key] += 1
        return served

    def image(self, block_hash: bytes) -> memoryview:
        """The bytes of a chunk's object."""
        self.layout.seal(Place.of(self._image, self.layout.header_bytes), block_hash)
        return self._image


class HostStore(MemoryStore):
    """The bucket as one host sees it."""

    def __init__(
        self,
        timeline: Timeline,
        bucket: SharedBucket,
        network: Network,
        object_bytes: int,
        rng: random.Random,
    ) -> None:
        super().__init__(clock=lambda: timeline.now_s)
        self._timeline = timeline
        self._bucket = bucket
        self._network = network
        self._rng = rng
        self._bytes_per_byte = object_bytes / bucket.layout.object_bytes
        self._down, self._up = (
            Link(
                timeline,
                bytes_per_s=network.bytes_per_s,
                connection_bytes_per_s=network.connection_bytes_per_s,
            )
            for _ in range(2)
        )

    async def get_into(
        self, key: str, place: Place, claim: Claim | None = None
    ) -> ObjectInfo | None:
        if not key.endswith(".safetensors"):
            await self._answer("get", key)
            return await super().get_into(key, place, claim)
        return await self._get(key, range(self._bucket.layout.object_bytes), place, claim)

    async def get_range(
        self, key: str, first: int, place: Place, claim: Claim | None = None
    ) -> ObjectInfo | None:
        return await self._get(key, range(first, first + place.nbytes), place, claim)

    async def _get(
        self, key: str, bounds: range, place: Place, claim: Claim | None
    ) -> ObjectInfo | None:
        await self._answer("get", key)
        block_hash = bytes.fromhex(key.rsplit("/", 2)[1])
        if block_hash not in self._bucket.chunks:
            self._bucket.requests["get_404"] += 1
            return None
        info = ObjectInfo(key, self._bucket.layout.object_bytes, 0.0, '"etag"')
        if claim is not None and not claim():
            return info
        await self._carry(self._down, len(bounds))
        image = self._bucket.image(block_hash)
        place.write(image[bounds.start : bounds.stop])
        self._bucket.requests["bytes_down"] += int(len(bounds) * self._bytes_per_byte)
        return info

    async def put(self, key: str, place: Place, *, if_absent: bool) -> bool:
        served = self._bucket.take("put", key, self._timeline.now_s)
        if not key.endswith(".safetensors"):
            await self._answered(served)
            return await super().put(key, place, if_absent=if_absent)
        await self._carry(self._up, place.nbytes)
        await self._answered(served)
        block_hash = bytes.fromhex(key.rsplit("/", 2)[1])
        is_new = block_hash not in self._bucket.chunks
        self._bucket.chunks.add(block_hash)
        self._bucket.requests["put_new" if is_new else "put_exists"] += 1
        return is_new

    async def check(self, prefix: str | None = None) -> bool:
        await self._answer("list", prefix or "")
        return await super().check(prefix)

    async def _answer(self, verb: str, key: str) -> None:
        await self._answered(self._bucket.take(verb, key, self._timeline.now_s))

    async def _answered(self, served: bool) -> None:
        if not served:
            await asyncio.sleep(_REFUSAL * self._network.first_byte_s)
            raise StoreThrottled("SlowDown")
        await asyncio.sleep(self._network.latency_s(self._rng))

    async def _carry(self, link: Link, nbytes: int) -> None:
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        flight = link.carry(int(nbytes * self._bytes_per_byte), partial(_arrive, arrived))
        try:
            await arrived
        except asyncio.CancelledError:
            link.break_off(flight)
            raise


def _arrive(arrived: asyncio.Future[None]) -> None:
    if not arrived.done():
        arrived.set_result(None)


class ServiceTransport:
    """An engine's I/O: the service, its slab and its store."""

    def __init__(
        self,
        config: Config,
        bucket: SharedBucket,
        store: HostStore,
        slots: int,
        rng: random.Random,
        on_end: Callable[[JobEnd], None],
    ) -> None:
        layout = bucket.layout
        self._slot_bytes = -(-layout.object_bytes // 4096) * 4096
        self._slab = Slab.create(slots * self._slot_bytes)
        self._on_end = on_end
        handshake = wire.Handshake(
            config,
            bucket.namespace.prefix,
            bucket.namespace.digest,
            layout.shard,
            {0: layout.tensors},
            manifest=MANIFEST,
            shapes=(layout.shard,),
        )
        self.service = Service(handshake, self._slab, store, self._heard, _hung_up, rng)

    def fetch(self, order: FetchOrder) -> None:
        offset = order.slot * self._slot_bytes
        self.service.receive(wire.Fetch(order.job_id, 0, order.key.block_hash, offset))

    def upload(self, order: SaveOrder | UploadOrder) -> None:
        offset = order.slot * self._slot_bytes
        self.service.receive(wire.Upload(order.job_id, 0, order.key.block_hash, offset))

    def cancel(self, job_id: int) -> None:
        self.service.receive(wire.Cancel(job_id))

    def withdraw(self, job_id: int) -> None:
        self.service.receive(wire.Withdraw(job_id))

    def send(self, block_hash: bytes) -> None:
        raise NotImplementedError("every chunk is uploaded through the queue")

    def close(self) -> None:
        self._slab.close()

    def _heard(self, message: Any) -> None:
        if isinstance(message, JobEnd):
            self._on_end(message)


def _hung_up() -> None:
    raise RuntimeError("the service does not serve")


def small(object_payload_bytes: int, digest: str, shard: str) -> ChunkFormat:
    """The format of chunks in memory."""
    tensors = (TensorSpec("kv", "U8", (object_payload_bytes // SHRINK,)),)
    return ChunkFormat(digest, tensors, 0, shard)


def settings(config: dict[str, Any]) -> Config:
    """Settings of an engine whose bytes are that much smaller."""
    plain = Config(bucket="simulated", **config)
    return Config(
        bucket="simulated",
        **config
        | {
            "max_inflight_bytes": plain.max_inflight_bytes // SHRINK,
            "range_bytes": plain.range_bytes // SHRINK,
        },
    )


@contextmanager
def clock(loop: VirtualLoop) -> Iterator[None]:
    """The service times its jobs by the loop, as long as the block lasts."""
    with mock.patch.object(service, "time", SimpleNamespace(monotonic=loop.time)):
        yield
