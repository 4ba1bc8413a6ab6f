"""Parser of untrusted object headers, for tools and for error messages.

Nothing in a header is trusted: lengths are bounded before they are used, and numbers before they
are multiplied. `codec` verifies objects by comparing bytes, and uses this module only to find the
reason why they differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from s3kv.errors import S3KVError
from s3kv.types import TensorSpec

FORMAT_VERSION = "3"
COMPRESSED_TENSOR = "segments"
"""The one tensor of a compressed object: its stored segments."""
MAX_HEADER_BYTES = 2**20
"""Longest header written or read; a reader of an untrusted object needs a bound. A real model's
is far shorter (about 100 bytes per layer)."""
MAX_DIMENSIONS = 16

Mismatch = Literal[
    "length",
    "header",
    "version",
    "namespace",
    "coverage",
    "shard",
    "block_hash",
    "blocks",
    "tensors",
    "algorithm",
    "digest",
    "codec",
    "encryption",
]
"""Reasons why an object is not the requested one; the first that applies in this order is given.
length: shorter or longer than the format's objects, or than its header states. header: not a header
of s3kv, or one with the right fields in other bytes. version: another version of this format.
namespace, coverage, shard, block_hash, blocks, tensors, algorithm: the object's header names
another object. digest: the header names the right object, but the object is damaged or forged.
codec: the object is compressed, and this process cannot decode it; the object may be valid.
encryption: the object is encrypted, and does not decrypt: it was moved, damaged or forged."""


class CodecError(S3KVError, ValueError):
    """Bytes that are not an object of this format; the message has the reason. Treat as a miss."""

    def __init__(self, message: str, refusal: Mismatch = "header") -> None:
        super().__init__(message)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class Header:
    """An object's header as read, unverified. tensors: for a compressed object, those of its
    decoded segments. payload_bytes: of the object as stored. codec: empty for a plain object."""

    namespace_digest: str
    coverage: int
    shard: str
    block_hash: bytes
    first_block: int
    blocks: int
    algorithm: str
    digests: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]
    header_bytes: int
    payload_bytes: int
    codec: str = ""


_Size = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Sizes = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
_Number = Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{1,9}\Z")]


class _Metadata(msgspec.Struct, rename="s3kv.{}".format):
    format: str
    namespace: str
    coverage: _Number
    shard: str
    block_hash: Annotated[str, msgspec.Meta(pattern=r"\A(?:[0-9a-f]{2})+\Z")]
    first_block: _Number
    blocks: _Number
    layers: str
    algorithm: str
    digests: Annotated[str, msgspec.Meta(pattern=r"\A(?:[0-9a-f]+(?:,[0-9a-f]+)*)?\Z")]
    codec: str = ""
    tensors: str = ""


class _TensorEntry(msgspec.Struct):
    dtype: str
    shape: _Sizes
    data_offsets: tuple[_Size, _Size]


def read_header(buffer: memoryview, *, object_bytes: int | None = None) -> Header:
    """Read the header of the object at the front of `buffer`; for tools and for error messages.

    object_bytes: the object's length, for a tool that has only the first bytes of the object;
    None: `len(buffer)`. Members may be in any order, and metadata may be unknown. Reads no
    more than `MAX_HEADER_BYTES`, and allocates in proportion to `buffer`. Raises `CodecError` for
    anything that is not a header of this version.
    """
    total = len(buffer) if object_bytes is None else object_bytes
    if len(buffer) < 8:
        raise CodecError(f"{len(buffer)} bytes hold no header")
    header_bytes = 8 + int.from_bytes(buffer[:8], "little")
    if header_bytes > min(MAX_HEADER_BYTES, len(buffer)):
        raise CodecError(
            f"header of {header_bytes} bytes, where {len(buffer)} are given and at most "
            f"{MAX_HEADER_BYTES} are read"
        )
    payload_bytes = total - header_bytes
    try:
        members = msgspec.json.decode(buffer[8:header_bytes], type=dict[str, msgspec.Raw])
        said = members.pop("__metadata__", msgspec.Raw(b"null"))
        version = msgspec.json.decode(said, type=dict[str, str]).get("s3kv.format")
        if version != FORMAT_VERSION:
            told = f"an object of format {version!r}, where {FORMAT_VERSION!r} is read"
            raise CodecError(told, "version" if version else "header")
        metadata = msgspec.json.decode(said, type=_Metadata)
        tensors = _read_tensors(members, "{}" if metadata.codec else metadata.layers, payload_bytes)
        if metadata.codec:
            members = msgspec.json.decode(metadata.tensors, type=dict[str, msgspec.Raw])
            tensors = _read_tensors(members, metadata.layers, None)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        if isinstance(error, CodecError):
            raise
        raise CodecError(f"the header cannot be read: {error}") from error
    return Header(
        namespace_digest=metadata.namespace,
        coverage=int(metadata.coverage),
        shard=metadata.shard,
        block_hash=bytes.fromhex(metadata.block_hash),
        first_block=int(metadata.first_block),
        blocks=int(metadata.blocks),
        algorithm=metadata.algorithm,
        digests=tuple(metadata.digests.split(",")) if metadata.digests else (),
        tensors=tensors,
        header_bytes=header_bytes,
        payload_bytes=payload_bytes,
        codec=metadata.codec,
    )


def _read_tensors(
    members: dict[str, msgspec.Raw], layers: str, payload_bytes: int | None
) -> tuple[TensorSpec, ...]:
    """The tensors in payload order; they must tile the payload, if its length is known. Raises
    `ValueError` or `msgspec.MsgspecError`."""
    parts = msgspec.json.decode(layers, type=dict[str, list[tuple[str, str, _Sizes, str]]])
    if not parts.keys() <= members.keys():
        raise CodecError("s3kv.layers names a tensor that is not there")
    spans: list[tuple[int, int, TensorSpec]] = []
    for name, entry in members.items():
        told = msgspec.json.decode(entry, type=_TensorEntry)
        specs = (TensorSpec(layer, of, page, (), at) for layer, of, page, at in parts.get(name, ()))
        tensor = TensorSpec(name, told.dtype, told.shape, tuple(specs))
        if tensor.layers and not tensor.shape:
            raise CodecError(f"tensor {name!r} has layers and no blocks")
        spans.append((*told.data_offsets, tensor))
    spans.sort(key=lambda span: span[:2])
    at = 0
    for begin, end, tensor in spans:
        if begin != at or end - begin != tensor.nbytes:
            raise CodecError(f"tensor {tensor.name!r} is not where its neighbours end")
        at = end
    if payload_bytes is not None and at != payload_bytes:
        raise CodecError(f"tensors of {at} bytes in a payload of {payload_bytes}", "length")
    return tuple(tensor for _, _, tensor in spans)
