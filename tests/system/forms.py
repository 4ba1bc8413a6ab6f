"""The two forms of an object, for tests that look into objects or change them."""

from __future__ import annotations

from lab.s3 import S3Server
from s3kv.objects import compression
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.envelope import Decoding, Envelope
from s3kv.objects.headers import Mismatch, read_header
from s3kv.place import Place


def plain_of(data: bytes) -> bytes:
    """The plain object of one with digests by xxh3: itself if it is plain, or else what it decodes
    to. Fails if a compressed one does not verify; a plain one is not looked at."""
    header = read_header(memoryview(data))
    if not header.codec:
        return data
    chunk = ChunkFormat(
        header.namespace_digest,
        header.tensors,
        header.coverage,
        header.shard,
        first_block=header.first_block,
    )
    reason, place = opened(chunk, data, header.block_hash)
    assert reason is None, f"a compressed object is refused: {reason}"
    chunk.seal(place, header.block_hash)
    return bytes(place)


def plain_bytes(s3: S3Server, bucket: str) -> int:
    return sum(len(plain_of(data)) for data in s3.contents(bucket).values())


def blank(data: bytes) -> bytes:
    """A plain object with a payload of zeros, which no digest goes with."""
    header = read_header(memoryview(data))
    return data[: header.header_bytes] + bytes(header.payload_bytes)


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def opened(
    chunk: ChunkFormat, data: bytes | bytearray, block_hash: bytes
) -> tuple[Mismatch | None, Place]:
    """Why an object of either form does not verify, and the place with its payload."""
    place = Place.of(bytearray(chunk.object_bytes), chunk.header_bytes)
    envelope = Envelope.of(chunk)
    if envelope is None or len(data) >= chunk.object_bytes:
        place.write(data[: chunk.object_bytes])
        return chunk.check(place, len(data), block_hash), place
    decoding = Decoding(envelope, place, len(data), block_hash, compression.codec())
    decoding.place_of(range(len(data))).write(data)
    decoding.advance(len(data))
    assert decoding.is_done
    return decoding.reason, place


def compressed(
    chunk: ChunkFormat, data: bytes | bytearray, block_hash: bytes, *, is_padded: bool = False
) -> bytes:
    envelope, codec = Envelope.of(chunk), compression.codec()
    assert envelope is not None, "no object of this format is compressed"
    assert codec is not None, compression.NO_CODEC
    place = Place.of(bytearray(data), chunk.header_bytes)
    parts = envelope.encode(place, block_hash, codec, lambda: False, is_padded=is_padded)
    assert parts is not None, "it would not be shorter"
    return b"".join(parts)
