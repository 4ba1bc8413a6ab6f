"""In place of vLLM's compiled modules in a rehearsal: what is looked up before anything computes.

Written as `vllm/_C_stable_libtorch.py`, and imported there. The modules of quantised layers ask at
import what the compiled code supports (nothing), and the activation looks up its kernel.
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

_LIBRARY: Any = torch.library.Library("_C", "FRAGMENT")
_LIBRARY.define("silu_and_mul(Tensor! result, Tensor input) -> ()")
for _question in QUESTIONS:
    _LIBRARY.define(f"{_question}(int capability) -> bool")
    _LIBRARY.impl(_question, lambda capability: False, "CompositeImplicitAutograd")
