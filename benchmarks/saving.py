"""What saving costs the requests that are saved: `python -m benchmarks.saving [--quick] [--json
FILE]`.

Prompts of 1,600 tokens, 64 KiB of KV per token, one after another, eight tokens out. No prompt is
sent twice, so each is computed. One engine serves all passes, and changes its connector between
them, as in `benchmarks.short`. A pass is four prompts, and its figure their median time. After a
pass with s3kv all of it is in the bucket before the next one begins. A ratio divides the figure of
a pass by that of `none` in the same turn; told is the median with its 95 % confidence interval.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from benchmarks.deadline import begin, ends, say
from benchmarks.rig import (
    SHORT_TOKENS,
    SMALL,
    Store,
    add_server,
    connector,
    machine,
    publish,
    s3,
    warm_engine,
)
from benchmarks.short import ENGINE_S, PASSES, Turn, ratios, turn
from lab.engine import Engine
from lab.models import build, prompts

PROMPTS = 4
TURN_S = 180.0
SAVED_WITHIN_S = 60.0


class Passes:
    """The passes of one engine: fresh prompts for each, and s3kv's objects in the bucket."""

    def __init__(self, engine: Engine, store: Store, prefix: str) -> None:
        self._engine = engine
        self._store = store
        self._prefix = prefix
        self._count = 0

    def time_ms(self, connector: str) -> float:
        """The median time of a request in a pass with this connector."""
        self._count += 1
        asked = prompts(PROMPTS, SMALL.prompt_tokens, seed=self._count)
        answers = self._engine.generate(asked)
        assert all(not answer.cached_tokens for answer in answers), "a prompt was not fresh"
        if connector == "own":
            self._wait_until_saved()
            self._empty()
        return 1e3 * statistics.median(answer.seconds for answer in answers)

    def _wait_until_saved(self) -> None:
        """Saves are reported in the engine's steps: short prompts make them."""
        deadline_s = time.monotonic() + SAVED_WITHIN_S
        while len(self._objects()) < PROMPTS * SMALL.chunks_per_prompt:
            assert time.monotonic() < deadline_s, f"not saved within {SAVED_WITHIN_S:g} s"
            self._engine.generate(prompts(1, SHORT_TOKENS, seed=time.monotonic_ns()))

    def _objects(self) -> dict[str, int]:
        return self._store.s3.objects(self._store.bucket, self._prefix)

    def _empty(self) -> None:
        """The server may keep its objects in memory."""
        client = self._store.s3.client()
        for key in self._objects():
            client.delete_object(Bucket=self._store.bucket, Key=key)


@ends(600)
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--engines", type=int, default=3, help="one after another")
    parser.add_argument("--turns", type=int, default=12, help="of each engine")
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
            ours = connector(store.settings, prefix, SMALL.host_gib)
            with warm_engine(model, Path(folder) / "engine.log", ours, store.env) as engine:
                passes = Passes(engine, store, prefix)
                measured += [turn(engine, passes.time_ms, n) for n in range(turns)]
        publish(
            {
                "benchmark": "saving",
                **store.told(),
                "machine": machine(),
                "prompts": f"{PROMPTS} x {SMALL.prompt_tokens} tokens, "
                f"{SMALL.preset.kv_bytes_per_token} B/token",
                "engines": engines,
                "turns": turns,
                "median_ms": {
                    name: round(statistics.median(each[name] for each in measured), 1)
                    for name in PASSES
                },
                "ratio": ratios(measured),
                "all_ms": [{name: round(ms) for name, ms in each.items()} for each in measured],
            },
            options.json,
        )


if __name__ == "__main__":
    main()
