"""Estimated cost of a store's requests, and of objects stored without a bound. Pure.

Answers of class 4xx are billed, those of class 5xx are not
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/ErrorCodeBilling.html). Traffic between a
bucket and machines of its region is free; traffic out of the region is not included here.
"""

from __future__ import annotations

from s3kv.config import Config
from s3kv.prices import DEFAULT, TABLE, Prices
from s3kv.stores.s3.address import zone_of
from s3kv.stores.traffic import Traffic

AWS_HOSTS = (".amazonaws.com", ".amazonaws.com.cn")
_FREE = Prices()
_GIB = 2**30
_MONTH_S = 365 / 12 * 86_400.0
GROWTH_KNOWN_S = 600.0
"""Time after the first upload from which the rate of uploads counts as known."""
_TOLD_FROM_GIB = 1.0
"""Growth in a month below which no warning is due."""


def prices_of(config: Config, traffic: Traffic) -> Prices:
    """Prices of the bucket's region if the table has them, otherwise those of us-east-1; all zero
    for a store other than AWS's."""
    if not traffic.host.endswith(AWS_HOSTS):
        return _FREE
    kind = "standard" if zone_of(config.bucket) is None else "express"
    region, _ = DEFAULT.split("/")
    return TABLE.get(f"{traffic.region}/{kind}") or TABLE[f"{region}/{kind}"]


def nanodollars(prices: Prices, traffic: Traffic) -> int:
    """Cost of all of `traffic`, in 10⁻⁹ dollars."""
    each = {"GET": prices.get, "HEAD": prices.get, "PUT": prices.put, "LIST": prices.put}
    dollars = prices.retrieval * traffic.received_bytes / _GIB
    dollars += prices.upload * traffic.sent_bytes / _GIB
    for request, count in traffic.requests.items():
        verb, _, answer = request.partition("|")
        if answer in ("2xx", "4xx"):
            dollars += each.get(verb, 0.0) * count / 1_000
    return round(dollars * 1e9)


def growth_warning(seconds: float, sent_bytes: int, storage_price: float) -> str | None:
    """Warning that a bucket grows without a bound, if it is due. seconds: time since the first
    upload. sent_bytes: of all uploads so far. storage_price: of a GiB for a month."""
    gib_per_month = sent_bytes / _GIB / max(seconds, GROWTH_KNOWN_S) * _MONTH_S
    if seconds < GROWTH_KNOWN_S or gib_per_month < _TOLD_FROM_GIB:
        return None
    cost = f", which then costs ${gib_per_month * storage_price:,.2f} a month"
    return (
        "the bucket has no bound: neither bucket_bytes nor bucket_idle_s is set. At the rate "
        f"of the last {seconds / 60:.0f} minutes, the uploads of this worker alone are "
        f"{gib_per_month:,.0f} GiB after a month{cost if storage_price else ''}. Set "
        "bucket_bytes; if a lifecycle rule deletes objects, set refresh_after_s"
    )
