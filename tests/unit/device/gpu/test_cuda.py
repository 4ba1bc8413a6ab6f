"""The real GPU: every line once with a torch that has no GPU, and what only a GPU can show."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from s3kv.device.copies import BlockCopies, open_copier
from s3kv.device.gpu import cuda
from s3kv.device.gpu.cuda import CudaGpu
from s3kv.device.gpu.gpu_copier import GpuCopier
from s3kv.messages import CopyPart
from tests.unit.device.caches import Shape, build, places

LONG_S = 10.0


class AtOnce:
    """A stream of torch's that has done everything when a call returns; also an event of its."""

    made: ClassVar[list[AtOnce]] = []

    def __init__(
        self, device: torch.device | None = None, priority: int = 0, enable_timing: bool = False
    ) -> None:
        self.is_timed = enable_timing
        self.priority = priority
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
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's streams, events and pinning as if there were CUDA."""

    def current(stream: AtOnce) -> AbstractContextManager[None]:
        assert isinstance(stream, AtOnce)
        return nullcontext()

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


def numbers_of(thing: Any) -> NDArray[Any]:
    """What numpy makes of CUDA's array interface, which is its own with another name."""
    holder = SimpleNamespace(__array_interface__=thing.__cuda_array_interface__, keeps=thing)
    return np.asarray(holder)


@pytest.mark.usefixtures("double")
def test_its_calls_are_those_torch_has() -> None:
    caches = build(Shape("LHBNC"))
    where, _ = places(caches)
    copies = BlockCopies(GpuCopier(where, CudaGpu(where.device)))
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
    copies.close()


@pytest.mark.usefixtures("double")
def test_loads_are_more_urgent_than_saves_and_than_the_engine() -> None:
    gpu = CudaGpu(torch.device("cpu"))
    gpu.new_stream(urgent=True)
    gpu.new_stream(urgent=False)
    assert [stream.priority for stream in AtOnce.made] == [-1, 0]


@pytest.mark.gpu
def test_the_slab_is_pinned_until_the_end() -> None:
    where, _ = places(build(Shape("LBNHC"), "cuda"))
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
def test_the_time_of_a_copy_is_measured() -> None:
    where, _ = places(build(Shape("LBNHC"), "cuda"))
    copier = GpuCopier(where, CudaGpu(where.device))
    tickets = [
        copier.copy_out(CopyPart(0, 0, 0, (0, 1)), copier.mark()),
        copier.copy_in(CopyPart(0, 0, 0, (2, 3)), copier.mark()),
    ]
    copier.settle()
    assert all(ticket.begun() and ticket.done() and ticket.seconds > 0 for ticket in tickets)
    copier.close()
