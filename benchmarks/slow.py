"""What a bucket of any speed costs a real engine: `python -m benchmarks.slow [--json FILE]`.

Every prompt is in the bucket, behind a proxy that passes on so many MiB/s. 1,600 tokens and
100 MiB of KV each, one request after another, a fresh engine per speed. The ratio is the time to
first token over that of an engine without a connector, prompt by prompt: median, mean and worst,
and the engine's first request, when nothing is known of the bucket. Below 1 the cache is of use.

The S3 server: `benchmarks/rig.py`. One with the shape of S3 (`--shaped`) limits its own rate, so
there is no proxy.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.deadline import begin, ends, say
from benchmarks.rig import Store, add_server, connector, machine, publish, s3, warm_engine
from lab.engine import Answer
from lab.models import FAT, build, prompts
from lab.proxy import proxy

PROMPTS = 8
PROMPT_TOKENS = 1_600
GIVE_UP_S = 600.0
"""Per speed; one takes about a minute."""
MIB_PER_S = (1, 4, 16, 64, 256, 1_024)


class Bench:
    def __init__(self, folder: Path, store: Store) -> None:
        self._folder = folder
        self._store = store
        self._prefix = f"bench/{uuid.uuid4().hex[:8]}"
        self._model = build(folder, FAT)
        self._prompts = prompts(PROMPTS, PROMPT_TOKENS, seed=7)

    def answers(self, name: str, url: str | None = None) -> list[Answer]:
        """One engine's. url: where it finds the bucket; None: it has no connector."""
        settings = self._store.settings | {"endpoint_url": url}
        say(f"engine {name}")
        log_path = self._folder / f"{name}.log"
        kv_connector = connector(settings, self._prefix) if url else None
        with warm_engine(self._model, log_path, kv_connector, self._store.env) as engine:
            return engine.generate(self._prompts)


@contextmanager
def limited(store: Store, url: str, bytes_per_s: float) -> Iterator[str]:
    """The URL of the bucket at this rate: of the server itself if it has a rate, or of a proxy."""
    if store.running is not None:
        store.running.limit(bytes_per_s / 1e6)
        yield url
    else:
        with proxy(url, bytes_per_s=bytes_per_s) as slower:
            yield slower.url


def compared(answers: list[Answer], without: list[Answer]) -> dict[str, Any]:
    ratios = [a.ttft_s / b.ttft_s for a, b in zip(answers, without, strict=True)]  # type: ignore[operator]
    return {
        "median": round(statistics.median(ratios), 3),
        "mean": round(statistics.mean(ratios), 3),
        "worst": round(max(ratios), 3),
        "first": round(ratios[0], 3),
        "tokens_hit": [answer.cached_tokens for answer in answers],
    }


@ends(600)
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--mib-per-s", type=float, nargs="+", default=MIB_PER_S)
    parser.add_argument("--quick", action="store_true", help="one speed, the fastest")
    parser.add_argument("--json", type=Path)
    add_server(parser)
    options = parser.parse_args(arguments)
    with s3(options) as store, tempfile.TemporaryDirectory() as folder:
        url = store.url
        if url is None:
            parser.error("S3KV_BUCKET is set: set AWS_ENDPOINT_URL, too; the proxy has to know it")
        speeds = options.mib_per_s[-1:] if options.quick else options.mib_per_s
        begin(store.name, (2 + len(speeds)) * GIVE_UP_S)
        bench = Bench(Path(folder), store)
        bench.answers("filling", url)
        without = bench.answers("none")
        by_speed = {}
        for mib_per_s in speeds:
            with limited(store, url, mib_per_s * 2**20) as limited_url:
                answers = bench.answers(f"at-{mib_per_s:g}", limited_url)
            by_speed[f"{mib_per_s:g}"] = compared(answers, without)
        told = store.told()
    result = {
        "benchmark": "slow",
        **told,
        "machine": machine(),
        "prompts": f"{PROMPTS} x {PROMPT_TOKENS} tokens, {FAT.kv_bytes_per_token} B/token",
        "ttft_without_ms": round(1e3 * statistics.median(a.ttft_s or 0.0 for a in without)),
        "ttft_over_no_cache_by_mib_per_s": by_speed,
    }
    publish(result, options.json)


if __name__ == "__main__":
    main()
