"""Pinning: in pieces of whole slots, and a refusal that is explained."""

from __future__ import annotations

import logging
import mmap

import pytest
import torch

from s3kv.device import pinning
from s3kv.device.places import ChunkPlaces
from tests.device.caches import Shape, build


class Refusing:
    """A CUDA runtime that registers `limit` pieces and then no more."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.registered: list[tuple[int, int]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if len(self.registered) == self.limit:
            return 2
        self.registered.append((address, nbytes))
        return 0


def places_of(slots: int, slot_bytes: int) -> ChunkPlaces:
    caches = build(Shape("LBNHC"), "cpu", torch.Generator().manual_seed(0))
    slab = memoryview(mmap.mmap(-1, slots * slot_bytes))
    return ChunkPlaces({0: caches.layout()}, slab, slot_bytes, {0: 4096})


def pin_with(monkeypatch: pytest.MonkeyPatch, runtime: Refusing, where: ChunkPlaces) -> int:
    monkeypatch.setattr(pinning, "_cudart", lambda: runtime)
    monkeypatch.setattr(pinning, "_PIECE_BYTES", 3 * 8192)
    monkeypatch.setattr(pinning, "_forget_error", lambda device: None)
    registered = pinning.pin(where.memory, where.slot_bytes, where.device)
    assert registered == dict(runtime.registered)
    return sum(registered.values())


def test_pieces_are_whole_slots_and_tile_the_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, where = Refusing(99), places_of(10, 8192)
    assert pin_with(monkeypatch, runtime, where) == 10 * 8192
    at = where.memory.data_ptr()
    for address, nbytes in runtime.registered:
        assert (address, nbytes % 8192) == (at, 0)
        at += nbytes
    assert len(runtime.registered) == 4


def test_slots_that_are_no_whole_pages_are_pinned_in_one_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, where = Refusing(99), places_of(10, 5000)
    assert pin_with(monkeypatch, runtime, where) == 10 * 5000
    assert len(runtime.registered) == 1


def test_a_refusal_to_pin_is_a_warning_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert pin_with(monkeypatch, Refusing(2), places_of(10, 8192)) == 6 * 8192
    (record,) = caplog.records
    assert "ulimit -l" in record.getMessage()
    assert "49152 of 81920" in record.getMessage()
