"""Run in the engine's process, by `Engine.call`: what has to happen in one exact moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.request import Request

from s3kv.planning.requests import RequestState

_LONGEST_S = 200.0
_ID = "inside"


def abort_at(engine: LLMEngine, moment: str, prompt: list[int], hog: list[int]) -> int:
    """Send a request for `prompt`, abort it at `moment`, and step until the engine is empty.

    moment: a key of `MOMENTS`. hog: a prompt to be computed before, if not empty, by a request
    that keeps its device blocks meanwhile. Returns the blocks in use while the engine had to keep
    those of the aborted request. Raises RuntimeError when the moment does not come.
    """
    release = _hold_loads(engine) if moment == "loading" else None
    if hog:
        holder = _add(engine, f"{_ID}-hog", hog)
        _step_until(engine, lambda: MOMENTS["decoding"](engine, holder))
    request = _add(engine, _ID, prompt)
    _step_until(engine, lambda: MOMENTS[moment](engine, request))
    engine.abort_request([_ID])
    if release is not None:
        # The copy has yet to write to its blocks, so the engine must not use them for others.
        for _ in range(20):
            engine.step()
    used = _blocks_in_use(engine)
    if release is not None:
        release()
    engine.abort_request([f"{_ID}-hog"])
    _step_until(engine, lambda: not _scheduler(engine).has_requests())
    return used


def _is(state: RequestState) -> Callable[[LLMEngine, Request], bool]:
    def is_now(engine: LLMEngine, request: Request) -> bool:
        planner = _scheduler(engine).connector._scheduler.planner
        return bool(planner._requests[request.request_id].state is state)

    return is_now


MOMENTS: dict[str, Callable[[LLMEngine, Request], bool]] = {
    "queued": lambda engine, request: True,
    "waiting": _is(RequestState.WAITING),
    "offered": _is(RequestState.OFFERED),
    "loading": _is(RequestState.LOADING),
    "computing": lambda engine, request: (
        0 < request.num_computed_tokens < request.num_prompt_tokens
        and _is(RequestState.COMPUTING)(engine, request)
    ),
    "decoding": lambda engine, request: request.num_output_tokens >= 3,
}


def _add(engine: LLMEngine, name: str, prompt: list[int], max_tokens: int = 500) -> Request:
    params = SamplingParams(temperature=0, detokenize=False, ignore_eos=True, max_tokens=max_tokens)
    request_id = engine.add_request(name, {"prompt_token_ids": prompt}, params)
    request: Request = _scheduler(engine).requests[request_id]
    return request


def _step_until(engine: LLMEngine, condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _LONGEST_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise RuntimeError("the moment has not come")
        engine.step()
        time.sleep(0.001)


def _hold_loads(engine: LLMEngine) -> Callable[[], None]:
    """Let no copy to the device begin until what is returned is called."""
    loads = get_kv_transfer_group()._worker._rank._copies._in
    gate = threading.Event()
    copy_in = loads.copy

    def held(*args: Any, **kwargs: Any) -> Any:
        gate.wait(_LONGEST_S)
        return copy_in(*args, **kwargs)

    def release() -> None:
        loads.copy = copy_in
        gate.set()

    loads.copy = held
    return release


def _scheduler(engine: LLMEngine) -> Any:
    return engine.engine_core.engine_core.scheduler


def _blocks_in_use(engine: LLMEngine) -> int:
    pool = _scheduler(engine).kv_cache_manager.block_pool
    return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


def fail_loads(engine: LLMEngine, times: int) -> None:
    """Let the device refuse the next copies from host memory, `times` of them."""
    loads = get_kv_transfer_group()._worker._rank._copies._in
    copy_in = loads.copy
    left = times

    def refused(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        if not left:
            return copy_in(*args, **kwargs)
        left -= 1
        raise RuntimeError("no copy this time")

    loads.copy = refused


def serve_and_save_late(engine: LLMEngine, prompts: list[list[int]], *, guarded: bool) -> None:
    """Answer every prompt with one token, while saves read blocks as late as fences allow.

    guarded: False switches off the fences in the step that orders a save. Raises RuntimeError if
    there are none to switch off.
    """
    worker = get_kv_transfer_group()._worker
    if not worker._fences_at_once:
        raise RuntimeError("this engine does not write to blocks before its fences")
    worker._fences_at_once = guarded
    copies = worker._rank._copies
    save, fence = copies.save, copies.fence
    held: dict[int, tuple[Any, ...]] = {}

    def start(job_ids: Iterable[int]) -> None:
        for job_id in job_ids:
            save(job_id, *held.pop(job_id))

    def held_save(job_id: int, *order: Any) -> None:
        held[job_id] = order

    def fence_held(job_ids: Iterable[int]) -> None:
        fenced = list(job_ids)
        start([job_id for job_id in fenced if job_id in held])
        fence(fenced)

    copies.save, copies.fence = held_save, fence_held
    for number, prompt in enumerate(prompts):
        _add(engine, f"{_ID}-{number}", prompt, max_tokens=1)
    # Not until it has nothing at all to do: the scheduler steps on for saves that have not ended.
    _step_until(engine, lambda: not engine.has_unfinished_requests())
    del copies.save, copies.fence
    start(list(held))
    worker._fences_at_once = True


def published(engine: LLMEngine) -> int:
    """The number of the last batch of KV events, once all have been sent."""
    publisher = _scheduler(engine).kv_event_publisher
    publisher._event_queue.join()
    return int(publisher._buffer[-1][0])


def schedules_ahead(engine: LLMEngine) -> bool:
    """Whether the engine schedules a step while the one before it runs."""
    return engine.engine_core.engine_core.batch_queue is not None


def runner(engine: LLMEngine) -> str:
    """The module of the model runner that this engine's model runs on."""
    worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
    return type(worker.model_runner).__module__


def load_adapter(
    engine: LLMEngine, name: str, number: int, path: str, *, in_place: bool = False
) -> bool:
    """Load an adapter as vLLM's server does: between the engine's steps, before any request."""
    return bool(engine.add_lora(LoRARequest(name, number, path, load_inplace=in_place)))


def unload_adapter(engine: LLMEngine, number: int) -> bool:
    return bool(engine.remove_lora(number))
