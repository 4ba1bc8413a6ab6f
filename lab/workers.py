"""vLLM's worker for CPUs, prepared as `Engine(prepare=…)` prepares the engine: for `worker_cls`.

A worker with a process of its own is spawned, and so has nothing of what its engine patched.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from lab.states import one_state_per_step
from lab.text_only import without_torchvision


class OneStatePerStep(CPUWorker):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        one_state_per_step()
        super().__init__(*args, **kwargs)


class WithoutTorchvision(CPUWorker):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        without_torchvision()
        super().__init__(*args, **kwargs)
