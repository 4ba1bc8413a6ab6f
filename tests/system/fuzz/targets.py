"""What a fuzzer calls: one function per reader, which raises when the reader did wrong.

Wrong is: any exception but the one the reader announces, an object accepted that is not the one
asked for, more memory than the input explains (see `test_fuzz`). Free of pytest and Hypothesis,
so that libFuzzer can drive them as well.
"""

from __future__ import annotations

import json
from collections.abc import Coroutine
from typing import Any, cast, get_args

from lab.constants import changed
from lab.memory_store import MemoryStore
from s3kv.config import Config
from s3kv.errors import StoreUnranged
from s3kv.io import wire
from s3kv.io.sources.encrypted_store import EncryptedStore
from s3kv.messages import BucketJob, JobEnd, JobKind
from s3kv.objects import compression
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.encryption import Keyring
from s3kv.objects.envelope import Decoding, Envelope
from s3kv.objects.headers import MAX_HEADER_BYTES, CodecError, Mismatch, read_header
from s3kv.objects.integrity import XXH3, Integrity
from s3kv.objects.item_format import ItemFormat, object_bytes
from s3kv.objects.keys import Namespace
from s3kv.objects.manifest import MAX_MANIFEST_BYTES, leaves
from s3kv.place import Place
from s3kv.stores.store import ObjectInfo
from s3kv.types import ChunkKey, ItemShape, Outcome, TensorSpec
from tests.system.encrypted_form import encrypted as form_of_encrypted

NAMESPACE = "0123456789abcdef" * 2
HASH = bytes(range(32))
TENSORS = (
    TensorSpec("g0", "BF16", (2, 1, 3, 4), (TensorSpec("layer.0", "BF16", (3, 4), (), "NC"),)),
    TensorSpec("g1", "U8", (2, 24), (TensorSpec("a", "F32", (5,)), TensorSpec("b", "U8", (4,)))),
    TensorSpec("g2", "U8", (48,)),
)
KEYED = Integrity("blake3-keyed", bytes(range(32)))
FORMATS = [ChunkFormat(NAMESPACE, TENSORS, 0, "h0-7of8-l0-31of32", mode) for mode in (XXH3, KEYED)]
LARGE = (
    TensorSpec.of_layers("g0", 2, (TensorSpec("layer.0", "BF16", (700,), (), "C"),)),
    TensorSpec.of_layers("g1", 2, (TensorSpec("a", "F32", (300,)), TensorSpec("b", "U8", (4,)))),
    TensorSpec("g2", "U8", (900,)),
)
ENVELOPES = [
    Envelope(ChunkFormat(NAMESPACE, LARGE, 0, "h0-7of8-l0-31of32", mode)) for mode in (XXH3, KEYED)
]
ITEM_BYTES = object_bytes("BF16", 3, 8)
ITEMS = [ItemFormat(NAMESPACE, "BF16", ItemShape(3, ITEM_BYTES), mode) for mode in (XXH3, KEYED)]


Form = ChunkFormat | ItemFormat | Envelope
"""The forms of an object, each with its reader."""


class Wrong(Exception):
    """A reader did what it must not."""


def sealed(form: ChunkFormat | ItemFormat) -> bytes:
    data = bytearray(bytes(range(256)) * (form.object_bytes // 256 + 1))[: form.object_bytes]
    form.seal(Place.of(data, form.header_bytes), HASH)
    return bytes(data)


def compressed(envelope: Envelope) -> bytes:
    chunk, codec = envelope.chunk, compression.codec()
    place = Place.of(bytearray(chunk.object_bytes), chunk.header_bytes)
    place.payload[:] = (b"text that shrinks, " * chunk.payload_bytes)[: chunk.payload_bytes]
    pieces = codec and envelope.encode(place, HASH, codec, lambda: False)
    if pieces is None:
        raise Wrong("the payload does not shrink")
    return b"".join(pieces)


GOOD: dict[Form, bytes] = {
    **{form: sealed(form) for form in (*FORMATS, *ITEMS)},
    **{envelope: compressed(envelope) for envelope in ENVELOPES},
}
GUARD_BYTES = 2**16


def refusal_of(form: Form, candidate: bytes) -> str | None:
    """What the reader says. Raises `Wrong` if it writes outside of the object's place."""
    if not isinstance(form, Envelope):
        return form.check(Place.of(candidate, form.header_bytes), len(candidate), HASH)
    chunk = form.chunk
    if len(candidate) >= chunk.object_bytes:
        return "length"
    arena = bytearray(b"\xa5" * (chunk.object_bytes + 2 * GUARD_BYTES))
    place = Place.of(memoryview(arena)[GUARD_BYTES:-GUARD_BYTES], chunk.header_bytes)
    decoding = Decoding(form, place, len(candidate), HASH, compression.codec())
    decoding.place_of(range(len(candidate))).write(candidate)
    decoding.advance(len(candidate))
    if not decoding.is_done:
        raise Wrong("an object that is there is not decoded")
    if {*arena[:GUARD_BYTES], *arena[-GUARD_BYTES:]} != {0xA5}:
        raise Wrong("bytes outside of the place are written")
    return decoding.reason


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
            refusal = judge(form, good, candidate)
            if refusal is not None and candidate == good:
                raise Wrong(f"{form} refused a good object: {refusal}")


def with_header(form: Form, good: bytes, text: str) -> bytes:
    """`good` with another header of the same length, as far as it fits."""
    room = form.header_bytes - 8
    return good[:8] + text.encode()[:room].ljust(room) + good[form.header_bytes :]


def places(members: Any) -> list[list[Any]]:
    """Where a header's JSON has values: the path to each, through objects and lists."""
    pairs = members.items() if isinstance(members, dict) else enumerate(members)
    found: list[list[Any]] = []
    for name, value in pairs:
        found.append([name])
        if isinstance(value, dict | list):
            found += [[name, *rest] for rest in places(value)]
    return found


def with_value(form: Form, good: bytes, path: list[Any], value: Any) -> bytes:
    """`good` with another value at one place of its header. Of a list of layers, too, by text."""
    members = json.loads(good[8 : form.header_bytes])
    inner = members
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return with_header(form, good, json.dumps(members, separators=(",", ":")))


def judge(form: Form, good: bytes, candidate: bytes) -> str | None:
    """What the reader says. Raises `Wrong` if it takes what is not there."""
    refusal = refusal_of(form, candidate)
    if refusal is None and candidate != good:
        raise Wrong(f"{form} accepted a forgery")
    if refusal is not None and refusal not in get_args(Mismatch):
        raise Wrong(f"{refusal} is no reason")
    return refusal


def fields(data: bytes) -> None:
    """A header with one value replaced: the first byte says where, the others what by."""
    text = data[1:].decode("utf-8", "replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    for form in (*FORMATS, *ENVELOPES):
        every = places(json.loads(GOOD[form][8 : form.header_bytes]))
        path = every[data[0] % len(every) if data else 0]
        judge(form, GOOD[form], with_value(form, GOOD[form], path, value))


def segments(data: bytes) -> None:
    """The object's own segments in another order, its digests in another order, and both: pairs of
    bytes say which goes where. Without a key nothing guards against both."""
    for form in FORMATS:
        good, payload = GOOD[form], GOOD[form][form.header_bytes :]
        said = list(read_header(memoryview(good)).digests)
        pieces, listed = [payload[span.start : span.stop] for span in form.segments], list(said)
        for to, source in zip(data[::2], data[1::2], strict=False):
            pieces[to % len(said)] = pieces[source % len(said)]
            listed[to % len(said)] = listed[source % len(said)]
        text = good[8 : form.header_bytes].decode().rstrip()
        other = with_header(form, good, text.replace(",".join(said), ",".join(listed)))
        judge(form, good, other)
        judge(form, good, good[: form.header_bytes] + b"".join(pieces))
        if form.integrity.key:
            judge(form, good, other[: form.header_bytes] + b"".join(pieces))


def header(data: bytes) -> None:
    """The parser that tools and error messages use, on anything at all and on a header's JSON."""
    framed = len(data).to_bytes(8, "little") + data
    for text in (data, framed, *(edited(GOOD[form], data) for form in (FORMATS[0], ENVELOPES[0]))):
        try:
            said = read_header(memoryview(text))
        except CodecError:
            continue
        if said.header_bytes > MAX_HEADER_BYTES or said.payload_bytes < 0:
            raise Wrong(f"the header has impossible sizes: {said}")
        if not said.codec and sum(t.nbytes for t in said.tensors) != said.payload_bytes:
            raise Wrong("the tensors do not tile the payload")


MASTER = bytes(range(32))
SEGMENT_BYTES = 1024
KEY = Namespace("s3kv", NAMESPACE).chunk(ChunkKey(0, HASH), "h0-7of8-l0-31of32")
PLAIN = GOOD[FORMATS[0]]
ENCRYPTED = form_of_encrypted(KEY, MASTER, PLAIN, SEGMENT_BYTES)
_HEADER_BYTES, _PIECE_BYTES = 256, SEGMENT_BYTES + 28


def encrypted(data: bytes) -> None:
    """An encrypted object as it is, as a change of a good one, and with its segments in another
    order: read whole and in ranges, as a job reads it."""
    with changed(encrypted_segment_bytes=SEGMENT_BYTES):
        for candidate in (data, edited(ENCRYPTED, data), reordered(data)):
            read_encrypted(candidate)


def reordered(data: bytes) -> bytes:
    """Pairs of bytes say which segment goes where."""
    begins = range(_HEADER_BYTES, len(ENCRYPTED), _PIECE_BYTES)
    pieces = [ENCRYPTED[at : at + _PIECE_BYTES] for at in begins]
    for to, source in zip(data[::2], data[1::2], strict=False):
        pieces[to % len(pieces)] = pieces[source % len(pieces)]
    return ENCRYPTED[:_HEADER_BYTES] + b"".join(pieces)


def ended(reading: Coroutine[Any, Any, ObjectInfo | None]) -> ObjectInfo | None:
    """The result of a coroutine that waits for nothing but its turn."""
    while True:
        try:
            reading.send(None)
        except StopIteration as end:
            return cast("ObjectInfo | None", end.value)


def read_encrypted(candidate: bytes) -> None:
    bucket, nbytes = MemoryStore(), len(PLAIN)
    ring = Keyring([MASTER])
    bucket.hold(ring.forms(KEY)[0].key, candidate)
    store = EncryptedStore(bucket, ring)
    for bounds in (None, range(2048), range(2048, 3072), range(2048, nbytes)):
        arena = bytearray(b"\xa5" * (nbytes + 2 * GUARD_BYTES))
        wanted = bounds or range(nbytes)
        view = memoryview(arena)[GUARD_BYTES : GUARD_BYTES + len(wanted)]
        place = Place.of(view, min(FORMATS[0].header_bytes, len(wanted)))
        try:
            first = None if bounds is None else bounds.start
            info = ended(store.get_into(KEY, place, first=first))
        except StoreUnranged:
            continue
        if info is None:
            raise Wrong("an object that is there is missing")
        is_right = view == PLAIN[wanted.start : wanted.stop]
        if info.nbytes == nbytes and not is_right:
            raise Wrong(f"a forgery is read in {bounds}")
        if bounds is None and (info.nbytes == nbytes) != (candidate == ENCRYPTED):
            raise Wrong(f"an object is told to have {info.nbytes} bytes")
        if {*arena[:GUARD_BYTES], *arena[GUARD_BYTES + len(wanted) :]} != {0xA5}:
            raise Wrong("bytes outside of the place are written")


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
    again, sent = wire.FrameReader(direction), wire.encode(messages)  # type: ignore[arg-type]
    # Compared as bytes: a number that is none equals nothing, itself included.
    if wire.encode(list(again.feed(sent))) != sent:
        raise Wrong(f"{messages} are others when sent again")


def manifests(data: bytes) -> None:
    """What somebody else has put at a namespace's root, as it is shown."""
    for name in leaves(data[:MAX_MANIFEST_BYTES]) or ():
        if len(name) > 1000 or not name.isprintable():
            raise Wrong(f"a name of {len(name)} characters, {name[:100]!r}")


DOWN = wire.encode(
    [
        wire.Handshake(Config(bucket="bkt"), "s3kv", NAMESPACE, "h0-7of8-l0-31of32", {0: TENSORS}),
        BucketJob(1, JobKind.FETCH, ChunkKey(0, HASH), 1),
        BucketJob(2, JobKind.UPLOAD, ChunkKey(0, HASH), 0, ItemShape(3, ITEM_BYTES)),
        wire.Cancel(1),
        wire.Ping(),
        wire.Drain(1.0),
    ]
)
UP = wire.encode(
    [
        wire.Ready(True, None, ""),
        JobEnd(1, JobKind.FETCH, Outcome.CORRUPT, 0, 0.5, 1, "not what its key says", "digest"),
        wire.Drained(0),
    ]
)
TARGETS = {
    "objects": objects,
    "fields": fields,
    "segments": segments,
    "encrypted": encrypted,
    "header": header,
    "frames": frames,
    "manifests": manifests,
}
SEEDS: dict[str, list[bytes]] = {
    "objects": [b"", *GOOD.values(), b"\x00\x10\x04abcd", b"\x08\x00\x02{}"],
    "fields": [b"", b"\x02" + b'"2"', b"\x09[]", b"\x0c-1"],
    "encrypted": [b"", ENCRYPTED, PLAIN, b"\x00\x01\x01\x00", b"\x00\x01\x01x", ENCRYPTED[:-1]],
    "segments": [b"", b"\x00\x01", b"\x00\x01\x01\x00\x02\x02", bytes(range(12))],
    "header": [b"", *GOOD.values(), GOOD[FORMATS[0]][8:600], GOOD[ENVELOPES[0]][8:2000]],
    "frames": [b"", DOWN, UP, DOWN[4:], UP[4:], b"\xdd\xff\xff\xff\xff"],
    "manifests": [b"{}", b'{"a":{"b":[1,null,"\\u001b"]}}'],
}
