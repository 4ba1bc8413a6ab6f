"""What is counted on its way to Prometheus: from two ranks and the scheduler, through vLLM's own
aggregation and serialisation, into the registry that `/metrics` shows."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from s3kv.connectors.metrics import S3ECPromMetrics, S3KVPromMetrics, S3KVStats
from s3kv.connectors.plugin import register
from s3kv.metrics import EC_METRICS, KV_METRICS, labels_of

TABLES = {"kv": KV_METRICS, "ec": EC_METRICS}


class Exported:
    """A registry of our own instead of prometheus_client's, and what vLLM makes metrics with."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def types(self) -> Any:
        return {k: partial(k, registry=self.registry) for k in (Counter, Gauge, Histogram)}

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"vllm:s3kv_{name}", {"engine": "0"} | labels)


@pytest.fixture
def exported() -> Exported:
    return Exported()


def prom(exported: Exported, kind: str = "kv") -> Any:
    made = S3KVPromMetrics if kind == "kv" else S3ECPromMetrics
    config: Any = SimpleNamespace(kv_transfer_config=None, ec_transfer_config=None)
    return made(config, exported.types(), ["engine"], {0: ["0"], 1: ["1"]})


def rank(**more: Any) -> S3KVStats:
    data = {"fetch_ok": 3, "fetch_bytes": 300, "io_requests|GET|2xx": 3, "cost_usd": 1_200}
    return S3KVStats(data=data | {"fetch_seconds": [0.004, 0.3, 30.0]} | more)


def scheduler() -> S3KVStats:
    return S3KVStats(data={"hit_tokens_bucket": 48, "misses|absent": 1, "breaker|open": 1})


def engine_step(ranks: list[Any], of_scheduler: Any) -> Any:
    """As vLLM does it: the executor folds the ranks, the scheduler adds its own."""
    outputs: list[Any] = [
        ModelRunnerOutput(
            req_ids=[],
            req_id_to_index={},
            kv_connector_output=KVConnectorOutput(kv_connector_stats=stats),
        )
        for stats in ranks
    ]
    folded = KVOutputAggregator(len(ranks)).aggregate(outputs, 0)
    of_ranks = folded.kv_connector_output.kv_connector_stats
    return of_scheduler if of_ranks is None else of_ranks.aggregate(of_scheduler)


def sent(stats: Any) -> dict[str, Any]:
    """From the engine's process to the server's, through vLLM's own encoder."""
    outputs = EngineCoreOutputs(scheduler_stats=SchedulerStats(kv_connector_stats=stats.to_dict()))
    received = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs))
    data = received.scheduler_stats.kv_connector_stats
    assert isinstance(data, dict)
    return data


def test_two_ranks_and_the_scheduler_are_counted_once_each(exported: Exported) -> None:
    metrics = prom(exported)
    metrics.observe(sent(engine_step([rank(), rank()], scheduler())))
    metrics.observe(sent(engine_step([None, rank()], scheduler())))
    metrics.observe({"of_a_later_version": 1, "io_requests|PATCH|2xx": 1})
    assert exported("fetch_ok_total") == 9
    assert exported("fetch_bytes_total") == 900
    assert exported("io_requests_total", verb="GET", status="2xx") == 9
    assert exported("cost_usd_total") == pytest.approx(3_600e-9)
    assert exported("hit_tokens_bucket_total") == 96
    assert exported("misses_total", reason="absent") == 2
    assert exported("fetch_seconds_count") == 9
    assert exported("fetch_seconds_sum") == pytest.approx(3 * 30.304)
    assert exported("fetch_seconds_bucket", le="0.005") == 3
    assert exported("fetch_seconds_bucket", le="10.0") == 6
    assert exported("breaker", state="open") == 1, "the last value of a gauge stands"
    assert exported("fetch_ok_total", engine="1") == 0, "engines are told apart"


@pytest.mark.parametrize("times", [1, 2])
def test_beside_other_connectors(exported: Exported, times: int) -> None:
    """MultiConnector hands statistics through by the class's name; several of one class share."""
    register()
    ours = {"kv_connector": "S3KVConnector", "kv_role": "kv_both"}
    other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"connectors": [*[ours] * times, other]}, engine_id="e"
        )
    )
    metrics = MultiConnector.build_prom_metrics(config, exported.types(), ["engine"], {0: ["0"]})

    def multi(stats: S3KVStats) -> Any:
        told = {"get_kv_connector_stats": lambda self: S3KVStats(data=dict(stats.data))}
        children = [type("S3KVConnector", (), told)() for _ in range(times)]
        silent = SimpleNamespace(get_kv_connector_stats=lambda: None)
        parent: Any = SimpleNamespace(_connectors=[*children, silent])
        return MultiConnector.get_kv_connector_stats(parent)

    data = sent(engine_step([multi(rank()), multi(rank())], multi(scheduler())))
    metrics.observe(data)
    assert exported("fetch_ok_total") == 6 * times
    assert exported("fetch_seconds_count") == 6 * times
    assert exported("hit_tokens_bucket_total") == 48 * times
    rebuilt = MultiConnector.build_kv_connector_stats(data)
    assert rebuilt.reduce()["S3KVConnector"]["fetch_ok"] == 6 * times


def test_what_the_log_adds_up_is_not_added_to_what_is_exported(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM gives one dictionary to its log, which keeps adding to it, and to Prometheus."""
    monkeypatch.setattr(KVConnectorLogging, "__init__", lambda self: self.reset())
    from s3kv.connectors.kv import S3KVConnector

    log = KVConnectorLogging()  # type: ignore[call-arg]
    log.connector_cls = S3KVConnector
    metrics = prom(exported)
    steps = [rank().to_dict() for _ in range(3)]
    for data in steps:
        log.observe(data)
    for data in steps:
        metrics.observe(data)
    assert exported("fetch_ok_total") == 9
    assert exported("fetch_seconds_count") == 9
    said: list[str] = []
    log.log(lambda text, *values: said.append(text % values))
    assert "fetch_ok=9" in said[0]
    assert "fetch_seconds_count=9, fetch_seconds_mean=10.1" in said[0]
    assert "cost_usd=3.6e-06" in said[0]


@pytest.mark.parametrize("kind", TABLES)
def test_every_series_is_there_before_anything_happens(exported: Exported, kind: str) -> None:
    prom(exported, kind)
    prefix = "" if kind == "kv" else "ec_"
    for name, metric in TABLES[kind].items():
        suffix = {"counter": "_total", "gauge": "", "histogram": "_count"}[metric.kind]
        for key in metric.keys(name):
            labels = dict(zip(metric.labels, labels_of(key), strict=True))
            assert exported(f"{prefix}{name}{suffix}", **labels) == 0, key
