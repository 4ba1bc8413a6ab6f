"""A bucket with a budget under a production trace: `python -m benchmarks.bucket --trace PATH
[--budget-gib 500 1000 2000 4000] [--json FILE]`.

How near `refresh_after_s` and a `s3kv gc --max-bytes` that runs now and then come to an ideal LRU
of the budget, and how far above the budget the bucket gets. What decides is s3kv's own code
(`benchmarks/simulation/expiry.py`); replicas are a host memory each, and requests find the
leading part of their prompt in it and in the bucket, and save the rest. The trace is that of
`benchmarks.trace`, and so is the size of a chunk.

A bucket turns over once in the time in which the fleet writes as much as the budget. Objects are
refreshed after a quarter of that and swept every fiftieth, as docs/operating.md has it. An hour of
the trace writes 11 TiB, so times here are minutes where they are days in a real bucket.

Runs per budget: the ideal LRU; s3kv; s3kv without refreshes (what was written first goes first);
and what the once-per-fleet measures are worth: without chance, without the store's condition,
without either. All see the same requests.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.simulation.expiry import Bucket, IdealBucket, SweptBucket, Upkeep
from benchmarks.simulation.fleet import Setup
from benchmarks.simulation.workload import Arrival, command, identity, load

REFRESH_SHARE, SWEEP_SHARE = 1 / 4, 1 / 50
"""Of the time in which a bucket turns over."""


@dataclasses.dataclass(slots=True)
class Fleet:
    """Replicas with an LRU of host memory each."""

    bucket: Bucket
    host_objects: int
    memories: list[OrderedDict[bytes, None]]
    chunks: int = 0
    host_hits: int = 0

    def serve(self, arrival: Arrival, replica: int) -> None:
        memory, now_s = self.memories[replica], arrival.time_s
        found = True
        for key in arrival.hashes:
            self.chunks += 1
            if found and key in memory:
                self.host_hits += 1
            elif found and self.bucket.get(key, replica, now_s):
                pass
            else:
                found = False
                if key not in memory:  # what is in memory was saved when it came there
                    self.bucket.put(key, replica, now_s)
            memory[key] = None
            memory.move_to_end(key)
            if len(memory) > self.host_objects:
                memory.popitem(last=False)


def run(
    arrivals: Sequence[Arrival], bucket: Bucket, *, replicas: int, routing: str, host_objects: int
) -> dict[str, Any]:
    """Figures of one bucket, the same for the same arguments."""
    fleet = Fleet(bucket, host_objects, [OrderedDict() for _ in range(replicas)])
    for arrival in arrivals:
        fleet.serve(arrival, arrival.engine(replicas, routing))
    counts = bucket.counts
    return {
        "peak_objects": bucket.peak_objects,
        "bucket_hits": counts["hits"],
        "bucket_hit_percent": round(100 * counts["hits"] / fleet.chunks, 2),
        "host_hit_percent": round(100 * fleet.host_hits / fleet.chunks, 2),
        **{name: counts[name] for name in sorted(counts) if name != "hits"},
    }


def written_per_s(arrivals: Sequence[Arrival]) -> float:
    """Objects the fleet would write per second, had the bucket room for all."""
    seen = {key for arrival in arrivals for key in arrival.hashes}
    return len(seen) / arrivals[-1].time_s


def compare(arrivals: Sequence[Arrival], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry for every budget."""
    object_bytes = Setup(kib_per_token=options.kib_per_token).layout.object_bytes
    fleet = {
        "replicas": options.replicas,
        "routing": options.routing,
        "host_objects": int(options.host_gib * 2**30) // object_bytes,
    }
    results = []
    for gib in options.budget_gib:
        capacity = int(gib * 2**30) // object_bytes
        turnover_s = capacity / written_per_s(arrivals)
        upkeep = Upkeep(turnover_s * REFRESH_SHARE, turnover_s * SWEEP_SHARE)
        ways = {
            "s3kv": upkeep,
            "without refreshes": dataclasses.replace(upkeep, refresh_after_s=0),
            "without chance": dataclasses.replace(upkeep, jitter=False),
            "without the condition": dataclasses.replace(upkeep, conditional=False),
            "without either": dataclasses.replace(upkeep, conditional=False, jitter=False),
        }
        ideal = run(arrivals, IdealBucket(capacity), **fleet)
        runs = {"ideal LRU": ideal}
        for name, way in ways.items():
            bucket = SweptBucket(capacity, object_bytes, way, options.seed)
            runs[name] = run(arrivals, bucket, **fleet)
        for figures in runs.values():
            figures["hits_of_ideal"] = round(figures["bucket_hits"] / ideal["bucket_hits"], 3)
            figures["peak_of_budget"] = round(figures["peak_objects"] / capacity, 3)
        results.append(
            {
                "budget_gib": gib,
                "turnover_s": round(turnover_s, 1),
                "refresh_after_s": round(upkeep.refresh_after_s, 1),
                "sweep_every_s": round(upkeep.sweep_every_s, 1),
                "runs": runs,
            }
        )
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    arrivals = load(options.trace, options.limit)
    results = compare(arrivals, options)
    for result in results:
        print(
            f"\n{result['budget_gib']:g} GiB, turned over in {result['turnover_s']:g} s: refresh "
            f"after {result['refresh_after_s']:g} s, sweep every {result['sweep_every_s']:g} s"
        )
        titles = ("hits, %", "of ideal", "peak", "copies", "refused", "duplicates")
        print(" " * 24 + "".join(f"{title:>12}" for title in titles))
        for name, figures in result["runs"].items():
            cells = [figures[n] for n in ("bucket_hit_percent", "hits_of_ideal", "peak_of_budget")]
            cells += [figures.get(n, 0) for n in ("refreshes", "refused", "duplicates")]
            print(f"{name:24}" + "".join(f"{cell:>12,}" for cell in cells))
    if options.json:
        document = {
            "benchmark": "bucket",
            "command": command("bucket", arguments, options.trace),
            "trace": identity(options.trace, len(arrivals)),
            "budgets": results,
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="a file in Mooncake's form")
    parser.add_argument("--limit", type=int, help="only that many requests, from the start")
    parser.add_argument(
        "--budget-gib", nargs="+", type=float, default=[500.0, 1000.0, 2000.0, 4000.0]
    )
    parser.add_argument("--replicas", type=int, default=8, help="that share the bucket (8)")
    parser.add_argument("--routing", choices=("session", "round-robin"), default="round-robin")
    parser.add_argument("--host-gib", type=float, default=32.0, help="per replica (32)")
    parser.add_argument("--kib-per-token", type=float, default=128.0, help="as in the trace (128)")
    parser.add_argument("--seed", type=int, default=0, help="of chance and delays")
    parser.add_argument("--json", type=Path, help="write everything there")
    return parser


if __name__ == "__main__":
    main()
