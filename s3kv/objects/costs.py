"""Estimated cost of a store's requests. Pure.

Answers of class 4xx are billed, those of class 5xx are not
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/ErrorCodeBilling.html). Traffic between a
bucket and machines of its region is free; traffic out of the region is not included here.
"""

from __future__ import annotations

from s3kv.config import Config
from s3kv.objects.s3.address import zone_of
from s3kv.objects.traffic import Traffic
from s3kv.prices import DEFAULT, TABLE, Prices

_FREE = Prices()
_GIB = 2**30


def prices_of(config: Config, traffic: Traffic) -> Prices:
    """Prices by the setting `prices`. auto: those of the bucket's region if the table has them, or
    else those of us-east-1; all zero for a store other than AWS's.
    """
    if config.prices == "none":
        return _FREE
    if config.prices != "auto":
        return TABLE[config.prices]
    if not traffic.host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
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
