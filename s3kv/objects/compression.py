"""Compression without loss of segments, by Blosc2: bytes by significance, then zstd at level 1.

The exponents of KV carry little information, and its mantissas cannot be compressed. With the bytes
of all numbers grouped by significance, bf16 shrinks to 0.69 or 0.70, which is nearly the entropy of
these groups (decision 32). A compressed segment is one chunk of Blosc2's format 5, of one block: a
header of 32 bytes, then the data. Writers produce and readers accept only the header of `_header`,
so no object chooses the code that decodes it.

The package blosc2 is an optional extra. Its calls release the GIL, and run in any thread.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import struct
from collections.abc import Callable
from typing import Any, Protocol

from s3kv.types import fastest_s

NAME = "blosc2"
"""Name of the codec in an object's header."""
REMEDY = "pip install 'vllm-s3kv[compression]'"
NO_CODEC = f"the package blosc2 is missing: {REMEDY}"
PLAIN_REASONS = ("fast_wire", "busy", "no_gain")
"""Reasons to upload an object plain although it has a compressed form: with `compress: auto`, the
wire is too fast; no thread or no memory is free; it would not be shorter."""
_HEADER = struct.Struct("<BBBBIII6sBB6sBB")
_FORMAT, _ZSTD_FORMAT, _FLAGS = 5, 1, 0x85
"""Format 5 of a chunk; version 1 of zstd's streams; a chunk with the long header, by zstd."""
_SHUFFLE, _ZSTD = 1, 5
SEGMENT_BYTES = 2**20
"""Length of a segment before encoding. A hit waits for one to be decoded after its last byte."""


class Codec(Protocol):
    """Encoder and decoder of segments. item_bytes: the size of the numbers in a segment, 1 to 8.
    Pure; every call may be made in any thread, and holds the GIL for microseconds."""

    def encode(self, segment: memoryview, item_bytes: int) -> bytes | None:
        """The segment compressed; None if that is not shorter, or if the segment is not a whole
        number of items."""

    def decode(self, data: memoryview, target: memoryview, item_bytes: int) -> bool:
        """Decode `data`, which `encode` made of a segment of `len(target)` bytes, into `target`.
        False if it is not such data; the content of `target` is then undefined. Writes to nothing
        else, whatever the data."""


class Blosc2:
    """The codec of the package blosc2."""

    def __init__(self, blosc2: Any) -> None:
        blosc2.set_releasegil(True)  # for the whole process: the package holds it by default
        self._compress, self._decompress = blosc2.compress2, blosc2.decompress2
        self._settings = {
            "codec": blosc2.Codec.ZSTD,
            "clevel": 1,
            "filters": [blosc2.Filter.SHUFFLE],
            "filters_meta": [0],
            "nthreads": 1,
        }

    def encode(self, segment: memoryview, item_bytes: int) -> bytes | None:
        nbytes = len(segment)
        if nbytes % item_bytes:  # some versions decode such a chunk to other bytes
            return None
        data: bytes = self._compress(
            segment, typesize=item_bytes, blocksize=nbytes, **self._settings
        )
        is_usual = data[: _HEADER.size] == _header(nbytes, len(data), item_bytes)
        return data if is_usual and len(data) < nbytes else None

    def decode(self, data: memoryview, target: memoryview, item_bytes: int) -> bool:
        # Blosc2 does not check the lengths in a header, and would write beyond the target.
        usual = _header(len(target), len(data), item_bytes)
        if len(target) % item_bytes or bytes(data[: _HEADER.size]) != usual:
            return False
        try:
            self._decompress(data, nthreads=1, dst=target)
        except ValueError:
            return False
        return True


def _header(nbytes: int, stored_bytes: int, item_bytes: int) -> bytes:
    """The header of a chunk of `nbytes` that takes `stored_bytes`, header included."""
    sizes = (nbytes, nbytes, stored_bytes)
    filters = bytes([_SHUFFLE, 0, 0, 0, 0, 0])
    return _HEADER.pack(
        _FORMAT, _ZSTD_FORMAT, _FLAGS, item_bytes, *sizes, filters, _ZSTD, 0, bytes(6), 0, 0
    )


@functools.cache
def codec() -> Codec | None:
    """The codec of this process; None if blosc2 is not installed, or if its version writes another
    format. The first call imports it, which takes some tenths of a second."""
    try:
        found = Blosc2(importlib.import_module("blosc2"))
    except (ImportError, AttributeError):  # a version with other names
        return None
    sample = memoryview(bytes(range(256)) * 16)
    encoded, decoded = found.encode(sample, 2), bytearray(len(sample))
    if encoded is None or not found.decode(memoryview(encoded), memoryview(decoded), 2):
        return None
    return found if decoded == sample else None


def decoding_speed(codec: Codec, clock: Callable[[], float]) -> float:
    """Bytes per second that one thread decodes: the best of three segments like those of KV in
    bf16: half random bytes, half small numbers with few values. clock: in seconds."""
    noise = hashlib.shake_128().digest(SEGMENT_BYTES)
    segment = bytearray(noise)
    kinds = bytes(9 - (n + 1).bit_length() for n in range(256))
    segment[1::2] = noise[1::2].translate(kinds)
    encoded = codec.encode(memoryview(segment), 2)
    assert encoded is not None
    data, target = memoryview(encoded), memoryview(segment)
    return SEGMENT_BYTES / fastest_s(lambda: codec.decode(data, target, 2), clock)
