"""The worker's side of the KV connector: what vLLM calls besides loads."""

from __future__ import annotations

import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from s3kv.config import Config
from s3kv.connectors import kv, kv_worker
from s3kv.connectors.adapter_loads import AdapterReport, AdapterStep
from s3kv.connectors.kv import S3KVConnector
from s3kv.connectors.kv_translate import WorkerHandshake, WorkerReport, geometry
from s3kv.connectors.kv_worker import WorkerSide
from s3kv.device import copies
from s3kv.device.gpu.gpu_copier import GpuCopier
from s3kv.errors import StoreUnavailable, UnsupportedError
from s3kv.host.slab import Slab
from s3kv.messages import CopyPart, LoadJob, SaveJob, StepPlan, StepReport
from s3kv.types import ENGINE_LOG, ChunkKey
from tests.contract.configurations import FULL, groups
from tests.contract.test_kv_shards import cache_of
from tests.contract.test_vllm_api import VERSION
from tests.unit.device.simulated import SimulatedGpu

PLAN = StepPlan(
    loads=(LoadJob("r", (CopyPart(0, 0, 0, (1,)),)),),
    saves=(SaveJob(1, ChunkKey(0, b"k" * 32), 1, (2,)),),
)
HANDSHAKE = WorkerHandshake("n" * 32, 8, 4096)


class Rank:
    """A rank that carries out nothing; `log` has its calls."""

    def __init__(self, launches: bool = True) -> None:
        self.launches = launches
        self.log: list[str] = []
        self.counters: Counter[str] = Counter()

    def load(self, orders: Any, *, from_now: bool) -> None:
        self.log.append("load from now" if from_now else "load")

    def save(self, orders: Any, *, read_first: bool) -> None:
        self.log.append("save, read first" if read_first else "save")

    def refuse(self, orders: Any) -> None:
        self.log.append("refuse")

    def begin(self, plan: StepPlan) -> None:
        self.log.append("begin")

    def take_report(self) -> StepReport | None:
        return None

    def give_up_loads(self) -> set[str]:
        return set()

    def wait_launched(self, timeout_s: float) -> bool:
        self.log.append("launched")
        return self.launches

    def suspend(self, timeout_s: float) -> bool:
        self.log.append("suspend")
        return self.launches

    def resume(self) -> None:
        self.log.append("resume")


def side(vllm_config: Any, rank: Rank | None = None, *, announces_sleep: bool = True) -> WorkerSide:
    """A worker's side that has not registered."""
    config, cache = Config(bucket="bkt"), groups(FULL)
    sizes = geometry(config, vllm_config, cache)
    worker = WorkerSide(config, vllm_config, cache, sizes, announces_sleep=announces_sleep)
    worker._rank = rank  # type: ignore[assignment]
    return worker


def step(worker: WorkerSide) -> None:
    worker.load(PLAN)
    worker.save(PLAN)


@pytest.fixture
def registered(tiny_config: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[WorkerSide, Mock]:
    """A side whose bucket holds objects, and the calls that wait for the bucket."""
    wait = Mock(return_value=True)
    monkeypatch.setattr(kv_worker, "wait_for_bucket", wait)
    worker = side(tiny_config, Rank())
    worker._tier, worker._handshake = Mock(), HANDSHAKE
    return worker, wait


def test_the_handshake_waits_for_the_bucket_at_start_and_not_at_a_wake_up(
    registered: tuple[WorkerSide, Mock],
) -> None:
    worker, wait = registered
    assert worker.handshake() is worker.handshake() is worker._handshake
    assert worker.handshake().known is True
    assert wait.call_count == 1
    assert worker.report() is None


def test_a_handshake_that_vllm_does_not_request_is_in_the_first_report(
    registered: tuple[WorkerSide, Mock],
) -> None:
    worker, _ = registered
    first = worker.report()
    assert first is not None
    assert [handshake.known for handshake in first.handshakes] == [True]
    assert worker.report() is None


def test_without_a_bucket_the_first_report_has_no_handshake(
    registered: tuple[WorkerSide, Mock], caplog: pytest.LogCaptureFixture
) -> None:
    worker, wait = registered
    wait.side_effect = StoreUnavailable("gone")
    for _ in range(2):
        assert worker.report() is None
    assert wait.call_count == 1
    assert worker.broken is None
    assert "runs without its cache" in caplog.text


def test_a_worker_that_has_failed_reports_so_in_every_step(
    tiny_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank()
    monkeypatch.setattr(rank, "begin", Mock(side_effect=ZeroDivisionError))
    worker = side(tiny_config, rank)
    worker.begin(PLAN)
    assert worker.broken == "_begin"
    for _ in range(2):
        report = worker.report()
        assert report.broken


class _Enough(Exception):
    """The rest of a start is not needed."""


@pytest.mark.parametrize(("rank", "level"), [(0, logging.NOTSET), (1, logging.WARNING)])
def test_the_first_rank_logs_for_all(
    tiny_config: Any, monkeypatch: pytest.MonkeyPatch, rank: int, level: int
) -> None:
    worker = side(tiny_config)
    monkeypatch.setattr(worker, "_layouts", lambda caches: {})
    monkeypatch.setattr(worker, "_shards", lambda: (["first", "second"], rank))
    monkeypatch.setattr(worker, "_identity", Mock(side_effect=_Enough))
    try:
        with pytest.raises(_Enough):
            worker.register({})
        assert logging.getLogger(ENGINE_LOG).level == level
    finally:
        logging.getLogger(ENGINE_LOG).setLevel(logging.NOTSET)


def test_a_gpu_without_memory_for_staging_ends_the_start(
    tiny_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has begun by then ends at the shutdown."""
    tiers: list[Any] = []

    def opened(config: Any, nbytes: int, *rest: Any, wait: None) -> Any:
        tiers.append(SimpleNamespace(slab=Slab.create(nbytes), close=Mock()))
        return tiers[-1]

    def full(gpu: SimulatedGpu, nbytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(kv_worker, "open_worker_tier", opened)
    monkeypatch.setattr(copies, "open_copier", lambda places: GpuCopier(places, SimulatedGpu(1)))
    monkeypatch.setattr(SimulatedGpu, "empty", full)
    worker = side(tiny_config)
    monkeypatch.setattr(worker, "_shards", lambda: (["h0-0of1-l0-0of1"], 0))
    with pytest.raises(UnsupportedError, match=r"copies need \d+ bytes on .* lower gpu_mem"):
        connector(worker).register_kv_caches({"layer.0": cache_of(FULL, "NHC", 10)})
    tiers[0].slab.close()
    worker.shutdown()
    tiers[0].close.assert_called_once_with()


@pytest.mark.parametrize(
    ("device", "may_sleep", "announces_sleep", "launches"),
    [
        ("cuda", True, False, True),
        ("cuda", True, True, False),
        ("cpu", True, False, False),
        ("cuda", False, False, False),
    ],
)
def test_copies_are_launched_within_the_hook_if_a_sleep_is_not_announced(
    tiny_config: Any,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    may_sleep: bool,
    announces_sleep: bool,
    launches: bool,
) -> None:
    monkeypatch.setattr(tiny_config.model_config, "enable_sleep_mode", may_sleep)
    monkeypatch.setitem(tiny_config.device_config.__dict__, "device_type", device)
    rank = Rank()
    step(side(tiny_config, rank, announces_sleep=announces_sleep))
    assert rank.log == (["load", "launched", "save", "launched"] if launches else ["load", "save"])


def test_copies_that_are_never_launched_are_waited_for_once(
    tiny_config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(launches=False)
    worker = side(tiny_config, rank)
    worker._launches_at_once = True
    step(worker)
    step(worker)
    assert rank.log.count("launched") == 1
    assert "not launched within" in caplog.text


@pytest.mark.parametrize(
    ("writes", "log"),
    [((True, False), ["load", "save, read first"]), ((False, True), ["load from now", "save"])],
)
def test_copies_are_ordered_with_what_a_step_writes_around_its_fences(
    tiny_config: Any, monkeypatch: pytest.MonkeyPatch, writes: tuple[bool, bool], log: list[str]
) -> None:
    monkeypatch.setattr(kv_worker, "writes_around_fences", lambda *args: writes)
    rank = Rank()
    step(side(tiny_config, rank))
    assert rank.log == log


def connector(worker: WorkerSide) -> S3KVConnector:
    """A connector of the worker's role, around a side made by hand."""
    made = S3KVConnector.__new__(S3KVConnector)
    made._worker = worker
    return made


def test_before_a_sleep_copies_end_and_after_it_they_may_begin(
    tiny_config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank()
    subject = connector(side(tiny_config, rank))
    for _ in range(2):
        subject.unregister_kv_caches()
        subject.restore_kv_caches()
    assert rank.log == ["suspend", "resume"] * 2
    rank.launches = False
    subject.unregister_kv_caches()
    assert "copies did not end" in caplog.text
    connector(side(tiny_config)).unregister_kv_caches()  # nothing registered: nothing to do


def test_sleep_is_supported_and_its_announcement_detected() -> None:
    assert S3KVConnector.supports_sleep_mode(SimpleNamespace())  # type: ignore[arg-type]
    theirs = hasattr(kv.KVConnectorBase_V1, "unregister_kv_caches")
    assert theirs == kv.ANNOUNCES_SLEEP == (VERSION >= (0, 33))


def test_saves_of_an_adapter_that_has_changed_are_refused(tiny_config: Any) -> None:
    """They were planned before the scheduler had the report."""
    rank = Rank()
    worker = side(tiny_config, rank)
    for may_save in (True, False, True):
        worker._adapters = Mock(may_save=may_save)
        worker.save(PLAN)
    assert rank.log == ["save", "refuse", "save"]


def test_every_step_of_an_engine_with_adapters_is_reported(tiny_config: Any) -> None:
    """An idle one, too: a request may wait for it."""
    worker = side(tiny_config, Rank())
    worker.begin(StepPlan(), AdapterStep(6, 5))
    assert worker.report() is None
    worker._adapters = loads = Mock()
    loads.report.return_value = AdapterReport(7)
    worker.begin(StepPlan(), AdapterStep(7, 6))
    loads.begin.assert_called_once_with(AdapterStep(7, 6))
    assert worker.report() == WorkerReport(StepReport(), adapters=AdapterReport(7))


def test_reports_of_ranks_are_folded_into_one() -> None:
    one = WorkerReport(StepReport(), adapters=AdapterReport(3))
    assert one.aggregate(WorkerReport(StepReport(), adapters=AdapterReport(2))) is one
    assert one.adapters == AdapterReport(2)
    one.aggregate(WorkerReport(StepReport(), (HANDSHAKE,)))
    assert (one.adapters, one.handshakes) == (None, (HANDSHAKE,))
