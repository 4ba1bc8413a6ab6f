"""Pauses of an idle engine whose requests wait for s3kv."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput


LINGER_S = 0.004  # for KV; it delays a new request


def is_in_lockstep(vllm_config: VllmConfig) -> bool:
    """Whether other engines wait for every step of this one. vLLM's data-parallel ranks of a model
    with experts do, even if a rank has nothing to compute (`execute_dummy_batch`)."""
    is_parallel = vllm_config.parallel_config.data_parallel_size > 1
    return bool(is_parallel and vllm_config.model_config.is_moe)


class Linger:
    """Pauses of an idle engine whose requests wait for s3kv. Without them vLLM's loop polls every
    1.3 ms, and takes a third of a core from the I/O process.
    longest_s: length of a pause that no arrival ends. in_lockstep: whether a pause would hold up
    other engines; then there is none."""

    def __init__(self, longest_s: float, *, in_lockstep: bool) -> None:
        self._longest_s = 0.0 if in_lockstep else longest_s
        self._was_idle = False

    def pause_s(self, output: SchedulerOutput, waits: Callable[[], bool]) -> float:
        """The pause in the step of `output`. waits: whether a request waits; called if idle."""
        idle, was_idle = output.total_num_scheduled_tokens == 0, self._was_idle
        self._was_idle = idle
        # Two idle steps, because the previous one may still run while this one is planned.
        return self._longest_s if idle and was_idle and waits() else 0.0
