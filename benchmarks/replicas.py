"""Fleets of one to a thousand replicas on one bucket with S3's limits, in simulated time:
`python -m benchmarks.replicas --trace PATH [--jobs 2] [--json FILE]`.

The trace is taken for the traffic of ten replicas, and scaled (`simulation/scaled.py`). The
planner, its breaker, deadlines and repeated uploads, and the whole I/O service (queue, attempts,
request window, hedging, ranged reads, verification, start) are s3kv's own. Engines and network are
the models of `benchmarks.trace`; the bucket is that of `simulation/s3.py`: requests per second of a
partition, splits after minutes of load, and 503 SlowDown. The first byte is log-normal, with a
median of 30 ms and a 99th percentile of 300 ms.

Runs:

    grown      twenty minutes of the trace, from an empty bucket that is one partition
    probing    the largest of these fleets with a first window of 16 chunks instead of 64
    sampled    ten minutes at ten replicas and a lower limit: all of them, and samples of them. The
               difference is the error of the sample
    together   1,000 replicas start at once, with nothing in memory, on a full bucket, to requests
               of two minutes that wait for them
    in turn    the same within five minutes

Of fleets of more than ten replicas a sample is simulated. Its requests stand for those of all: a
request is refused at random, as often as the load of the whole fleet demands. What that leaves out:
bursts of several replicas at one moment. Another replica's request uploads all of its chunks or
none, none as often as the sample drops a chunk. `benchmarks.trace` lists what the engines' model
leaves out.

Not modelled: connections that S3 opens late or closes, DNS, a slow or failing part of S3, the
budget's cleaner, several ranks. A fleet with eight ranks sends eight times the requests.

The result depends on the arguments alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.deadline import ends, say
from benchmarks.origin import code, commit
from benchmarks.simulation.replicas import Scenario, run
from benchmarks.simulation.s3 import Limits
from benchmarks.simulation.scaled import Routing
from benchmarks.simulation.workload import command, identity, load

SAMPLE = 10
STAMPEDE_SAMPLE = 25
ROUTINGS: tuple[Routing, ...] = ("round-robin", "session")
RESTART_S = 1200.0
CHECK_LIMITS = Limits(put_per_s=60.0, get_per_s=90.0)
"""About what ten replicas ask for."""


def scenarios(minutes: float, sizes: Sequence[int], stampede: int) -> dict[str, Scenario]:
    """The runs, by name. stampede: replicas that start together; 0: without those runs."""
    runs: dict[str, Scenario] = {}
    for replicas in sizes:
        for routing in ROUTINGS[: 1 if replicas == 1 else 2]:
            runs[f"grown, {replicas}, {routing}"] = Scenario(
                replicas=replicas,
                sampled=min(replicas, SAMPLE),
                routing=routing,
                until_s=60 * minutes,
            )
    most = max(sizes)
    for routing in ROUTINGS:
        runs[f"probing, {most}, {routing}"] = Scenario(
            replicas=most,
            sampled=min(most, SAMPLE),
            routing=routing,
            until_s=60 * minutes,
            config={"probe_chunks": 16},
        )
    for sampled in (10, 5, 2):
        runs[f"sampled, {sampled} of 10"] = Scenario(
            replicas=10, sampled=sampled, limits=CHECK_LIMITS, until_s=30 * minutes
        )
    if not stampede:
        return runs
    begun: dict[str, Any] = {
        "replicas": stampede,
        "sampled": min(stampede, STAMPEDE_SAMPLE),
        "from_s": RESTART_S,
        "until_s": RESTART_S + 60,
        "full": True,
        "waiting_s": 120.0,
        "smooth_s": 1.0,
    }
    for partitions in (1, 4, 16):
        runs[f"together, {partitions}"] = Scenario(**begun, partitions=partitions)
    later = begun | {"until_s": RESTART_S + 300}
    runs["in turn, 1"] = Scenario(**later, spread_s=300.0)
    runs["in turn, 4"] = Scenario(**later, spread_s=300.0, partitions=4)
    for probes in (16, 4):
        runs[f"together, 1, probe_chunks {probes}"] = Scenario(
            **begun, config={"probe_chunks": probes}
        )
    runs["together, 1, range_bytes 0"] = Scenario(**begun, config={"range_bytes": 0})
    return runs


@ends(7200)
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="a file in Mooncake's form")
    parser.add_argument("--quick", action="store_true", help="a minute of two small fleets")
    parser.add_argument("--minutes", type=float, default=20.0, help="of the trace, of `grown`")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--stampede", type=int, default=1000, help="replicas that start at once")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, a process each")
    parser.add_argument("--json", type=Path, help="write everything there")
    options = parser.parse_args(arguments)
    if options.quick:
        options.minutes, options.sizes, options.stampede = 1.0, [1, 100], 0
    arrivals = load(options.trace)
    wanted = scenarios(options.minutes, options.sizes, options.stampede)
    with ProcessPoolExecutor(options.jobs) as pool:
        found = {}
        figures = pool.map(partial(run, arrivals), wanted.values())
        for name in wanted:
            found[name] = next(figures)
            say(f"{name}: {found[name]['slow_down_percent']} % refused")
    result = {
        "benchmark": "replicas",
        "command": command("replicas", arguments, options.trace),
        "commit": commit(),
        "code": code("replicas"),
        "trace": identity(options.trace, len(arrivals)),
        "minutes": options.minutes,
        "runs": found,
    }
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if options.json:
        options.json.write_text(text)


if __name__ == "__main__":
    main()
