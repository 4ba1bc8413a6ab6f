"""Computes the numbers of docs/cost.md from stated prices.

Prices and bills come from `s3kv.cli`. This module assumes the size of KV, what an engine costs and
how fast it computes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from benchmarks import counters
from benchmarks.simulation.fleet import Setup
from s3kv import prices
from s3kv.cli import billing
from s3kv.cli.app import cli
from scripts.marks import filled
from scripts.pictures import ROOT, recorded

CHUNK_TOKENS = 256
PRICES = prices.TABLE[prices.DEFAULT]


@dataclass(frozen=True)
class Engine:
    """An example. bytes_per_token: of KV, on one of `ranks` workers."""

    name: str
    bytes_per_token: int
    ranks: int
    prefill_tokens_per_s: float
    dollars_per_hour: float

    @property
    def chunk_bytes(self) -> int:
        """Of all ranks together."""
        return self.bytes_per_token * CHUNK_TOKENS * self.ranks

    @property
    def compute_dollars(self) -> float:
        """To compute the KV of a chunk."""
        return CHUNK_TOKENS / self.prefill_tokens_per_s / 3600 * self.dollars_per_hour

    @property
    def put_dollars(self) -> float:
        return self.ranks * PRICES.put / 1000

    @property
    def get_dollars(self) -> float:
        return self.ranks * PRICES.get / 1000

    def storage_dollars(self, days: float) -> float:
        return (
            self.chunk_bytes / billing.GIB * PRICES.storage * days * billing.DAY_S / billing.MONTH_S
        )

    def break_even(self, days: float) -> float:
        """How often a chunk has to be fetched in the days it is kept, so that computing it each
        time would have cost as much."""
        kept = self.put_dollars + self.storage_dollars(days)
        return kept / (self.compute_dollars - self.get_dollars)


# 32 layers, 8 KV heads, keys and values of 128 numbers, as Llama 3.1 8B has; 80 and 8, as its 70B.
ENGINES = (
    Engine("8B, one GPU", 32 * 8 * 256 * 2, 1, 8_000, 3.0),
    Engine("70B, four GPUs", 80 * 2 * 256 * 2, 4, 3_000, 12.0),
    Engine("the same, KV in fp8", 80 * 2 * 256, 4, 3_000, 12.0),
)
RUN = ("benchmarks/results/trace-session.json", "--host-gib", "32")
COMMAND = (
    "cost --metrics counters.txt --over 1h --keep-days 1 --gpu-dollars-per-hour 3 "
    "--prefill-tokens-per-s 8000"
)


GRIDS = {"chat": "trace-bill.json", "public data sets": "trace-bill-synthetic.json"}
"""Results of `benchmarks.trace` for several budgets, by what their traffic is called."""


def page() -> str:
    """docs/cost.md."""
    shown = f"$ python -m benchmarks.counters {' '.join(RUN)} > counters.txt\n$ s3kv {COMMAND}"
    return filled(
        ROOT / "docs" / "cost.md",
        {
            "prices": price_list(),
            "budgets": budgets({name: recorded(file) for name, file in GRIDS.items()}),
            "chunk": table(),
            "bill": f"```console\n{shown}\n{bill()}\n```",
        },
    )


def price_list() -> str:
    return (
        f"Prices as of {prices.AS_OF}, S3 Standard in us-east-1 ([AWS]({prices.SOURCE})): "
        f"${PRICES.put:g} per 1,000 PUTs,\n${PRICES.get:g} per 1,000 GETs, "
        f"${PRICES.storage:g} per GiB-month; traffic within the region is free."
    )


def budgets(results: Mapping[str, dict[str, Any]]) -> str:
    """Bills of results of `benchmarks.trace`, by what they are called: of the first result with the
    host memory of `Setup` every budget, otherwise that of `Setup` alone."""
    lines = [
        "| traffic | `host_bytes` | `bucket_bytes` | prompt tokens found in the bucket | PUTs "
        "| other requests | storage | computing spared | net | net, if saved at second use |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    default = Setup()
    for number, (name, result) in enumerate(results.items()):
        runs = [run for run in result["runs"] if run["bucket_gib"]]
        runs.sort(key=lambda run: (-run["host_gib"], run["bucket_gib"]))
        for run in runs:
            place = run["host_gib"], run["bucket_gib"]
            every = number == 0 and run["host_gib"] == default.host_gib
            if run["save"] != "all" or not (every or run["bucket_gib"] == default.bucket_gib):
                continue
            (later,) = (
                one["usd_per_month"]["net"]
                for one in runs
                if (one["host_gib"], one["bucket_gib"], one["save"]) == (*place, "second_use")
            )
            lines.append(_budget(name, run, later))
    return "\n".join([*lines, "", *(f"- {_verdict(*of)}" for of in results.items())])


def _budget(name: str, run: dict[str, Any], later: float) -> str:
    month = run["usd_per_month"]
    puts, others, storage, spared = (
        f"{dollars:,.0f}"
        for dollars in (
            month["puts"],
            month["gets"] + month["upkeep"],
            month["storage"],
            month["spared"],
        )
    )
    return (
        f"| {name} | {run['host_gib']:g} GiB | {run['bucket_gib']:,.0f} GiB "
        f"| {run['percent']['bucket']:.1f} % | {puts} | {others} | {storage} | {spared} "
        f"| **{month['net']:+,.0f}** | {later:+,.0f} |"
    )


def _verdict(name: str, result: dict[str, Any]) -> str:
    """How the budget and the host memory of `Setup` do among all budgets."""
    (ours,) = (v for v in result["verdicts"] if v["host_gib"] == Setup().host_gib)
    grid = {(r["bucket_gib"], r["save"]) for r in result["runs"] if r["bucket_gib"]}
    return (
        f"{name[0].upper()}{name[1:]}: {ours['bucket_gib']:,.0f} GiB nets "
        f"{ours['net_of_best']:.3f} of the most that any of {len(grid)} combinations nets, and has "
        f"{ours['hits_of_unbound']:.3f} of the hits of a bucket without a bound. "
        f"`{result['command']}`, at {result['commit']}."
    )


def table() -> str:
    """One column for each engine."""
    rows: list[tuple[str, list[str]]] = [
        ("assumed: tokens per second in prefill", [f"{e.prefill_tokens_per_s:,}" for e in ENGINES]),
        ("assumed: the engine, per hour", [f"${e.dollars_per_hour:g}" for e in ENGINES]),
        ("KV per token, all ranks", [_size(e.chunk_bytes // CHUNK_TOKENS) for e in ENGINES]),
        (f"a chunk of {CHUNK_TOKENS} tokens", [_size(e.chunk_bytes) for e in ENGINES]),
        ("computing it once", [_micro(e.compute_dollars) for e in ENGINES]),
        ("storing it: PUTs, one per rank", [_micro(e.put_dollars) for e in ENGINES]),
        ("keeping it for a day", [_micro(e.storage_dollars(1)) for e in ENGINES]),
        ("keeping it for a week", [_micro(e.storage_dollars(7)) for e in ENGINES]),
        ("fetching it once: GETs", [_micro(e.get_dollars) for e in ENGINES]),
        (
            "**fetches to break even, kept for a day**",
            [f"**{e.break_even(1):.1f}**" for e in ENGINES],
        ),
        (
            "**fetches to break even, kept for a week**",
            [f"**{e.break_even(7):.1f}**" for e in ENGINES],
        ),
    ]
    head = "| millionths of a dollar, unless stated | " + " | ".join(e.name for e in ENGINES) + " |"
    lines = [head, "|---" * (len(ENGINES) + 1) + "|"]
    lines += [f"| {name} | {' | '.join(values)} |" for name, values in rows]
    return "\n".join(lines)


def bill() -> str:
    """What `COMMAND` prints."""
    file, _, host_gib = RUN
    run = counters.chosen(ROOT / file, float(host_gib))
    with tempfile.TemporaryDirectory() as directory:
        written = Path(directory) / "counters.txt"
        written.write_text(counters.exposition(run))
        done = CliRunner(env={"COLUMNS": "100", "TERM": "dumb"}).invoke(
            cli, COMMAND.replace("counters.txt", str(written)).split()
        )
    assert done.exit_code == 0, done.output
    return "\n".join(line.rstrip() for line in done.output.splitlines())


def _micro(dollars: float) -> str:
    return f"{dollars * 1e6:,.1f}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:g} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:g} KiB"
