"""What a lookup in the bucket costs a request, or spares it: `python -m benchmarks.lookups
[--quick] [--json FILE]`.

An engine in simulated time, one request after another, each with a prompt that nobody has sent
before. The bucket has the first `hit` of its chunks. The planner and the I/O process's service are
s3kv's own, the engine and the store are those of `benchmarks/simulation`. A chunk has 512 tokens of
64 KiB, the network 25 Gbit/s, and a connection 90 MB/s. Buckets:

    tail     first byte: log-normal, median 30 ms, 99th percentile 300 ms
    steady   first byte: log-normal, median 30 ms, 99th percentile 38 ms

Told is the time to the first token over the time to compute all of the prompt: above 1 the lookup
costs time, below it saves some. `first` are the first requests of `--engines` engines, `later` the
next `--requests` of each.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from benchmarks.deadline import ends, say
from benchmarks.rig import publish
from benchmarks.shaped import SIGMA
from benchmarks.simulation.replicas import SETUP, Fleet, Scenario
from benchmarks.simulation.scaled import Load
from benchmarks.simulation.service import clock
from benchmarks.simulation.workload import CHUNK_TOKENS, Arrival
from tests.system.sim.loop import VirtualLoop

BUCKETS = {"tail": SIGMA, "steady": 0.1}
"""The shape of a bucket's first-byte times."""
MORE_TOKENS = 64
"""Of a prompt behind its last chunk."""
PAUSE_S = 10.0
"""From one request to the next, which is never sent before the one before is answered."""


@dataclass(frozen=True, slots=True)
class Case:
    """chunks: of each prompt. hit: of them, from the front, in the bucket. chunk_ms: to compute
    one."""

    bucket: str
    chunk_ms: float
    chunks: int
    hit: int

    @property
    def tokens(self) -> int:
        return self.chunks * CHUNK_TOKENS + MORE_TOKENS

    @property
    def tokens_per_s(self) -> float:
        return CHUNK_TOKENS / self.chunk_ms * 1e3

    def arrival(self, number: int) -> Arrival:
        hashes = tuple(
            hashlib.sha256(f"{number} {chunk}".encode()).digest() for chunk in range(self.chunks)
        )
        return Arrival(number, (1 + number) * PAUSE_S, self.tokens, 1, hashes, number)


CASES = tuple(
    Case(bucket, chunk_ms, chunks, hit)
    for bucket, chunk_ms, chunks in product(BUCKETS, (12.0, 48.0), (8, 32))
    for hit in (0, 1, chunks // 2, chunks - 1, chunks)
)


def ratios(case: Case, requests: int, seed: int) -> list[float]:
    """Of the requests of an engine."""
    arrivals = [case.arrival(number) for number in range(requests)]
    setup = replace(
        SETUP,
        kib_per_token=64.0,
        prefill_tokens_per_s=case.tokens_per_s,
        first_byte_sigma=BUCKETS[case.bucket],
    )
    scenario = Scenario(
        replicas=1, sampled=1, until_s=(2 + requests) * PAUSE_S, setup=setup, seed=seed
    )
    loop = VirtualLoop()
    with clock(loop):
        fleet = Fleet(loop, scenario, Load([(0, arrival) for arrival in arrivals], []))
        for arrival in arrivals:
            fleet.bucket.chunks.update(arrival.hashes[: case.hit])
        try:
            fleet.run()
            compute_s = case.tokens / case.tokens_per_s
            return [ttft_s / compute_s for ttft_s in fleet.engines[0].seen.ttft_s]
        finally:
            fleet.close()


def row(case: Case, engines: int, requests: int) -> dict[str, Any]:
    found = [ratios(case, 1 + requests, seed) for seed in range(engines)]
    later = [ratio for one in found for ratio in one[1:]]
    return {
        "bucket": case.bucket,
        "chunk_ms": case.chunk_ms,
        "chunks": case.chunks,
        "hit": case.hit,
        "first_mean": round(fmean(one[0] for one in found), 3),
        "first_worst": round(max(one[0] for one in found), 3),
        "later_median": round(median(later), 3),
        "later_mean": round(fmean(later), 3),
        "later_p95": round(quantiles(later, n=20)[-1], 3),
        "later_worst": round(max(later), 3),
    }


@ends(900)
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=20)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="two engines, three requests of each")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    engines, requests = (2, 3) if options.quick else (options.engines, options.requests)
    rows = []
    for case in CASES:
        say(f"{case.bucket}, {case.chunks} chunks of {case.chunk_ms:g} ms, {case.hit} there")
        rows.append(row(case, engines, requests))
    told = {"engines": engines, "requests": requests, "rows": rows}
    publish({"benchmark": "lookups", **told}, options.json)


if __name__ == "__main__":
    main()
