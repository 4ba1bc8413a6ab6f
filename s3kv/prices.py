"""S3's prices for what a cache does, in dollars.

Prices change, and differ by region, contract and store. So every price is a field here and an
option of `s3kv cost`; the metric `cost_usd` takes the row of the bucket's region. Transfer
between a bucket and instances of its own region costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

AS_OF = "2025-11"
SOURCE = "https://aws.amazon.com/s3/pricing/"


def price(doc: str) -> float:
    return field(default=0.0, metadata={"doc": doc})


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices of one storage class in one region, in dollars, for the first 50 TB."""

    put: float = price("1,000 PUTs or copies, including PUTs of objects that are there already")
    get: float = price("1,000 GETs, including those that find nothing")
    storage: float = price("a GiB for a month")
    upload: float = price("a GiB sent to the bucket")
    retrieval: float = price("a GiB read from the bucket")
    transfer: float = price("a GiB transferred from the bucket to another region or cloud")


TABLE: dict[str, Prices] = {
    "us-east-1/standard": Prices(put=0.005, get=0.0004, storage=0.023),
    "us-east-1/express": Prices(
        put=0.00113, get=0.00003, storage=0.11, upload=0.0032, retrieval=0.0006
    ),
    "eu-central-1/standard": Prices(put=0.0054, get=0.00043, storage=0.0245),
    "ap-northeast-1/standard": Prices(put=0.0047, get=0.00037, storage=0.025),
}
"""Prices by region and storage class. us-east-2 and us-west-2 cost the same as us-east-1."""
DEFAULT = "us-east-1/standard"
