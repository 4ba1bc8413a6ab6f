"""What the copier of a GPU takes at its start, and gives back."""

from __future__ import annotations

import gc
import weakref
from unittest.mock import Mock

import pytest
import torch

from s3kv.device.gpu.gpu_copier import GpuCopier
from s3kv.device.layout import PageLayout
from s3kv.device.slot_payloads import ChunkPlaces
from s3kv.errors import UnsupportedError
from tests.unit.device.caches import Shape, build, places
from tests.unit.device.simulated import SimulatedGpu, SimulatedStream


def full(gpu: SimulatedGpu, count: int) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("memory", ["empty", "host_numbers"])
def test_without_memory_for_staging_the_error_says_how_much_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    monkeypatch.setattr(SimulatedGpu, memory, full)
    caches = build(Shape("LBNHC"))
    where, _ = places(caches)
    gpu = SimulatedGpu(11)
    with pytest.raises(UnsupportedError) as refused:
        GpuCopier(where, gpu)
    assert str(refused.value) == (
        f"no memory for staging: copies need {4 * caches.layout().payload_bytes} bytes on cpu. "
        "Leave more of it free (with vLLM, lower gpu_memory_utilization), or make chunks shorter "
        "(a smaller chunk_tokens): CUDA out of memory"
    )
    assert gpu.pinned is None
    assert not where.layouts, "the slab is still held"


class Memory(bytearray):
    """Of a cache, and alive as long as any tensor over it."""


@pytest.mark.parametrize("failed", [False, True])
def test_what_is_closed_keeps_no_cache_alive(monkeypatch: pytest.MonkeyPatch, failed: bool) -> None:
    memory = Memory(6 * 2 * 4 * 8)
    kept = weakref.ref(memory)
    cache = torch.frombuffer(memory, dtype=torch.uint8).view(6, 2, 4, 8)
    layout = PageLayout.of({"x": cache}, 6, ["x"], 2)
    places = ChunkPlaces({0: layout}, memoryview(bytearray(4096)), 4096, {0: 256})
    copier = GpuCopier(places, gpu := SimulatedGpu(11))
    gpu.synchronize()
    if failed:
        monkeypatch.setattr(SimulatedStream, "synchronize", Mock(side_effect=RuntimeError))
    del memory, cache, layout
    gc.collect()
    assert kept() is not None
    copier.close()
    copier.close()
    gc.collect()
    assert kept() is None
