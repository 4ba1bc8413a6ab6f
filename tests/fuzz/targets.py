"""What a fuzzer calls: one function per reader, which raises when the reader did wrong.

Wrong is: any exception but the one the reader announces, an object accepted that is not the one
asked for, more memory than the input explains (see `test_fuzz`). Free of pytest and Hypothesis,
so that libFuzzer can drive them as well.
"""

from __future__ import annotations

from s3kv.config import Config
from s3kv.io import wire
from s3kv.io.manifest import MAX_MANIFEST_BYTES, explain, leaves
from s3kv.objects.codec import MAX_HEADER_BYTES, ChunkFormat, CodecError, read_header
from s3kv.objects.integrity import XXH3, Integrity
from s3kv.objects.items import ItemFormat, object_bytes
from s3kv.types import ItemShape, Outcome, TensorSpec

NAMESPACE = "0123456789abcdef" * 2
HASH = bytes(range(32))
TENSORS = (TensorSpec("layer.0", "BF16", (2, 3, 4)), TensorSpec("layer.1", "U8", (50,)))
KEYED = Integrity("blake3-keyed", bytes(range(32)))
FORMATS = [ChunkFormat(NAMESPACE, TENSORS, 0, "t0of1-p0of1", mode) for mode in (XXH3, KEYED)]
ITEM_BYTES = object_bytes("BF16", 3, 8)
ITEMS = [ItemFormat(NAMESPACE, "BF16", ItemShape(3, ITEM_BYTES), mode) for mode in (XXH3, KEYED)]


class Wrong(Exception):
    """A reader did what it must not."""


def sealed(form: ChunkFormat | ItemFormat) -> bytes:
    data = bytearray(bytes(range(256)) * (form.object_bytes // 256 + 1))[: form.object_bytes]
    form.seal(memoryview(data), HASH)
    return bytes(data)


GOOD = {form: sealed(form) for form in (*FORMATS, *ITEMS)}


def edited(good: bytes, edits: bytes) -> bytes:
    """`good` with pieces replaced: offset (2 bytes), length (1) and the new bytes, repeated."""
    data = bytearray(good)
    at = 0
    while at + 3 <= len(edits):
        offset = int.from_bytes(edits[at : at + 2], "little") % (len(good) + 1)
        length = edits[at + 2] % 64
        piece = edits[at + 3 : at + 3 + length]
        data[offset : offset + len(piece)] = piece
        at += 3 + length
    return bytes(data)


def objects(data: bytes) -> None:
    """An object as it is, and as a change of a good one, for every format."""
    for form, good in GOOD.items():
        for candidate in (data, edited(good, data)):
            refusal = form.check(memoryview(candidate), len(candidate), HASH)
            if refusal is None and candidate != good:
                raise Wrong(f"{form} accepted a forgery")
            if refusal is not None and candidate == good:
                raise Wrong(f"{form} refused a good object: {refusal}")


def header(data: bytes) -> None:
    """The parser that tools and error messages use, on anything at all and on a header's JSON."""
    framed = len(data).to_bytes(8, "little") + data
    for text in (data, framed, edited(GOOD[FORMATS[0]], data)):
        try:
            said = read_header(memoryview(text))
        except CodecError:
            continue
        if said.header_bytes > MAX_HEADER_BYTES or said.payload_bytes < 0:
            raise Wrong(f"the header has impossible sizes: {said}")
        if sum(t.nbytes for t in said.tensors) != said.payload_bytes:
            raise Wrong("the tensors do not tile the payload")


def frames(data: bytes) -> None:
    """A stream in both directions, as it is and as one frame, cut where the first byte says."""
    framed = len(data).to_bytes(4, "little") + data
    for direction, known in ((wire.Down, DOWN), (wire.Up, UP)):
        for stream in (data, framed, known + data):
            read_stream(direction, stream, 1 + (data[0] if data else 0))


def read_stream(direction: object, stream: bytes, step: int) -> None:
    reader = wire.FrameReader(direction)
    messages: list[wire.Down | wire.Up] = []
    try:
        for at in range(0, len(stream), step):
            messages += reader.feed(stream[at : at + step])
            if len(reader._pending) > wire.MAX_FRAME_BYTES + 4:
                raise Wrong("more than a frame is held")
    except wire.WireError:
        return
    again = wire.FrameReader(direction)
    if list(again.feed(wire.encode(messages))) != messages:  # type: ignore[arg-type]
        raise Wrong(f"{messages} are others when sent again")


def manifests(data: bytes) -> None:
    """What somebody else has put at a sibling's root, up to the line that is logged of it."""
    theirs = leaves(data[:MAX_MANIFEST_BYTES])
    if theirs is None:
        return
    for line in explain(theirs, {"model": '"m"'}):
        if not line.isprintable() or len(line) > 1000:
            raise Wrong(f"a line that does not belong into a log: {line!r}")


DOWN = wire.encode(
    [
        wire.Hello(Config(bucket="bkt"), "s3kv", NAMESPACE, "t0of1-p0of1", {0: TENSORS}),
        wire.Fetch(1, 0, HASH, 4096),
        wire.Upload(2, 0, HASH, 0, ItemShape(3, ITEM_BYTES)),
        wire.Cancel(1),
        wire.Ping(),
        wire.Drain(1.0),
    ]
)
UP = wire.encode(
    [
        wire.Ready(True, None, ""),
        wire.Done(1, Outcome.CORRUPT, 0, 0.5, "not what its key says", "digest"),
        wire.Drained(0),
    ]
)
TARGETS = {
    "objects": objects,
    "header": header,
    "frames": frames,
    "manifests": manifests,
}
SEEDS: dict[str, list[bytes]] = {
    "objects": [b"", *GOOD.values(), b"\x00\x10\x04abcd", b"\x08\x00\x02{}"],
    "header": [b"", *GOOD.values(), GOOD[FORMATS[0]][8:600]],
    "frames": [b"", DOWN, UP, DOWN[4:], UP[4:], b"\xdd\xff\xff\xff\xff"],
    "manifests": [b"{}", b'{"a":{"b":[1,null,"\\u001b"]}}'],
}
