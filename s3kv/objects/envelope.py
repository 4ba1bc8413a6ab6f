"""Compressed objects: the second form of an object of the format, shorter than the plain one.

A compressed object is a valid safetensors file with one tensor of bytes: the stored segments, one
after the other. Its header lists their lengths, their digests, and those of the decoded segments,
and describes the tensors that they decode to. A segment that does not shrink is stored as it is. A
reader knows every byte of the header except these lists, and compares all the others. An object to
be encrypted is padded to one of a few lengths: its exact length would tell prompts apart.

An object is received at the end of its place, and decoded to the front of it, segment after
segment, while the rest arrives:

    place     |header| payload                                          |
    received            |header|seg 0|seg 1|seg 2| … arriving           |
    decoded          |segment 0    |segment 1    |

No stored segment is longer than its decoded form. So decoded segment n ends before stored segment
n + 1, and overwrites at most its own stored bytes, which are copied first if so. Nothing outside of
the place is read or written, whatever the object contains. Pure; see `codec`.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import xxhash

from s3kv.objects import compression
from s3kv.objects.codec import (
    ALIGN_BYTES,
    HOLE,
    ChunkFormat,
    difference,
    entries_of,
    metadata_of,
    segments_of,
    template,
    to_json,
)
from s3kv.objects.compression import SEGMENT_BYTES
from s3kv.objects.headers import (
    COMPRESSED_TENSOR,
    MAX_HEADER_BYTES,
    CodecError,
    Mismatch,
    read_header,
)
from s3kv.objects.keys import MAX_HASH_BYTES
from s3kv.place import Place
from s3kv.types import item_bytes

LEAST_PAYLOAD_BYTES = 2**18
"""Shortest payload that is compressed. A shorter one would save less time than a wake-up costs."""
_LENGTH_CHARS, _DECODED_CHARS = 6, 16
_LENGTHS = 64
"""Number of lengths that padded objects of one format may have."""
_HEX = re.compile(rb"[0-9a-f]{6}")


class Envelope:
    """The compressed form of the objects of one format. `of` returns None for a format without one:
    its payload is too short, its objects have no digests, or the header would be too long."""

    def __init__(self, chunk: ChunkFormat) -> None:
        self.chunk = chunk
        self.segments = segments_of(chunk.tensors, SEGMENT_BYTES)
        """Bytes of each segment in the decoded payload."""
        self.item_bytes = tuple(
            max(item_bytes(spec.dtype) for spec in (tensor, *tensor.layers))
            for tensor in chunk.tensors
            for _ in segments_of([tensor], SEGMENT_BYTES)
        )
        """Item size of each segment; the largest if its layers differ."""
        self._texts = _header_text(chunk).encode("ascii").split(HOLE)
        widths = (_LENGTH_CHARS, _DECODED_CHARS, chunk.integrity.digest_chars)
        listed = sum((width + 1) * len(self.segments) - 1 for width in widths)
        numbers = 2 * MAX_HASH_BYTES + listed + 2 * len(str(chunk.payload_bytes))
        longest = 8 + sum(map(len, self._texts)) + numbers
        self.header_bytes = -(-longest // ALIGN_BYTES) * ALIGN_BYTES

    @classmethod
    def of(cls, chunk: ChunkFormat) -> Envelope | None:
        if chunk.payload_bytes < LEAST_PAYLOAD_BYTES or not chunk.integrity.digest_chars:
            return None
        envelope = cls(chunk)
        return envelope if envelope.header_bytes <= MAX_HEADER_BYTES else None

    def header(self, block_hash: bytes, segments: Segments) -> bytes:
        """The header of the object with these segments."""
        if not 1 <= len(block_hash) <= MAX_HASH_BYTES:
            raise ValueError(f"block hash of {len(block_hash)} bytes: 1 to {MAX_HASH_BYTES}")
        total = b"%d" % (sum(segments.lengths) + segments.padding)
        lengths = [b"%06x" % length for length in segments.lengths]
        lists = map(b",".join, (lengths, segments.decoded, segments.digests))
        fields = (block_hash.hex().encode(), *lists, total, total, b"")
        text = b"".join(x for pair in zip(self._texts, fields, strict=True) for x in pair)
        return ((self.header_bytes - 8).to_bytes(8, "little") + text).ljust(self.header_bytes)

    def listed(self, header: bytes, block_hash: bytes, nbytes: int) -> Segments | None:
        """The segments that the header of an object of `nbytes` lists, unverified. None if no such
        object has this header."""
        count, chars = len(self.segments), self.chunk.integrity.digest_chars
        at = 8 + len(self._texts[0]) + 2 * len(block_hash)
        lists: list[list[bytes]] = []
        widths = (_LENGTH_CHARS, _DECODED_CHARS, chars)
        for text, width in zip(self._texts[1:4], widths, strict=True):
            at += len(text)
            end = at + (width + 1) * count - 1
            lists.append(header[at:end].split(b","))
            at = end
        if any(len(found) != count for found in lists) or not all(map(_HEX.fullmatch, lists[0])):
            return None
        lengths = [int(text, 16) for text in lists[0]]
        padding = nbytes - self.header_bytes - sum(lengths)
        if padding not in (0, self._padding(sum(lengths))):
            return None
        segments = Segments(lengths, lists[1], lists[2], padding)
        for length, segment in zip(segments.lengths, self.segments, strict=True):
            if not 1 <= length <= len(segment):
                return None
        is_whole = hmac.compare_digest(header, self.header(block_hash, segments))
        return segments if is_whole else None

    def _padding(self, nbytes: int) -> int:
        """The padding before segments of `nbytes` that rounds their sum up to a multiple of a 64th
        of the plain payload."""
        return -nbytes % max(1, -(-self.chunk.payload_bytes // _LENGTHS))

    def encode(
        self,
        place: Place,
        block_hash: bytes,
        codec: compression.Codec,
        is_over: Callable[[], bool],
        *,
        is_padded: bool = False,
    ) -> list[bytes | memoryview] | None:
        """The compressed object of the payload in `place`: header, padding if `is_padded`, and
        segments; those that do not shrink are views of the payload. None if it would not be shorter
        than the plain object, or if `is_over`, which is called before each segment."""
        stored: list[bytes | memoryview] = []
        decoded: list[bytes] = []
        for segment, number_bytes in zip(self.segments, self.item_bytes, strict=True):
            if is_over():
                return None
            data = place.payload[segment.start : segment.stop]
            decoded.append(_decoded_digest(data))
            stored.append(codec.encode(data, number_bytes) or data)
        lengths = [len(data) for data in stored]
        padding = self._padding(sum(lengths)) if is_padded else 0
        if self.header_bytes + sum(lengths) + padding >= self.chunk.object_bytes:
            return None
        segments = Segments(lengths, decoded, (), padding)
        plain = self.header(block_hash, segments)
        digests = [
            self.chunk.integrity.digest(plain, number, memoryview(data)).encode()
            for number, data in enumerate(stored)
        ]
        header = self.header(block_hash, segments._replace(digests=digests))
        return [header, bytes(padding), *stored]


class Segments(NamedTuple):
    """The lists in a header. lengths: of the stored segments. decoded: digests of the decoded ones.
    digests: of the stored ones; they also cover this header without its digests. padding: bytes
    before the first one."""

    lengths: Sequence[int]
    decoded: Sequence[bytes]
    digests: Sequence[bytes] = ()
    padding: int = 0


def _decoded_digest(segment: memoryview) -> bytes:
    """The digest that detects a defect of the codec. Forging it takes a forged digest of the stored
    segment."""
    return xxhash.xxh3_64_hexdigest(segment).encode()


class Decoding:
    """Verification and decoding of one compressed object that arrives in its place. One thread at a
    time calls `advance`. place: of the plain object. nbytes: length of the object, shorter than the
    plain one."""

    def __init__(
        self,
        envelope: Envelope,
        place: Place,
        nbytes: int,
        block_hash: bytes,
        codec: compression.Codec | None,
    ) -> None:
        self._envelope, self._place, self._block_hash = envelope, place, block_hash
        self._nbytes, self._codec = nbytes, codec
        self._plain = b""
        self._segments = Segments((), ())
        self._bounds: list[int] = []
        """Offsets of the stored segments in the object: the start of the first, and all ends."""
        self._done = 0
        self.reason: Mismatch | None = None
        """The reason why it does not verify. Set once."""
        self.wanted_bytes = min(envelope.header_bytes, nbytes)
        """Bytes of the object that must have arrived before `advance` has anything to do."""

    def place_of(self, bounds: range) -> Place:
        """The memory for these bytes of the object."""
        begin = self._place.nbytes - self._nbytes
        return self._place.cut(begin + bounds.start, begin + bounds.stop)

    def advance(self, arrived_bytes: int, is_over: Callable[[], bool] = lambda: False) -> None:
        """Decode the segments within the first `arrived_bytes` of the object, until `is_over`,
        which is called before each of them."""
        while self.wanted_bytes <= arrived_bytes and not (self.is_done or is_over()):
            if self._bounds:
                self._decode()
            else:
                self._read_header()

    @property
    def is_done(self) -> bool:
        return self.reason is not None or 0 < len(self._bounds) - 1 == self._done

    @property
    def is_right(self) -> bool:
        """Whether all of it is decoded and verified."""
        return self.is_done and self.reason is None

    def _read_header(self) -> None:
        envelope = self._envelope
        header = bytes(self.place_of(range(envelope.header_bytes)))
        segments = envelope.listed(header, self._block_hash, self._nbytes)
        if segments is None:
            self.reason = self._refusal(header)
        elif self._codec is None:
            self.reason = "codec"
        else:
            self._segments = segments
            self._plain = envelope.header(self._block_hash, segments._replace(digests=()))
            begin = envelope.header_bytes + segments.padding
            self._bounds = list(accumulate(segments.lengths, initial=begin))
            self.wanted_bytes = self._bounds[1]

    def _decode(self) -> None:
        assert self._codec is not None
        number, envelope = self._done, self._envelope
        bounds, segment = range(*self._bounds[number : number + 2]), envelope.segments[number]
        views = self.place_of(bounds).views
        target = self._place.payload[segment.start : segment.stop]
        begin = self._place.nbytes - self._nbytes - len(self._place.header)
        if len(views) > 1 or begin + bounds.start < segment.stop:
            views = (memoryview(b"".join(views)),)
        digest = envelope.chunk.integrity.digest(self._plain, number, views[0]).encode()
        is_right = hmac.compare_digest(digest, self._segments.digests[number])
        if is_right and len(bounds) == len(segment):
            target[:] = views[0]
        elif is_right:
            is_right = self._codec.decode(views[0], target, envelope.item_bytes[number])
        if not is_right or _decoded_digest(target) != self._segments.decoded[number]:
            self.reason = "digest"
        self._done += 1
        self.wanted_bytes = self._bounds[min(number + 2, len(self._bounds) - 1)]

    def _refusal(self, header: bytes) -> Mismatch:
        """The reason why this header is not valid here."""
        try:
            said = read_header(memoryview(header), object_bytes=self._nbytes)
        except CodecError as error:
            return error.refusal
        if not said.codec:
            return "length"
        return difference(self._envelope.chunk, said, self._block_hash) or "header"


def _header_text(chunk: ChunkFormat) -> str:
    hole = HOLE.decode()
    metadata = metadata_of(chunk) | {
        "s3kv.codec": compression.NAME,
        "s3kv.tensors": to_json(entries_of(chunk.tensors)),
        "s3kv.stored": hole,
        "s3kv.decoded": hole,
        "s3kv.digests": hole,
    }
    text = template({"__metadata__": metadata}, holes=4)
    entry = f'"dtype":"U8","shape":[{hole}],"data_offsets":[0,{hole}]'
    return f'{text[:-1]},"{COMPRESSED_TENSOR}":{{{entry}}}}}'
