"""One run of the comparison: rounds of passes, each with its proof."""

from __future__ import annotations

import statistics
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.floor import Server
from benchmarks.peers.contenders import Contender
from benchmarks.peers.proof import faults
from benchmarks.rig import SHORT_TOKENS, Size, warm_engine
from lab.engine import Answer, Engine, EngineFailed
from lab.models import prompts

SAVING_TIMEOUT_S = 60.0

Make = Callable[[str], Contender]
"""A contender with an empty place for a run of this name."""


@dataclass(slots=True)
class Passes:
    """All passes of one kind, over the rounds."""

    seconds: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    cpu_s: list[dict[str, float]] = field(default_factory=list)
    """Processor time per prompt, by process: the engine's own, and the others by module."""
    faults: list[str] = field(default_factory=list)

    def told(self) -> dict[str, Any]:
        if self.faults or not self.seconds:
            return {"failed": self.faults or ["no pass"]}
        return {
            "median_ms": _ms(statistics.median(self.seconds)),
            "ttft_median_ms": _ms(statistics.median(self.ttft_s)),
            "slowest_ms": _ms(max(self.seconds)),
            "cpu_ms_per_prompt": _ms(statistics.mean(sum(cpu.values()) for cpu in self.cpu_s)),
            "cpu_ms_by_process": {
                name: _ms(statistics.mean(cpu.get(name, 0.0) for cpu in self.cpu_s))
                for name in sorted(set().union(*self.cpu_s))
            },
            "all_ms": [round(1e3 * s) for s in self.seconds],
        }


class Bench:
    def __init__(
        self,
        folder: Path,
        env: dict[str, str],
        makes: list[Make],
        model: Path,
        size: Size,
        server: Server,
    ) -> None:
        self._folder = folder
        self._env = env
        self._makes = makes
        self._model = model
        self._size = size
        self._server = server
        self._prompts = prompts(size.prompts, size.prompt_tokens, seed=7)
        self._chunks = size.prompts * size.chunks_per_prompt
        self._rounds = 0
        self.passes: dict[str, dict[str, Passes]] = {}
        self.saved: dict[str, dict[str, list[float]]] = {}

    def round(self) -> None:
        run = f"peers/{uuid.uuid4().hex[:8]}"
        computed, local = self._without()
        turn = self._rounds % len(self._makes)
        for make in self._makes[turn:] + self._makes[:turn]:
            contender = make(run)
            try:
                self._with(contender, computed, local)
                if contender.name == "s3kv":
                    self._server.read(f"{run}/s3kv", self._size.chunks_per_prompt)
            finally:
                contender.forget()
        self._rounds += 1

    def _without(self) -> tuple[list[Answer], list[Answer]]:
        log_path = self._folder / "none.log"
        with warm_engine(self._model, log_path, None, self._env, size=self._size) as engine:
            computed = self._pass("none", "computed", engine)
            local = self._pass("none", "local", engine)
        return computed, local

    def _with(self, contender: Contender, computed: list[Answer], local: list[Answer]) -> None:
        for state, right in (("cold", computed), ("warm", local)):
            log_path = self._folder / f"{contender.name}-{state}.log"
            env = self._env | dict(contender.env)
            connector, python = contender.connector, contender.python
            passes = self._passes(contender.name, state)
            try:
                with warm_engine(
                    self._model, log_path, connector, env, python, size=self._size
                ) as engine:
                    answers = self._pass(contender.name, state, engine)
                    hits = _connector_hits(engine)
                    if state == "cold":
                        passes.faults += self._wait_until_saved(contender, engine)
                    if not contender.ends:
                        engine.kill()
            except EngineFailed as error:
                print(error, file=sys.stderr)
                passes.faults.append(str(error).splitlines()[0])
                return
            passes.faults += faults(answers, right, hits)

    def _pass(self, name: str, state: str, engine: Engine) -> list[Answer]:
        before_s = _cpu_s(engine)
        answers = engine.generate(self._prompts)
        passes = self._passes(name, state)
        used_s = _cpu_s(engine)
        passes.cpu_s.append(
            {name: (used_s[name] - before_s.get(name, 0.0)) / len(answers) for name in used_s}
        )
        passes.seconds += [answer.seconds for answer in answers]
        passes.ttft_s += [answer.ttft_s or 0.0 for answer in answers]
        times = " ".join(f"{answer.seconds:.2f}" for answer in answers)
        print(f"{name} {state}: {times} s", file=sys.stderr, flush=True)
        return answers

    def _passes(self, name: str, state: str) -> Passes:
        return self.passes.setdefault(name, {}).setdefault(state, Passes())

    def _wait_until_saved(self, contender: Contender, engine: Engine) -> list[str]:
        """Connectors that save on the engine's steps need steps: short prompts make them."""
        start = time.monotonic()
        while len(chunks := contender.saved()) < self._chunks:
            if time.monotonic() - start > SAVING_TIMEOUT_S:
                return [
                    f"{len(chunks)} of {self._chunks} chunks saved {SAVING_TIMEOUT_S:g} s after"
                ]
            engine.generate(prompts(1, SHORT_TOKENS, seed=time.monotonic_ns()))
        told = self.saved.setdefault(contender.name, {"after_last_answer_s": [], "mib": []})
        told["after_last_answer_s"].append(round(time.monotonic() - start, 2))
        told["mib"].append(round(sum(chunks.values()) / 2**20))
        return []

    def result(self) -> dict[str, Any]:
        return {
            "prompts": self._size.told(),
            "rounds": self._rounds,
            "raw": self._server.told(),
            "passes": {
                name: {state: passes.told() for state, passes in states.items()}
                for name, states in self.passes.items()
            },
            "saved": self.saved,
        }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)


def _cpu_s(engine: Engine) -> dict[str, float]:
    used_s: dict[str, float] = {}
    for process in engine.processes():
        with suppress(psutil.NoSuchProcess):
            times, command = process.cpu_times(), process.cmdline()
            module = command[command.index("-m") + 1] if "-m" in command else process.name()
            name = "engine" if module == "lab.entry" else module
            used_s[name] = used_s.get(name, 0.0) + times.user + times.system
    return used_s


def _connector_hits(engine: Engine) -> int:
    """Tokens, since the engine started: what it has served before is too short for any hit."""
    return int(engine.metrics().get("vllm:external_prefix_cache_hits_total", 0))
