"""The example of docs/object-format.md, written by the code that writes objects."""

from __future__ import annotations

from s3kv.objects.codec import ChunkFormat
from s3kv.objects.keys import Namespace
from s3kv.place import Place
from s3kv.types import ChunkKey, TensorSpec
from scripts.marks import ROOT, filled

HASH = bytes(range(32))
PAGE = (3, 2)
TENSORS = (
    TensorSpec(
        "g1",
        "BF16",
        (2, 2, *PAGE),
        tuple(TensorSpec(f"layers.{n}.kv", "BF16", PAGE, (), "HC") for n in range(2)),
    ),
    TensorSpec(
        "g2",
        "U8",
        (2, 9),
        (TensorSpec("layers.2.kv", "F32", (2,), (), "C"), TensorSpec("layers.2.scale", "U8", ())),
    ),
)
CHUNK = ChunkFormat(
    "0123456789abcdef0123456789abcdef", TENSORS, 1, "h0-3of8-l0-2of3", first_block=14
)


def page() -> str:
    """docs/object-format.md."""
    name = Namespace("s3kv", CHUNK.namespace_digest).chunk(
        ChunkKey(CHUNK.coverage, HASH), CHUNK.shard
    )
    header = bytes(example()[8 : CHUNK.header_bytes]).decode("ascii").rstrip()
    wrapped = header.replace(',"s3kv.', ',\n"s3kv.').replace(',"g', ',\n"g')
    parts = {"name": f"```text\n{name}\n```", "header": f"```text\n{wrapped}\n```"}
    return filled(ROOT / "docs" / "object-format.md", parts)


def example() -> memoryview:
    """The object."""
    buffer = memoryview(bytearray(CHUNK.object_bytes))
    buffer[CHUNK.header_bytes :] = bytes(range(CHUNK.payload_bytes))
    CHUNK.seal(Place.of(buffer, CHUNK.header_bytes), HASH)
    return buffer
