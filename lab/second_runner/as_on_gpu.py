"""What vLLM leaves out on a CPU and does on a GPU, put back: for `Engine(prepare=…)`.

Each function patches vLLM in the engine's process, before it starts.
"""

from __future__ import annotations

from typing import Any


def schedule_asynchronously() -> None:
    """Schedule each step while the one before it runs, as is the default on a GPU."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_keep(cls: type[CpuPlatform], vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(check_and_keep)


def zero_new_blocks() -> None:
    """Zero every block that a request is given, as is done where layers have several precisions."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    KVCacheConfig.needs_kv_cache_zeroing = property(lambda self: True)


def only_encode() -> None:
    """Take the model runner that a GPU worker takes for an instance which only encodes."""
    import vllm.v1.worker.cpu.shm  # noqa: F401 - fakes what the runner's module takes from CUDA
    from vllm.v1.worker.cpu import model_runner
    from vllm.v1.worker.mm_encoder_model_runner import MMEncoderModelRunner

    model_runner.CPUModelRunner = MMEncoderModelRunner
