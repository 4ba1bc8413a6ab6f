"""Pinning: in pieces of whole slots, and a refusal that is explained."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from types import SimpleNamespace

import pytest
import torch

from s3kv.device.gpu import pinning
from s3kv.device.slot_payloads import ChunkPlaces
from s3kv.host import slab
from s3kv.host.limits import MemoryLimits
from tests.unit.device.caches import Shape, build


class Refusing:
    """A CUDA runtime that registers `limit` pieces, and gives back none of those in `kept`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.registered: list[tuple[int, int]] = []
        self.kept: set[int] = set()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if len(self.registered) == self.limit:
            return 2
        self.registered.append((address, nbytes))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if address in self.kept:
            return 713
        self.registered = [piece for piece in self.registered if piece[0] != address]
        return 0


def places_of(slots: int, slot_bytes: int) -> ChunkPlaces:
    slab = memoryview(mmap.mmap(-1, slots * slot_bytes))
    return ChunkPlaces({0: build(Shape("LBNHC")).layout()}, slab, slot_bytes, {0: 4096})


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
    odd = Refusing(99)
    assert pin_with(monkeypatch, odd, places_of(10, 5000)) == 50_000
    assert len(odd.registered) == 1, "slots that are no whole pages"


def test_a_refusal_to_pin_is_a_warning_that_says_what_it_costs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert pin_with(monkeypatch, Refusing(2), places_of(10, 8192)) == 6 * 8192
    (said,) = caplog.messages
    for part in ("49152 of the 81920", "cudaErrorMemoryAllocation (2)", pinning.COST):
        assert part in said


@pytest.mark.parametrize(
    ("code", "locked", "reason", "remedy"),
    [
        (1, None, "cudaErrorInvalidValue (1)", "NVRM"),
        (2, None, "cudaErrorMemoryAllocation (2)", "set host_bytes lower"),
        (2, 4096, "may lock 4,096", "--ulimit memlock=-1"),
        (304, None, "cudaErrorOperatingSystem (304)", "NVRM"),
        (712, None, "cudaErrorHostMemoryAlreadyRegistered (712)", "report a bug"),
        (800, None, "cudaErrorNotPermitted (800)", "capture"),
        (801, 4096, "cudaErrorNotSupported (801)", "cudaDevAttrHostRegisterSupported"),
        (999, None, "(999)", "set host_bytes lower"),
    ],
)
def test_a_refusal_names_the_error_the_limits_and_a_way_out(
    code: int, locked: int | None, reason: str, remedy: str
) -> None:
    limits = MemoryLimits(2**34, 2**32, 2**31, locked)
    refusal = pinning.PinningRefusal.of(code, 2**30, limits)
    assert reason in refusal.reason
    assert str(limits) in refusal.reason
    assert remedy in refusal.remedy


@pytest.mark.parametrize(("code", "locked"), [(801, 4096), (2, 2**30), (2, None)])
def test_the_limit_is_no_remedy_where_it_cannot_be_the_cause(code: int, locked: int | None) -> None:
    refusal = pinning.PinningRefusal.of(code, 2**30, MemoryLimits(2**34, None, None, locked))
    assert "memlock" not in refusal.remedy


def test_what_cuda_does_not_give_back_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime, where = Refusing(99), places_of(10, 8192)
    monkeypatch.setattr(pinning, "_cudart", lambda: runtime)
    forgotten: list[torch.device] = []
    monkeypatch.setattr(pinning, "_forget_error", forgotten.append)
    registered = pinning.pin(where.memory, where.slot_bytes, where.device)
    runtime.kept = {min(registered)}
    pinning.unpin(registered)
    assert registered == {}
    assert [address for address, _ in runtime.registered] == [min(runtime.kept)]
    assert "error 713" in caplog.text
    assert len(forgotten) == 1


def resident(where: ChunkPlaces) -> bool:
    """Whether all pages of the slab are in memory."""
    nbytes = where.memory.numel()
    pages = (ctypes.c_ubyte * (nbytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert libc.mincore(where.memory.data_ptr(), nbytes, pages) == 0
    return all(page & 1 for page in pages)


def test_pages_are_there_before_cuda_is_asked_and_other_threads_bring_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, where = Refusing(99), places_of(64, 65536)
    found: list[bool] = []
    register = runtime.cudaHostRegister

    def looking(address: int, nbytes: int, flags: int) -> int:
        found.append(resident(where))
        return register(address, nbytes, flags)

    threads: set[int] = set()
    populate = slab.populate

    def watched(address: int, nbytes: int) -> int:
        threads.add(threading.get_ident())
        return populate(address, nbytes)

    monkeypatch.setattr(runtime, "cudaHostRegister", looking)
    monkeypatch.setattr(pinning, "_cudart", lambda: runtime)
    monkeypatch.setattr(slab, "populate", watched)
    monkeypatch.setattr(slab, "PREFAULT_BYTES", 65536)
    assert not resident(where)
    pinning.pin(where.memory, where.slot_bytes, where.device)
    assert found == [True]
    assert threads
    assert threading.get_ident() not in threads


def test_how_long_it_takes_is_told_on_the_way_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pinning, "_cudart", lambda: Refusing(99))
    monkeypatch.setattr(pinning, "_PIECE_BYTES", 8192)
    now = iter([100.0, 108.0, 112.5])
    where = places_of(20, 8192)
    with caplog.at_level(logging.INFO):
        pinning.register(where.memory, 8192, where.device, now.__next__)
    assert [record.getMessage() for record in caplog.records] == [
        f"s3kv: pinned {16 * 8192} of {20 * 8192} bytes in 8.0 s",
        f"s3kv: pinned {20 * 8192} of {20 * 8192} bytes in 12.5 s",
    ]


def test_an_error_comes_from_the_runtime_torch_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no kernel is launched for it."""
    loaded: list[tuple[str, int]] = []
    asked: list[str] = []

    def load(name: str, mode: int) -> SimpleNamespace:
        loaded.append((name, mode))
        return SimpleNamespace(cudaGetLastError=lambda: asked.append(name))

    monkeypatch.setattr(pinning, "ctypes", SimpleNamespace(CDLL=load))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch, "zeros", None)
    pinning._forget_error(torch.device("cuda"))
    assert loaded == [("libcudart.so.12", os.RTLD_NOLOAD)]
    assert asked == ["libcudart.so.12"]


@pytest.mark.gpu
def test_the_codes_are_those_of_cuda() -> None:
    """The same memory registered twice."""
    where = places_of(10, 8192)
    torch.zeros(1, device="cuda")
    registered, refusal = pinning.register(where.memory, 8192, torch.device("cuda"))
    assert refusal is None
    _, again = pinning.register(where.memory, 8192, torch.device("cuda"))
    assert again.reason.startswith("cudaErrorHostMemoryAlreadyRegistered")
    assert torch.zeros(8, device="cuda").sum() == 0, "the error was left to the engine"
    pinning.unpin(registered)
    assert not where.memory.is_pinned()
