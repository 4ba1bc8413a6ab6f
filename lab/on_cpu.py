"""What keeps models from running on vLLM's CPU build, or only exists there, taken away.

Functions without arguments are for `Engine(prepare=…)`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

_NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
_FUNCTIONS = "torchvision.transforms.v2.functional"


def one_state_per_step() -> None:
    """Have Mamba2 write states at the ends of steps alone. vLLM asks its kernels for states within
    a step, too, and the kernel for CPUs does not return them."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    spec_of: Any = MambaMixer2.get_kv_cache_spec

    def without(self: MambaMixer2, vllm_config: Any) -> Any:
        spec = spec_of(self, vllm_config)
        return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)

    MambaMixer2.get_kv_cache_spec = without


def without_torchvision() -> None:
    """Let vLLM import Qwen3.5, whose module has the model with pictures in it, too: with empty
    modules in place of torchvision.

    Transformers looks for torchvision first and goes on without; of the empty modules that follow,
    only names are imported.
    """
    import transformers.image_utils  # noqa: F401 - looks for torchvision

    for name in (*_NAMES, _FUNCTIONS):
        module: Any = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)

    from vllm import ModelRegistry
    from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM

    # As a class: vLLM would import a name in a process of its own.
    ModelRegistry.register_model("Qwen3_5ForCausalLM", Qwen3_5ForCausalLM)


def keep_prefix_cache() -> None:
    """Let the CPU platform keep the engine's prefix cache beside MLA, for a reference with a hit.

    Beside its backend CPU_MLA vLLM switches it off, although its kernels read such a prefix.
    """
    from vllm.platforms.cpu import CpuPlatform

    decide = CpuPlatform.check_and_update_config

    def decided(vllm_config: Any) -> None:
        decide(vllm_config)
        vllm_config.cache_config.enable_prefix_caching = True

    CpuPlatform.check_and_update_config = staticmethod(decided)


def touch_kv_cache(engine: Any) -> int:
    """For `Engine.call`: write to every page of the engine's KV cache; returns its bytes.

    On a CPU the cache is memory that the kernel has only promised. Whoever writes to a page first
    pays for it: the forward of a first prefill, or the load of a first hit, and never again.
    """
    executor = engine.engine_core.engine_core.model_executor
    caches = executor.driver_worker.worker.model_runner.kv_caches
    for cache in caches:
        cache.zero_()
    if caches[0].is_cuda:
        torch.cuda.synchronize()  # before a copy on another stream
    return sum(cache.nbytes for cache in caches)
