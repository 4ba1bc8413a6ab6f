"""What the tests of compressed objects share: a format like that of KV, its objects, a codec."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from s3kv.config import Config
from s3kv.io import wire
from s3kv.objects import compression
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.envelope import SEGMENT_BYTES, Envelope
from s3kv.place import Place
from s3kv.types import TensorSpec
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


def payload(seed: int, nbytes: int = FORMAT.payload_bytes) -> bytes:
    """Bytes like KV in bf16: half random, and half of them small numbers of few kinds."""
    rng = random.Random(seed)
    data = bytearray(rng.randbytes(nbytes))
    kinds = bytes(number.bit_length() for number in range(256))
    data[1::2] = data[1::2].translate(kinds)
    return bytes(data)


def apart(form: ChunkFormat) -> Place:
    """Memory for an object of this format, whose header and payload do not adjoin."""
    header, both = bytearray(form.header_bytes), bytearray(form.payload_bytes)
    return Place(memoryview(header), memoryview(both))


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
    envelope = Envelope.of(form)
    assert envelope is not None
    parts = envelope.encode(place, block_hash, codec(), lambda: False)
    assert parts is not None
    return b"".join(parts)


def greeting(**settings: Any) -> wire.Handshake:
    """The handshake of a worker with chunks of `FORMAT`."""
    handshake = rig.handshake(Config(**{"bucket": "bkt", **settings}))
    return msgspec.structs.replace(handshake, groups={0: TENSORS}, slot_bytes=SLOT_BYTES)


def slot(worker: rig.Worker, index: int) -> memoryview:
    return worker.slab.view[index * SLOT_BYTES :][: FORMAT.object_bytes]
