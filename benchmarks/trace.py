"""A production trace against s3kv's planner, in simulated time: `python -m benchmarks.trace --trace
PATH [--host-gib 8 32 128] [--json FILE]`.

The planner, its table, and the I/O process's queue are the real ones; engines,
network and bucket are models (`benchmarks/simulation/`). The trace is in Mooncake's form, one JSON
object per line: timestamp (ms), input_length, output_length, hash_ids (one id per 512 tokens).

What the model leaves out, and which way that errs:

- Chunks are 512 tokens, as the trace knows no less; s3kv's default is 256. Half the requests, twice
  the bytes in each, and with one connection per object half the speed while few are asked for.
- Only prompts are saved. What the trace says of an answer is its length, so the next turn of a
  chat finds its predecessor's prompt, never its answer: too few hits, on the device alike.
- Prefill takes the same time per token at any length, alone or in a batch; decoding takes memory
  and time, but none of the prompts' time. Real engines are slower, and hits are worth more.
- Memory for a request's answer is taken on admission: no preemption, and so no fences.
- Copies to host memory end with their step, a real engine's a little later.
- With `--stored-share` all objects shrink alike, whatever is in them; those on a disk stay plain.
  An upload waits for its encoding, and a fetch for the decoding of its last segment, as the others
  are decoded while the rest arrives. There is always a core for both, so no object is left plain
  because the encoder is busy: too many hits. That core is not billed.
- A disk never fails, and what is written shares its speed with what is read; its price is not
  billed.
- The bucket never fails, throttles or slows down with load. First-byte times are independent.
- One worker per engine. With several, each moves its part of every chunk at the same time.
- Arrivals of one time stamp are spread evenly until the next; see `simulation/workload.py`.
- The bucket and the disks start empty, the hour includes warming up, and nothing expires.

Stdout and `--json` depend on the arguments only.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.deadline import command_line, ends, say
from benchmarks.origin import commit
from benchmarks.report import leaves
from benchmarks.simulation.fleet import BASELINES, OURS, Setup, run
from benchmarks.simulation.workload import command, identity, load

GRID = (
    *("host_gib", "bucket_gib", "stored_share"),
    *("engines_per_host", "disk_gib", "disk_admission"),
)
"""Options that may have several values: every combination is a run."""
QUICK_REQUESTS = 500
MANY = {"host_gib": [8.0, 32.0, 128.0]}


@ends(7200)
def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    arrivals = load(options.trace, QUICK_REQUESTS if options.quick else options.limit)
    names = [f.name for f in dataclasses.fields(Setup) if f.name not in GRID]
    setup = Setup(**{name: getattr(options, name) for name in names})
    places = [
        dict(zip(GRID, values, strict=True))
        for values in product(*(getattr(options, name) for name in GRID))
    ]
    # Without a disk there is nothing to admit or to share.
    first = {name: getattr(options, name)[0] for name in ("engines_per_host", "disk_admission")}
    places = [p for p in places if p["disk_gib"] or p.items() >= first.items()]
    wanted = [(setup, name) for name in BASELINES] + [
        (dataclasses.replace(setup, **place), OURS) for place in places
    ]
    with ProcessPoolExecutor(options.jobs) as pool:
        results = pool.map(partial(run, arrivals), *zip(*wanted, strict=True))
        runs = [next(results) for _ in BASELINES]
        for place in places:
            ours = next(results)
            title = ", ".join(f"{name} {value}" for name, value in place.items())
            say(title)
            print("\n".join(table(title, [*runs[: len(BASELINES)], ours])), flush=True)
            runs.append(ours)
    if options.json:
        result = {
            "benchmark": "trace",
            "command": command("trace", arguments, options.trace),
            "commit": commit(),
            "trace": identity(options.trace, len(arrivals)),
            "seconds": arrivals[-1].time_s,
            "setup": {name: getattr(setup, name) for name in names},
            "runs": runs,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = command_line(__doc__, f"only {QUICK_REQUESTS} of them")
    parser.add_argument("--trace", type=Path, required=True, help="a file in Mooncake's form")
    parser.add_argument("--limit", type=int, help="only that many requests, from the start")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, a process each")
    for field in dataclasses.fields(Setup):
        is_many = field.name in GRID
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=type(field.default),
            nargs="+" if is_many else None,
            default=MANY.get(field.name, [field.default]) if is_many else field.default,
            choices=field.metadata["choices"] or None,
            help=f"{field.metadata['doc']} (default: {field.default})",
        )
    return parser


def table(title: str, runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """All figures of some runs, a column for each."""
    yield f"\n{title}"
    for figures in zip(*map(leaves, runs), strict=True):
        values = (f"{v:,}" if isinstance(v, (int, float)) else str(v) for _, v in figures)
        yield f"{figures[0][0]:36}" + "".join(f"{value:>13}" for value in values)


if __name__ == "__main__":
    main()
