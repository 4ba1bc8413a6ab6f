"""s3kv's counters in vLLM's words: statistics of either connector, and their Prometheus metrics.

vLLM asks both sides of a connector for statistics after every step, adds up what it gets, and hands
it to whoever logs and exports. What is handed over are increments: what has happened since the last
time. In a step in which nothing has happened nothing is handed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from s3kv.metrics import KV_METRICS, MISSES, NAMESPACE, Metric, labels_of, name_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Values = dict[str, Any]
"""Keys as in `s3kv.metrics`: whole numbers, and of histograms lists of what was observed."""


class Sums:
    """The arithmetic of both connectors' statistics. `metrics`: the table they are from."""

    metrics: ClassVar[Mapping[str, Metric]]
    data: Values

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: Any) -> Any:
        add(self.data, other.data, self.metrics)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log: a histogram as how many it observed, and their mean."""
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
    """Fold `more` into `values`, each by its kind. `more` stays as it is."""
    for key, value in more.items():
        metric = metrics.get(name_of(key))
        if isinstance(value, list):
            values[key] = [*values.get(key, ()), *value]
        elif metric is not None and metric.kind == "gauge":
            values[key] = value
        else:
            values[key] = values.get(key, 0) + value


class S3KVStats(Sums, KVConnectorStats):
    """What happened since the last report, of any number of ranks and of both sides."""

    metrics = KV_METRICS


Shares = Mapping[str, tuple[tuple[str, int], ...]]
"""What a counter adds to which metrics, and with which sign, where that is not itself alone."""


class Meter:
    """Hands out by how much a set of counters has grown since the last time.

    shares: of the counters that are called otherwise in the table, or are part of several metrics.
    Whatever else is in no table is left out.
    """

    def __init__(
        self, metrics: Mapping[str, Metric] = KV_METRICS, shares: Shares | None = None
    ) -> None:
        keys = (key for name, metric in metrics.items() for key in metric.keys(name))
        self._shares = {key: ((key, 1),) for key in keys} | dict(shares or {})
        self._seen: dict[str, int] = {}

    def grown(self, counters: Mapping[str, int]) -> Values:
        """Costs one comparison when none has. Asked in every step: hence no look at all of them."""
        if dict.__eq__(self._seen, counters):  # a Counter's own == is written in Python
            return {}
        grown: Values = {}
        for name, value in counters.items() - self._seen.items():
            more = value - self._seen.get(name, 0)
            self._seen[name] = value
            for key, sign in self._shares.get(name, ()):
                grown[key] = grown.get(key, 0) + sign * more
        return {key: value for key, value in grown.items() if value}


class Gauges:
    """Hands out those of a set of values that are not what they were the last time."""

    def __init__(self) -> None:
        self._told: Values = {}

    def changed(self, values: Values) -> Values:
        changed = {k: v for k, v in values.items() if self._told.get(k) != v}
        self._told.update(changed)
        return changed


def with_misses(shares: Shares) -> Shares:
    """A planner's counters as the metric "misses", beside what `shares` says of them."""
    return {
        **shares,
        **{
            name: (*shares.get(name, ((name, 1),)), (f"misses|{reason}", 1))
            for name, reason in MISSES.items()
        },
    }


def breaker_states(metrics: Mapping[str, Metric]) -> Mapping[str, Values]:
    """The metric "breaker", by the breaker's state."""
    keys = metrics["breaker"].keys("breaker")
    return {
        state: {key: int(labels_of(key) == (state,)) for key in keys}
        for key in keys
        for state in labels_of(key)
    }


class Registered:
    """The metrics of one table in Prometheus, per engine, and all their series from the start: an
    increase from nothing to one is otherwise no increase to Prometheus.

    metric_types: vLLM's classes for each kind, by prometheus_client's.
    """

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        namespace: str,
        types: Mapping[str, Any],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        self._metrics = metrics
        self._series: dict[tuple[int, str], Any] = {}
        for name, metric in metrics.items():
            family = types[metric.kind](
                name=f"{namespace}{name}",
                documentation=metric.doc,
                labelnames=[*labelnames, *metric.labels],
                **_more(metric),
            )
            for engine, values in per_engine_labelvalues.items():
                for key in metric.keys(name):
                    self._series[engine, key] = family.labels(*values, *labels_of(key))

    def observe(self, values: Mapping[str, Any], engine: int) -> None:
        for key, value in values.items():
            series = self._series.get((engine, key))
            if series is None:
                continue
            metric = self._metrics[name_of(key)]
            if metric.kind == "histogram":
                for observed in value:
                    series.observe(observed)
            elif metric.kind == "gauge":
                series.set(value)
            else:
                series.inc(value * metric.scale)


def _more(metric: Metric) -> dict[str, Any]:
    if metric.kind == "histogram":
        return {"buckets": metric.buckets}
    return {"multiprocess_mode": "mostrecent"} if metric.kind == "gauge" else {}


class S3KVPromMetrics(KVConnectorPromMetrics):
    """`KV_METRICS` in the process that exports."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
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
            KV_METRICS, NAMESPACE, types, labelnames, per_engine_labelvalues
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._registered.observe(transfer_stats_data, engine_idx)
