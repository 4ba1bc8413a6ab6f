"""`s3kv cost`."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from s3kv import prices
from s3kv.cli import billing, show
from s3kv.cli.billing import Part, Savings, Traffic
from s3kv.cli.invocation import EXIT_CODES, print_json, reporting_errors
from s3kv.cli.quantities import duration, size
from s3kv.cli.server import fetch_text, sums_by_key
from s3kv.errors import ConfigError
from s3kv.prices import Prices

_RARELY_BILLED = ("upload", "retrieval")
"""By other storage classes than the usual; shown where they have a price."""


def _price_options(command: Callable[..., None]) -> Callable[..., None]:
    for field in reversed(dataclasses.fields(Prices)):
        option = click.option(
            f"--price-{field.name}",
            type=click.FloatRange(0),
            metavar="DOLLARS",
            help=f"Of {field.metadata['doc']}.",
        )
        command = option(command)
    return command


@click.command(epilog=EXIT_CODES)
@click.option(
    "--metrics",
    "sources",
    multiple=True,
    metavar="FILE|URL",
    help="What a vLLM server's /metrics says; once for each server.",
)
@click.option(
    "--simulation",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What `python -m benchmarks.trace --json` has written of a trace.",
)
@click.option("--policy", help="Which run of the simulation: its eviction policy.")
@click.option("--host-gib", type=float, help="Which run of the simulation: its host memory.")
@click.option(
    "--over",
    type=duration,
    required=True,
    help="The time the counts are of (90m, 24h, 7d): since the servers started, or of the trace.",
)
@click.option("--stored", type=size, help="What the bucket holds, as `s3kv du` says it (1.5TiB).")
@click.option(
    "--keep-days",
    type=click.FloatRange(0, min_open=True),
    default=7,
    show_default=True,
    help="Without --stored: how long objects stay, as the bucket's lifecycle rule has it.",
)
@click.option(
    "--prices",
    "table",
    type=click.Choice(list(prices.TABLE)),
    default=prices.DEFAULT,
    show_default=True,
    help=f"Region and storage class, at Amazon's prices of {prices.AS_OF}.",
)
@_price_options
@click.option(
    "--gpu-dollars-per-hour",
    type=click.FloatRange(0),
    help="Of one engine with all its GPUs: say what the cache saves.",
)
@click.option(
    "--prefill-tokens-per-s",
    type=click.FloatRange(0, min_open=True),
    help="Prompt tokens such an engine computes in a second. Needed to say what is saved.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def cost(
    sources: Sequence[str],
    simulation: Path | None,
    policy: str | None,
    host_gib: float | None,
    over: float,
    stored: int | None,
    keep_days: float,
    table: str,
    gpu_dollars_per_hour: float | None,
    prefill_tokens_per_s: float | None,
    as_json: bool,
    **own_prices: float | None,
) -> None:
    """Say what the bucket costs in a month, and what the cache saves.

    Counts are those of running servers (--metrics) or of a simulated trace (--simulation). The
    month is as if all of it were like the time they are of.
    """
    with reporting_errors():
        if (gpu_dollars_per_hour is None) != (prefill_tokens_per_s is None):
            raise ConfigError("--gpu-dollars-per-hour and --prefill-tokens-per-s go together")
        traffic = _traffic(sources, simulation, policy, host_gib, over)
        changed = {k.removeprefix("price_"): v for k, v in own_prices.items() if v is not None}
        chosen = dataclasses.replace(prices.TABLE[table], **changed)
        held = billing.steady_bytes(traffic, keep_days) if stored is None else stored
        parts = billing.bill(traffic, held, chosen)
        saved = None
        if gpu_dollars_per_hour is not None and prefill_tokens_per_s is not None:
            saved = billing.savings(traffic, prefill_tokens_per_s, gpu_dollars_per_hour)
        print_json(_document(traffic, parts, saved)) if as_json else _show(parts, saved)


def _traffic(
    sources: Sequence[str],
    simulation: Path | None,
    policy: str | None,
    host_gib: float | None,
    seconds: float,
) -> Traffic:
    if bool(sources) == (simulation is not None):
        raise ConfigError("give either --metrics or --simulation")
    if simulation is not None:
        run = _run_of(simulation, policy, host_gib)
        return billing.traffic_of_simulation(run, seconds)
    # One after another they are one exposition: samples of one name are summed.
    text = "\n".join(_read(source) for source in sources)
    return billing.traffic_of_metrics(sums_by_key(text, billing.LABELS), seconds)


def _read(source: str) -> str:
    if re.match(r"https?://", source):
        return fetch_text(source)
    try:
        return Path(source).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--metrics {source!r} cannot be read: {error}") from error


def _run_of(file: Path, policy: str | None, host_gib: float | None) -> dict[str, Any]:
    try:
        runs: list[dict[str, Any]] = json.loads(file.read_text("utf-8"))["runs"]
        ours = {(str(run["policy"]), float(run["host_gib"])): run for run in runs}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--simulation {str(file)!r} is not what benchmarks.trace --json writes: {error!r}"
        ) from error
    chosen = [
        run
        for (name, gib), run in ours.items()
        if gib > 0 and policy in (None, name) and host_gib in (None, gib)
    ]
    if len(chosen) != 1:
        known = ", ".join(f"{name} {gib:g}" for name, gib in ours if gib > 0)
        raise ConfigError(
            f"--policy and --host-gib are to name one run of {str(file)!r}. There are: {known}"
        )
    return chosen[0]


def _document(traffic: Traffic, parts: Sequence[Part], saved: Savings | None) -> dict[str, Any]:
    return {
        "counted": asdict(traffic),
        "parts": [{**asdict(part), "dollars": part.dollars} for part in parts],
        "dollars_per_month": sum(part.dollars for part in parts),
        "saved": None if saved is None else asdict(saved),
        "prices_as_of": prices.AS_OF,
    }


def _show(parts: Sequence[Part], saved: Savings | None) -> None:
    table = Table("a month", box=None)
    for name in ("amount", "price", "dollars"):
        table.add_column(name, justify="right")
    for part in parts:
        if part.name in _RARELY_BILLED and not part.price:
            continue
        price = f"${part.price:g} for {'a GiB' if part.unit == 'GiB' else part.unit}"
        amount = show.size(round(part.amount * billing.GIB))
        if part.unit != "GiB":
            amount = f"{part.amount * 1e3:,.0f}"
        table.add_row(part.name, amount, price, f"{part.dollars:,.2f}")
    total = sum(part.dollars for part in parts)
    table.add_row("total", "", "", f"{total:,.2f}")
    console = Console()
    console.print(table)
    if saved is None:
        return
    tokens = f"{saved.tokens_bucket / 1e6:,.1f} M from the bucket, {saved.tokens_host / 1e6:,.1f} M"
    console.print(
        f"Not computed: {tokens} from host memory.\n"
        f"Computing them would take {saved.hours:,.1f} hours of an engine: "
        f"${saved.dollars:,.2f}, against ${total:,.2f} for the bucket."
    )
