"""One run of the comparison with one model: rounds of passes, each with its proof."""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.deadline import say
from benchmarks.floor import Server
from benchmarks.peers.contenders import Contender
from benchmarks.peers.proof import faults, hit_percent
from benchmarks.peers.work import Case, Work
from benchmarks.rig import SHORT_TOKENS, warm_engine
from lab.engine import Answer, Engine, EngineFailed
from lab.models import prompts

SAVING_TIMEOUT_S = 60.0

Make = Callable[[str, Path], Contender]
"""A contender with an empty place for a run of this name, and this model."""
Answers = dict[str, list[Answer]]
"""By case."""


@dataclass(slots=True)
class Passes:
    """All passes of one kind, over the rounds."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[dict[str, float]] = field(default_factory=list)
    """Processor time per prompt, by process: the engine's own, and the others by module."""
    hit_percent: list[float] = field(default_factory=list)
    """Of what an engine's own cache hits."""
    faults: list[str] = field(default_factory=list)

    def told(self) -> dict[str, Any]:
        if self.faults or not self.seconds:
            return {"failed": self.faults or ["no pass"]}
        return {
            "median_ms": _ms(statistics.median(self.seconds)),
            "fastest_ms": _ms(min(self.seconds)),
            "slowest_ms": _ms(max(self.seconds)),
            "hit_percent": round(statistics.mean(self.hit_percent or [0.0]), 1),
            "cpu_ms_per_prompt": _ms(statistics.mean(sum(cpu.values()) for cpu in self.cpu_s)),
            "cpu_ms_by_process": {
                name: _ms(statistics.mean(cpu.get(name, 0.0) for cpu in self.cpu_s))
                for name in sorted(set().union(*self.cpu_s))
            },
            "all_ms": [round(1e3 * s) for s in self.seconds],
        }


class Bench:
    def __init__(
        self, folder: Path, env: dict[str, str], makes: list[Make], work: Work, server: Server
    ) -> None:
        self._folder = folder
        self._env = env
        self._makes = makes
        self._work = work
        self._server = server
        self._rounds = 0
        self.passes: dict[str, dict[str, dict[str, Passes]]] = {}
        """By case, contender and state."""
        self.saved: dict[str, dict[str, list[float]]] = {}

    def round(self) -> None:
        run = f"peers/{uuid.uuid4().hex[:8]}"
        computed, local = self._without()
        turn = self._rounds % len(self._makes)
        for make in self._makes[turn:] + self._makes[:turn]:
            contender = make(run, self._work.model)
            try:
                self._with(contender, computed, local)
                if contender.name == "s3kv":
                    self._server.read(f"{run}/s3kv", self._work.size.chunks_per_prompt)
            except EngineFailed as error:
                say(str(error))
            finally:
                contender.forget()
        self._rounds += 1

    def _without(self) -> tuple[Answers, Answers]:
        work = self._work
        with warm_engine(
            work.model, self._folder / "none.log", None, self._env, size=work.size
        ) as engine:
            computed = {c.name: self._pass(c, "none", "computed", engine) for c in work.first}
            every = [case for cases in work.engines for case in cases]
            local = {c.name: self._pass(c, "none", "local", engine) for c in every}
        return computed, local

    def _with(self, contender: Contender, computed: Answers, local: Answers) -> None:
        """A cold engine, which leaves everything saved, and the warm ones."""
        first, *others = self._work.engines
        start_s = time.monotonic()
        engines = [(first, "cold", computed)] + [(c, "warm", local) for c in (first, *others)]
        for cases, state, right in engines:
            try:
                self._engine(contender, cases, state, right)
            except EngineFailed as error:
                for case in cases:
                    fault = str(error).splitlines()[0]
                    self._passes(case, contender.name, state).faults.append(fault)
                raise
        say(f"{contender.name}: {time.monotonic() - start_s:.0f} s")

    def _engine(
        self, contender: Contender, cases: Sequence[Case], state: str, right: Answers
    ) -> None:
        log_path = self._folder / f"{self._work.name}-{contender.name}-{state}.log"
        with (
            contender.server(log_path.with_suffix(".server.log")) as server,
            warm_engine(
                contender.model or self._work.model,
                log_path,
                contender.connector,
                self._env | dict(contender.env),
                contender.python,
                size=self._work.size,
                prepare=contender.prepare,
            ) as engine,
        ):
            start_s = time.monotonic()
            for case in cases:
                before = _connector_hits(engine)
                answers = self._pass(case, contender.name, state, engine, server)
                passes = self._passes(case, contender.name, state)
                hits = _connector_hits(engine) - before
                users = case.users if state == "warm" else 1
                passes.faults += faults(answers, right[case.name], hits, users)
                passes.hit_percent.append(hit_percent(answers, right[case.name]))
            if state == "cold":
                late = self._wait_until_saved(contender, engine, start_s)
                self._passes(cases[0], contender.name, state).faults.extend(late)

    def _pass(
        self,
        case: Case,
        name: str,
        state: str,
        engine: Engine,
        server: psutil.Process | None = None,
    ) -> list[Answer]:
        others = [] if server is None else [server]
        before_s = _cpu_s(engine, others)
        answers = engine.generate(
            self._work.prompts[case.prompts],
            max_tokens=case.max_tokens,
            concurrency=case.users if state in ("local", "warm") else 1,
        )
        passes = self._passes(case, name, state)
        used_s = _cpu_s(engine, others)
        passes.cpu_s.append(
            {one: (used_s[one] - before_s.get(one, 0.0)) / len(answers) for one in used_s}
        )
        passes.seconds += [answer.seconds for answer in answers]
        times = " ".join(f"{answer.seconds:.2f}" for answer in answers)
        say(f"{name} {case.name} {state}: {times} s")
        return answers

    def _passes(self, case: Case, name: str, state: str) -> Passes:
        of_case = self.passes.setdefault(case.name, {})
        return of_case.setdefault(name, {}).setdefault(state, Passes())

    def _wait_until_saved(self, contender: Contender, engine: Engine, start_s: float) -> list[str]:
        """Connectors that save on the engine's steps need steps: short prompts make them."""
        answered_s = time.monotonic()
        while len(chunks := contender.saved()) < self._work.chunks:
            if time.monotonic() - answered_s > SAVING_TIMEOUT_S:
                return [
                    f"{len(chunks)} of {self._work.chunks} chunks saved {SAVING_TIMEOUT_S:g} s "
                    "after"
                ]
            engine.generate(prompts(1, SHORT_TOKENS, seed=time.monotonic_ns()))
        told = self.saved.setdefault(contender.name, {"seconds": [], "mib": []})
        told["seconds"].append(round(time.monotonic() - start_s, 2))
        told["mib"].append(round(sum(chunks.values()) / 2**20))
        return []

    def result(self) -> dict[str, Any]:
        return {
            "prompts": self._work.size.told(),
            "raw": self._server.told(),
            "saved": self.saved,
            "cases": {
                case: {
                    name: {state: passes.told() for state, passes in states.items()}
                    for name, states in names.items()
                }
                for case, names in self.passes.items()
            },
        }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 1)


def _cpu_s(engine: Engine, others: Sequence[psutil.Process]) -> dict[str, float]:
    used_s: dict[str, float] = {}
    for process in [*engine.processes(), *others]:
        with suppress(psutil.NoSuchProcess):
            times, command = process.cpu_times(), process.cmdline()
            module = command[command.index("-m") + 1] if "-m" in command else process.name()
            name = "engine" if module in ("lab.entry", "lab.zygote") else module
            used_s[name] = used_s.get(name, 0.0) + times.user + times.system
    return used_s


def _connector_hits(engine: Engine) -> int:
    """Tokens, since the engine started."""
    return int(engine.metrics().get("vllm:external_prefix_cache_hits_total", 0))
