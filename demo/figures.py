"""Figures of a replica or a fleet: requests, time to first token, origin of tokens, dollars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from demo import stay
from s3kv import prices
from s3kv.cli.billing import MONTH_S, bill, metric_sums, traffic_of_metrics
from s3kv.cli.show import DAY_S
from s3kv.metrics import NAMESPACE

DOLLARS_PER_HOUR = 3.0
PREFILL_TOKENS_PER_S = 8_000.0
ASSUMED = (
    f"$ per 10⁶ requests: computing at ${DOLLARS_PER_HOUR:g} an hour and "
    f"{PREFILL_TOKENS_PER_S:,.0f} tokens per second, as docs/cost.md assumes; requests to the "
    f"bucket, and a day of storage, at S3's prices in us-east-1 ({prices.AS_OF})."
)
SOURCES = ("own cache", "host memory", "bucket", "computed")


@dataclass(frozen=True, slots=True)
class Served:
    """A request that has been answered. cached_tokens: of the prompt, from all caches together.
    ttft_s: since it was sent for the first time."""

    prompt_tokens: int
    cached_tokens: int
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Sums over requests. tokens: of the prompts, in the order of `SOURCES`."""

    ttfts_s: tuple[float, ...]
    tokens: tuple[int, int, int, int]
    bucket_dollars: float

    @property
    def requests(self) -> int:
        return len(self.ttfts_s)

    @property
    def dollars_per_million(self) -> float | None:
        """For a million such requests: computing, requests to the bucket and a day of storage."""
        if not self.requests:
            return None
        hours = self.tokens[3] / PREFILL_TOKENS_PER_S / 3_600
        return (hours * DOLLARS_PER_HOUR + self.bucket_dollars) / self.requests * 1e6

    def ttft_ms(self, share: float) -> float | None:
        """The time to first token that this share of the requests did not exceed."""
        if not self.requests:
            return None
        return sorted(self.ttfts_s)[math.ceil(share * self.requests) - 1] * 1e3


def figures_of(served: Sequence[Served], metrics: Mapping[str, float]) -> Figures:
    """Of one engine: the answers it has given, and its metrics after the last of them."""
    exposition = stay.exposition(metrics)
    sums = metric_sums(exposition)
    bucket = int(sums.get(f"{NAMESPACE}hit_tokens_bucket_total", 0))
    host = int(sums.get(f"{NAMESPACE}hit_tokens_host_total", 0))
    cached = sum(one.cached_tokens for one in served)
    computed = sum(one.prompt_tokens for one in served) - cached
    return Figures(
        tuple(one.ttft_s for one in served),
        (max(0, cached - bucket - host), host, bucket, computed),
        _bucket_dollars(exposition),
    )


def total(parts: Iterable[Figures]) -> Figures:
    """All of them together."""
    given = list(parts)
    tokens = [sum(one.tokens[source] for one in given) for source in range(len(SOURCES))]
    return Figures(
        tuple(ttft_s for one in given for ttft_s in one.ttfts_s),
        (tokens[0], tokens[1], tokens[2], tokens[3]),
        sum(one.bucket_dollars for one in given),
    )


def _bucket_dollars(exposition: str) -> float:
    if not exposition:  # an engine without s3kv, or before its first request
        return 0.0
    # Of a "month" with this traffic and no other; what has been written is stored for a day.
    traffic = traffic_of_metrics(exposition, MONTH_S)
    stored_bytes = traffic.bytes_up * DAY_S / MONTH_S
    return sum(part.dollars for part in bill(traffic, stored_bytes, prices.TABLE[prices.DEFAULT]))
