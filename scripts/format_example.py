"""The example of docs/object-format.md, written by the code that writes objects."""

from __future__ import annotations

from s3kv.objects.codec import ChunkFormat
from s3kv.objects.keys import Namespace
from s3kv.types import ChunkKey, TensorSpec
from scripts.marks import filled
from scripts.pictures import ROOT

HASH = bytes(range(32))
TENSORS = (
    TensorSpec("layers.0.kv", "BF16", (2, 3, 4)),
    TensorSpec("layers.1.kv", "F32", (5,)),
    TensorSpec("layers.2.scale", "U8", ()),
)
CHUNK = ChunkFormat("0123456789abcdef0123456789abcdef", TENSORS, 1, "t0of2-p0of1")


def page() -> str:
    """docs/object-format.md."""
    name = Namespace("s3kv", CHUNK.namespace_digest).chunk(ChunkKey(CHUNK.group, HASH), CHUNK.shard)
    header = bytes(example()[8 : CHUNK.header_bytes]).decode("ascii").rstrip()
    wrapped = header.replace(',"s3kv.', ',\n"s3kv.').replace(',"layers', ',\n"layers')
    parts = {"name": f"```text\n{name}\n```", "header": f"```text\n{wrapped}\n```"}
    return filled(ROOT / "docs" / "object-format.md", parts)


def example() -> memoryview:
    """The object."""
    buffer = memoryview(bytearray(CHUNK.object_bytes))
    buffer[CHUNK.header_bytes :] = bytes(range(CHUNK.payload_bytes))
    CHUNK.seal(buffer, HASH)
    return buffer
