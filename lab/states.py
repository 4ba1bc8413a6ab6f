"""What keeps Mamba2 from running on vLLM's CPU build, taken away: for `Engine(prepare=…)`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any


def one_state_per_step() -> None:
    """Have Mamba2 write states at the ends of steps alone. vLLM asks its kernels for states within
    a step, too, and the kernel for CPUs does not return them."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    spec_of: Any = MambaMixer2.get_kv_cache_spec

    def without(self: MambaMixer2, vllm_config: Any) -> Any:
        spec = spec_of(self, vllm_config)
        return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)

    MambaMixer2.get_kv_cache_spec = without
