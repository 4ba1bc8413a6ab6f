"""s3kv's counters in vLLM's words: `KVConnectorStats` and their Prometheus counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.v1.metrics.utils import create_metric_per_engine

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_CORRUPT: dict[str, str] = {
    "length": "Objects that were shorter or longer than their chunk",
    "header": "Objects without a header s3kv could have written",
    "version": "Objects of another format version",
    "namespace": "Objects of another namespace under this one's keys",
    "group": "Objects of another KV-cache group under this one's keys",
    "shard": "Objects of another rank under this one's keys",
    "block_hash": "Objects of another chunk under this one's key",
    "tensors": "Objects with other tensors",
    "algorithm": "Objects sealed in another integrity mode",
    "digest": "Objects whose digest does not fit: damaged, or forged",
    "quarantined": "Chunks not asked for because their object is known to be bad",
}
"""What `fetch_corrupt` consists of (`codec.Refusal`), together with second readings that verified
after all; and, outside of it, what the quarantine spared."""

COUNTERS: dict[str, str] = {
    "hit_tokens_bucket": "Prompt tokens served from the bucket.",
    "hit_tokens_host": "Prompt tokens served from host memory.",
    "fetches": "Chunks asked for in the bucket.",
    "fetch_ok": "Chunks that arrived and verified, per rank.",
    "fetch_missing": "Chunks the bucket did not have, per rank.",
    "fetch_corrupt": "Objects that were not what their key says, per rank.",
    **{f"fetch_corrupt_{reason}": f"{doc}, per rank." for reason, doc in _CORRUPT.items()},
    "fetch_denied": "Fetches refused for want of permission, per rank.",
    "fetch_failed": "Fetches that failed otherwise, per rank.",
    "fetch_cancelled": "Fetches given up because nobody waited any more, per rank.",
    "fetch_bytes": "Bytes that arrived from the bucket and verified.",
    "fetches_spared": "Chunks not asked for because the bucket did not have them a moment ago.",
    "fetches_without_slot": "Chunks not asked for because host memory was full.",
    "fetches_refused_by_breaker": "Chunks not asked for because the store keeps failing.",
    "deadline_cuts": "Waits for the bucket that were cut short in favour of computing.",
    "loads_failed": "Requests whose copy to the device failed.",
    "saves": "Chunks ordered saved.",
    "saves_dropped": "Chunks not saved because too many were on their way or memory was full.",
    "save_ok": "Chunks copied to host memory, per rank.",
    "save_failed": "Chunks whose copy to host memory failed, per rank.",
    "upload_ok": "Objects written, per rank.",
    "upload_exists": "Objects that were in the bucket already, per rank.",
    "upload_denied": "Uploads refused for want of permission, per rank.",
    "upload_failed": "Uploads that failed otherwise, per rank.",
    "upload_bytes": "Bytes of objects written or found written.",
    "uploads_given_up": "Chunks that were never uploaded, after all tries.",
    "io_retries": "Requests to the store sent again after they had failed.",
    "io_throttled": "Answers of the store that asked for fewer requests.",
    "io_window_cuts": "Times the number of requests at once was made smaller.",
    "io_hedges": "Fetches sent a second time because their first byte was late.",
    "io_hedges_won": "Of those, the ones whose second request was the faster.",
    "evictions": "Chunks evicted from host memory.",
    "internal_errors": "Bugs of s3kv that made it stop caching in this engine.",
}
"""Every counter there is, with its meaning. Exported as `vllm:s3kv_<name>_total`."""


class Sums:
    """The arithmetic of both connectors' statistics: increments by name, summed over ranks."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: Any) -> Any:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        return not self.data


class S3KVStats(Sums, KVConnectorStats):
    """Increments of `COUNTERS` since the last report; sums over ranks and sides."""


class Meter:
    """Hands out what a set of counters grew by since the last time."""

    def __init__(self, names: Container[str] = frozenset(COUNTERS)) -> None:
        self._names = names
        self._seen: Counter[str] = Counter()

    def grown(self, counters: Mapping[str, int]) -> dict[str, int]:
        """Those of `names` that have, and by how much."""
        if self._seen == counters:
            return {}
        grown = {
            name: value - self._seen[name]
            for name, value in counters.items()
            if name in self._names and value != self._seen[name]
        }
        self._seen = Counter(counters)
        return grown

    def take(self, counters: Mapping[str, int]) -> S3KVStats | None:
        grown = self.grown(counters)
        return S3KVStats(data=grown) if grown else None


def prometheus_counters(
    counter_cls: Any,
    prefix: str,
    docs: Mapping[str, str],
    labelnames: list[str],
    per_engine_labelvalues: dict[int, list[object]],
) -> dict[str, Any]:
    """One Prometheus counter per name, labelled per engine as vLLM does."""
    return {
        name: create_metric_per_engine(
            counter_cls(name=f"{prefix}{name}", documentation=doc, labelnames=labelnames),
            per_engine_labelvalues,
        )
        for name, doc in docs.items()
    }


class S3KVPromMetrics(KVConnectorPromMetrics):
    """One Prometheus counter per entry of `COUNTERS`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = prometheus_counters(
            self._counter_cls, "vllm:s3kv_", COUNTERS, labelnames, per_engine_labelvalues
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
