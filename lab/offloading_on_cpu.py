"""vLLM's OffloadingConnector with tiers, made to run where the device is the CPU.

The connector refuses a CPU ("CPU Offloading is currently only supported on CUDA-alike and XPU
GPUs"). This serves tests and the comparison of connectors alone: it is no way to use the connector.

Replaced, in vllm.v1.kv_offload.cpu.gpu_worker alone: streams and events, by one thread that copies
in the order of submission, and the batched copy kernel, by memmove (which lets go of the GIL). The
tensors of the KV cache claim to be on a GPU, because the worker asserts it. Before vLLM 0.32 also
the number of a worker's device, by its rank.

Runs untouched: the scheduler's side, lookups, the primary tier and its memory, the secondary tiers
with their NIXL or file I/O, and all of the worker's bookkeeping. The engine's stream needs no wait:
on a CPU the forward pass is over when it returns.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.parallel_state import get_world_group
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheLayout, create_kv_cache_views
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.tiering import spec as tiering_spec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

_COPIES = ThreadPoolExecutor(1, thread_name_prefix="copies")


class _Stream:
    """All work runs in one thread in order, so a stream never has anything to wait for."""

    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self._reached_s: Future[float]

    def record(self, stream: _Stream) -> None:
        self._reached_s = _COPIES.submit(perf_counter)

    def query(self) -> bool:
        return self._reached_s.done()

    def synchronize(self) -> None:
        self._reached_s.result()

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds."""
        return 1e3 * (end._reached_s.result() - self._reached_s.result())


class _Over:
    """Another object with some attributes replaced."""

    def __init__(self, under: Any, **replaced: Any) -> None:
        self._under = under
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._under, name)


class _OnDevice(torch.Tensor):
    """A tensor in the CPU's memory that says it is on a GPU."""

    is_cuda = True


@contextmanager
def _stream(stream: _Stream) -> Iterator[None]:
    yield


def _swap_blocks_batch(
    src: torch.Tensor, dst: torch.Tensor, sizes: torch.Tensor, **hints: Any
) -> None:
    # The caller uses the tensors again once the copies are done: take the numbers out now.
    copies = list(zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True))

    def copy() -> None:
        for to, at, nbytes in copies:
            ctypes.memmove(to, at, nbytes)

    _COPIES.submit(copy)


def _rank() -> int:
    return get_world_group().rank if torch.distributed.is_initialized() else 0


gpu_worker.torch = _Over(torch, Event=_Event)
gpu_worker.ops = _Over(gpu_worker.ops, swap_blocks_batch=_swap_blocks_batch)
gpu_worker.current_platform = _Over(
    current_platform, Stream=_Stream, current_stream=_Stream, stream=_stream
)
if hasattr(tiering_spec, "torch"):  # before 0.32 a rank is the number of its device
    _devices = _Over(torch.accelerator, current_device_index=_rank)
    tiering_spec.torch = _Over(torch, accelerator=_devices)


class TieringOnCpu(TieringOffloadingSpec):
    """For `spec_name` and `spec_module_path` in the connector's extra config."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        tensors = [
            dataclasses.replace(one, tensor=one.tensor.as_subclass(_OnDevice))
            for one in kv_caches.tensors
        ]
        return self.create_worker(dataclasses.replace(kv_caches, tensors=tensors))


def worker_alone(
    spec: Any, vllm_config: Any, cache: KVCacheConfig, fill: int
) -> OffloadingConnectorWorker:
    """The worker's side of a connector without an engine. spec: vLLM's, whose scheduler's side has
    made the primary tier. cache: in the layout LBHNC; every byte of its memory is `fill`."""
    memory = torch.full((cache.kv_cache_tensors[0].size,), fill, dtype=torch.int8)
    layers: dict[str, torch.Tensor] = {}
    for group, tensor in zip(cache.kv_cache_groups, cache.kv_cache_tensors, strict=True):
        form = group.kv_cache_spec, cache.num_blocks, KVCacheLayout.LBHNC
        layers |= zip(tensor.layers, create_kv_cache_views(memory, *form, tensor), strict=True)
    spec.get_worker = partial(TieringOnCpu.get_worker, spec)
    worker = OffloadingConnectorWorker(spec, vllm_config, cache)
    worker.register_kv_caches(layers)
    return worker
