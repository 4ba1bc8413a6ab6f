"""A real vLLM engine in a process of its own, driven from tests, the demo and benchmarks.

    with Engine(model, connector={"kv_connector": …}, log_path=tmp_path / "engine.log") as engine:
        answers = engine.generate(prompts, max_tokens=8)

Every wait has an end, and every process the engine started ends with the `with` block: by a clean
shutdown when the block succeeds (something that outlives that is an error), killed otherwise. The
engine's own output goes to `log_path`; its tail is part of every `EngineFailed`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, ClassVar

import psutil

from lab.constants import environment, split_connector
from lab.second_runner import interpreted_triton
from lab.zygote import ForkedProcess, Zygotes

ROOT = Path(__file__).resolve().parent.parent

ENVIRONMENT = {
    # No model hub, no telemetry, no network but the loopback.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    # One thread, not pinned: engines, S3 and I/O processes share few cores.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The engine's processes are forked from one that has imported everything already: 11 s less.
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_LOGGING_LEVEL": "INFO",
    "PYTHONUNBUFFERED": "1",
}

ENGINE_ARGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 4_096,
    "kv_cache_memory_bytes": 320 * 2**20,
    "disable_log_stats": False,
    "seed": 0,
}

PATIENCE_S = 300.0
"""Longest wait for an answer. A shared machine may stand still for minutes."""


class EngineFailed(Exception):
    """The engine died, refused a command, or did not answer in time. Carries the log's tail."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    images: seeds of `lab.vision.image`; uuids: a client's names for them. adapter: name, number and
    path of a LoRA adapter.
    stop: tokens that end it; none does otherwise. stream: `Pending.so_far` shows it grow.
    abort_after_*: give it up after so many tokens, or so long after sending.
    kv_transfer_params: for the connector.
    """

    prompt: Sequence[int]
    max_tokens: int = 8
    stop: Sequence[int] = ()
    stream: bool = False
    cache_salt: str | None = None
    images: Sequence[int] = ()
    uuids: Sequence[str | None] = ()
    adapter: tuple[str, int, str] | None = None
    abort_after_tokens: int | None = None
    abort_after_s: float | None = None
    kv_transfer_params: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """How a request went. Times are the client's, inside the engine's process.

    cached_tokens: prompt tokens not computed, from the engine's own cache and the connector's
    together. finish_reason: "length", "stop", "abort" or "error".
    """

    tokens: list[int]
    cached_tokens: int | None
    ttft_s: float | None
    seconds: float
    finish_reason: str


class Pending:
    """An answer that is on its way; the engine can be observed, or hurt, meanwhile."""

    def __init__(self, engine: Engine, number: int) -> None:
        self._engine = engine
        self._number = number

    def result(self, timeout_s: float = PATIENCE_S) -> Any:
        return self._engine._wait_for(self._number, timeout_s)

    def done(self) -> bool:
        """Whether `result` returns, or raises because the engine's process has ended, at once."""
        return self._engine._has_come(self._number)

    def so_far(self) -> list[int]:
        """The tokens that a streamed request has got."""
        self.done()
        return list(self._engine._so_far.get(self._number, {}).get("so_far", ()))


class Engine:
    """A vLLM engine. Not thread-safe.

    model: a directory from `lab.models.build`.
    connector, ec_connector: vLLM's kv_transfer_config and ec_transfer_config as dicts, or None.
        Their settings may name constants (`lab.constants`).
    in_process: True runs scheduler, worker and client in one process, and `call` reaches in. False
        starts the engine core and its worker as processes of their own, as a server does.
    python: the interpreter, where it is to be another environment's.
    prepare: `module:function` to run in the engine's process before vLLM starts.
    second_runner: serve with vLLM's second-generation model runner, a step of which takes three to
        five times as long here.
    engine_args: any of vLLM's EngineArgs, over `ENGINE_ARGS`; `tensor_parallel_size=2` works on a
        CPU, with in_process=False.
    """

    zygotes: ClassVar[Zygotes | None] = None
    """Where the processes of all engines are forked; without, each imports vLLM itself."""

    def __init__(
        self,
        model: Path,
        *,
        log_path: Path,
        connector: Mapping[str, Any] | None = None,
        ec_connector: Mapping[str, Any] | None = None,
        in_process: bool = True,
        prepare: str | None = None,
        second_runner: bool = False,
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
        start_timeout_s: float = PATIENCE_S,
        **engine_args: Any,
    ) -> None:
        self.log_path = log_path
        self._python = python
        self._start_timeout_s = start_timeout_s
        transfers: list[dict[str, Any] | None] = []
        others: dict[str, Any] = {}
        for given in (connector, ec_connector):
            found, its_own = (None, {}) if given is None else split_connector(given)
            transfers.append(found)
            others |= its_own
        self._settings = {
            "model": str(model),
            "kv_transfer_config": transfers[0],
            "ec_transfer_config": transfers[1],
            "in_process": in_process,
            "prepare": prepare,
            "engine_args": ENGINE_ARGS | engine_args,
        }
        self._env = os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)} | dict(env or {})
        if second_runner:
            self._env |= interpreted_triton(self._env["PYTHONPATH"])
        self._env |= environment(others, self._env["PYTHONPATH"])
        self._env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
        self._commands = 0
        self._answers: dict[int, Any] = {}
        self._so_far: dict[int, Any] = {}
        self._unread = b""

    def start(self) -> None:
        """Start the process and wait until the engine is ready to serve."""
        # Interrupted before it returns, a launch leaves a process that ends with its empty input.
        started = self.launch()
        try:
            started.result(self._start_timeout_s)
        except BaseException:
            self.kill()
            raise

    def launch(self) -> Pending:
        """Start the process without waiting. The result is there once the engine can serve."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = self._new_process(log)
        self._write(self._settings)
        return Pending(self, 0)

    def _new_process(self, log: IO[bytes]) -> subprocess.Popen[bytes] | ForkedProcess:
        if self.zygotes is not None:
            return self.zygotes.launch(self._python, self._env, log)
        return subprocess.Popen(
            [self._python, "-m", "lab.entry"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=self._env,
            cwd=ROOT,
            start_new_session=True,
        )

    def shutdown(self, timeout_s: float = PATIENCE_S) -> None:
        """Shut down cleanly. Raises `EngineFailed` when a process of the engine is still there."""
        try:
            self._wait_for(self._send("shutdown", {}), timeout_s)
            self._process.wait(timeout_s)
            left = self._wait_until_gone(timeout_s=100.0)
            if left:
                raise EngineFailed(f"still running after the shutdown: {left}")
        except subprocess.TimeoutExpired:
            raise EngineFailed(self._with_log("the process does not end")) from None
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill every process of the engine. Idempotent."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended by itself
                process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # a command nobody read
                pipe.close()

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A killed process may have ended before its zygote has reported so.
        if error is None and self._process.poll() is None and self.processes():
            self.shutdown()
        else:
            self.kill()

    def processes(self) -> list[psutil.Process]:
        """Every living process of the engine: the client first, if it lives, then core, workers and
        children of the connectors."""
        ours = [p for p in psutil.process_iter() if self._is_ours(p)]
        # By number the client would come last when the numbers of processes begin anew.
        return sorted(ours, key=lambda process: process.pid != self._process.pid)

    def io_processes(self) -> list[psutil.Process]:
        """The living I/O processes of the engine's connectors."""
        return [p for p in self.processes() if "s3kv.io" in _command(p)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if os.getsid(process.pid) != self._process.pid:
                return False
            # The first thread of a killed process is a zombie before the others have ended.
            return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False

    def _wait_until_gone(self, timeout_s: float) -> list[str]:
        deadline = time.monotonic() + timeout_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [f"{p.pid} {' '.join(_command(p))}" for p in left]

    def generate(
        self,
        asks: Sequence[Ask | Sequence[int]],
        *,
        max_tokens: int = 8,
        concurrency: int = 1,
        timeout_s: float = PATIENCE_S,
    ) -> list[Answer]:
        """Serve requests, at most `concurrency` at once; answers in the order of the requests.

        A bare list of token ids is an `Ask` with `max_tokens`.
        """
        pending = self.begin_generate(asks, max_tokens=max_tokens, concurrency=concurrency)
        return [Answer(**answer) for answer in pending.result(timeout_s)]

    def begin_generate(
        self, asks: Sequence[Ask | Sequence[int]], *, max_tokens: int = 8, concurrency: int = 1
    ) -> Pending:
        """The same without waiting; `result()` gives the answers as dicts of `Answer`'s fields."""
        requests = [a if isinstance(a, Ask) else Ask(a, max_tokens) for a in asks]
        return self._begin(
            "generate", requests=[asdict(r) for r in requests], concurrency=concurrency
        )

    def metrics(self) -> dict[str, float]:
        """vLLM's Prometheus samples: {"vllm:external_prefix_cache_hits_total": 1536.0, …}."""
        return dict(self.begin_metrics().result())

    def begin_metrics(self) -> Pending:
        """The same without waiting."""
        return self._begin("metrics")

    def reload_weights(self, path: Path) -> None:
        """Put the weights of another model of the same shape into the running one, and no more:
        what is cached stays."""
        self._begin("reload_weights", path=str(path)).result()

    def reset_prefix_cache(self, *, connector: bool = False) -> None:
        """Forget the engine's own KV cache, so that only the connector's tiers can hit; with
        `connector` tell the connector to forget, too."""
        if not self._begin("reset_prefix_cache", connector=connector).result():
            raise EngineFailed(self._with_log("the prefix cache could not be reset: blocks in use"))

    def limit_hits(self, tokens: int | None) -> None:
        """Cap hits in the engine's own cache, to make a reference with a hit of a given length."""
        self._begin("limit_hits", tokens=tokens).result()

    def call(self, target: str, **kwargs: Any) -> Any:
        """Run `module:function(llm_engine, **kwargs)` in the engine's process (in_process only)."""
        return self._begin("call", target=target, kwargs=kwargs).result()

    def _begin(self, op: str, **args: Any) -> Pending:
        return Pending(self, self._send(op, args))

    def _send(self, op: str, args: dict[str, Any]) -> int:
        self._commands += 1
        self._write({"id": self._commands, "op": op, "args": args})
        return self._commands

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineFailed(self._with_log("the engine's process is gone")) from None

    def _wait_for(self, number: int, timeout_s: float) -> Any:
        deadline = time.monotonic() + timeout_s
        while number not in self._answers:
            if not self._read(min(1.0, deadline - time.monotonic())):
                if self._process.poll() is not None:
                    code = self._process.returncode
                    raise EngineFailed(self._with_log(f"the engine's process ended ({code})"))
                if time.monotonic() >= deadline:
                    raise EngineFailed(self._with_log(f"no answer within {timeout_s:g} s"))
        answer = self._answers.pop(number)
        if "error" in answer:
            raise EngineFailed(self._with_log(answer["error"]))
        return answer["value"]

    def _has_come(self, number: int) -> bool:
        while number not in self._answers and self._read(0.0):
            pass
        return number in self._answers or self._process.poll() is not None

    def _read(self, timeout_s: float) -> bool:
        """Take in what the child has written; False when nothing came in time, or nothing can."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, timeout_s))
        data = os.read(self._process.stdout.fileno(), 1 << 16) if ready else b""
        if ready and not data:
            self._process.wait()  # end of file: nobody is left to answer
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            taken = self._so_far if "so_far" in answer else self._answers
            taken[answer["id"]] = answer
        return bool(data)

    def _with_log(self, message: str, lines: int = 40) -> str:
        tail = self.log_path.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join([message, f"--- the end of {self.log_path}:", *tail])


def _command(process: psutil.Process) -> list[str]:
    """The command line of a process; empty if it is ending."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # `ZombieProcess` is one
        return []
