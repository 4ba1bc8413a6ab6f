"""What saving costs the requests that are saved: `python -m benchmarks.saving [--quick]
[--max-tokens N] [--json FILE]`.

Prompts of 1,600 tokens, 64 KiB of KV per token, one after another, eight tokens out unless told
otherwise. No prompt is sent twice, so each is computed. The figure of a pass of four prompts is
their median time; `benchmarks/turns.py` has the passes. Two more show what that of s3kv is made of:
`loads` looks up and saves nothing, `saves` saves without a lookup. After a pass that saves, every
chunk of its prompts is in the bucket before the next one begins, or the benchmark fails.

Processor times are those of a request until the last answer of its pass: of the engine with its
copies to host memory, of the I/O process with its digests, and of a server with the shape of S3.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial

import psutil

from benchmarks import turns
from benchmarks.deadline import ends
from benchmarks.rig import SHORT_TOKENS, SMALL, Store
from lab.engine import Engine
from lab.models import prompts

PROMPTS = 4
TOLD = f"{PROMPTS} x {SMALL.prompt_tokens} tokens, {SMALL.preset.kv_bytes_per_token} B/token"
SAVES = "vllm:s3kv_saves_total"
SAVED_WITHIN_S = 300.0


class Passes:
    """The passes of one engine: fresh prompts for each, and s3kv's objects under the prefix."""

    def __init__(self, max_tokens: int, engine: Engine, store: Store, prefix: str) -> None:
        self._max_tokens = max_tokens
        self._engine = engine
        self._store = store
        self._prefix = prefix
        self._count = 0

    def serve(self, connector: str) -> turns.Figures:
        """Serve the prompts of a pass with this connector."""
        self._count += 1
        asked = prompts(PROMPTS, SMALL.prompt_tokens, seed=self._count)
        before, saves = self._cpu_ms(), self._saves()
        answers = self._engine.generate(asked, max_tokens=self._max_tokens)
        cpu_ms = {name: ms - before[name] for name, ms in self._cpu_ms().items()}
        assert all(not answer.cached_tokens for answer in answers), "a prompt was not fresh"
        if connector in ("own", "saves"):
            self._wait_until_saved(saves)
            # The server may keep its objects in memory.
            self._store.s3.empty(self._store.bucket, self._prefix)
        median_ms = 1e3 * statistics.median(answer.seconds for answer in answers)
        return {"median_ms": median_ms} | {name: ms / PROMPTS for name, ms in cpu_ms.items()}

    def _cpu_ms(self) -> dict[str, float]:
        """Processor time so far, which other programs of the machine change little."""
        processes = {"io_cpu_ms": self._engine.io_processes()}
        others = set(self._engine.processes()) - set(processes["io_cpu_ms"])
        processes["engine_cpu_ms"] = sorted(others, key=lambda process: process.pid)
        if self._store.running is not None:
            processes["server_cpu_ms"] = [psutil.Process(self._store.running.process.pid)]
        return {
            name: 1e3 * sum(sum(process.cpu_times()[:2]) for process in group)
            for name, group in processes.items()
        }

    def _wait_until_saved(self, before: int) -> None:
        """Saves are reported in the engine's steps: short prompts make them. before: saves of the
        passes before."""
        deadline_s = time.monotonic() + SAVED_WITHIN_S
        chunks = PROMPTS * SMALL.chunks_per_prompt
        while (saved := len(self._objects())) < chunks or self._saves() - before < chunks:
            assert time.monotonic() < deadline_s, f"{saved} of {chunks} chunks are saved"
            self._engine.generate(prompts(1, SHORT_TOKENS, seed=time.monotonic_ns()))

    def _saves(self) -> int:
        metrics = self._engine.metrics().items()
        return int(sum(value for name, value in metrics if name.startswith(SAVES)))

    def _objects(self) -> dict[str, int]:
        return self._store.s3.objects(self._store.bucket, self._prefix)


def passes(max_tokens: int, engine: Engine, store: Store, prefix: str) -> turns.Measure:
    return Passes(max_tokens, engine, store, prefix).serve


@ends(600)
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--max-tokens", type=int, default=8)
    options, others = parser.parse_known_args(arguments)
    turns.run(
        others,
        partial(passes, options.max_tokens),
        benchmark="saving",
        figure="median_ms",
        prompts=f"{TOLD}, {options.max_tokens} tokens out",
        turns=12,
        passes=turns.PASSES | {"loads": "loads", "saves": "saves"},
    )


if __name__ == "__main__":
    main()
