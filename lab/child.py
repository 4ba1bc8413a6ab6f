"""The process an engine runs in, started by `lab.entry` and driven by `lab.engine`.

Commands come as JSON lines on stdin, answers go as JSON lines to what was stdout at the start.
Commands run concurrently; each answer carries the command's number. The end of stdin means the
driver is gone: the whole process group is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pkgutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Callable
from contextvars import ContextVar
from typing import Any, Protocol

from prometheus_client import REGISTRY
from vllm import SamplingParams
from vllm.config import ECTransferConfig, KVEventsConfig, KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine

Message = dict[str, Any]

NUMBER: ContextVar[int] = ContextVar("NUMBER")
"""Of the command that a task handles."""


class Host(Protocol):
    """An engine whose requests are asynchronous generators; leaving one early aborts it."""

    def generate(
        self, prompt: Any, params: Any, request_id: str, *, lora_request: LoRARequest | None
    ) -> AsyncGenerator[Any, None]: ...
    async def reset_prefix_cache(self, running: bool, connector: bool) -> bool: ...
    async def collective_rpc(self, method: str, *, kwargs: Message) -> Any: ...
    def shutdown(self) -> None: ...


class InlineHost:
    """vLLM's engine core in this process, stepped on the asyncio loop.

    Starts in half the time of an engine with processes of its own, and `call` reaches into it.
    vLLM's in-process client would spin on steps that run no model and keep the GIL from every
    other thread; like the engine's own process loop, this one sleeps 1 ms there.
    """

    def __init__(self, args: AsyncEngineArgs) -> None:
        self.engine = LLMEngine.from_engine_args(args, enable_multiprocessing=False)
        self.core = self.engine.engine_core.engine_core
        self._outputs: dict[str, asyncio.Queue[Any]] = {}
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Step the engine for ever. Raises what a step raises: then the engine is done for."""
        while True:
            if not self.core.scheduler.has_requests():
                self._wake.clear()
                await self._wake.wait()
            outputs = self.engine.step()
            for output in outputs:
                if output.request_id in self._outputs:
                    self._outputs[output.request_id].put_nowait(output)
            await asyncio.sleep(0 if outputs else 0.001)

    async def generate(
        self, prompt: Any, params: Any, request_id: str, *, lora_request: LoRARequest | None
    ) -> AsyncGenerator[Any, None]:
        queue = self._outputs[request_id] = asyncio.Queue()
        self.engine.add_request(request_id, prompt, params, lora_request=lora_request)
        self._wake.set()
        finished = False
        try:
            while not finished:
                output = await queue.get()
                finished = output.finished
                yield output
        finally:
            del self._outputs[request_id]
            if not finished:
                self.engine.abort_request([request_id])
                self._wake.set()

    async def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        return bool(self.engine.reset_prefix_cache(running, connector))

    async def collective_rpc(self, method: str, *, kwargs: Message) -> Any:
        return self.engine.collective_rpc(method, kwargs=kwargs)

    def shutdown(self) -> None:
        self.engine.engine_core.shutdown()


class Child:
    def __init__(self, host: Host, answers: Any) -> None:
        self._host = host
        self._answers = answers
        self._requests = 0

    def answer(self, message: Message) -> None:
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()

    async def handle(self, command: Message) -> None:
        NUMBER.set(command["id"])
        try:
            value = await getattr(self, "do_" + command["op"])(**command["args"])
            self.answer({"id": command["id"], "value": value})  # raises if JSON has no such value
        except Exception as error:  # noqa: BLE001 - the driver raises it, with this text
            traceback.print_exc()
            self.answer({"id": command["id"], "error": f"{type(error).__name__}: {error}"})

    async def do_generate(self, requests: list[Message], concurrency: int) -> list[Message]:
        gate = asyncio.Semaphore(concurrency)

        async def one(request: Message) -> Message:
            async with gate:
                return await self._generate(**request)

        return await asyncio.gather(*(one(request) for request in requests))

    async def _generate(
        self,
        prompt: list[int],
        max_tokens: int,
        stop: list[int],
        stream: bool,
        cache_salt: str | None,
        images: list[int],
        uuids: list[str | None],
        adapter: list[Any] | None,
        abort_after_tokens: int | None,
        abort_after_s: float | None,
        kv_transfer_params: Message | None,
    ) -> Message:
        params = SamplingParams(
            temperature=0,
            detokenize=False,
            ignore_eos=True,
            max_tokens=max_tokens,
            stop_token_ids=stop,
            extra_args={"kv_transfer_params": kv_transfer_params} if kv_transfer_params else None,
        )
        whole: Message = {"prompt_token_ids": prompt}
        if cache_salt is not None:
            whole["cache_salt"] = cache_salt
        if images:
            from lab.vision import image

            whole["multi_modal_data"] = {"image": [image(seed) for seed in images]}
        if uuids:
            whole["multi_modal_uuids"] = {"image": uuids}
        self._requests += 1
        lora = None if adapter is None else LoRARequest(*adapter)
        name = f"lab-{self._requests}"
        outputs = self._host.generate(whole, params, name, lora_request=lora)
        record: Message = {
            "tokens": [],
            "cached_tokens": None,
            "ttft_s": None,
            "finish_reason": "abort",
        }
        start = time.monotonic()

        async def follow() -> None:
            async for output in outputs:
                record["tokens"] = list(output.outputs[0].token_ids)
                if record["ttft_s"] is None and record["tokens"]:
                    record["ttft_s"] = time.monotonic() - start
                record["cached_tokens"] = output.num_cached_tokens
                if stream:
                    self.answer({"id": NUMBER.get(), "so_far": record["tokens"]})
                if output.finished:
                    record["finish_reason"] = output.outputs[0].finish_reason
                elif abort_after_tokens and len(record["tokens"]) >= abort_after_tokens:
                    return

        with contextlib.suppress(asyncio.TimeoutError):  # the record says "abort" already
            await asyncio.wait_for(follow(), abort_after_s)
        await outputs.aclose()  # leaving the stream is what aborts the request
        return record | {"seconds": time.monotonic() - start}

    async def do_metrics(self) -> dict[str, float]:
        """Every Prometheus sample but histogram buckets: name, then the labels of interest."""
        values: dict[str, float] = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                if sample.name.endswith(("_bucket", "_created")):
                    continue
                rest = sorted(set(sample.labels) - {"engine", "model_name"})
                name = sample.name
                if rest:
                    name += "{" + ",".join(f"{key}={sample.labels[key]}" for key in rest) + "}"
                # Other packages' values may be numpy's, which JSON does not have.
                values[name] = values.get(name, 0.0) + float(sample.value)
        return values

    async def do_reset_prefix_cache(self, connector: bool) -> bool:
        return await self._host.reset_prefix_cache(False, connector)

    async def do_reload_weights(self, path: str) -> None:
        """Put other weights into the running model, on every rank."""
        await self._host.collective_rpc("reload_weights", kwargs={"weights_path": path})

    async def do_limit_hits(self, tokens: int | None) -> None:
        """Let the engine's own prefix cache answer with at most `tokens` tokens."""
        if not isinstance(self._host, InlineHost):
            raise TypeError("limit_hits needs an engine with in_process=True")
        coordinator = self._host.core.scheduler.kv_cache_manager.coordinator
        unlimited = type(coordinator).find_longest_cache_hit

        def limited(block_hashes: Any, max_cache_hit_length: int, *rest: Any, **more: Any) -> Any:
            most = max_cache_hit_length if tokens is None else min(max_cache_hit_length, tokens)
            return unlimited(coordinator, block_hashes, most, *rest, **more)

        coordinator.find_longest_cache_hit = limited

    async def do_call(self, target: str, kwargs: Message) -> Any:
        """Run `module:function` with this process's LLMEngine; what it returns must be JSON."""
        if not isinstance(self._host, InlineHost):
            raise TypeError("call needs an engine with in_process=True")
        return function_named(target)(self._host.engine, **kwargs)


def function_named(target: str) -> Callable[..., Any]:
    found: Callable[..., Any] = pkgutil.resolve_name(target)
    return found


def start_host(settings: Message) -> Host:
    if settings["prepare"] is not None:
        function_named(settings["prepare"])()
    engine_args = dict(settings["engine_args"])
    if settings["kv_transfer_config"] is not None:
        engine_args["kv_transfer_config"] = KVTransferConfig(**settings["kv_transfer_config"])
    if settings["ec_transfer_config"] is not None:
        engine_args["ec_transfer_config"] = ECTransferConfig(**settings["ec_transfer_config"])
    if "kv_events_config" in engine_args:
        engine_args["kv_events_config"] = KVEventsConfig(**engine_args["kv_events_config"])
    args = AsyncEngineArgs(model=settings["model"], **engine_args)
    if settings["in_process"]:
        return InlineHost(args)
    config = args.create_engine_config()
    # As `lab.engine` has it: vLLM's platform for CPUs has just put "spawn" there.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    host: Host = AsyncLLM.from_vllm_config(config, disable_log_stats=args.disable_log_stats)
    return host


def read_commands(loop: asyncio.AbstractEventLoop, commands: asyncio.Queue[Message]) -> None:
    """A thread, so that the end of stdin is noticed while a step blocks the loop."""
    for line in sys.stdin:
        loop.call_soon_threadsafe(commands.put_nowait, json.loads(line))
    os.killpg(0, signal.SIGKILL)


async def main(answers: Any) -> None:
    settings = json.loads(sys.stdin.readline())
    host = start_host(settings)
    child = Child(host, answers)
    commands: asyncio.Queue[Message] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    threading.Thread(target=read_commands, args=(loop, commands), daemon=True).start()
    stepping = asyncio.create_task(host.run()) if isinstance(host, InlineHost) else None
    if stepping is not None:
        stepping.add_done_callback(die_with)
    child.answer({"id": 0, "value": None})
    running: set[asyncio.Task[None]] = set()
    while (command := await commands.get())["op"] != "shutdown":
        task = asyncio.create_task(child.handle(command))
        running.add(task)
        task.add_done_callback(running.discard)
    if stepping is not None:
        stepping.remove_done_callback(die_with)
        stepping.cancel()
    host.shutdown()
    child.answer({"id": command["id"], "value": None})


def die_with(stepping: asyncio.Task[None]) -> None:
    """The engine's loop has raised: like vLLM's own process, end at once and leave a traceback."""
    traceback.print_exception(stepping.exception())
    sys.stderr.flush()
    os._exit(1)
