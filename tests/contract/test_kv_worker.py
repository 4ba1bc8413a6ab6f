"""The worker's side of the KV connector: what vLLM calls besides loads."""

from __future__ import annotations

import logging
from collections import Counter
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

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
from s3kv.worker.rank import RankWorker
from tests.contract.configurations import FULL, groups
from tests.contract.test_kv import connector
from tests.contract.test_kv_shards import cache_of
from tests.unit.device.simulated import SimulatedGpu
from tests.versions import VERSION

PLAN = StepPlan(
    loads=(LoadJob("r", (CopyPart(0, 0, 0, (1,)),)),),
    saves=(SaveJob(1, ChunkKey(0, b"k" * 32), 1, (2,)),),
)
HANDSHAKE = WorkerHandshake("n" * 32, 8, 4096)


def idle_rank(*, launches: bool = True) -> Mock:
    """A rank that carries out nothing. launches: its copies are launched, and end."""
    rank = Mock(spec=RankWorker, counters=Counter())
    rank.wait_launched.return_value = rank.suspend.return_value = launches
    rank.take_report.return_value = None
    rank.give_up_loads.return_value = set()
    return rank


def calls(rank: Mock) -> list[str]:
    return [name for name, *_ in rank.mock_calls]


def side(vllm_config: Any, rank: Any = None) -> WorkerSide:
    """A worker's side that has not registered."""
    config, cache = Config(bucket="bkt"), groups(FULL)
    worker = WorkerSide(config, vllm_config, cache, geometry(config, vllm_config, cache))
    worker._rank = rank
    return worker


def step(worker: WorkerSide) -> None:
    worker.load(PLAN)
    worker.save(PLAN)


@pytest.fixture
def registered(tiny_config: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[WorkerSide, Mock]:
    """A side whose bucket holds objects, and the calls that wait for the bucket."""
    wait = Mock(return_value=True)
    monkeypatch.setattr(kv_worker, "wait_for_bucket", wait)
    worker = side(tiny_config, idle_rank())
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
    assert [handshake.known for handshake in worker.report().handshakes] == [True]
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


def test_a_worker_that_has_failed_reports_so_in_every_step(tiny_config: Any) -> None:
    rank = idle_rank()
    rank.begin.side_effect = ZeroDivisionError
    worker = side(tiny_config, rank)
    worker.begin(PLAN)
    assert worker.broken == "_begin"
    assert worker.report().broken
    assert worker.report().broken


@pytest.mark.parametrize(("rank", "level"), [(0, logging.NOTSET), (1, logging.WARNING)])
def test_the_first_rank_logs_for_all(
    tiny_config: Any, monkeypatch: pytest.MonkeyPatch, rank: int, level: int
) -> None:
    worker = side(tiny_config)
    monkeypatch.setattr(worker, "_layouts", lambda caches: {})
    monkeypatch.setattr(worker, "_shards", lambda: (["first", "second"], rank))
    monkeypatch.setattr(worker, "_identity", Mock(side_effect=LookupError("this far and no more")))
    try:
        with pytest.raises(LookupError, match="this far"):
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
    subject = connector(KVConnectorRole.WORKER, worker)
    with pytest.raises(UnsupportedError, match=r"copies need \d+ bytes on .* lower gpu_mem"):
        subject.register_kv_caches({"layer.0": cache_of(FULL, "NHC", 10)})
    tiers[0].slab.close()
    worker.shutdown()
    tiers[0].close.assert_called_once_with()


@pytest.mark.parametrize("engine", list(product(("cuda", "cpu"), (True, False), (True, False))))
def test_copies_are_launched_within_the_hook_if_a_sleep_is_not_announced(
    tiny_config: Any, monkeypatch: pytest.MonkeyPatch, engine: tuple[str, bool, bool]
) -> None:
    device, may_sleep, announces_sleep = engine
    monkeypatch.setattr(tiny_config.model_config, "enable_cumem_allocator", may_sleep)
    monkeypatch.setitem(tiny_config.device_config.__dict__, "device_type", device)
    rank = idle_rank()
    monkeypatch.setattr(kv_worker, "ANNOUNCES_SLEEP", announces_sleep)
    step(side(tiny_config, rank))
    launched = ["load", "wait_launched", "save", "wait_launched"]
    assert calls(rank) == (launched if engine == ("cuda", True, False) else ["load", "save"])


def test_copies_that_are_never_launched_are_waited_for_once(
    tiny_config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rank = idle_rank(launches=False)
    worker = side(tiny_config, rank)
    worker._launches_at_once = True
    step(worker)
    step(worker)
    assert rank.wait_launched.call_count == 1
    assert "not launched within" in caplog.text


@pytest.mark.parametrize("writes", [(True, False), (False, True)])
def test_copies_are_ordered_with_what_a_step_writes_around_its_fences(
    tiny_config: Any, monkeypatch: pytest.MonkeyPatch, writes: tuple[bool, bool]
) -> None:
    monkeypatch.setattr(kv_worker, "writes_around_fences", lambda *args: writes)
    rank = idle_rank()
    step(side(tiny_config, rank))
    rank.load.assert_called_once_with(PLAN.loads, from_now=writes[1])
    rank.save.assert_called_once_with(PLAN.saves, read_first=writes[0])


def test_before_a_sleep_copies_end_and_after_it_they_may_begin(
    tiny_config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rank = idle_rank()
    subject = connector(KVConnectorRole.WORKER, side(tiny_config, rank))
    for _ in range(2):
        subject.unregister_kv_caches()
        subject.restore_kv_caches()
    assert calls(rank) == ["suspend", "resume"] * 2
    rank.suspend.return_value = False
    subject.unregister_kv_caches()
    assert "copies did not end" in caplog.text
    unregistered = connector(KVConnectorRole.WORKER, side(tiny_config))
    unregistered.unregister_kv_caches()  # nothing registered: nothing to do


def test_sleep_is_supported_and_its_announcement_detected() -> None:
    assert S3KVConnector.supports_sleep_mode(SimpleNamespace())  # type: ignore[arg-type]
    theirs = {"unregister_kv_caches", "release_kv_caches"} & set(dir(kv.KVConnectorBase_V1))
    assert bool(theirs) == kv_worker.ANNOUNCES_SLEEP == (VERSION >= (0, 33))
    assert S3KVConnector.release_kv_caches is S3KVConnector.unregister_kv_caches


def test_saves_of_an_adapter_that_has_changed_are_refused(tiny_config: Any) -> None:
    """They were planned before the scheduler had the report."""
    rank = idle_rank()
    worker = side(tiny_config, rank)
    for may_save in (True, False, True):
        worker._adapters = Mock(may_save=may_save)
        worker.save(PLAN)
    assert calls(rank) == ["save", "refuse", "save"]


def test_every_step_of_an_engine_with_adapters_is_reported(tiny_config: Any) -> None:
    """An idle one, too: a request may wait for it."""
    worker = side(tiny_config, idle_rank())
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
