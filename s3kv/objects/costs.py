"""What a store's requests are taken to cost. Pure.

Answers of class 5xx are not billed, those of class 4xx are
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/ErrorCodeBilling.html). Traffic between a
bucket and machines of its region costs nothing; what leaves the region is not in here.
"""

from __future__ import annotations

from s3kv.config import Config
from s3kv.objects.sessions import zone_of
from s3kv.objects.traffic import Traffic
from s3kv.prices import DEFAULT, TABLE, Prices

_FREE = Prices()
_GIB = 2**30


def prices_of(config: Config, traffic: Traffic) -> Prices:
    """Those that the setting `prices` names. auto: those of the bucket's region if they are in the
    table, or else those of us-east-1; none for a store that is not AWS's.
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
    """What all of `traffic` costs, in 10⁻⁹ dollars."""
    each = {"GET": prices.get, "HEAD": prices.get, "PUT": prices.put, "LIST": prices.put}
    dollars = prices.retrieval * traffic.received_bytes / _GIB
    dollars += prices.upload * traffic.sent_bytes / _GIB
    for request, count in traffic.requests.items():
        verb, _, answer = request.partition("|")
        if answer in ("2xx", "4xx"):
            dollars += each.get(verb, 0.0) * count / 1_000
    return round(dollars * 1e9)
