"""In place of vLLM's compiled modules: what a small Llama touches of them, in torch.

Archived as `vllm/_C_stable_libtorch.py`, and imported there. With `custom_ops=["none"]` the layers
compute by vLLM's own functions in torch, but the activation looks its kernel up all the same, the
modules of quantised layers ask at import what the compiled code supports (nothing), and the
second-generation runner writes its inputs to pinned memory that the GPU reads in place. Every other
kernel is missing, and whoever needs one is told its name.
"""

from __future__ import annotations

from typing import Any

import torch

QUESTIONS = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_group_gemm_supported",
)


def _silu_and_mul(result: torch.Tensor, source: torch.Tensor) -> None:
    gate, up = source.chunk(2, -1)
    result.copy_(torch.nn.functional.silu(gate) * up)


class _Bytes:
    """Pinned host memory as torch takes CUDA's arrays from other libraries: addresses are unified,
    so one of the host's is one of the GPU's."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.numel() * memory.element_size(),),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


def _cuda_view(memory: torch.Tensor) -> torch.Tensor:
    """The same bytes for the GPU. `memory` is pinned and contiguous; the view keeps it alive."""
    if not memory.numel():
        return torch.empty(memory.shape, dtype=memory.dtype, device="cuda")
    whole = torch.as_tensor(_Bytes(memory), device="cuda")
    return whole.view(memory.dtype).view(memory.shape)


def _no(capability: int) -> bool:
    return False


_LIBRARY: Any = torch.library.Library("_C", "FRAGMENT")
_LIBRARY.define("silu_and_mul(Tensor! result, Tensor input) -> ()")
_LIBRARY.impl("silu_and_mul", _silu_and_mul, "CompositeExplicitAutograd")
_LIBRARY.define("get_cuda_view_from_cpu_tensor(Tensor memory) -> Tensor")
_LIBRARY.impl("get_cuda_view_from_cpu_tensor", _cuda_view, "CPU")
for _question in QUESTIONS:
    _LIBRARY.define(f"{_question}(int capability) -> bool")
    _LIBRARY.impl(_question, _no, "CompositeImplicitAutograd")
