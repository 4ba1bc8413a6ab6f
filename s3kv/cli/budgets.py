"""Budgets of a bucket, compared by what they net in a month. Pure.

The figures are those of `python -m benchmarks.trace --json FILE` with several values of
`--bucket-gib`: one run is one budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from s3kv.cli import billing
from s3kv.cli.billing import GIB, BilledTraffic
from s3kv.errors import ConfigError
from s3kv.prices import Prices


@dataclass(frozen=True, slots=True)
class BudgetMonth:
    """A month of one budget, in dollars. bucket_gib: the budget; 0 for none. spared: computing that
    hits in the bucket spare. tokens: those that the bucket served in the run."""

    bucket_gib: float
    host_gib: float
    policy: str
    tokens: int
    requests: float
    storage: float
    spared: float

    @property
    def net(self) -> float:
        return self.spared - self.requests - self.storage


def months(
    result: Mapping[str, Any],
    prices: Prices,
    *,
    keep_days: float,
    prefill_tokens_per_s: float,
    dollars_per_hour: float,
) -> list[BudgetMonth]:
    """One for every run of the result, by budget. keep_days: as for `billing.steady_bytes`, for a
    bucket without a budget; one with a budget is taken to be always as full as it ever was. Raises
    `ConfigError` for what is no such result."""
    try:
        # s3kv saves everything.
        runs = [r for r in result["runs"] if r["host_gib"] and r.get("save", "all") == "all"]
        seconds = float(result["seconds"])
        found = []
        for run in runs:
            traffic = _traffic(run, seconds)
            held = run["gib_stored"] * GIB
            if not run["bucket_gib"]:
                held = billing.steady_bytes(traffic, keep_days)
            parts = billing.bill(traffic, held, prices)
            storage = next(part.dollars for part in parts if part.name == "storage")
            saved = billing.savings(traffic, prefill_tokens_per_s, dollars_per_hour)
            found.append(
                BudgetMonth(
                    run["bucket_gib"],
                    run["host_gib"],
                    run["policy"],
                    run["tokens"]["bucket"],
                    sum(part.dollars for part in parts) - storage,
                    storage,
                    saved.dollars,
                )
            )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--simulation is not what `python -m benchmarks.trace --json` writes: {error!r}"
        ) from error
    if not found:
        raise ConfigError("--simulation has no run with s3kv")
    return sorted(found, key=lambda one: (one.host_gib, one.policy, one.bucket_gib or float("inf")))


def best(found: Sequence[BudgetMonth]) -> BudgetMonth:
    """The one with the largest net; of equals the smaller budget."""
    return max(found, key=lambda one: (one.net, -(one.bucket_gib or float("inf"))))


def most_hits(found: Sequence[BudgetMonth]) -> BudgetMonth:
    return max(found, key=lambda one: one.tokens)


def paid_bytes(parts: Sequence[billing.Part], spared: float) -> float | None:
    """Largest size of a bucket at which the computing that it spares, in dollars a month, pays for
    it; None if storage is free. parts: its bill."""
    storage = next(part for part in parts if part.name == "storage")
    others = sum(part.dollars for part in parts) - storage.dollars
    return max(0.0, spared - others) / storage.price * GIB if storage.price else None


def _traffic(run: Mapping[str, Any], seconds: float) -> BilledTraffic:
    """Host memory is left out: it has nothing to do with the bucket's budget."""
    requests, kept = run["requests"], run["kept"]
    puts = requests["put_new"] + requests["put_exists"]
    copies = kept["refreshes"] + kept["refused"] + kept["lists"] + kept["lease_puts"]
    gets = requests["get_hit"] + requests["get_404"] + requests["get_cancelled"] + kept["heads"]
    up = run["gib_up"] * GIB
    return BilledTraffic(
        seconds=seconds,
        puts=puts + copies,
        gets=gets,
        bytes_new=up * requests["put_new"] / puts if puts else 0.0,
        bytes_up=up,
        bytes_down=run["gib_down"] * GIB,
        tokens_bucket=run["tokens"]["bucket"],
        tokens_host=0.0,
    )
