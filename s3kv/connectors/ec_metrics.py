"""The EC connector's counters in vLLM's words; vLLM asks for them since 0.32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from s3kv.connectors.metrics import Sums, prometheus_counters

try:  # vLLM 0.32 and later
    from vllm.distributed.ec_transfer.ec_connector.metrics import (
        ECConnectorPromMetrics,
        ECConnectorStats,
    )
except ImportError:  # pragma: no cover
    ECConnectorPromMetrics = ECConnectorStats = object

if TYPE_CHECKING:
    from vllm.config import VllmConfig

COUNTERS: dict[str, str] = {
    "hits": "Encoder outputs loaded instead of encoded.",
    "hit_rows": "Embeddings in them.",
    "encoded": "Encoder outputs that were encoded here.",
    "encoded_rows": "Embeddings in them.",
    "fetches": "Items asked for in the bucket.",
    "fetch_ok": "Items that arrived and verified.",
    "fetch_missing": "Items the bucket did not have.",
    "fetch_corrupt": "Objects that were not what their key says.",
    "fetch_denied": "Fetches refused for want of permission.",
    "fetch_failed": "Fetches that failed otherwise.",
    "fetch_cancelled": "Fetches given up because nobody waited any more.",
    "fetch_bytes": "Bytes that arrived from the bucket and verified.",
    "fetches_spared": "Items not asked for because the bucket did not have them a moment ago.",
    "fetches_without_room": "Items not asked for because host memory was full.",
    "fetches_refused_by_breaker": "Items not asked for because the store keeps failing.",
    "deadline_cuts": "Waits for the bucket that were cut short in favour of encoding.",
    "saves": "Items ordered saved.",
    "saves_dropped": "Items not saved because too many were on their way.",
    "saves_unfit": "Items not saved because their shape or dtype was not the one expected.",
    "upload_ok": "Objects written.",
    "upload_exists": "Objects that were in the bucket already.",
    "upload_denied": "Uploads refused for want of permission.",
    "upload_failed": "Uploads that failed otherwise; the item is not in the bucket.",
    "upload_cancelled": "Uploads given up at shutdown.",
    "upload_bytes": "Bytes of objects written or found written.",
    "items_too_large": "Items larger than max_item_bytes or host memory.",
    "items_untrusted": "Items left alone because a client named them.",
    "evictions": "Items evicted from host memory.",
    "internal_errors": "Bugs of s3kv that made it stop caching in this engine.",
}
"""Every counter there is, with its meaning. Exported as `vllm:s3kv_ec_<name>_total`."""


class S3ECStats(Sums, ECConnectorStats):
    """Increments of `COUNTERS` since the last report; the scheduler's side sums all up."""


class S3ECPromMetrics(ECConnectorPromMetrics):
    """One Prometheus counter per entry of `COUNTERS`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = prometheus_counters(
            self._counter_cls, "vllm:s3kv_ec_", COUNTERS, labelnames, per_engine_labelvalues
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
