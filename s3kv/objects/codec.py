"""The object format, version 3; docs/object-format.md specifies it.

An object is one chunk of one coverage on one rank, or one item, and one valid safetensors file: a
header of JSON, padded to a multiple of 4096 bytes, and the payload. This is its plain form;
`envelope` defines the compressed one. The payload is a sequence of parts. A part is one tensor: the
data of one KV-cache group in one shard. It is cut into segments of at most 8 MiB, and the header
lists one digest for each.

All of the header but the block hash and the digests follows from the format. A reader therefore
knows every byte of the requested object except the payload and its digests. It computes the digests
of the segments received, and compares the header with the expected one. One comparison refuses a
flipped byte anywhere, another chunk's object and another model's. `integrity` describes what the
digests protect against.

Everything here is synchronous, allocates at most a few headers, and runs in any process and thread.
The digests release the GIL while they read a payload.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from s3kv.objects.headers import (
    FORMAT_VERSION,
    MAX_HEADER_BYTES,
    CodecError,
    Header,
    Mismatch,
    read_header,
)
from s3kv.objects.integrity import XXH3, Integrity
from s3kv.objects.keys import MAX_HASH_BYTES
from s3kv.place import Place
from s3kv.types import TensorSpec, laid_out

ALIGN_BYTES = 4096
SEGMENT_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class ChunkFormat:
    """The layout of all chunks of one coverage on one rank. Plain data: cheap to send and rebuild.

    tensors: the parts, in payload order; at least one, names unique. Those with layers have the
        same number of blocks.
    first_block: the first of the chunk's blocks in the object.
    Raises `ValueError` if no header can be written for it.
    """

    namespace_digest: str
    tensors: tuple[TensorSpec, ...]
    coverage: int
    shard: str
    integrity: Integrity = XXH3
    first_block: int = 0
    segments: tuple[range, ...] = field(init=False, repr=False, compare=False)
    """Bytes of each segment in the payload."""
    header_bytes: int = field(init=False, repr=False, compare=False)
    """Length of the header, including its 8-byte length field; a multiple of 4096."""
    payload_bytes: int = field(init=False, repr=False, compare=False)
    _texts: tuple[bytes, bytes, bytes] = field(init=False, repr=False, compare=False)
    """The header's text before the block hash, between it and the digests, and after."""

    def __post_init__(self) -> None:
        names = {t.name for t in self.tensors} | {"__metadata__"}
        if not self.tensors or len(names) != len(self.tensors) + 1:
            raise ValueError("a chunk needs tensors, with names that differ from each other")
        if len({t.shape[0] for t in self.tensors if t.layers}) > 1:
            raise ValueError("the tensors of a chunk differ in their number of blocks")
        payload_bytes = sum(tensor.nbytes for tensor in self.tensors)
        if payload_bytes > MAX_HEADER_BYTES * SEGMENT_BYTES:  # not even one byte for each digest
            raise ValueError(f"tensors of {payload_bytes} bytes do not fit into one object")
        segments = segments_of(self.tensors, SEGMENT_BYTES)
        before, between, after = _header_text(self).encode("ascii").split(HOLE)
        digests = len(b",".join([b"0" * self.integrity.digest_chars] * len(segments)))
        longest = 8 + len(before) + 2 * MAX_HASH_BYTES + len(between) + digests + len(after)
        header_bytes = -(-longest // ALIGN_BYTES) * ALIGN_BYTES
        if header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"header of {header_bytes} bytes: at most {MAX_HEADER_BYTES}")
        put = object.__setattr__
        put(self, "segments", segments)
        put(self, "header_bytes", header_bytes)
        put(self, "payload_bytes", payload_bytes)
        put(self, "_texts", ((header_bytes - 8).to_bytes(8, "little") + before, between, after))

    @property
    def blocks(self) -> int:
        """Blocks in the object; 1 if its tensors have none."""
        return next((t.shape[0] for t in self.tensors if t.layers), 1)

    @property
    def object_bytes(self) -> int:
        """Length of the whole object, header and payload."""
        return self.header_bytes + self.payload_bytes

    def seal(self, place: Place, block_hash: bytes) -> None:
        """Write the header of a chunk whose payload is already in place and must not change
        afterwards. Raises `ValueError` if the place does not fit this format, or the hash is empty
        or too long."""
        if not self._fills(place, self.object_bytes):
            raise ValueError(f"a place of {place.nbytes} bytes for {self.object_bytes}")
        numbers = range(len(self.segments) if self.integrity.digest_chars else 0)
        digests = [self._digest(number, place, block_hash) for number in numbers]
        place.header[:] = self._header(block_hash, digests)

    def check(self, place: Place, nbytes: int, block_hash: bytes) -> Mismatch | None:
        """Verify that the object of `nbytes` in `place` is this format's for `block_hash`.

        nbytes: the object's length as the store reports it; it may exceed the place. Returns None
        if it is, and otherwise the reason; the object is then a miss. Raises nothing because of the
        object's content.
        """
        gathering = Gathering(self, place, block_hash)
        if self._fills(place, nbytes):  # otherwise there is nothing to digest
            gathering.arrived(0, nbytes)
        return gathering.check(nbytes)

    def _fills(self, place: Place, nbytes: int) -> bool:
        """Whether an object of `nbytes` in `place` has this format's length. The place may have
        room for a longer one."""
        return (
            nbytes == self.object_bytes
            and len(place.header) == self.header_bytes
            and len(place.payload) >= self.payload_bytes
        )

    def _digest(self, number: int, place: Place, block_hash: bytes) -> bytes:
        segment = self.segments[number]
        data = place.payload[segment.start : segment.stop]
        return self.integrity.digest(self._header(block_hash, []), number, data).encode()

    def _header(self, block_hash: bytes, digests: Sequence[bytes]) -> bytes:
        if not 1 <= len(block_hash) <= MAX_HASH_BYTES:
            raise ValueError(f"block hash of {len(block_hash)} bytes: 1 to {MAX_HASH_BYTES}")
        before, between, after = self._texts
        text = b"".join((before, block_hash.hex().encode(), between, b",".join(digests), after))
        return text.ljust(self.header_bytes)

    def _reason(self, header: bytes, block_hash: bytes, digests: Sequence[bytes]) -> Mismatch:
        try:
            said = read_header(memoryview(header), object_bytes=self.object_bytes)
        except CodecError as error:
            return error.refusal
        is_forged = [d.encode() for d in said.digests] != digests
        return difference(self, said, block_hash) or ("digest" if is_forged else "header")


class Gathering:
    """Check of an object whose bytes arrive in any order. The digest of a segment is computed once
    the segment is complete, while others are still arriving. place: where the object arrives."""

    def __init__(self, chunk: ChunkFormat, place: Place, block_hash: bytes) -> None:
        self._chunk, self._place, self._block_hash = chunk, place, block_hash
        self._missing = [len(segment) for segment in chunk.segments]
        self._digests: dict[int, bytes] = {}

    def arrived(self, begin: int, end: int) -> None:
        """Note that bytes `begin` to `end` (exclusive) of the object are in the place. No byte may
        arrive twice."""
        seam = self._chunk.header_bytes
        for number, segment in enumerate(self._chunk.segments):
            came = min(end - seam, segment.stop) - max(begin - seam, segment.start)
            if came > 0:
                self._missing[number] -= came
                if not self._missing[number]:
                    digest = self._chunk._digest(number, self._place, self._block_hash)
                    self._digests[number] = digest

    def check(self, nbytes: int) -> Mismatch | None:
        """Verify the object like `ChunkFormat.check`, after all of it has arrived."""
        if any(self._missing) or not self._chunk._fills(self._place, nbytes):
            return "length"
        header = bytes(self._place.header)
        is_digested = self._chunk.integrity.digest_chars > 0
        digests = [self._digests[number] for number in sorted(self._digests) if is_digested]
        # In constant time: in a keyed mode, timing would help a forger.
        if hmac.compare_digest(header, self._chunk._header(self._block_hash, digests)):
            return None
        return self._chunk._reason(header, self._block_hash, digests)


def difference(chunk: ChunkFormat, said: Header, block_hash: bytes) -> Mismatch | None:
    """The first header field that differs from those of the object of `block_hash`."""
    differences: tuple[tuple[Mismatch, bool], ...] = (
        ("namespace", said.namespace_digest != chunk.namespace_digest),
        ("coverage", said.coverage != chunk.coverage),
        ("shard", said.shard != chunk.shard),
        ("block_hash", said.block_hash != block_hash),
        ("blocks", (said.first_block, said.blocks) != (chunk.first_block, chunk.blocks)),
        ("tensors", said.tensors != chunk.tensors),
        ("algorithm", said.algorithm != chunk.integrity.algorithm),
    )
    return next((reason for reason, differs in differences if differs), None)


HOLE = b"?"
"""Placeholder for the values that differ between chunks. It occurs nowhere else in the JSON,
because `template` refuses names that contain it."""


def segments_of(tensors: Sequence[TensorSpec], segment_bytes: int) -> tuple[range, ...]:
    """The segments of at most `segment_bytes`, as ranges of bytes in the payload."""
    return tuple(
        range(at, min(at + segment_bytes, end))
        for _, begin, end in laid_out(tensors)
        for at in range(begin, end, segment_bytes)
    )


def _header_text(chunk: ChunkFormat) -> str:
    metadata = metadata_of(chunk) | {"s3kv.digests": HOLE.decode()}
    return template({"__metadata__": metadata} | entries_of(chunk.tensors), holes=2)


def metadata_of(chunk: ChunkFormat) -> dict[str, str]:
    """The metadata at the start of the headers of both forms, with a hole for the block hash."""
    layers = {
        tensor.name: [[it.name, it.dtype, list(it.shape), it.order] for it in tensor.layers]
        for tensor in chunk.tensors
        if tensor.layers
    }
    return {
        "s3kv.format": FORMAT_VERSION,
        "s3kv.namespace": chunk.namespace_digest,
        "s3kv.coverage": str(chunk.coverage),
        "s3kv.shard": chunk.shard,
        "s3kv.block_hash": HOLE.decode(),
        "s3kv.first_block": str(chunk.first_block),
        "s3kv.blocks": str(chunk.blocks),
        "s3kv.layers": to_json(layers),
        "s3kv.algorithm": chunk.integrity.algorithm,
    }


def entries_of(tensors: Sequence[TensorSpec]) -> dict[str, Any]:
    """The entries of tensors in a safetensors header, by name."""
    return {
        it.name: {"dtype": it.dtype, "shape": list(it.shape), "data_offsets": [begin, end]}
        for it, begin, end in laid_out(tensors)
    }


def template(members: dict[str, Any], holes: int) -> str:
    """The JSON of a header with `holes` holes. Raises `ValueError` if a name contains the mark."""
    text = to_json(members)
    if text.count(HOLE.decode()) != holes:
        raise ValueError("a name in this format holds a question mark")
    return text


def to_json(value: Any) -> str:
    """JSON without white space, in ASCII."""
    return json.dumps(value, separators=(",", ":"))
