"""Computes the numbers of docs/cost.md from stated prices.

Prices come from `s3kv.prices`. This module assumes the size of KV, what an engine costs and how
fast it computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from s3kv import prices
from s3kv.cli import billing
from scripts.marks import ROOT, filled, recorded, table

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
        return self.chunk_bytes / billing.GIB * PRICES.storage * days * 86_400 / billing.MONTH_S

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


def page() -> str:
    """docs/cost.md."""
    return filled(
        ROOT / "docs" / "cost.md",
        {
            "prices": price_list(),
            "bill": bill(recorded("trace-session.json")),
            "compressed": compressed(recorded("trace-compression.json")),
            "chunk": chunk(),
        },
    )


def price_list() -> str:
    return (
        f"Prices as of {prices.AS_OF}, S3 Standard in us-east-1 ([AWS]({prices.SOURCE})): "
        f"${PRICES.put:g} per 1,000 PUTs,\n${PRICES.get:g} per 1,000 GETs, "
        f"${PRICES.storage:g} per GiB-month; traffic within the region is free."
    )


def bill(result: dict[str, Any]) -> str:
    """Dollars a month of each run of `benchmarks.trace` with s3kv."""
    head = ["`host_bytes`", "`bucket_bytes`", "prompt tokens found in the bucket", "PUTs"]
    head += ["other requests", "storage", "computing spared", "net"]
    rows = []
    for run in filter(itemgetter("host_gib"), result["runs"]):
        month = run["usd_per_month"]
        others = month["gets"] + month["upkeep"]
        dollars = (month["puts"], others, month["storage"], month["spared"])
        budget = f"{run['bucket_gib']:,.0f} GiB" if run["bucket_gib"] else "none, a day's objects"
        told = (f"{run['host_gib']:g} GiB", budget, f"{run['percent']['bucket']:.1f} %")
        net = f"**{month['net']:+,.0f}**"
        rows.append((*told, *(f"{amount:,.0f}" for amount in dollars), net))
    return f"{table(head, rows)}\n\n`{result['command']}`, at {result['commit']}."


def compressed(result: dict[str, Any]) -> str:
    """Hits, and dollars a month, of plain and of compressed objects by the budget of the bucket."""
    head = ["`bucket_bytes`", "an object", "prompt tokens found in the bucket", "median TTFT"]
    head += ["received", "storage", "computing spared", "net"]
    rows = []
    for run in filter(itemgetter("host_gib"), result["runs"]):
        share, month = run["stored_share"], run["usd_per_month"]
        cells = [
            f"{run['bucket_gib']:,.0f} GiB",
            "plain" if share == 1.0 else f"{100 * share:.0f} % of that",
            f"{run['percent']['bucket']:.1f} %",
            f"{run['ttft_ms']['p50'] / 1e3:.2f} s",
            f"{run['gib_down']:,.0f} GiB",
            f"{month['storage']:,.0f}",
            f"{month['spared']:,.0f}",
            f"**{month['net']:+,.0f}**",
        ]
        rows.append(cells)
    return f"{table(head, rows)}\n\n`{result['command']}`, at {result['commit']}."


def chunk() -> str:
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
    ]
    for span, days in (("day", 1), ("week", 7)):
        even = [f"**{e.break_even(days):.1f}**" for e in ENGINES]
        rows.append((f"**fetches to break even, kept for a {span}**", even))
    head = ("millionths of a dollar, unless stated", *(engine.name for engine in ENGINES))
    return table(head, [(name, *values) for name, values in rows])


def _micro(dollars: float) -> str:
    return f"{dollars * 1e6:,.1f}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:g} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:g} KiB"
