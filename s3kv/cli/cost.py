"""`s3kv cost`."""

from __future__ import annotations

import dataclasses
import re
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict
from http.client import HTTPException
from pathlib import Path
from typing import Any

import click

from s3kv import prices
from s3kv.cli import billing, show
from s3kv.cli.billing import BilledTraffic, Part, Savings
from s3kv.cli.invocation import (
    EXIT_CODES,
    FiniteRange,
    duration,
    json_option,
    print_json,
    reporting_errors,
    size,
)
from s3kv.errors import ConfigError, StoreUnavailable
from s3kv.prices import Prices

_TIMEOUT_S = 30.0
_RARELY_BILLED = ("upload", "retrieval")
"""Billed only by some storage classes; shown only if they have a price."""


def _price_options(command: Callable[..., None]) -> Callable[..., None]:
    for field in reversed(dataclasses.fields(Prices)):
        command = click.option(
            f"--price-{field.name}",
            type=FiniteRange(0),
            metavar="DOLLARS",
            help=f"Price of {field.metadata['doc']}.",
        )(command)
    return command


@click.command(epilog=EXIT_CODES)
@click.option(
    "--metrics",
    "sources",
    multiple=True,
    required=True,
    metavar="FILE|URL",
    help="The /metrics of a vLLM server; give it once for each server.",
)
@click.option(
    "--over",
    type=duration,
    required=True,
    help="Period of the counts (90m, 24h, 7d), since the servers started.",
)
@click.option(
    "--stored",
    type=size,
    required=True,
    help="Size of the bucket, as `s3kv ls --summary` prints it (1.5TiB).",
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
    type=FiniteRange(0),
    help="Price of one engine with all its GPUs, to print the savings of the cache.",
)
@click.option(
    "--prefill-tokens-per-s",
    type=FiniteRange(0, min_open=True),
    help="Prompt tokens such an engine computes in a second, to print the savings of the cache.",
)
@json_option
def cost(
    sources: Sequence[str],
    over: float,
    stored: int,
    table: str,
    gpu_dollars_per_hour: float | None,
    prefill_tokens_per_s: float | None,
    as_json: bool,
    **own_prices: float | None,
) -> None:
    """Estimate the monthly cost of the bucket, and the savings of the cache.

    The counts are those of running servers. The estimate takes the whole month to be like the
    period of the counts. With the price and the speed of an engine, the result ends with the
    largest bucket_bytes that pays.
    """
    with reporting_errors():
        if (gpu_dollars_per_hour is None) != (prefill_tokens_per_s is None):
            raise ConfigError("--gpu-dollars-per-hour and --prefill-tokens-per-s go together")
        changed = {k.removeprefix("price_"): v for k, v in own_prices.items() if v is not None}
        traffic = billing.traffic_of_metrics("\n".join(map(_read, sources)), over)
        parts = billing.bill(traffic, stored, dataclasses.replace(prices.TABLE[table], **changed))
        saved = paid = None
        if gpu_dollars_per_hour is not None and prefill_tokens_per_s is not None:
            saved = billing.savings(traffic, prefill_tokens_per_s, gpu_dollars_per_hour)
            tokens = max(1.0, saved.tokens_bucket + saved.tokens_host)
            paid = billing.paid_bytes(parts, saved.dollars * saved.tokens_bucket / tokens)
        print_json(_document(traffic, parts, saved, paid)) if as_json else _show(parts, saved, paid)


def _read(source: str) -> str:
    if not re.match(r"https?://", source):
        try:
            return Path(source).read_text("utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--metrics {source!r} cannot be read: {error}") from error
    try:
        with urllib.request.urlopen(source, timeout=_TIMEOUT_S) as answer:
            return str(answer.read().decode(errors="replace"))
    except (OSError, ValueError, HTTPException) as error:
        told = f"--metrics {source!r} does not answer ({error}): has the server started?"
        raise StoreUnavailable(told) from error


def _document(
    traffic: BilledTraffic, parts: Sequence[Part], saved: Savings | None, paid: float | None
) -> dict[str, Any]:
    return {
        "counted": asdict(traffic),
        "parts": [{**asdict(part), "dollars": part.dollars} for part in parts],
        "dollars_per_month": sum(part.dollars for part in parts),
        "saved": None if saved is None else asdict(saved),
        "paid_bytes": paid,
        "prices_as_of": prices.AS_OF,
    }


def _show(parts: Sequence[Part], saved: Savings | None, paid: float | None) -> None:
    total = sum(part.dollars for part in parts)
    billed = (part for part in parts if part.price or part.name not in _RARELY_BILLED)
    rows = [(part.name, *_amount(part), f"{part.dollars:,.2f}") for part in billed]
    rows.append(("total", "", "", f"{total:,.2f}"))
    show.print_table(["a month", *show.numbers("amount", "price", "dollars")], rows)
    if saved is None:
        return
    tokens = f"{saved.tokens_bucket / 1e6:,.1f} M from the bucket, {saved.tokens_host / 1e6:,.1f} M"
    click.echo(
        f"Tokens not computed: {tokens} from host memory.\n"
        f"Computing them would take {saved.hours:,.1f} hours of an engine: "
        f"${saved.dollars:,.2f}, against ${total:,.2f} for the bucket."
    )
    if paid:
        most = show.size(round(paid))
        click.echo(f"The bucket's own hits pay for a bucket_bytes of at most {most}.")
    elif paid == 0:
        click.echo("The bucket's own hits do not even pay for its requests.")


def _amount(part: Part) -> tuple[str, str]:
    """Amount and price of one line of the bill."""
    if part.unit == "GiB":
        return show.size(round(part.amount * billing.GIB)), f"${part.price:g} for a GiB"
    return f"{part.amount * 1e3:,.0f}", f"${part.price:g} for {part.unit}"
