"""A bucket with a budget under a production trace: `python -m benchmarks.bucket --trace PATH
[--budget-gib 500 1000 2000 4000] [--json FILE]`.

How near a bucket that the engines keep themselves (`bucket_bytes`) comes to an ideal LRU of the
budget, how far above the budget it gets, and what the cleaner's requests cost. Cleaner and
refreshes are s3kv's own code in virtual time (`benchmarks/simulation/expiry.py`); replicas are a
host memory each, and requests find the leading part of their prompt in it and in the bucket, and
save the rest. The trace is that of `benchmarks.trace`, and so is the size of a chunk.

A bucket turns over once in the time in which the fleet writes as much as the budget. An hour of the
trace writes 11 TiB, so that takes minutes here and days in a real bucket.

Runs per budget: the ideal LRU; s3kv; s3kv without refreshes (what was written first goes first).
All see the same requests.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.deadline import QUICK_REQUESTS, ends, say
from benchmarks.origin import code, commit
from benchmarks.simulation.expiry import Bucket, IdealBucket, KeptBucket, Upkeep
from benchmarks.simulation.fleet import Setup
from benchmarks.simulation.workload import CHUNK_TOKENS, Arrival, command, identity, load
from s3kv import prices

_PRICES = prices.TABLE[prices.DEFAULT]
WAYS = ("ideal LRU", "s3kv", "without refreshes")
_MONTH_HOURS = 365 * 24 / 12


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
                # What is in memory was saved when it came there.
                if key not in memory:
                    self.bucket.put(key, replica, now_s)
            memory[key] = None
            memory.move_to_end(key)
            if len(memory) > self.host_objects:
                memory.popitem(last=False)


def run(
    arrivals: Sequence[Arrival],
    bucket: Bucket,
    *,
    replicas: int,
    routing: str,
    host_objects: int,
) -> dict[str, Any]:
    """Figures of one bucket, the same for the same arguments."""
    memories: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(replicas)]
    fleet = Fleet(bucket, host_objects, memories)
    for arrival in arrivals:
        fleet.serve(arrival, arrival.engine(replicas, routing))
    bucket.end(arrivals[-1].time_s)
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


def bill(
    figures: dict[str, Any], object_bytes: int, object_tokens: int, hours: float
) -> dict[str, float]:
    """Dollars a month, if every hour is like these, with the bucket always at its largest.

    sweeping: the cleaner's listings and lease, which `requests` has, too. Deleting is free. spared:
    the computing of what was found in the bucket, by the engines of `Setup`.
    """
    engine = Setup()
    spared_hours = figures["bucket_hits"] * object_tokens / engine.prefill_tokens_per_s / 3600
    puts = figures.get("puts", 0) + figures.get("copies", 0)
    gets = figures["gets"] + figures.get("heads", 0)
    sweeping = (figures.get("lists", 0) + figures.get("lease_puts", 0)) * _PRICES.put / 1000
    months = hours / _MONTH_HOURS
    requests = (puts * _PRICES.put + gets * _PRICES.get) / 1000 + sweeping
    storage = figures["peak_objects"] * object_bytes / 2**30 * _PRICES.storage
    spared = spared_hours * engine.engine_dollars_per_hour
    return {
        "spared": round(spared / months, 2),
        "net": round((spared - requests) / months - storage, 2),
        "requests": round(requests / months, 2),
        "storage": round(storage, 2),
        "sweeping": round(sweeping / months, 2),
        "sweeping_percent": round(100 * sweeping / months / (requests / months + storage), 2),
    }


def compare(arrivals: Sequence[Arrival], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry for every budget."""
    object_bytes = Setup(kib_per_token=options.kib_per_token).layout.object_bytes
    fleet = {
        "replicas": options.replicas,
        "routing": options.routing,
        "host_objects": int(options.host_gib * 2**30) // object_bytes,
    }
    hours = arrivals[-1].time_s / 3600
    with ProcessPoolExecutor(options.jobs) as pool:
        wanted = [(gib, way) for gib in options.budget_gib for way in WAYS]
        one = partial(_run_one, arrivals, options, object_bytes, fleet)
        done = {}
        for (gib, way), run_ in zip(wanted, pool.map(one, *zip(*wanted, strict=True)), strict=True):
            say(f"{gib:g} GiB, {way}")
            done[gib, way] = run_
    results = []
    for gib in options.budget_gib:
        capacity = int(gib * 2**30) // object_bytes
        runs = {way: done[gib, way] for way in WAYS}
        ideal = runs["ideal LRU"]
        for figures in runs.values():
            figures["hits_of_ideal"] = round(figures["bucket_hits"] / ideal["bucket_hits"], 3)
            figures["peak_of_budget"] = round(figures["peak_objects"] / capacity, 3)
            figures["usd_per_month"] = bill(figures, object_bytes, CHUNK_TOKENS, hours)
        turnover_s = round(capacity / written_per_s(arrivals), 1)
        results.append({"budget_gib": gib, "turnover_s": turnover_s, "runs": runs})
    return results


def _run_one(
    arrivals: Sequence[Arrival],
    options: argparse.Namespace,
    object_bytes: int,
    fleet: dict[str, Any],
    gib: float,
    way: str,
) -> dict[str, Any]:
    max_bytes = int(gib * 2**30)
    bucket: Bucket = IdealBucket(max_bytes // object_bytes)
    if way != "ideal LRU":
        upkeep = Upkeep(max_bytes, min_age_s=options.min_age_s, refreshes=way == "s3kv")
        bucket = KeptBucket(object_bytes, upkeep, replicas=options.replicas, seed=options.seed)
    return run(arrivals, bucket, **fleet)


@ends(7200)
def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    arrivals = load(options.trace, QUICK_REQUESTS if options.quick else options.limit)
    results = compare(arrivals, options)
    for result in results:
        print(f"\n{result['budget_gib']:g} GiB, turned over in {result['turnover_s']:g} s")
        titles = (
            "hits, %",
            "of ideal",
            "peak",
            "copies",
            "sweeps",
            "lists",
            "sweeping, %",
            "net, $",
        )
        print(" " * 24 + "".join(f"{title:>15}" for title in titles))
        for name, figures in result["runs"].items():
            cells = [figures[n] for n in ("bucket_hit_percent", "hits_of_ideal", "peak_of_budget")]
            cells += [figures.get(n, 0) for n in ("copies", "sweeps", "lists")]
            cells.append(figures["usd_per_month"]["sweeping_percent"])
            cells.append(figures["usd_per_month"]["net"])
            print(f"{name:24}" + "".join(f"{cell:>15,}" for cell in cells))
    if options.json:
        document = {
            "benchmark": "bucket",
            "command": command("bucket", arguments, options.trace),
            "commit": commit(),
            "code": code("bucket"),
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
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_REQUESTS} of them")
    parser.add_argument(
        "--budget-gib", nargs="+", type=float, default=[500.0, 1000.0, 2000.0, 4000.0]
    )
    parser.add_argument("--replicas", type=int, default=8, help="that share the bucket (8)")
    parser.add_argument("--routing", choices=("session", "round-robin"), default="round-robin")
    parser.add_argument("--host-gib", type=float, default=32.0, help="per replica (32)")
    parser.add_argument("--kib-per-token", type=float, default=128.0, help="as in the trace (128)")
    parser.add_argument(
        "--min-age-s",
        type=float,
        default=Upkeep(0).min_age_s,
        help="age below which nothing is deleted (%(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of chance and delays")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, a process each")
    parser.add_argument("--json", type=Path, help="write everything there")
    return parser


if __name__ == "__main__":
    main()
