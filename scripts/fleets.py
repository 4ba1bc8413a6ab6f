"""The tables of docs/trace.md about fleets, from benchmarks/results/."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_SOURCES = ("gpu", "host", "bucket", "computed")


def grown(result: dict[str, Any]) -> str:
    """Fleets of several sizes: one table of what requests get, and one of what S3 gets."""
    hits, store = [], []
    for name, run in result["runs"].items():
        kind = name.partition(",")[0]
        if kind in ("grown", "probing"):
            settings = ", `probe_chunks` 16" if kind == "probing" else ""
            fleet = f"{run['replicas']:,} | {run['routing']}{settings}"
            usd = run["usd_per_hour"]
            hits.append(
                f"{fleet} | {_sources(run)} | {_seconds(run, 'p50')} | {_seconds(run, 'p95')}"
            )
            store.append(
                f"{fleet} | {_refused(run)} | {run['slow_down_percent_worst_minute']:.1f} % "
                f"| {run['partitions']} | ${usd['puts'] + usd['gets']:,.2f} "
                f"| ${usd['storage']:,.2f} | ${usd['spared']:,.2f}"
            )
    columns = "replicas | routing | device | host | bucket | computed | TTFT, median | p95"
    of_store = (
        "replicas | routing | SlowDown | in the worst minute | partitions | requests | storage "
        "| computing spared"
    )
    return "\n\n".join([_table(columns, hits), _table(of_store, store), _origin(result)])


def started(result: dict[str, Any]) -> str:
    """Fleets that start on a full bucket."""
    rows = []
    for name, run in result["runs"].items():
        kind, *rest = name.split(", ")
        if kind in ("together", "in turn"):
            share, fetches = run["percent"], run["fetches"]
            told = ", ".join([kind, *(f"`{setting}`" for setting in rest[1:])])
            rows.append(
                f"{told} | {rest[0]} | {run['partitions']} | {share['bucket']:.1f} "
                f"| {share['computed']:.1f} | {_seconds(run, 'p50')} | {_refused(run)} "
                f"| {fetches.get('ok', 0):,} | {fetches.get('missing', 0):,} "
                f"| {fetches.get('failed', 0):,}"
            )
    columns = (
        "start | partitions before | after | bucket | computed | TTFT, median | SlowDown "
        "| chunks found | chunks not there | failed"
    )
    return _table(columns, rows)


def sampled(result: dict[str, Any]) -> str:
    """The error of samples."""
    rows = []
    every = result["runs"]["sampled, 10 of 10"]
    for name, run in result["runs"].items():
        if name.startswith("sampled"):
            share = run["percent"]
            same = every["bucket_percent_of_first"].get(str(run["sampled"]))
            told = f"{same:.1f}" if same is not None else "–"
            rows.append(
                f"{run['sampled']} | {share['gpu']:.1f} | {share['host']:.1f} "
                f"| {share['bucket']:.1f} | {told} | {share['computed']:.1f} "
                f"| {_seconds(run, 'p50')} | {_refused(run)}"
            )
    columns = (
        "simulated, of ten | device | host | bucket | of the same replicas, among all ten "
        "| computed | TTFT, median | SlowDown"
    )
    return _table(columns, rows)


def throttled(result: dict[str, Any]) -> str:
    """The model against the client."""
    rows = []
    for limit, row in result["limits_per_s"].items():
        pairs = (
            f"{row[who][figure]:.1f}{unit}"
            for figure, unit in (
                ("answered_per_s", ""),
                ("slow_down_percent", " %"),
                ("failed_percent", " %"),
            )
            for who in ("client", "model")
        )
        rows.append(f"{limit} | {' | '.join(pairs)}")
    columns = (
        "limit, requests/s | answered/s: client | model | SlowDown: client | model "
        "| fetches failed: client | model"
    )
    seconds = f"{result['seconds']:g}"
    told = f"`python -m benchmarks.throttled --seconds {seconds}`, at {result['commit']}."
    return f"{_table(columns, rows)}\n\n{told}"


def _table(columns: str, rows: Iterable[str]) -> str:
    """A table in Markdown. columns, rows: cells with " | " between them."""
    rule = "---|" * (columns.count("|") + 1)
    return "\n".join([f"| {columns} |", f"|{rule}", *(f"| {row} |" for row in rows)])


def _origin(result: dict[str, Any]) -> str:
    return f"`{result['command']}`, at {result['commit']}."


def _sources(run: dict[str, Any]) -> str:
    return " | ".join(f"{run['percent'][source]:.1f}" for source in _SOURCES)


def _seconds(run: dict[str, Any], percentile: str) -> str:
    return f"{run['ttft_ms'][percentile] / 1e3:.1f} s"


def _refused(run: dict[str, Any]) -> str:
    return f"{run['slow_down_percent']:.2f} %"
