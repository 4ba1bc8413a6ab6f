"""What s3kv does to a real vLLM engine: `python -m benchmarks.engine [--quick] [--large] [--json
FILE]`.

One request after another, as in a chat that starts cold: prompts of 1,600 tokens, 64 KiB of KV per
token, eight tokens out, the median over all prompts and rounds. With `--large` prompts have 8,000
tokens of 128 KiB, as Llama-3-8B has. Every round starts three engines, so that a machine that slows
down slows all of them:

    none     an engine without a connector: a cold pass, then the same prompts again, which hit
             the engine's own prefix cache (the floor: nothing is fetched from anywhere)
    cold     an engine with s3kv on an empty prefix of the bucket: computes, saves, uploads
    warm     a new engine with s3kv on what `cold` left in the bucket
    short    prompts shorter than a chunk, many at once, six times in `none` and in `warm`: nothing
             to hit, nothing to save

and after them plain sockets read what each prompt has in the bucket, with no engine beside them
(`raw`): what of the difference between `warm` and `local` is the server's and the network's.

Every engine first writes to all of its KV cache, so that no page of it is touched for the first
time while something is measured. The S3 server: `benchmarks/rig.py`; `--shaped` takes one with the
shape of S3.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.deadline import begin, ends, say
from benchmarks.floor import Server
from benchmarks.rig import (
    CHUNK_TOKENS,
    SHORT_TOKENS,
    Store,
    add_server,
    connector,
    machine,
    publish,
    s3,
    warm_engine,
)
from lab.engine import Engine
from lab.models import FAT, Preset, build, prompts

SHORT_PROMPTS, SHORT_TIMES = 48, 6


@dataclass(frozen=True, slots=True)
class Size:
    """give_up_s: per round."""

    preset: Preset
    prompts: int
    prompt_tokens: int
    give_up_s: float

    @property
    def kv_bytes(self) -> int:
        """Room for the KV of all prompts at once."""
        nbytes = self.prompts * self.prompt_tokens * self.preset.kv_bytes_per_token
        return max(2**30, nbytes * 4 // 3)


SMALL = Size(FAT, 6, 1_600, 600.0)
LARGE = Size(replace(FAT, name="fatter", layers=32, max_tokens=8_192), 2, 8_000, 1_800.0)


class Bench:
    def __init__(self, folder: Path, store: Store, size: Size) -> None:
        self._server = Server(store.url or "", store.bucket, store.s3.env)
        self._folder = folder
        self._store = store
        self._size = size
        self._model = build(folder, size.preset)
        self._long = prompts(size.prompts, size.prompt_tokens, seed=7)
        self._short = prompts(SHORT_PROMPTS, SHORT_TOKENS, seed=8)
        self.seconds: dict[str, list[float]] = {}
        self.rates: dict[str, list[float]] = {"none": [], "s3kv": []}
        self.hits: list[int | None] = []

    @contextmanager
    def _engine(self, name: str, prefix: str | None) -> Iterator[Engine]:
        say(f"engine {name}")
        log_path = self._folder / f"{name}.log"
        kv_connector = connector(self._store.settings, prefix) if prefix else None
        with warm_engine(
            self._model,
            log_path,
            kv_connector,
            self._store.env,
            kv_bytes=self._size.kv_bytes,
            max_tokens=self._size.preset.max_tokens,
        ) as engine:
            yield engine

    def _pass(self, name: str, engine: Engine) -> None:
        answers = engine.generate(self._long)
        self.seconds.setdefault(name, []).extend(answer.seconds for answer in answers)
        if name == "warm":
            self.hits.extend(answer.cached_tokens for answer in answers)

    def _throughput(self, name: str, engine: Engine) -> None:
        for _ in range(SHORT_TIMES):
            start = time.monotonic()
            engine.generate(self._short, max_tokens=16, concurrency=8)
            self.rates[name].append(SHORT_PROMPTS / (time.monotonic() - start))
            engine.reset_prefix_cache()

    def round(self) -> None:
        prefix = f"bench/{uuid.uuid4().hex[:8]}"
        with self._engine("none", None) as engine:
            self._pass("none", engine)
            self._pass("local", engine)
            self._throughput("none", engine)
        with self._engine("cold", prefix) as engine:
            self._pass("cold", engine)
        with self._engine("warm", prefix) as engine:
            self._pass("warm", engine)
            self._throughput("s3kv", engine)
        per_prompt = self._size.prompt_tokens // CHUNK_TOKENS
        self.seconds.setdefault("raw", []).extend(self._server.read_s(prefix, per_prompt))

    def result(self) -> dict[str, Any]:
        ms = {name: round(1e3 * statistics.median(s), 1) for name, s in self.seconds.items()}
        rate = {name: round(statistics.median(r), 2) for name, r in self.rates.items()}
        size = self._size
        return {
            "benchmark": "engine",
            **self._store.told(),
            "machine": machine(),
            "prompts": f"{size.prompts} x {size.prompt_tokens} tokens, "
            f"{size.preset.kv_bytes_per_token} B/token",
            "tokens_hit_of_prompt": sorted({str(hit) for hit in self.hits}),
            "median_ms": ms,
            "short_requests_per_s": rate,
            "warm_over_local_hit": round(ms["warm"] / ms["local"], 3),
            "raw_and_local_over_local_hit": round((ms["raw"] + ms["local"]) / ms["local"], 3),
            "cold_over_none": round(ms["cold"] / ms["none"], 3),
            "short_throughput_ratio": round(rate["s3kv"] / rate["none"], 3),
            "all_ms": {n: [round(1e3 * x) for x in s] for n, s in self.seconds.items()},
            "all_short_requests_per_s": {
                n: [round(x, 2) for x in r] for n, r in self.rates.items()
            },
        }


@ends(600)
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--large", action="store_true", help="8,000 tokens of 128 KiB a prompt")
    parser.add_argument("--json", type=Path)
    add_server(parser)
    options = parser.parse_args(arguments)
    with s3(options) as store, tempfile.TemporaryDirectory() as folder:
        rounds = 1 if options.quick else options.rounds
        size = LARGE if options.large else SMALL
        begin(store.name, rounds * size.give_up_s)
        bench = Bench(Path(folder), store, size)
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            bench.round()
        publish(bench.result(), options.json)


if __name__ == "__main__":
    main()
