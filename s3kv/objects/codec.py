"""The object format, version 1.

An object is one chunk of one rank, and one valid safetensors file
(https://huggingface.co/docs/safetensors/en/index#format):

    bytes 0..8      N, the length of the JSON, unsigned, little-endian
    bytes 8..8+N    JSON in ASCII, padded at its end with spaces until 8+N is a multiple of 4096
    bytes 8+N..     the payload: every tensor, row-major, in the order of the JSON, no gaps

The JSON is one object without white space. Its first member is `__metadata__`, all text values,
in this order:

    s3kv.format      "1"
    s3kv.namespace   namespace digest, 32 hex digits (`keys.fingerprint_digest`)
    s3kv.group       KV-cache group, decimal
    s3kv.shard       which rank's part, as in the key
    s3kv.block_hash  the block hash at the chunk's end, hex
    s3kv.algorithm   "xxh3-128", "blake3-keyed" or "none"
    s3kv.digest      "xxh3-128": XXH3-128 (seed 0) of the payload, 32 hex digits, big-endian as
                     xxhash prints it. "blake3-keyed": BLAKE3 keyed, of the whole header with this
                     text empty (and spaces for it at the end) and the payload, 64 hex digits.
                     "none": empty

and every other member is a tensor, `"name":{"dtype":…,"shape":[…],"data_offsets":[begin,end]}`.
N is padded as if the block hash had 64 bytes, so a format's header has the same length for every
chunk, and slots, headers and payloads are all page-aligned.

All of the header but the block hash and the digest follows from the format. A reader therefore
knows every byte of the object it asked for except the payload, computes the digest of the payload
it got, and compares the header with the one it would have written: one comparison refuses a
flipped byte anywhere, another chunk's object and another model's. Against whom the digest guards
is told in `integrity`.

Everything here is synchronous, allocates a header at most, and runs in any process and thread.
The digests let go of the GIL while they read a payload.
"""

from __future__ import annotations

import hmac
import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from s3kv.errors import S3KVError
from s3kv.objects.integrity import XXH3, Integrity
from s3kv.objects.keys import MAX_HASH_BYTES
from s3kv.types import TensorSpec

FORMAT_VERSION = "1"
ALIGN_BYTES = 4096
MAX_HEADER_BYTES = 2**20
"""Far above any real model's (about 100 bytes per layer); what a reader of an untrusted object
is ready to look at."""
MAX_DIMENSIONS = 16

Refusal = Literal[
    "length",
    "header",
    "version",
    "namespace",
    "group",
    "shard",
    "block_hash",
    "tensors",
    "algorithm",
    "digest",
]
"""Why an object is not the one asked for, the first that applies in this order:
length: shorter or longer than the format's objects. header: no header of s3kv, or one that says
the right things in other bytes. version, namespace, group, shard, block_hash, tensors, algorithm:
the object says it is something else. digest: it says it is the right one, but it is damaged or
forged.
"""


class CodecError(S3KVError, ValueError):
    """These bytes are no object of this format. The caller treats them as a miss."""


@dataclass(frozen=True, slots=True)
class Header:
    """What an object says of itself; nothing of it has been verified."""

    version: str
    namespace_digest: str
    group: int
    shard: str
    block_hash: bytes
    algorithm: str
    digest: str
    tensors: tuple[TensorSpec, ...]
    header_bytes: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class ChunkFormat:
    """The layout of all chunks of one group on one rank. Plain data: cheap to send and rebuild.

    tensors: in payload order; at least one, names unique.
    Raises `ValueError` when such a header cannot be written.
    """

    namespace_digest: str
    tensors: tuple[TensorSpec, ...]
    group: int
    shard: str
    integrity: Integrity = XXH3
    header_bytes: int = field(init=False, repr=False, compare=False)
    """Length of the header with its 8-byte length, a multiple of 4096."""
    payload_bytes: int = field(init=False, repr=False, compare=False)
    _parts: tuple[bytes, bytes, bytes] = field(init=False, repr=False, compare=False)
    """The header's text before the block hash, between it and the digest, and after."""

    def __post_init__(self) -> None:
        names = {t.name for t in self.tensors} | {"__metadata__"}
        if not self.tensors or len(names) != len(self.tensors) + 1:
            raise ValueError("a chunk needs tensors, with names that differ from each other")
        text = _header_text(self)
        before, between, after = text.encode("ascii").split(_HOLE)
        digest_chars = self.integrity.digest_chars
        longest = 8 + len(before) + 2 * MAX_HASH_BYTES + len(between) + digest_chars + len(after)
        header_bytes = -(-longest // ALIGN_BYTES) * ALIGN_BYTES
        if header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"header of {header_bytes} bytes: at most {MAX_HEADER_BYTES}")
        put = object.__setattr__
        put(self, "header_bytes", header_bytes)
        put(self, "payload_bytes", sum(t.nbytes for t in self.tensors))
        put(self, "_parts", ((header_bytes - 8).to_bytes(8, "little") + before, between, after))

    @property
    def object_bytes(self) -> int:
        """Length of the whole object, header and payload."""
        return self.header_bytes + self.payload_bytes

    def seal(self, buffer: memoryview, block_hash: bytes) -> None:
        """Write the header of a chunk whose payload is already in place behind it.

        buffer: writable bytes, `object_bytes` or more; [header_bytes, object_bytes) is the
        payload, and must not change any more. Raises `ValueError` when the buffer is too short
        or the hash is empty or too long.
        """
        if len(buffer) < self.object_bytes:
            raise ValueError(f"buffer of {len(buffer)} bytes for an object of {self.object_bytes}")
        buffer[: self.header_bytes] = self._header(block_hash, self._digest(buffer, block_hash))

    def check(self, buffer: memoryview, nbytes: int, block_hash: bytes) -> Refusal | None:
        """None when the first `nbytes` of `buffer` are this format's object for `block_hash`.

        nbytes: the length of the object as the store told it, which may be more than fits into
        `buffer`. Otherwise the reason; the object is then a miss. Never raises for what the
        object holds.
        """
        if nbytes != self.object_bytes or len(buffer) < nbytes:
            return "length"
        expected = self._header(block_hash, self._digest(buffer, block_hash))
        # In constant time: with a key, where the first difference is would be worth knowing.
        if hmac.compare_digest(bytes(buffer[: self.header_bytes]), expected):
            return None
        return self._reason(buffer[:nbytes], block_hash, expected)

    def _digest(self, buffer: memoryview, block_hash: bytes) -> str:
        payload = buffer[self.header_bytes : self.object_bytes]
        return self.integrity.digest(self._header(block_hash, ""), payload)

    def _header(self, block_hash: bytes, digest: str) -> bytes:
        if not 1 <= len(block_hash) <= MAX_HASH_BYTES:
            raise ValueError(f"block hash of {len(block_hash)} bytes: 1 to {MAX_HASH_BYTES}")
        before, between, after = self._parts
        text = b"".join((before, block_hash.hex().encode(), between, digest.encode(), after))
        return text.ljust(self.header_bytes)

    def _reason(self, buffer: memoryview, block_hash: bytes, expected: bytes) -> Refusal:
        try:
            said = read_header(buffer)
        except CodecError:
            return "header"
        meant = read_header(memoryview(expected), object_bytes=self.object_bytes)
        differences: tuple[tuple[Refusal, bool], ...] = (
            ("version", said.version != meant.version),
            ("namespace", said.namespace_digest != meant.namespace_digest),
            ("group", said.group != meant.group),
            ("shard", said.shard != meant.shard),
            ("block_hash", said.block_hash != block_hash),
            ("tensors", said.tensors != meant.tensors),
            ("algorithm", said.algorithm != meant.algorithm),
            ("digest", said.digest != meant.digest),
        )
        return next((reason for reason, differs in differences if differs), "header")


_HOLE = b"?"
"""Marks the two places of the template that differ between chunks; JSON text of ours cannot hold
it elsewhere, because `_header_text` refuses names that do."""


def _header_text(chunk: ChunkFormat) -> str:
    hole = _HOLE.decode()
    metadata = {
        "s3kv.format": FORMAT_VERSION,
        "s3kv.namespace": chunk.namespace_digest,
        "s3kv.group": str(chunk.group),
        "s3kv.shard": chunk.shard,
        "s3kv.block_hash": hole,
        "s3kv.algorithm": chunk.integrity.algorithm,
        "s3kv.digest": hole,
    }
    members: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for tensor in chunk.tensors:
        end = begin + tensor.nbytes
        members[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(members, separators=(",", ":"))
    if text.count(hole) != 2:
        raise ValueError("a name in this format holds a question mark")
    return text


def read_header(buffer: memoryview, *, object_bytes: int | None = None) -> Header:
    """What the object at the front of `buffer` says of itself; for tools and for error messages.

    object_bytes: the object's length; `len(buffer)` when not given, so that a tool can read a
    header from the object's first bytes. Takes any order of members and unknown metadata, but
    believes nothing it cannot bound: looks at no more than `MAX_HEADER_BYTES` and allocates in
    proportion to what it was given. Raises `CodecError`.
    """
    total = len(buffer) if object_bytes is None else object_bytes
    if len(buffer) < 8:
        raise CodecError(f"{len(buffer)} bytes hold no header")
    header_bytes = 8 + int.from_bytes(buffer[:8], "little")
    if header_bytes > min(MAX_HEADER_BYTES, len(buffer)):
        raise CodecError(
            f"header of {header_bytes} bytes, where {len(buffer)} are at hand and at most "
            f"{MAX_HEADER_BYTES} are read"
        )
    members = _load_json(bytes(buffer[8:header_bytes]))
    metadata = members.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CodecError("there is no __metadata__ of texts")
    tensors = _read_tensors(members, total - header_bytes)
    return Header(
        version=_text(metadata, "format", r".*"),
        namespace_digest=_text(metadata, "namespace", r".*"),
        group=int(_text(metadata, "group", r"[0-9]{1,9}")),
        shard=_text(metadata, "shard", r".*"),
        block_hash=bytes.fromhex(_text(metadata, "block_hash", r"(?:[0-9a-f]{2})+")),
        algorithm=_text(metadata, "algorithm", r".*"),
        digest=_text(metadata, "digest", r"[0-9a-f]*"),
        tensors=tensors,
        header_bytes=header_bytes,
        payload_bytes=total - header_bytes,
    )


def _text(metadata: dict[str, str], name: str, pattern: str) -> str:
    value = metadata.get(f"s3kv.{name}")
    if value is None or re.fullmatch(pattern, value, re.DOTALL) is None:
        raise CodecError(f"s3kv.{name} is {value!r}")
    return value


def _load_json(text: bytes) -> dict[str, Any]:
    try:
        members = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"the header is no JSON: {error}") from error
    if not isinstance(members, dict):
        raise CodecError("the header is no JSON object")
    return members


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise CodecError("a member occurs twice")
    return members


def _read_tensors(members: dict[str, Any], payload_bytes: int) -> tuple[TensorSpec, ...]:
    """The tensors in payload order; they must tile the payload."""
    spans = [_read_tensor(name, entry, payload_bytes) for name, entry in members.items()]
    spans.sort(key=lambda span: span[:2])
    at = 0
    for begin, end, tensor in spans:
        if begin != at or end - begin != tensor.nbytes:
            raise CodecError(f"tensor {tensor.name!r} is not where its neighbours end")
        at = end
    if at != payload_bytes:
        raise CodecError(f"tensors of {at} bytes in a payload of {payload_bytes}")
    return tuple(tensor for _, _, tensor in spans)


def _read_tensor(name: str, entry: Any, payload_bytes: int) -> tuple[int, int, TensorSpec]:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        sizes = (*shape, begin, end)
        # Bounded dimensions and sizes bound the arithmetic on them.
        in_bounds = len(shape) <= MAX_DIMENSIONS and all(
            type(n) is int and 0 <= n <= payload_bytes for n in sizes
        )
        tensor = TensorSpec(name, dtype, shape)
    except (KeyError, TypeError, ValueError) as error:
        raise CodecError(f"tensor {name!r} has no valid description: {error!r}") from error
    if not in_bounds:
        raise CodecError(f"tensor {name!r} does not fit into the payload")
    return begin, end, tensor
