"""Parser of untrusted object headers, for tools and for error messages.

Nothing in a header is trusted: lengths are bounded before they are used, and numbers before they
are multiplied. `codec` verifies objects by comparing bytes, and uses this module only to find the
reason why they differ.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from s3kv.errors import S3KVError
from s3kv.types import TensorSpec

FORMAT_VERSION = "2"
MAX_HEADER_BYTES = 2**20
"""Longest header written or read, because a reader of an untrusted object needs a bound. A real
model's is far shorter (about 100 bytes per layer)."""
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
]
"""Reasons why an object is not the requested one; the first that applies in this order is given.
length: shorter or longer than the format's objects. header: no header of s3kv, or one that says the
right things in other bytes. version: another version of this format. namespace, coverage, shard,
block_hash, blocks, tensors, algorithm: the object's header names another object. digest: the header
names the right object, but the object is damaged or forged.
"""


class CodecError(S3KVError, ValueError):
    """Bytes that are no object of this format; the message says why. Treat them as a miss."""

    def __init__(self, message: str, refusal: Mismatch = "header") -> None:
        super().__init__(message)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class Header:
    """An object's header as read, unverified."""

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


def read_header(buffer: memoryview, *, object_bytes: int | None = None) -> Header:
    """Read the header of the object at the front of `buffer`; for tools and for error messages.

    object_bytes: the object's length, so that a tool can read a header from the object's first
    bytes; None: `len(buffer)`. Members may be in any order, and metadata may be unknown. Reads no
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
    members = _load_json(bytes(buffer[8:header_bytes]))
    metadata = members.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CodecError("__metadata__ of texts is missing")
    version = _text(metadata, "format", r".*")
    if version != FORMAT_VERSION:
        raise CodecError(
            f"an object of format {version!r}, where {FORMAT_VERSION!r} is read", "version"
        )
    digests = _text(metadata, "digests", r"(?:[0-9a-f]+(?:,[0-9a-f]+)*)?")
    return Header(
        namespace_digest=_text(metadata, "namespace", r".*"),
        coverage=int(_text(metadata, "coverage", _NUMBER)),
        shard=_text(metadata, "shard", r".*"),
        block_hash=bytes.fromhex(_text(metadata, "block_hash", r"(?:[0-9a-f]{2})+")),
        first_block=int(_text(metadata, "first_block", _NUMBER)),
        blocks=int(_text(metadata, "blocks", _NUMBER)),
        algorithm=_text(metadata, "algorithm", r".*"),
        digests=tuple(digests.split(",")) if digests else (),
        tensors=_read_tensors(members, _read_layers(metadata), total - header_bytes),
        header_bytes=header_bytes,
        payload_bytes=total - header_bytes,
    )


_NUMBER = r"[0-9]{1,9}"


def _text(metadata: dict[str, str], name: str, pattern: str) -> str:
    value = metadata.get(f"s3kv.{name}")
    if value is None or re.fullmatch(pattern, value, re.DOTALL) is None:
        raise CodecError(f"s3kv.{name} is {value!r}")
    return value


def _load_json(text: bytes) -> dict[str, Any]:
    try:
        members = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"the header is not JSON: {error}") from error
    if not isinstance(members, dict):
        raise CodecError("the header is not a JSON object")
    return members


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise CodecError("a member occurs twice")
    return members


def _read_layers(metadata: dict[str, str]) -> dict[str, tuple[TensorSpec, ...]]:
    """The layers of the tensors that have any."""
    parts = _load_json(_text(metadata, "layers", r".*").encode("utf-8", "surrogatepass"))
    try:
        return {
            name: tuple(
                _spec(layer, dtype, page, order=order) for layer, dtype, page, order in layers
            )
            for name, layers in parts.items()
        }
    except (TypeError, ValueError) as error:
        raise CodecError(f"s3kv.layers cannot be read: {error!r}") from error


def _spec(
    name: Any,
    dtype: Any,
    shape: Any,
    layers: tuple[TensorSpec, ...] = (),
    most: int = 2**53,
    order: Any = "",
) -> TensorSpec:
    """A tensor of untrusted values. most: bounds each dimension, and so the arithmetic on them.
    Raises `TypeError` or `ValueError`.
    """
    sizes = tuple(shape)
    if not all(isinstance(v, str) for v in (name, dtype, order)) or len(sizes) > MAX_DIMENSIONS:
        raise ValueError(f"{name!r} is not a tensor")
    if not all(type(n) is int and 0 <= n <= most for n in sizes):
        raise ValueError(f"{name!r} does not fit into the payload")
    return TensorSpec(name, dtype, sizes, layers, order)


def _read_tensors(
    members: dict[str, Any], layers: dict[str, tuple[TensorSpec, ...]], payload_bytes: int
) -> tuple[TensorSpec, ...]:
    """The tensors in payload order; they must tile the payload."""
    if not layers.keys() <= members.keys():
        raise CodecError("s3kv.layers names a tensor that is not there")
    spans = [
        _read_tensor(name, entry, layers.get(name, ()), payload_bytes)
        for name, entry in members.items()
    ]
    spans.sort(key=lambda span: span[:2])
    at = 0
    for begin, end, tensor in spans:
        if begin != at or end - begin != tensor.nbytes:
            raise CodecError(f"tensor {tensor.name!r} is not where its neighbours end")
        at = end
    if at != payload_bytes:
        raise CodecError(f"tensors of {at} bytes in a payload of {payload_bytes}")
    return tuple(tensor for _, _, tensor in spans)


def _read_tensor(
    name: str, entry: Any, layers: tuple[TensorSpec, ...], payload_bytes: int
) -> tuple[int, int, TensorSpec]:
    try:
        tensor = _spec(name, entry["dtype"], entry["shape"], layers, payload_bytes)
        begin, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CodecError(f"tensor {name!r} has no valid description: {error!r}") from error
    if not all(type(n) is int and 0 <= n <= payload_bytes for n in (begin, end)):
        raise CodecError(f"tensor {name!r} does not fit into the payload")
    if layers and not tensor.shape:
        raise CodecError(f"tensor {name!r} has layers and no blocks")
    return begin, end, tensor
