"""The real GPU: every line once with a torch that has no GPU, and what only a GPU can show.

The driver's batch call is seen by a function of its prototype.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from s3kv.device.copier import BatchRefused, Path
from s3kv.device.copies import BlockCopies, open_copier
from s3kv.device.gpu import cuda
from s3kv.device.gpu.cuda import Attributes, BatchCall, CudaGpu, MemoryLocation, NoBatchCall
from s3kv.device.gpu.gpu_copier import GpuCopier
from s3kv.device.gpu.interface import Copies
from s3kv.messages import CopyPart
from tests.unit.device.caches import Shape, build, places

STREAM = 0x7F00_1234_5678


class Driver:
    """Carries the copies out in host memory, and keeps what it was called with.

    refuse: the index of a copy of a call at which to fail with CUDA_ERROR_INVALID_VALUE.
    """

    def __init__(self, refuse: int | None = None) -> None:
        self.calls: list[dict[str, Any]] = []
        self.refuse = refuse
        self.entry = cuda.PROTOTYPE(self._call)

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
        BatchRefused, match=f"CUresult 1 at 8 bytes from {source:#x} to {target:#x}"
    ):
        BatchCall(Driver(refuse=at).entry)(copies, False, STREAM)


def test_a_refusal_of_the_whole_call() -> None:
    _, _, copies = scattered(3)
    with pytest.raises(BatchRefused, match=r"CUresult 201$"):
        BatchCall(lambda *_: 201)(copies, False, STREAM)


def test_the_structures_are_those_of_the_header() -> None:
    """cuda.h of 12.8 to 13.0: `struct { CUmemcpySrcAccessOrder srcAccessOrder; CUmemLocation
    srcLocHint, dstLocHint; unsigned int flags; }`, where a location is `struct { CUmemLocationType
    type; int id; }`, and enumerations are four bytes.
    """
    assert ctypes.sizeof(MemoryLocation) == 8
    assert (MemoryLocation.type.offset, MemoryLocation.id.offset) == (0, 4)
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
    ours = Attributes(
        cuda.ANY_ORDER, MemoryLocation(2, 7), MemoryLocation(1, 9), cuda.PREFER_OVERLAP
    )
    assert bytes(ours) == ctypes.string_at(theirs.getPtr(), ctypes.sizeof(ours))
    assert int(cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM) == cuda.STREAM_ORDER


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


LONG_S = 10.0


class AtOnce:
    """A stream of torch's that has done everything when a call returns; also an event of its."""

    made: ClassVar[list[AtOnce]] = []

    def __init__(
        self, device: torch.device | None = None, priority: int = 0, enable_timing: bool = False
    ) -> None:
        self.is_timed = enable_timing
        self.priority = priority
        self.cuda_stream = 4096 + len(self.made)
        self.made.append(self)

    def wait_event(self, event: AtOnce) -> None:
        assert isinstance(event, AtOnce)

    def record(self, stream: AtOnce) -> None:
        assert isinstance(stream, AtOnce)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: AtOnce) -> float:
        assert self.is_timed
        assert end.is_timed
        return 0.5

    def synchronize(self) -> None:
        return


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """torch's streams, events and pinning as if there were CUDA; its driver's batch call."""

    def current(stream: AtOnce) -> AbstractContextManager[None]:
        assert isinstance(stream, AtOnce)
        return nullcontext()

    driver = Driver()
    AtOnce.made.clear()
    for name, instead in {
        "Stream": AtOnce,
        "Event": AtOnce,
        "stream": current,
        "current_stream": AtOnce,
        "set_device": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, instead)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    as_tensor = torch.as_tensor
    monkeypatch.setattr(torch, "as_tensor", lambda thing, device: as_tensor(numbers_of(thing)))
    monkeypatch.setattr(cuda, "pin", lambda memory, unit, device: {0: memory.numel()})
    monkeypatch.setattr(cuda, "unpin", dict.clear)
    monkeypatch.setattr(BatchCall, "find", lambda: BatchCall(driver.entry))
    return driver


def numbers_of(thing: Any) -> NDArray[Any]:
    """What numpy makes of CUDA's array interface, which is its own with another name."""
    holder = SimpleNamespace(__array_interface__=thing.__cuda_array_interface__, keeps=thing)
    return np.asarray(holder)


@pytest.mark.parametrize("path", [*Path, None])
def test_its_calls_are_those_torch_and_the_driver_have(double: Driver, path: Path | None) -> None:
    caches = build(Shape("LHBNC"), "cpu", torch.Generator().manual_seed(3))
    where, _ = places(caches, caches.layout())
    copies = BlockCopies(GpuCopier(where, CudaGpu(where.device), path))
    before = caches.content([3, 0])
    copies.save(1, 0, 0, [3, 0])
    copies.fence([1])
    assert copies.wait_all(LONG_S)
    copies.load("whole", [CopyPart(0, 0, 0, (4, 1))])
    copies.load("part", [CopyPart(0, 0, 1, (5,))])
    assert copies.wait_all(LONG_S)
    saved, loaded = copies.poll()
    assert [end.ok for end in (*saved, *loaded)] == [True] * 3
    after = caches.content([4, 1, 5])
    assert all(torch.equal(after[name], before[name][[0, 1, 1]]) for name in before)
    assert copies.copier.pinned
    assert bool(double.calls) == (path is not Path.GATHER)
    copies.close()


def test_loads_are_more_urgent_than_saves_and_than_the_engine(double: Driver) -> None:
    gpu = CudaGpu(torch.device("cpu"))
    gpu.new_stream(urgent=True)
    gpu.new_stream(urgent=False)
    assert [stream.priority for stream in AtOnce.made] == [-1, 0]


def test_why_there_is_no_batch_call_is_kept(
    double: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find() -> BatchCall:
        raise NoBatchCall("the driver is older")

    monkeypatch.setattr(BatchCall, "find", find)
    assert CudaGpu(torch.device("cpu")).no_batch == "the driver is older"


@pytest.mark.gpu
def test_the_slab_is_pinned_until_the_end() -> None:
    caches = build(Shape("LBNHC"), "cuda", torch.Generator().manual_seed(3))
    where, _ = places(caches, caches.layout())
    slab = memoryview(where.slab)
    copies = BlockCopies(open_copier(where))
    assert copies.copier.pinned
    assert where.memory.is_pinned()
    copies.close()
    assert not torch.frombuffer(slab, dtype=torch.uint8).is_pinned()


@pytest.mark.gpu
def test_kernels_read_numbers_where_the_host_writes_them() -> None:
    gpu = CudaGpu(torch.device("cuda", torch.cuda.current_device()))
    host, device = gpu.host_numbers(4096)
    assert device.data_ptr() == host.ctypes.data
    here = torch.zeros(4096, dtype=torch.int64, device="cuda")
    stream = gpu.new_stream(urgent=False)
    for begin in (5, 2**40):
        host[:] = np.arange(begin, begin + 4096)
        stream.fetch(here, device)
        stream.synchronize()
        assert here.tolist() == host.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("path", Path)
def test_the_time_of_a_copy_is_measured(path: Path) -> None:
    caches = build(Shape("LBNHC"), "cuda", torch.Generator().manual_seed(3))
    where, _ = places(caches, caches.layout())
    copier = GpuCopier(where, CudaGpu(where.device), path)
    tickets = [
        copier.copy_out(CopyPart(0, 0, 0, (0, 1)), copier.mark()),
        copier.copy_in(CopyPart(0, 0, 0, (2, 3)), copier.mark()),
    ]
    copier.settle()
    assert all(ticket.begun() and ticket.done() and ticket.seconds > 0 for ticket in tickets)
    copier.close()
