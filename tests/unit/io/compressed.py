"""What the tests of compressed objects share: a format like that of KV, its objects, a codec."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any

import msgspec

from s3kv.config import Config
from s3kv.io import wire
from s3kv.io.sources.bucket import BucketSource
from s3kv.io.sources.compressing import Compressor, CompressSetting
from s3kv.io.sources.reception import Decoder
from s3kv.objects import compression
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.envelope import SEGMENT_BYTES, Envelope
from s3kv.objects.item_format import ItemFormat
from s3kv.place import Place
from s3kv.stores.store import ObjectStore
from s3kv.types import TensorSpec
from s3kv.upkeep.refreshing import Refresher, RefreshRule
from tests.unit.io import rig

TENSORS = (
    TensorSpec("g0", "BF16", (SEGMENT_BYTES // 2 + 70_000,)),
    TensorSpec("g1", "F32", (SEGMENT_BYTES // 8,)),
)
FORMAT = ChunkFormat(rig.NAMESPACE.digest, TENSORS, 0, rig.SHARD)
"""A chunk of three segments."""
SLOT_BYTES = -(-FORMAT.object_bytes // 4096) * 4096


def codec() -> compression.Codec:
    found = compression.codec()
    assert found is not None, "blosc2 is not installed"
    return found


class Held:
    """A codec that waits before it decodes, or encodes if it `encodes`. begun: it waits. error:
    what it raises then. done: number of segments."""

    def __init__(self, *, encodes: bool = False) -> None:
        self.begun, self.gate = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.done = 0
        self.encode: Any = codec().encode
        self.decode: Any = codec().decode
        if encodes:
            self.encode = partial(self._wait, self.encode)
        else:
            self.decode = partial(self._wait, self.decode)

    def _wait(self, work: Callable[..., Any], *segment: Any) -> Any:
        self.begun.set()
        assert self.gate.wait(60)
        if self.error:
            raise self.error
        self.done += 1
        return work(*segment)


def payload(seed: int, nbytes: int = FORMAT.payload_bytes) -> bytes:
    """Bytes like KV in bf16: half random, and half of them small numbers of few kinds."""
    data = bytearray(random.Random(seed).randbytes(nbytes))
    data[1::2] = data[1::2].translate(bytes(number.bit_length() for number in range(256)))
    return bytes(data)


def apart(form: ChunkFormat | ItemFormat) -> Place:
    """Memory for an object of this format, whose header and payload do not adjoin."""
    lengths = form.header_bytes, form.object_bytes - form.header_bytes
    return Place(*(memoryview(bytearray(length)) for length in lengths))


def plain(
    data: bytes, *, block_hash: bytes = rig.chunk(1).block_hash, form: ChunkFormat = FORMAT
) -> bytes:
    """The plain object of a payload."""
    whole = bytearray(form.header_bytes) + data
    form.seal(Place.of(whole, form.header_bytes), block_hash)
    return bytes(whole)


def stored(
    data: bytes, *, block_hash: bytes = rig.chunk(1).block_hash, form: ChunkFormat = FORMAT
) -> bytes:
    """The compressed object of a payload."""
    place = Place.of(bytearray(form.header_bytes) + data, form.header_bytes)
    return b"".join(Envelope.of(form).encode(place, block_hash, codec(), lambda: False))


def greeting(**settings: Any) -> wire.Handshake:
    """The handshake of a worker with chunks of `FORMAT`."""
    handshake = rig.handshake(Config(**{"bucket": "bkt", **settings}))
    return msgspec.structs.replace(handshake, groups={0: TENSORS}, slot_bytes=SLOT_BYTES)


def slot(worker: rig.Worker, index: int) -> memoryview:
    return worker.slab.view[index * SLOT_BYTES :][: FORMAT.object_bytes]


@asynccontextmanager
async def source_of(
    store: ObjectStore,
    config: Config,
    mode: CompressSetting = "on",
    *,
    places: int | None = None,
    pads: bool = False,
) -> AsyncIterator[BucketSource]:
    """The bucket of a store, with so many places to borrow (None: any number). Closes the store."""
    rng = random.Random(1)
    refresher = Refresher(store, RefreshRule(math.inf, rng), lambda: False)

    def borrow(count: int) -> Any:
        return nullcontext((max(0, count if places is None else places), lambda: None))

    with ThreadPoolExecutor(2) as pool:
        compressor = Compressor(mode, Decoder(time.monotonic, codec(), pool), pool, pads=pads)
        try:
            yield BucketSource(store, config, refresher, borrow, rng, compressor)
        finally:
            await store.close()
