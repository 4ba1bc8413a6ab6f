"""The monthly bill of a bucket, computed from the traffic of a period. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from s3kv.errors import ConfigError
from s3kv.metrics import EC_NAMESPACE, NAMESPACE
from s3kv.prices import Prices

MONTH_S = 365 / 12 * 86_400.0
GIB = 2**30
_LABELS = ("verb", "status")
"""The labels by which metrics distinguish requests."""
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\d+(?:\.\d+)?(?:e[-+]?\d+)?)\b")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_BILLED = ("2xx", "4xx")
"""https://docs.aws.amazon.com/AmazonS3/latest/userguide/ErrorCodeBilling.html"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BilledTraffic:
    """The traffic of all engines together in `seconds`.

    puts, gets: requests billed as such. bytes_up: bytes written. bytes_down: bytes received.
    tokens_bucket, tokens_host: prompt tokens that were not computed because the bucket (or a disk
    before it), or host memory, had them; None if they were not counted.
    """

    seconds: float
    puts: float
    gets: float
    bytes_up: float
    bytes_down: float
    tokens_bucket: float | None
    tokens_host: float | None


@dataclass(frozen=True, slots=True)
class Part:
    """One line of a monthly bill: an amount at a price."""

    name: str
    amount: float
    unit: str
    price: float

    @property
    def dollars(self) -> float:
        return self.amount * self.price


@dataclass(frozen=True, slots=True)
class Savings:
    """Computing saved in a month: hours of an engine, and their cost."""

    tokens_bucket: float
    tokens_host: float
    hours: float
    dollars: float


def traffic_of_metrics(exposition: str, seconds: float) -> BilledTraffic:
    """The traffic in vLLM's metrics, in Prometheus's text format; samples of several engines, one
    after another, are added up. Raises `ConfigError` if s3kv's metrics are not among them.

    Both connectors are counted. A listing costs as much as a PUT, a HEAD as much as a GET.
    """
    sums = metric_sums(exposition)
    if not any(name.startswith(NAMESPACE) for name in sums):
        raise ConfigError(
            f"the input has no metric named {NAMESPACE}…: is it the /metrics of a vLLM server "
            "with s3kv, after its first request?"
        )

    def total(*names: str) -> float:
        kinds = (NAMESPACE, EC_NAMESPACE)
        return sum(sums.get(f"{kind}{name}", 0.0) for kind in kinds for name in names)

    def billed(*verbs: str) -> float:
        return total(*(f"io_requests_total|{verb}|{s}" for verb in verbs for s in _BILLED))

    return BilledTraffic(
        seconds=seconds,
        puts=billed("PUT", "LIST"),
        gets=billed("GET", "HEAD"),
        bytes_up=total("io_sent_bytes_total"),
        bytes_down=total("io_received_bytes_total"),
        tokens_bucket=sums.get(f"{NAMESPACE}hit_tokens_bucket_total"),
        tokens_host=sums.get(f"{NAMESPACE}hit_tokens_host_total"),
    )


def metric_sums(exposition: str) -> dict[str, float]:
    """Sums of the samples by metric, verb and status: "name", "name|verb" or "name|verb|status",
    depending on the labels of a sample."""
    sums: dict[str, float] = {}
    for line in exposition.splitlines():
        if (sample := _SAMPLE.match(line)) is not None:
            own = dict(_LABEL.findall(sample[2] or ""))
            key = "|".join([sample[1], *(own[label] for label in _LABELS if label in own)])
            sums[key] = sums.get(key, 0.0) + float(sample[3])
    return sums


def bill(traffic: BilledTraffic, stored_bytes: float, prices: Prices) -> list[Part]:
    """The parts of a month's bill, if the whole month is like the period of `traffic`."""
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


def savings(
    traffic: BilledTraffic, prefill_tokens_per_s: float, dollars_per_hour: float
) -> Savings:
    """Computing saved in a month, for an engine of this speed and price. Raises `ConfigError`."""
    if traffic.tokens_bucket is None or traffic.tokens_host is None:
        raise ConfigError(
            "the input does not count the tokens that were not computed, as a tier of vLLM's "
            "OffloadingConnector cannot: leave out the price and the speed of an engine"
        )
    months = traffic.seconds / MONTH_S
    bucket, host = traffic.tokens_bucket / months, traffic.tokens_host / months
    hours = (bucket + host) / prefill_tokens_per_s / 3600
    return Savings(bucket, host, hours, hours * dollars_per_hour)


def paid_bytes(parts: Sequence[Part], spared: float) -> float | None:
    """Largest size of a bucket at which the computing that it saves, `spared` dollars a month, pays
    for it; None if storage is free. parts: its bill."""
    storage = next(part for part in parts if part.name == "storage")
    others = sum(part.dollars for part in parts) - storage.dollars
    return max(0.0, spared - others) / storage.price * GIB if storage.price else None
