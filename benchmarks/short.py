"""What s3kv costs requests that it does nothing for: `python -m benchmarks.short [--quick] [--json
FILE]`.

Prompts shorter than a chunk, 16 tokens out, eight at a time: nothing to hit, nothing to save. The
figure of a pass of 48 prompts is its requests per second.

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

import math
import statistics
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.deadline import begin, command_line, ends, say
from benchmarks.rig import (
    SHORT_TOKENS,
    SMALL,
    add_server,
    connector,
    machine,
    publish,
    s3,
    warm_engine,
)
from lab.engine import Engine
from lab.models import build, prompts

PROMPTS, OUT_TOKENS, AT_ONCE = 48, 16, 8
PASSES = {"none": "none", "again": "none", "empty": "empty", "own": "own"}
"""Names of the passes of a turn, each with its connector in `lab.connectors`."""
QUERIES = "vllm:external_prefix_cache_queries_total"
"""Tokens that the engine has asked its connector for."""
ENGINE_S, TURN_S = 300.0, 180.0
"""Longest time that an engine may take to start, and a turn to end."""

Turn = dict[str, float]
"""The requests per second of each pass."""


@ends(600)
def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__, "one engine, one turn")
    parser.add_argument("--engines", type=int, default=3, help="one after another")
    parser.add_argument("--turns", type=int, default=20, help="of each engine")
    add_server(parser)
    options = parser.parse_args(arguments)
    engines, turns = (1, 1) if options.quick else (options.engines, options.turns)
    measured: list[Turn] = []
    with s3(options) as store, tempfile.TemporaryDirectory() as folder:
        begin(store.name, engines * (ENGINE_S + turns * TURN_S))
        model = build(Path(folder), SMALL.preset)
        for number in range(engines):
            say(f"engine {number + 1} of {engines}")
            ours = connector(store.settings, f"bench/{uuid.uuid4().hex[:8]}", host_gib=1)
            log_path = Path(folder) / "engine.log"
            with warm_engine(model, log_path, ours, store.env, size=SMALL.quick()) as engine:
                measured += [turn(engine, n) for n in range(turns)]
        told = store.told()
    result = {
        "benchmark": "short",
        **told,
        "machine": machine(),
        "prompts": f"{PROMPTS} x {SHORT_TOKENS} tokens, {OUT_TOKENS} tokens out, {AT_ONCE} at once",
        "engines": engines,
        "turns": turns,
        "requests_per_s": {
            name: round(statistics.median(turn[name] for turn in measured), 2) for name in PASSES
        },
        "ratio": {
            name: median([turn[name] / turn["none"] for turn in measured])
            for name in PASSES
            if name != "none"
        },
        "all": measured,
    }
    publish(result, options.json)


def turn(engine: Engine, number: int) -> Turn:
    """Turn `number`: a pass with each connector."""
    rates: Turn = {}
    names, queries = list(PASSES), engine.metrics().get(QUERIES, 0.0)
    asked = prompts(PROMPTS, SHORT_TOKENS, seed=8)
    first = number % len(names)
    for name in names[first:] + names[:first]:
        engine.call("lab.connectors:use", connector=PASSES[name])
        start_s = time.monotonic()
        engine.generate(asked, max_tokens=OUT_TOKENS, concurrency=AT_ONCE)
        rates[name] = len(asked) / (time.monotonic() - start_s)
        queries, before = engine.metrics().get(QUERIES, 0.0), queries
        assert (queries > before) == (PASSES[name] != "none"), f"{name}: {before}, then {queries}"
    return rates


def median(values: Sequence[float]) -> dict[str, Any]:
    """The median and its 95 % confidence interval, by the normal approximation of the binomial
    distribution (https://en.wikipedia.org/wiki/Order_statistic). None for too few values."""
    ordered, count = sorted(values), len(values)
    low = math.floor(count / 2 - 1.96 * math.sqrt(count) / 2)
    told: dict[str, Any] = {"median": round(statistics.median(ordered), 4), "interval_95": None}
    if low >= 1:
        told["interval_95"] = [round(ordered[low - 1], 4), round(ordered[count - low], 4)]
    return told


if __name__ == "__main__":
    main()
