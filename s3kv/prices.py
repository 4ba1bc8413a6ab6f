"""What S3 asks for what a cache does there, in dollars.

Prices change and differ by region, contract and store: every one of them is a field here and an
option of `s3kv cost`; the setting `prices` chooses a row for the metric `cost_usd`. Transfer
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
    """Of one storage class in one region, in dollars, for the first 50 TB."""

    put: float = price("1,000 PUTs or copies, those of objects that are there already among them")
    get: float = price("1,000 GETs, those that find nothing among them")
    storage: float = price("a GiB for a month")
    upload: float = price("a GiB sent to the bucket")
    retrieval: float = price("a GiB read from the bucket")
    transfer: float = price("a GiB on its way from the bucket to another region or cloud")


TABLE: dict[str, Prices] = {
    "us-east-1/standard": Prices(put=0.005, get=0.0004, storage=0.023),
    "us-east-1/express": Prices(
        put=0.00113, get=0.00003, storage=0.11, upload=0.0032, retrieval=0.0006
    ),
    "eu-central-1/standard": Prices(put=0.0054, get=0.00043, storage=0.0245),
    "ap-northeast-1/standard": Prices(put=0.0047, get=0.00037, storage=0.025),
}
"""By region and storage class. us-east-2 and us-west-2 cost what us-east-1 does."""
DEFAULT = "us-east-1/standard"
