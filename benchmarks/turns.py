"""Turns: one engine serves the same kind of prompts with each connector in turn.

Two engines with the same code can differ by several per cent for as long as they run, so their
ratio says little about a connector. Here one engine changes its connector between passes
(`lab.connectors`):

    none     no connector
    again    no connector either: how far equal passes are apart
    empty    a connector whose hooks do nothing: what vLLM does for any connector
    own      s3kv

A turn is a pass with each, in rotating order. A ratio divides the figure of a pass by that of
`none` in the same turn. Told is the median over the turns of all engines, with the 95 % confidence
interval that the order of the values gives. A pass counts only if the engine has asked a connector
where it has one, and asked none where it has none.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.deadline import begin, say
from benchmarks.rig import SMALL, Store, add_server, connector, machine, publish, s3, warm_engine
from lab.engine import Engine
from lab.models import build

PASSES = {"none": "none", "again": "none", "empty": "empty", "own": "own"}
"""Names of the passes of a turn, each with its connector in `lab.connectors`. A benchmark may add
others."""
QUERIES = "vllm:external_prefix_cache_queries_total"
"""Tokens that the engine has asked its connector for."""
ENGINE_S, TURN_S = 300.0, 180.0
"""Longest time that an engine may take to start, and a turn to end."""

Figures = dict[str, float]
Turn = dict[str, Figures]
"""The figures of each pass."""
Measure = Callable[[str], Figures]
"""Lets the engine serve the prompts of a pass with this connector. Returns the pass's figures."""


def run(
    arguments: Sequence[str] | None,
    measure: Callable[[Engine, Store, str], Measure],
    *,
    benchmark: str,
    figure: str,
    prompts: str,
    turns: int,
    passes: Mapping[str, str] = PASSES,
) -> None:
    """Run turns as the command line asks for, and publish the result.

    measure: gets an engine, the server and the prefix of this engine's objects. figure: the one of
    which ratios are told. prompts: those of a pass, in words. turns: of each engine.
    """
    parser = argparse.ArgumentParser(prog=f"benchmarks.{benchmark}")
    parser.add_argument("--engines", type=int, default=3, help="one after another")
    parser.add_argument("--turns", type=int, default=turns, help="of each engine")
    parser.add_argument("--quick", action="store_true", help="one engine, one turn")
    parser.add_argument("--json", type=Path)
    add_server(parser)
    options = parser.parse_args(arguments)
    engines, turns = (1, 1) if options.quick else (options.engines, options.turns)
    measured: list[Turn] = []
    with s3(options) as store, tempfile.TemporaryDirectory() as folder:
        begin(store.name, engines * (ENGINE_S + turns * TURN_S))
        model = build(Path(folder), SMALL.preset)
        for number in range(engines):
            say(f"engine {number + 1} of {engines}")
            prefix = f"bench/{uuid.uuid4().hex[:8]}"
            ours = connector(store.settings, prefix, host_gib=1)
            log_path = Path(folder) / "engine.log"
            with warm_engine(model, log_path, ours, store.env, size=SMALL.quick()) as engine:
                one = measure(engine, store, prefix)
                measured += [turn(engine, one, n, passes) for n in range(turns)]
        medians = {
            name: {f: round(statistics.median(t[name][f] for t in measured), 2) for f in figures}
            for name, figures in measured[0].items()
        }
        publish(
            {
                "benchmark": benchmark,
                **store.told(),
                "machine": machine(),
                "prompts": prompts,
                "engines": engines,
                "turns": turns,
                "medians": medians,
                "ratio": ratios(measured, figure),
                "all": measured,
            },
            options.json,
        )


def turn(engine: Engine, measure: Measure, number: int, passes: Mapping[str, str] = PASSES) -> Turn:
    """Turn `number`: a pass with each connector."""
    figures: Turn = {}
    names, queries = list(passes), engine.metrics().get(QUERIES, 0.0)
    first = number % len(names)
    for name in names[first:] + names[:first]:
        engine.call("lab.connectors:use", connector=passes[name])
        figures[name] = measure(passes[name])
        queries, before = engine.metrics().get(QUERIES, 0.0), queries
        assert (queries > before) == (passes[name] != "none"), f"{name}: {before}, then {queries}"
    return figures


def ratios(turns: Sequence[Turn], figure: str) -> dict[str, dict[str, Any]]:
    """The median of every pass's figure relative to that of `none` in the same turn."""
    others = [name for name in turns[0] if name != "none"]
    return {
        name: median([each[name][figure] / each["none"][figure] for each in turns])
        for name in others
    }


def median(values: Sequence[float]) -> dict[str, Any]:
    """The median and its 95 % confidence interval, by the normal approximation of the binomial
    distribution (https://en.wikipedia.org/wiki/Order_statistic). None for too few values."""
    ordered, count = sorted(values), len(values)
    low = math.floor(count / 2 - 1.96 * math.sqrt(count) / 2)
    told: dict[str, Any] = {"median": round(statistics.median(ordered), 4), "interval_95": None}
    if low >= 1:
        told["interval_95"] = [round(ordered[low - 1], 4), round(ordered[count - low], 4)]
    return told
