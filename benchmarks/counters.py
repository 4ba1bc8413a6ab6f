"""A simulated run as the /metrics of a server, for `s3kv cost`.

`python -m benchmarks.counters RESULT [--host-gib 32] > counters.txt` takes a run of
what `python -m benchmarks.trace --json RESULT` has written.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.deadline import ends
from benchmarks.simulation.fleet import OURS

GIB = 2**30


@ends(60)
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, help="what benchmarks.trace --json has written")
    parser.add_argument("--host-gib", type=float, help="the run to take, by host memory")
    options = parser.parse_args(arguments)
    try:
        print(exposition(chosen(options.result, options.host_gib)), end="")
    except ValueError as error:
        parser.error(str(error))


def chosen(result: Path, host_gib: float | None) -> dict[str, Any]:
    """The one run of s3kv with this host memory. Raises `ValueError` if there is not one."""
    found: list[dict[str, Any]] = json.loads(result.read_text())["runs"]
    runs = [run for run in found if run["policy"] == OURS]
    fitting = [run for run in runs if host_gib in (None, run["host_gib"])]
    if len(fitting) != 1:
        known = ", ".join(f"{run['host_gib']:g}" for run in runs)
        raise ValueError(
            f"--host-gib names {len(fitting)} runs of {result}: allowed is one of {known}"
        )
    return fitting[0]


def exposition(run: dict[str, Any]) -> str:
    """The counters of a run in Prometheus's text format."""
    requests, tokens = run["requests"], run["tokens"]
    counters = {
        'io_requests_total{verb="PUT",status="2xx"}': requests["put_new"],
        'io_requests_total{verb="PUT",status="4xx"}': requests["put_exists"],
        'io_requests_total{verb="GET",status="2xx"}': requests["get_hit"]
        + requests["get_cancelled"],
        'io_requests_total{verb="GET",status="4xx"}': requests["get_404"],
        "upload_ok_total": requests["put_new"],
        "upload_exists_total": requests["put_exists"],
        "upload_bytes_total": run["gib_up"] * GIB,
        "fetch_bytes_total": run["gib_down"] * GIB,
        "hit_tokens_bucket_total": tokens["bucket"],
        "hit_tokens_host_total": tokens["host"],
    }
    return "".join(f"vllm:s3kv_{name} {value}\n" for name, value in counters.items())


if __name__ == "__main__":
    main()
