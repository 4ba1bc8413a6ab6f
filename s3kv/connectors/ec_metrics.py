"""The EC connector's counters in vLLM's words; vLLM asks for them since 0.32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from s3kv.connectors.metrics import Registered, Sums
from s3kv.metrics import EC_METRICS, EC_NAMESPACE

try:  # vLLM 0.32 and later
    from vllm.distributed.ec_transfer.ec_connector.metrics import (
        ECConnectorPromMetrics,
        ECConnectorStats,
    )
except ImportError:  # pragma: no cover
    ECConnectorPromMetrics = ECConnectorStats = object

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class S3ECStats(Sums, ECConnectorStats):
    """What happened since the last report; the scheduler's side tells of both."""

    metrics = EC_METRICS


class S3ECPromMetrics(ECConnectorPromMetrics):
    """`EC_METRICS` in the process that exports."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        types = {
            "counter": self._counter_cls,
            "gauge": self._gauge_cls,
            "histogram": self._histogram_cls,
        }
        self._registered = Registered(
            EC_METRICS, EC_NAMESPACE, types, labelnames, per_engine_labelvalues
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._registered.observe(transfer_stats_data, engine_idx)
