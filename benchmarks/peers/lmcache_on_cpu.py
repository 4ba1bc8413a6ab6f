"""LMCache's in-process connector for vLLM, made to run where the device is the CPU.

It exists because LMCache has no copy object for a CPU ("No supported cpu connector found"), and
serves nothing but the comparison: it is no way to use LMCache.

Replaced: the object that copies between vLLM's pages and LMCache's chunks, and that alone. On a GPU
a kernel reorders tokens on the way, at the speed of the device's memory; here pages go over as they
lie, one memmove per layer and page, so that the copy costs what it costs the other connectors.
Nobody else reads these chunks. Chunks have to be whole pages.

Runs untouched: vLLM's LMCacheConnectorV1 and LMCache's adapter, engine, lookup, memory, storage
backends and S3 client.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1


class LMCacheOnCpu(LMCacheConnectorV1):  # type: ignore[misc]
    """For `kv_connector` and `kv_connector_module_path`.

    LMCache is imported when a connector is made and not before: vLLM's CPU worker looks through all
    modules there are when it starts, and trips over llvmlite, which LMCache imports.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        import lmcache.v1.gpu_connector

        lmcache.v1.gpu_connector.CreateGPUConnector = _create
        super().__init__(*args, **kwargs)


class _CopyOnCpu:
    """The methods of LMCache's GPUConnectorInterface."""

    def __init__(self, chunk_shape: tuple[int, int, int, int, int], chunk_format: Any) -> None:
        self._layers, _, _, heads, head_dim = chunk_shape
        self._width = heads * head_dim
        self._format = chunk_format
        self._pages: list[torch.Tensor] | None = None

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        self._pages = kwargs.get("kvcaches", self._pages)

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, self._layers, num_tokens, self._width])

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        for page, chunk, nbytes in self._pieces(memory_obj, start, end, **kwargs):
            ctypes.memmove(page, chunk, nbytes)

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        for page, chunk, nbytes in self._pieces(memory_obj, start, end, **kwargs):
            ctypes.memmove(chunk, page, nbytes)
        memory_obj.metadata.fmt = self._format

    def batched_to_gpu(
        self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any
    ) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def _pieces(
        self, memory_obj: Any, start: int, end: int, *, slot_mapping: torch.Tensor, **kwargs: Any
    ) -> list[tuple[int, int, int]]:
        """Address of the page, address in the chunk, bytes: one for each layer and page."""
        self.initialize_kvcaches_ptr(**kwargs)
        assert self._pages is not None
        page_tokens = self._pages[0].shape[2]  # [pages, heads, tokens, 2 x head_dim]
        first_slots = slot_mapping[start:end:page_tokens].tolist()
        if (end - start) % page_tokens or any(slot % page_tokens for slot in first_slots):
            raise ValueError(f"tokens {start} to {end} are not whole pages of {page_tokens}")
        pieces = []
        chunk = memory_obj.tensor.data_ptr()
        for layer in self._pages:
            nbytes = layer[0].nbytes
            assert layer[0].is_contiguous()
            for slot in first_slots:
                pieces.append((layer[slot // page_tokens].data_ptr(), chunk, nbytes))
                chunk += nbytes
        return pieces


def _create(config: Any, metadata: Any, engine: Any, layout_hints: Any = None) -> _CopyOnCpu:
    from lmcache.v1.memory_management import MemoryFormat

    return _CopyOnCpu(metadata.kv_shape, MemoryFormat.KV_2LTD)
