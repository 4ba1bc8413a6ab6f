"""s3kv's counters as vLLM's classes: statistics of both connectors, and Prometheus metrics.

vLLM takes the statistics of both sides of a connector after every step, adds them up, and passes
them to its loggers and exporters. They are increments since the last report. A step in which
nothing has happened has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from vllm.distributed.ec_transfer.ec_connector.metrics import (
    ECConnectorPromMetrics,
    ECConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from s3kv.metrics import EC_METRICS, EC_NAMESPACE, KV_METRICS, NAMESPACE, Metric, labels_of, name_of

Values = dict[str, Any]
"""Values by the keys of `s3kv.metrics`. The value of a histogram is a list of observations."""


class Sums:
    """Statistics of either connector, which vLLM adds up. metrics: the table of their keys."""

    metrics: ClassVar[Mapping[str, Metric]]
    data: Values

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: Any) -> Any:
        add(self.data, other.data, self.metrics)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Plain numbers for vLLM's log; a histogram becomes its count and mean."""
        reduced: dict[str, int | float] = {}
        for key, value in sorted(self.data.items()):
            metric = self.metrics.get(name_of(key))
            if isinstance(value, list):
                reduced[f"{key}_count"] = len(value)
                reduced[f"{key}_mean"] = _short(sum(value) / max(1, len(value)))
            elif metric is not None and metric.scale != 1:
                reduced[key] = _short(value * metric.scale)
            else:
                reduced[key] = value
        return reduced

    def is_empty(self) -> bool:
        return not self.data


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def add(values: Values, more: Mapping[str, Any], metrics: Mapping[str, Metric]) -> None:
    """Add `more` to `values` in place, each value according to its kind."""
    for key, value in more.items():
        metric = metrics.get(name_of(key))
        if isinstance(value, list):
            values[key] = [*values.get(key, ()), *value]
        elif metric is not None and metric.kind == "gauge":
            values[key] = value
        else:
            values[key] = values.get(key, 0) + value


class S3KVStats(Sums, KVConnectorStats):
    """The KV connector's increments since the last report, of all ranks and both sides."""

    metrics = KV_METRICS


class S3ECStats(Sums, ECConnectorStats):
    """The EC connector's increments since the last report. The scheduler reports for both sides."""

    metrics = EC_METRICS


class Exported:
    """Prometheus metrics of one table, per engine. All their series exist from the start:
    otherwise Prometheus would not see the first increase, from nothing to one.
    Comes before vLLM's class among the bases. That class has vLLM's own class for each kind of
    metric."""

    table: ClassVar[Mapping[str, Metric]]
    namespace: ClassVar[str]

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        base: Any = super()
        base.__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._series: dict[tuple[int, str], Any] = {}
        for name, metric in self.table.items():
            family = getattr(self, f"_{metric.kind}_cls")(
                name=f"{self.namespace}{name}",
                documentation=metric.doc,
                labelnames=[*labelnames, *metric.labels],
                **({"buckets": metric.buckets} if metric.kind == "histogram" else {}),
                **({"multiprocess_mode": "mostrecent"} if metric.kind == "gauge" else {}),
            )
            for engine, values in per_engine_labelvalues.items():
                for key in metric.keys(name):
                    self._series[engine, key] = family.labels(*values, *labels_of(key))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, value in transfer_stats_data.items():
            series = self._series.get((engine_idx, key))
            if series is None:
                continue
            metric = self.table[name_of(key)]
            if metric.kind == "histogram":
                for observed in value:
                    series.observe(observed)
            elif metric.kind == "gauge":
                series.set(value)
            else:
                series.inc(value * metric.scale)


class S3KVPromMetrics(Exported, KVConnectorPromMetrics):
    """`KV_METRICS` as Prometheus metrics, in the process that exports them."""

    table, namespace = KV_METRICS, NAMESPACE


class S3ECPromMetrics(Exported, ECConnectorPromMetrics):
    """`EC_METRICS` as Prometheus metrics, in the process that exports them."""

    table, namespace = EC_METRICS, EC_NAMESPACE
