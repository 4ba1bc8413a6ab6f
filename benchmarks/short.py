"""What s3kv costs requests that it does nothing for: `python -m benchmarks.short [--quick] [--json
FILE]`.

Prompts shorter than a chunk, 16 tokens out, eight at a time: nothing to hit, nothing to save. One
engine serves them again and again, and changes its connector between passes (`lab.connectors`):

    none     no connector
    again    no connector either: how far equal passes are apart
    empty    a connector whose hooks do nothing: what vLLM does for any connector
    own      s3kv

A pass is 48 prompts, a turn is a pass with each. Turns rotate the order. A ratio divides the
requests per second of a pass by those of `none` in the same turn. The figure is the median over the
turns of all engines, with the 95 % confidence interval that the order of the values gives. A pass
counts only if the engine has asked a connector where it has one, and asked none where it has none.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.deadline import begin, ends, say
from benchmarks.rig import (
    SHORT_TOKENS,
    add_server,
    connector,
    machine,
    publish,
    s3,
    warm_engine,
)
from lab.engine import Engine
from lab.models import FAT, build, prompts

PROMPTS, OUT_TOKENS, AT_ONCE = 48, 16, 8
PASSES = {"none": "none", "again": "none", "empty": "empty", "own": "own"}
"""Names of the passes of a turn, each with its connector in `lab.connectors`."""
QUERIES = "vllm:external_prefix_cache_queries_total"
"""Tokens that the engine has asked its connector for."""
ENGINE_S, TURN_S = 300.0, 120.0
"""Longest time that an engine may take to start, and a turn to end."""

Turn = dict[str, float]
"""The figure of each pass."""


def turn(engine: Engine, measure: Callable[[str], float], number: int) -> Turn:
    """Turn `number`: a pass with each connector. measure: lets the engine serve the prompts of a
    pass with this connector, and returns the pass's figure."""
    figures: Turn = {}
    names, queries = list(PASSES), engine.metrics().get(QUERIES, 0.0)
    first = number % len(names)
    for name in names[first:] + names[:first]:
        engine.call("lab.connectors:use", connector=PASSES[name])
        figures[name] = measure(PASSES[name])
        queries, before = engine.metrics().get(QUERIES, 0.0), queries
        assert (queries > before) == (PASSES[name] != "none"), f"{name}: {before}, then {queries}"
    return figures


def ratios(turns: Sequence[Turn]) -> dict[str, dict[str, Any]]:
    """The median of every pass's figure relative to that of `none` in the same turn."""
    others = [name for name in PASSES if name != "none"]
    return {name: median([each[name] / each["none"] for each in turns]) for name in others}


def median(values: Sequence[float]) -> dict[str, Any]:
    """The median and its 95 % confidence interval, by the normal approximation of the binomial
    distribution (https://en.wikipedia.org/wiki/Order_statistic). None for too few values."""
    ordered, count = sorted(values), len(values)
    low = math.floor(count / 2 - 1.96 * math.sqrt(count) / 2)
    told: dict[str, Any] = {"median": round(statistics.median(ordered), 4), "interval_95": None}
    if low >= 1:
        told["interval_95"] = [round(ordered[low - 1], 4), round(ordered[count - low], 4)]
    return told


def _requests_per_s(engine: Engine, asked: Sequence[Sequence[int]], connector: str) -> float:
    start_s = time.monotonic()
    engine.generate(asked, max_tokens=OUT_TOKENS, concurrency=AT_ONCE)
    return len(asked) / (time.monotonic() - start_s)


@ends(600)
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--engines", type=int, default=3, help="one after another")
    parser.add_argument("--turns", type=int, default=20, help="of each engine")
    parser.add_argument("--quick", action="store_true", help="one engine, two turns")
    parser.add_argument("--json", type=Path)
    add_server(parser)
    options = parser.parse_args(arguments)
    engines, turns = (1, 2) if options.quick else (options.engines, options.turns)
    asked = prompts(PROMPTS, SHORT_TOKENS, seed=8)
    measured: list[Turn] = []
    with s3(options) as store, tempfile.TemporaryDirectory() as folder:
        begin(store.name, engines * (ENGINE_S + turns * TURN_S))
        model = build(Path(folder), FAT)
        ours = connector(store.settings, f"bench/{uuid.uuid4().hex[:8]}")
        for number in range(engines):
            say(f"engine {number + 1} of {engines}")
            with warm_engine(model, Path(folder) / "engine.log", ours, store.env) as engine:
                rate = partial(_requests_per_s, engine, asked)
                measured += [turn(engine, rate, n) for n in range(turns)]
        publish(
            {
                "benchmark": "short",
                **store.told(),
                "machine": machine(),
                "prompts": f"{PROMPTS} x {SHORT_TOKENS} tokens, {OUT_TOKENS} tokens out, "
                f"{AT_ONCE} at a time",
                "engines": engines,
                "turns": turns,
                "requests_per_s": {
                    name: round(statistics.median(each[name] for each in measured), 2)
                    for name in PASSES
                },
                "ratio": ratios(measured),
                "all_requests_per_s": [
                    {name: round(rate, 2) for name, rate in each.items()} for each in measured
                ],
            },
            options.json,
        )


if __name__ == "__main__":
    main()
