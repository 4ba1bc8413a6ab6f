"""The machine code of one GPU architecture in a shared library that has that of several.

NVIDIA's compiler puts code for every architecture into the section `.nv_fatbin`: regions, each a
header of 16 bytes and entries. An entry has a header of its own, with kind (1: PTX, 2: machine
code), its length, the length of its payload and the architecture, and its payload. The driver takes
the entry of its own architecture and reads no other, so the payloads of the others can be zeros,
which take no room in an archive. The layout is not documented: cuobjdump shows the same entries.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_SECTION = b".nv_fatbin"
_MAGIC = 0xBA55ED50
_CODE = 2
_REGION = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQ12xI")


def of_one_architecture(library: bytes, architecture: int) -> bytes:
    """The same file; other architectures' payloads and all PTX are zeros. A library without code
    for GPUs comes back as it is. architecture: 90 for compute capability 9.0, with 9.0a."""
    kept = bytearray(library)
    for begin, end, kind, found in _payloads(library):
        if (kind, found) != (_CODE, architecture):
            kept[begin:end] = bytes(end - begin)
    return bytes(kept)


def _payloads(library: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Begin, end, kind and architecture of each."""
    for begin, end in _regions(library):
        position = begin
        while position < end:
            kind, _, header_bytes, payload_bytes, found = _ENTRY.unpack_from(library, position)
            position += header_bytes + payload_bytes
            yield position - payload_bytes, position, kind, found


def _regions(library: bytes) -> Iterator[tuple[int, int]]:
    """Begin and end of the entries of each."""
    position, end = _section(library)
    while position < end:
        magic, _, header_bytes, size = _REGION.unpack_from(library, position)
        if magic != _MAGIC:
            position += 8  # between two regions
            continue
        position += header_bytes + size
        yield position - size, position


def _section(library: bytes) -> tuple[int, int]:
    """Begin and end of the section in a 64-bit ELF file; equal where there is none."""
    (table,) = struct.unpack_from("<Q", library, 0x28)
    entry_bytes, count, names = struct.unpack_from("<HHH", library, 0x3A)
    sections = [
        struct.unpack_from("<I20xQQ", library, table + number * entry_bytes)
        for number in range(count)
    ]
    for name, offset, size in sections:
        if library[sections[names][1] + name :].startswith(_SECTION + b"\0"):
            return offset, offset + size
    return 0, 0
