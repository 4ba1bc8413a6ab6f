"""Machine code of other architectures is left out, and nothing else changes."""

from __future__ import annotations

import struct

from scripts.gpu.fatbins import of_one_architecture

CODE, PTX = 2, 1
NAMES = b"\0.text\0.nv_fatbin\0.shstrtab\0"


def entry(kind: int, architecture: int, payload: bytes) -> bytes:
    head = struct.pack("<HHIQ12xI", kind, 0x101, 64, len(payload), architecture)
    return head.ljust(64, b"h") + payload


def region(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(fatbin: bytes, section: bytes = b".nv_fatbin") -> bytes:
    """An ELF file with three sections, of which the first is text."""
    text = b"machine code of the host"
    parts = ((b".text", text), (section, fatbin), (b".shstrtab", NAMES))
    body, headers = bytearray(64), b""
    for name, content in parts:
        found = struct.pack("<I20xQQ24x", NAMES.find(name), len(body), len(content))
        headers += found.ljust(64, b"\0")
        body += content
    struct.pack_into("<Q", body, 0x28, len(body))
    struct.pack_into("<HHH", body, 0x3A, 64, len(parts), len(parts) - 1)
    return bytes(body) + headers


def test_payloads_of_one_architecture_are_kept_and_no_ptx() -> None:
    payloads = [bytes([number]) * 32 for number in range(1, 5)]
    kinds = ((CODE, 80), (CODE, 90), (PTX, 90), (CODE, 90))
    entries = [entry(*kind, payload) for kind, payload in zip(kinds, payloads, strict=True)]
    kept = [*entries]
    for number in (0, 2):
        kept[number] = entry(*kinds[number], bytes(32))
    gap = bytes(8)
    whole = region(*entries[:3]) + gap + region(entries[3])
    expected = region(*kept[:3]) + gap + region(kept[3])
    assert of_one_architecture(library(whole), 90) == library(expected)


def test_a_library_without_code_for_gpus_stays_as_it_is() -> None:
    plain = library(region(entry(CODE, 80, b"8" * 32)), b".text")
    assert of_one_architecture(plain, 90) == plain
