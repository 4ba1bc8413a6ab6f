"""What the driver's batch call is given, seen by a function of its prototype."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from s3kv.device import driver
from s3kv.device.driver import Attributes, BatchCall, Location, NoBatchCall
from s3kv.device.gpu import Copies

STREAM = 0x7F00_1234_5678


class Driver:
    """Carries the copies out in host memory, and keeps what it was called with.

    refuse: the index of a copy of a call at which to fail with CUDA_ERROR_INVALID_VALUE.
    """

    def __init__(self, refuse: int | None = None) -> None:
        self.calls: list[dict[str, Any]] = []
        self.refuse = refuse
        self.entry = driver.PROTOTYPE(self._call)

    def _call(
        self,
        destinations: int,
        sources: int,
        sizes: int,
        count: int,
        attributes: int,
        first: int,
        num_attributes: int,
        failed: int,
        stream: int,
    ) -> int:
        arrays = [list((ctypes.c_size_t * count).from_address(a)) for a in (sources, sizes)]
        targets = list((ctypes.c_size_t * count).from_address(destinations))
        given = (ctypes.c_uint32 * 6).from_address(attributes)
        self.calls.append(
            {
                "count": count,
                "attributes": list(given),
                "firsts": [ctypes.c_size_t.from_address(first).value] * num_attributes,
                "stream": stream,
            }
        )
        for i, (target, source, size) in enumerate(zip(targets, *arrays, strict=True)):
            if i == self.refuse:
                ctypes.c_size_t.from_address(failed).value = i
                return 1
            ctypes.memmove(target, source, size)
        return 0


def scattered(count: int) -> tuple[torch.Tensor, torch.Tensor, Copies]:
    """Eight bytes each, from where they are to the mirror image of it."""
    source = torch.arange(count * 8, dtype=torch.int64).to(torch.uint8)
    target = torch.zeros_like(source)
    at = np.arange(count, dtype=np.int64) * 8
    sizes = np.full(count, 8, dtype=np.int64)
    return (
        source,
        target,
        Copies(target.data_ptr() + at[::-1].copy(), source.data_ptr() + at, sizes),
    )


@pytest.mark.parametrize(("is_stable", "order"), [(False, 1), (True, 3)])
def test_the_arrays_the_attributes_and_the_stream_arrive(is_stable: bool, order: int) -> None:
    double = Driver()
    source, target, copies = scattered(100)
    BatchCall(double.entry)(copies, is_stable, STREAM)
    assert torch.equal(target.view(100, 8), source.view(100, 8).flip(0))
    (call,) = double.calls
    # srcAccessOrder, two location hints of type and id, flags.
    assert call["attributes"] == [order, 0, 0, 0, 0, 1]
    assert call["firsts"] == [0]
    assert call["stream"] == STREAM


def test_many_copies_are_several_calls() -> None:
    double = Driver()
    source, target, copies = scattered(10_000)
    BatchCall(double.entry)(copies, False, STREAM)
    assert torch.equal(target.view(-1, 8), source.view(-1, 8).flip(0))
    assert [call["count"] for call in double.calls] == [4096, 4096, 1808]


@pytest.mark.parametrize(("count", "at"), [(20, 7), (5_000, 7)])
def test_a_refusal_names_the_copy(count: int, at: int) -> None:
    _, _, copies = scattered(count)
    source, target = int(copies.sources[at]), int(copies.destinations[at])
    with pytest.raises(
        RuntimeError, match=f"CUresult 1 at 8 bytes from {source:#x} to {target:#x}"
    ):
        BatchCall(Driver(refuse=at).entry)(copies, False, STREAM)


def test_a_refusal_of_the_whole_call() -> None:
    _, _, copies = scattered(3)
    with pytest.raises(RuntimeError, match=r"CUresult 201$"):
        BatchCall(lambda *_: 201)(copies, False, STREAM)


def test_the_structures_are_those_of_the_header() -> None:
    """cuda.h of 12.8 to 13.0: `struct { CUmemcpySrcAccessOrder srcAccessOrder; CUmemLocation
    srcLocHint, dstLocHint; unsigned int flags; }`, where a location is `struct { CUmemLocationType
    type; int id; }`, and enumerations are four bytes.
    """
    assert ctypes.sizeof(Location) == 8
    assert (Location.type.offset, Location.id.offset) == (0, 4)
    assert ctypes.sizeof(Attributes) == 24
    fields = (Attributes.srcAccessOrder, Attributes.srcLocHint, Attributes.dstLocHint)
    assert [field.offset for field in (*fields, Attributes.flags)] == [0, 4, 12, 20]


@pytest.mark.gpu
def test_the_structures_are_those_of_the_bindings() -> None:
    from cuda.bindings import driver as cu

    theirs = cu.CUmemcpyAttributes()
    theirs.srcAccessOrder = cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_ANY
    theirs.srcLocHint.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST
    theirs.srcLocHint.id = 7
    theirs.dstLocHint.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    theirs.dstLocHint.id = 9
    theirs.flags = cu.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
    ours = Attributes(driver.ANY_ORDER, Location(2, 7), Location(1, 9), driver.PREFER_OVERLAP)
    assert bytes(ours) == ctypes.string_at(theirs.getPtr(), ctypes.sizeof(ours))
    assert int(cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM) == driver.STREAM_ORDER


def bindings(monkeypatch: pytest.MonkeyPatch, ask: Callable[..., Any] | None) -> None:
    """`cuda.bindings.driver` with this `cuGetProcAddress`; None: it is not installed."""
    module = ModuleType("cuda.bindings")
    if ask is not None:
        module.driver = SimpleNamespace(cuGetProcAddress=ask)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", module)


def test_the_version_with_a_fail_index_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    double, asked = Driver(), []

    def ask(*arguments: object) -> tuple[int, int | None, object]:
        asked.append(arguments)
        return 0, ctypes.cast(double.entry, ctypes.c_void_p).value, None

    bindings(monkeypatch, ask)
    source, target, copies = scattered(5)
    BatchCall.find()(copies, False, STREAM)
    assert asked == [(b"cuMemcpyBatchAsync", 12080, 0)]
    assert torch.equal(target.view(-1, 8), source.view(-1, 8).flip(0))


def test_a_driver_without_the_call_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings(monkeypatch, lambda *_: (1, None, None))
    with pytest.raises(NoBatchCall, match="older than CUDA"):
        BatchCall.find()
    bindings(monkeypatch, lambda *_: (0, 0, None))
    with pytest.raises(NoBatchCall, match="older than CUDA"):
        BatchCall.find()


def test_no_driver_and_no_bindings_are_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object) -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    bindings(monkeypatch, ask)
    with pytest.raises(NoBatchCall, match="libcuda"):
        BatchCall.find()
    bindings(monkeypatch, None)
    with pytest.raises(NoBatchCall, match="cuda-bindings is not installed"):
        BatchCall.find()
