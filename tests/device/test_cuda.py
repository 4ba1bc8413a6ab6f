"""The real GPU: every line once with a torch that has no GPU, and what only a GPU can show."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import pytest
import torch

from s3kv.device import cuda
from s3kv.device.copies import BlockCopies, open_copier
from s3kv.device.cuda import CudaGpu
from s3kv.device.driver import BatchCall, NoBatchCall
from s3kv.device.gpu_copier import GpuCopier
from s3kv.device.paths import Path
from s3kv.messages import LoadPart
from tests.device.caches import Shape, build, places
from tests.device.test_driver import Driver

LONG_S = 10.0


class AtOnce:
    """A stream of torch's that has done everything when a call returns; also an event of its."""

    made: ClassVar[list[AtOnce]] = []

    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        self.priority = priority
        self.cuda_stream = 4096 + len(self.made)
        self.made.append(self)

    def wait_event(self, event: AtOnce) -> None:
        assert isinstance(event, AtOnce)

    def record(self, stream: AtOnce) -> None:
        assert isinstance(stream, AtOnce)

    def query(self) -> bool:
        return True

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
    monkeypatch.setattr(cuda, "pin", lambda memory, unit, device: {0: memory.numel()})
    monkeypatch.setattr(cuda, "unpin", dict.clear)
    monkeypatch.setattr(BatchCall, "find", lambda: BatchCall(driver.entry))
    return driver


@pytest.mark.parametrize("path", [*Path, None])
def test_its_calls_are_those_torch_and_the_driver_have(double: Driver, path: Path | None) -> None:
    caches = build(Shape("LHBNC"), "cpu", torch.Generator().manual_seed(3))
    where, _ = places(caches, caches.layout())
    copies = BlockCopies(GpuCopier(where, CudaGpu(where.device), path))
    before = caches.content([3, 0])
    copies.save(1, 0, 0, [3, 0])
    copies.fence([1])
    assert copies.wait_all(LONG_S)
    copies.load("whole", [LoadPart(0, 0, 0, (4, 1))])
    copies.load("part", [LoadPart(0, 0, 1, (5,))])
    assert copies.wait_all(LONG_S)
    saved, loaded = copies.poll()
    assert [end.ok for end in (*saved, *loaded)] == [True] * 3
    after = caches.content([4, 1, 5])
    assert all(torch.equal(after[name], before[name][[0, 1, 1]]) for name in before)
    assert copies.statistics().pinned
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
    assert copies.statistics().pinned
    assert where.memory.is_pinned()
    copies.close()
    assert not torch.frombuffer(slab, dtype=torch.uint8).is_pinned()
