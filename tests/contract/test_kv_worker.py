"""The worker's side of the connector: what vLLM asks of it besides steps."""

from __future__ import annotations

import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from s3kv.config import Config
from s3kv.connectors import kv, kv_worker
from s3kv.connectors.adapter_loads import AdapterReport, AdapterStep
from s3kv.connectors.kv import S3KVConnector
from s3kv.connectors.kv_translate import WorkerHandshake, WorkerReport, geometry
from s3kv.connectors.kv_worker import WorkerSide
from s3kv.errors import StoreUnavailable
from s3kv.messages import CopyPart, LoadJob, SaveJob, StepPlan, StepReport
from s3kv.types import ENGINE_LOG, ChunkKey
from tests.contract.configurations import FULL, groups
from tests.contract.test_vllm_api import VERSION

PLAN = StepPlan(
    loads=(LoadJob("r", (CopyPart(0, 0, 0, (1,)),)),),
    saves=(SaveJob(1, ChunkKey(0, b"k" * 32), 1, (2,)),),
)


class Rank:
    """What would carry the orders out; `log` has what it is told."""

    def __init__(self, launches: bool = True) -> None:
        self.launches = launches
        self.log: list[str] = []

    def load(self, orders: Any, *, from_now: bool) -> None:
        self.log.append("load from now" if from_now else "load")

    def save(self, orders: Any, *, read_first: bool) -> None:
        self.log.append("save, and wait until it has been read" if read_first else "save")

    def refuse(self, orders: Any) -> None:
        self.log.append("refuse")

    def begin(self, plan: StepPlan) -> None:
        pass

    def take_report(self) -> StepReport | None:
        return None

    def wait_launched(self, timeout_s: float) -> bool:
        self.log.append("launched")
        return self.launches

    def suspend(self, timeout_s: float) -> bool:
        self.log.append("suspend")
        return self.launches

    def resume(self) -> None:
        self.log.append("resume")


def side(vllm_config: Any, rank: Rank | None = None, *, told: bool = True) -> WorkerSide:
    """Made, and not registered."""
    config, cache = Config(bucket="bkt"), groups(FULL)
    sizes = geometry(config, vllm_config, cache)
    worker = WorkerSide(config, vllm_config, cache, sizes, sleep_is_told=told)
    worker._rank = rank  # type: ignore[assignment]
    return worker


@pytest.fixture
def sleeping(tiny_config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration of an engine on a GPU that may be put to sleep."""
    monkeypatch.setattr(tiny_config.model_config, "enable_sleep_mode", True)
    monkeypatch.setitem(tiny_config.device_config.__dict__, "device_type", "cuda")
    return tiny_config


def test_the_bucket_is_waited_for_at_start_and_not_at_a_wake_up(
    tiny_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[Any] = []

    def knows(*args: Any) -> bool:
        waited.append(args)
        return True

    monkeypatch.setattr(kv_worker, "wait_for_bucket", knows)
    worker = side(tiny_config)
    worker._tier, worker._handshake = Mock(), WorkerHandshake("n" * 32, 8, 4096)  # type: ignore[assignment]
    assert worker.handshake() is worker.handshake() is worker._handshake
    assert len(waited) == 1
    assert worker.handshake().known is True


class Quiet(Rank):
    def take_report(self) -> StepReport | None:
        return None


def test_who_has_not_been_asked_reports_in_the_first_step(
    tiny_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_worker, "wait_for_bucket", lambda *args: None)
    handshake = WorkerHandshake("n" * 32, 8, 4096)
    for asked in (False, True):
        worker = side(tiny_config, Quiet())
        worker._tier, worker._handshake = Mock(), handshake  # type: ignore[assignment]
        if asked:
            worker.handshake()
        first = worker.report()
        assert (None if first is None else first.handshakes) == (None if asked else (handshake,))
        assert worker.report() is None


def test_who_has_no_bucket_in_the_first_step_does_not_report(
    tiny_config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: Any) -> None:
        raise StoreUnavailable("gone")

    monkeypatch.setattr(kv_worker, "wait_for_bucket", fails)
    worker = side(tiny_config, Quiet())
    worker._tier, worker._handshake = Mock(), WorkerHandshake("n" * 32, 8, 4096)  # type: ignore[assignment]
    first = worker.report()
    assert first is not None
    assert first.handshakes == ()
    assert worker.report() is None
    assert worker.broken is None
    assert "runs without its cache" in caplog.text


def test_a_worker_that_has_failed_says_so_in_every_report(tiny_config: Any) -> None:
    class Failing(Rank):
        def __init__(self) -> None:
            super().__init__()
            self.counters: Counter[str] = Counter()

        def begin(self, plan: StepPlan) -> None:
            raise ZeroDivisionError

        def give_up_loads(self) -> set[str]:
            return set()

    worker = side(tiny_config, Failing())
    worker.begin(PLAN)
    assert worker.broken == "begin"
    for _ in range(2):
        report = worker.report()
        assert report is not None
        assert report.broken


def step(worker: WorkerSide) -> None:
    worker.load(PLAN)
    worker.save(PLAN)


def test_copies_are_launched_within_the_hook_where_a_sleep_is_not_told(sleeping: Any) -> None:
    rank = Rank()
    step(side(sleeping, rank, told=False))
    assert rank.log == ["load", "launched", "save", "launched"]


def test_otherwise_nobody_waits_for_a_launch(
    sleeping: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, cpu, awake = Rank(), Rank(), Rank()
    step(side(sleeping, told))
    with monkeypatch.context() as patch:
        patch.setitem(sleeping.device_config.__dict__, "device_type", "cpu")
        step(side(sleeping, cpu, told=False))
    monkeypatch.setattr(sleeping.model_config, "enable_sleep_mode", False)
    step(side(sleeping, awake, told=False))
    assert told.log == cpu.log == awake.log == ["load", "save"]


def test_copies_that_are_never_launched_are_waited_for_once(
    sleeping: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(launches=False)
    worker = side(sleeping, rank, told=False)
    step(worker)
    step(worker)
    assert rank.log.count("launched") == 1
    assert "not launched within" in caplog.text


@pytest.mark.parametrize("at_once", [False, True])
def test_saves_are_fenced_at_once_where_a_step_writes_before_its_fences(
    tiny_config: Any, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    monkeypatch.setattr(kv_worker, "writes_around_fences", lambda *args: (at_once, False))
    rank = Rank()
    step(side(tiny_config, rank))
    assert rank.log[1].endswith("has been read") == at_once


@pytest.mark.parametrize("writes", [False, True])
def test_loads_come_after_what_a_step_writes_behind_its_fences(
    tiny_config: Any, monkeypatch: pytest.MonkeyPatch, writes: bool
) -> None:
    monkeypatch.setattr(kv_worker, "writes_around_fences", lambda *args: (False, writes))
    rank = Rank()
    step(side(tiny_config, rank))
    assert rank.log[0] == ("load from now" if writes else "load")


def connector(worker: WorkerSide) -> S3KVConnector:
    """Of the worker's role, around a side made by hand."""
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


def test_sleep_is_supported_and_its_telling_detected() -> None:
    assert S3KVConnector.supports_sleep_mode(SimpleNamespace())  # type: ignore[arg-type]
    theirs = hasattr(kv.KVConnectorBase_V1, "unregister_kv_caches")
    assert theirs == kv.SLEEP_IS_TOLD == (VERSION >= (0, 33))


class Loads:
    """What the rank has loaded of adapters."""

    def __init__(self) -> None:
        self.may_save = True
        self.number = 0

    def begin(self, step: AdapterStep) -> None:
        self.number = step.number

    def report(self) -> AdapterReport:
        return AdapterReport(self.number)


def test_saves_of_an_adapter_that_is_another_by_now_are_refused(tiny_config: Any) -> None:
    """Planned before the scheduler could hear of it."""
    rank, loads = Rank(), Loads()
    worker = side(tiny_config, rank)
    worker._adapters = loads  # type: ignore[assignment]
    for may_save in (True, False, True):
        loads.may_save = may_save
        worker.save(PLAN)
    assert rank.log == ["save", "refuse", "save"]


def test_every_step_of_an_engine_with_adapters_is_reported(tiny_config: Any) -> None:
    """An idle one, too: a request may wait for it."""
    worker = side(tiny_config, Rank())
    worker.begin(StepPlan(), AdapterStep(6, 5))
    assert worker.report() is None
    worker._adapters = Loads()  # type: ignore[assignment]
    worker.begin(StepPlan(), AdapterStep(7, 6))
    assert worker.report() == WorkerReport(StepReport(), adapters=AdapterReport(7))


def test_reports_of_ranks_are_folded_into_what_all_say() -> None:
    one = WorkerReport(StepReport(), adapters=AdapterReport(3))
    assert one.aggregate(WorkerReport(StepReport(), adapters=AdapterReport(2))) is one
    assert one.adapters == AdapterReport(2)
    one.aggregate(WorkerReport(StepReport()))
    assert one.adapters is None


class _Enough(Exception):
    """The rest of a start is not needed."""


@pytest.mark.parametrize(("rank", "level"), [(0, logging.NOTSET), (1, logging.WARNING)])
def test_one_rank_logs_what_all_would_log_alike(
    tiny_config: Any, monkeypatch: pytest.MonkeyPatch, rank: int, level: int
) -> None:
    def stop(*args: Any, **more: Any) -> None:
        raise _Enough

    worker = side(tiny_config)
    monkeypatch.setattr(worker, "_layouts", lambda caches: {})
    monkeypatch.setattr(worker, "_shards", lambda: (["first", "second"], rank))
    monkeypatch.setattr(kv_worker, "introduce", stop)
    monkeypatch.setattr(worker, "_identity", stop)
    try:
        with pytest.raises(_Enough):
            worker.register({})
        assert logging.getLogger(ENGINE_LOG).level == level
    finally:
        logging.getLogger(ENGINE_LOG).setLevel(logging.NOTSET)
