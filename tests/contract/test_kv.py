"""The KV connector as vLLM calls it: one class, of which each process has one side.

For the parameters of its hooks see test_vllm_api.py, for loads and their ends test_load_results.py.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from lab import models
from s3kv.connectors import S3KVConnector
from s3kv.connectors.adapter_loads import AdapterStep
from s3kv.connectors.kv_scheduler import SchedulerSide
from s3kv.connectors.kv_translate import PlanMetadata, WorkerHandshake
from s3kv.connectors.kv_worker import WorkerSide
from s3kv.connectors.plugin import register
from s3kv.messages import EMPTY_PLAN, StepPlan
from tests.contract.configurations import FULL, configured, groups
from tests.contract.test_kv_scheduler import HANDSHAKE, looked_up, request, step
from tests.plans import fetches_of
from tests.versions import since


def connector(role: KVConnectorRole, side: Any) -> S3KVConnector:
    made = S3KVConnector.__new__(S3KVConnector)
    made._role, made._connector_metadata = role, None
    setattr(made, "_scheduler" if role is KVConnectorRole.SCHEDULER else "_worker", side)
    return made


def test_a_step_takes_its_plan_to_the_worker() -> None:
    side, plan = Mock(spec=WorkerSide), StepPlan(linger_s=0.5)
    worker = connector(KVConnectorRole.WORKER, side)
    worker.wait_for_save()
    metadata = PlanMetadata(plan, AdapterStep(3, 2))
    worker.handle_preemptions(metadata)
    worker.bind_connector_metadata(metadata)
    worker.wait_for_save()
    assert side.mock_calls == [
        call.save(EMPTY_PLAN),  # nothing is bound in a step without a scheduler's plan
        call.begin(plan, AdapterStep(3, 2)),
        call.save(plan),
    ]


def test_the_schedulers_plan_is_numbered_and_handshakes_of_other_connectors_left_out() -> None:
    plan, handshake = StepPlan(linger_s=0.5), WorkerHandshake("namespace", 8, 4096)
    side = Mock(spec=SchedulerSide)
    side.plan.return_value = plan
    side.adapters = SimpleNamespace(next_step=lambda: AdapterStep(3, 2))
    scheduler = connector(KVConnectorRole.SCHEDULER, side)
    step: Any = SimpleNamespace()
    assert scheduler.build_connector_meta(step) == PlanMetadata(plan, AdapterStep(3, 2))
    scheduler.set_xfer_handshake_metadata({0: handshake, 1: step})
    assert side.mock_calls == [call.plan(step), call.set_workers([handshake])]


EXPERTS = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
TRANSFER: dict[str, Any] = {
    "kv_connector": "S3KVConnector",
    "kv_connector_module_path": "s3kv.connectors",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"bucket": "bucket"},
}


@pytest.mark.parametrize(
    ("ranks", "experts", "pauses"),
    [(1, EXPERTS, True), (2, {}, True), (2, EXPERTS, False)],
    ids=["one rank", "ranks of a dense model", "ranks that exchange tokens"],
)
def test_no_idle_rank_holds_up_ranks_that_wait_for_its_step(
    tmp_path: Path, ranks: int, experts: dict[str, Any], pauses: bool
) -> None:
    """vLLM's engines of a model with experts compute each step together (`execute_dummy_batch`)."""
    path = models.build(tmp_path, models.TINY)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | experts))
    config = configured(path, data_parallel_size=ranks, kv_transfer_config=TRANSFER)
    scheduler = S3KVConnector(config, KVConnectorRole.SCHEDULER, groups(FULL))._scheduler
    scheduler.set_workers([HANDSHAKE])
    assert looked_up(scheduler, request("r", chunks=16)) == (None, False)
    plans = [scheduler.plan(step()) for _ in range(3)]
    assert fetches_of(plans[0])
    assert [plan.linger_s > 0 for plan in plans] == [False, pauses, pauses]
    assert scheduler.broken is None


@pytest.mark.parametrize(
    ("drafts", "ahead", "saves"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_a_session_ends_saves_beside_drafts_that_are_verified_within_the_step(
    tiny_config: Any, drafts: bool, ahead: bool, saves: bool
) -> None:
    config = copy.copy(tiny_config)
    config.kv_transfer_config = KVTransferConfig(**TRANSFER)
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.async_scheduling = ahead
    speculative: Any = SimpleNamespace(use_eagle=lambda: False)
    config.__dict__["speculative_config"] = speculative if drafts else None
    scheduler = S3KVConnector(config, KVConnectorRole.SCHEDULER, groups(FULL))._scheduler
    scheduler.set_workers([HANDSHAKE])
    scheduler.on_new_request(request("session", resumable=True))
    assert (scheduler.planner.may_save, scheduler.broken) == (saves, None)


@since(0, 32, "`CacheHitSource`")
@pytest.mark.parametrize(("bucket", "host"), [(0, 48), (16, 32), (48, 0)])
def test_hits_are_reported_by_their_source(bucket: int, host: int) -> None:
    side = Mock(**{"bucket_tokens.return_value": bucket})
    scheduler = connector(KVConnectorRole.SCHEDULER, side)
    sources = scheduler.get_external_cache_hit_sources(SimpleNamespace(), 48)  # type: ignore[arg-type]
    named = {"HOST": host, "EXTERNAL_UNSPECIFIED": bucket}
    assert {source.name: tokens for source, tokens in sources.items()} == {
        name: tokens for name, tokens in named.items() if tokens
    }


@pytest.mark.parametrize(
    ("role", "hook"), [(KVConnectorRole.SCHEDULER, []), (KVConnectorRole.WORKER, ["shutdown"])]
)
def test_only_a_worker_has_something_to_shut_down(role: KVConnectorRole, hook: list[str]) -> None:
    side = Mock(**{"stats.return_value": "statistics"})
    ours = connector(role, side)
    assert ours.get_kv_connector_stats() == "statistics"  # type: ignore[comparison-overlap]
    ours.shutdown()
    assert [name for name, *_ in side.mock_calls] == ["stats", *hook]


def test_neighbours_choose_the_layout_of_the_kv_cache() -> None:
    """MultiConnector refuses to start connectors that ask for different layouts."""
    register()
    other = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    attention: Any = SimpleNamespace(hisparse_config=None)

    def asked(connectors: list[dict[str, str]]) -> str | None:
        transfer = SimpleNamespace(
            kv_connector_extra_config={"connectors": connectors}, engine_id="e"
        )
        config: Any = SimpleNamespace(kv_transfer_config=transfer, attention_config=attention)
        return MultiConnector.get_required_kvcache_layout(config)

    ours = {"kv_connector": "S3KVConnector", "kv_role": "kv_both"}
    assert asked([ours]) is None
    assert asked([ours, other]) == asked([other])
