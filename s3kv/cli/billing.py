"""From what happened in some time to dollars per month. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from s3kv.errors import ConfigError
from s3kv.metrics import EC_NAMESPACE, NAMESPACE
from s3kv.prices import Prices

DAY_S = 86_400.0
MONTH_S = 365 / 12 * DAY_S
GIB = 2**30
LABELS = ("verb", "status")
"""Of metrics, those by which requests are told apart."""
_BILLED = ("2xx", "4xx")
"""https://docs.aws.amazon.com/AmazonS3/latest/userguide/ErrorCodeBilling.html"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What engines and bucket did in `seconds`, of all engines together.

    puts, gets: requests that are billed as such. bytes_new: of objects that were not there before.
    bytes_up, bytes_down: that moved. tokens_bucket, tokens_host: prompt tokens that were not
    computed because the bucket, or host memory, had them.
    """

    seconds: float
    puts: float
    gets: float
    bytes_new: float
    bytes_up: float
    bytes_down: float
    tokens_bucket: float
    tokens_host: float


@dataclass(frozen=True, slots=True)
class Part:
    """One line of a bill: so much of something a month at a price."""

    name: str
    amount: float
    unit: str
    price: float

    @property
    def dollars(self) -> float:
        return self.amount * self.price


@dataclass(frozen=True, slots=True)
class Savings:
    """Computing spared in a month: hours of an engine, and what they would have cost."""

    tokens_bucket: float
    tokens_host: float
    hours: float
    dollars: float


def traffic_of_metrics(sums: Mapping[str, float], seconds: float) -> Traffic:
    """sums: of vLLM's metrics over all engines, requests by verb and status. Raises `ConfigError`
    when s3kv's are not among them.

    Both connectors are counted. A listing costs what a PUT does, a HEAD what a GET does.
    """
    if not any(name.startswith(NAMESPACE) for name in sums):
        raise ConfigError(
            f"there is no metric of the name {NAMESPACE}… in what was given: is it the "
            "/metrics of a vLLM server with s3kv, after its first request?"
        )

    def total(*names: str) -> float:
        kinds = (NAMESPACE, EC_NAMESPACE)
        return sum(sums.get(f"{kind}{name}", 0.0) for kind in kinds for name in names)

    def billed(*verbs: str) -> float:
        return total(
            *(f"io_requests_total|{verb}|{status}" for verb in verbs for status in _BILLED)
        )

    written, found = total("upload_ok_total"), total("upload_exists_total")
    bytes_up = total("upload_bytes_total")
    return Traffic(
        seconds=seconds,
        puts=billed("PUT", "LIST"),
        gets=billed("GET", "HEAD"),
        bytes_new=bytes_up * written / (written + found) if written else 0.0,
        bytes_up=bytes_up,
        bytes_down=total("fetch_bytes_total"),
        tokens_bucket=total("hit_tokens_bucket_total"),
        tokens_host=total("hit_tokens_host_total"),
    )


def traffic_of_simulation(run: Mapping[str, Any], seconds: float) -> Traffic:
    """run: one of those that `python -m benchmarks.trace --json` writes (docs/trace.md)."""
    requests = run["requests"]
    return Traffic(
        seconds=seconds,
        puts=requests["put_new"] + requests["put_exists"],
        gets=requests["get_hit"] + requests["get_404"] + requests["get_cancelled"],
        bytes_new=run["gib_stored"] * GIB,
        bytes_up=run["gib_up"] * GIB,
        bytes_down=run["gib_down"] * GIB,
        tokens_bucket=run["tokens"]["bucket"],
        tokens_host=run["tokens"]["host"],
    )


def steady_bytes(traffic: Traffic, keep_days: float) -> float:
    """What the bucket comes to hold when everything stays so many days after it was written."""
    return traffic.bytes_new / traffic.seconds * keep_days * DAY_S


def bill(traffic: Traffic, stored_bytes: float, prices: Prices) -> list[Part]:
    """The parts of a month's bill, when every hour of it is like those of `traffic`."""
    months = traffic.seconds / MONTH_S
    up_gib, down_gib = traffic.bytes_up / GIB / months, traffic.bytes_down / GIB / months
    return [
        Part("PUT", traffic.puts / 1e3 / months, "1,000 requests", prices.put),
        Part("GET", traffic.gets / 1e3 / months, "1,000 requests", prices.get),
        Part("storage", stored_bytes / GIB, "GiB", prices.storage),
        Part("upload", up_gib, "GiB", prices.upload),
        Part("retrieval", down_gib, "GiB", prices.retrieval),
        Part("transfer", down_gib, "GiB", prices.transfer),
    ]


def savings(traffic: Traffic, prefill_tokens_per_s: float, dollars_per_hour: float) -> Savings:
    """What the spared tokens would have cost an engine that computes so many in a second."""
    months = traffic.seconds / MONTH_S
    bucket, host = traffic.tokens_bucket / months, traffic.tokens_host / months
    hours = (bucket + host) / prefill_tokens_per_s / 3600
    return Savings(bucket, host, hours, hours * dollars_per_hour)
