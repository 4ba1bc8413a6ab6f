"""How the ends of loads are told: through the hooks that the installed vLLM calls for it.

vLLM 0.29 calls `get_finished` and `get_block_ids_with_load_errors`; from 0.30 on
`get_transfer_results`, whose default would call `get_finished`, and the blocks as well.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.outputs import KVConnectorOutput

from s3kv.config import Config
from s3kv.connectors.kv import S3KVConnector
from s3kv.connectors.kv_scheduler import SchedulerSide
from s3kv.connectors.kv_translate import KVGeometry, PlanMetadata, WorkerHello
from s3kv.messages import EMPTY_PLAN, JobEnd, JobKind, LoadOrder, LoadPart, LostLoad, StepPlan
from s3kv.types import Outcome
from tests.contract.test_kv_scheduler import output, request, step
from tests.contract.test_kv_worker import connector, side
from tests.contract.test_vllm_api import VERSION

BY_BLOCK = VERSION < (0, 30)


class Rank:
    """Loads whatever it is told to; `ends` says how, and `breaks` what a bug of ours would do."""

    is_quiet = False

    def __init__(self) -> None:
        self.ends: dict[str, bool] = {}
        self.breaks = False
        self.counters: dict[str, int] = {"internal_errors": 0}
        self._loading: set[str] = set()

    def load(self, orders: Any, *, from_now: bool) -> None:
        self._loading |= {order.request_id for order in orders}

    def poll(self, linger_s: float) -> None:
        if self.breaks:
            raise RuntimeError("a bug")

    def take_loaded(self) -> tuple[set[str], set[str]]:
        ended, self.ends = self.ends, {}
        self._loading -= set(ended)
        return set(ended), {name for name, ok in ended.items() if not ok}

    def give_up_loads(self) -> set[str]:
        return self._loading


def load(name: str, *blocks: int) -> LoadOrder:
    """Of two parts, as of two chunks."""
    parts = (LoadPart(0, 0, 0, blocks[:1]), LoadPart(0, 1, 0, blocks[1:]))
    return LoadOrder(name, parts)


class Steps:
    """A worker's connector, called as vLLM's runner calls it in a step."""

    def __init__(self, vllm_config: Any) -> None:
        self.rank = Rank()
        self.worker = side(vllm_config, self.rank)  # type: ignore[arg-type]
        self.connector: S3KVConnector = connector(self.worker)

    def step(self, plan: StepPlan = EMPTY_PLAN) -> tuple[set[str], set[str], set[int]]:
        """Requests whose load has ended, those told of as failed, and blocks told of as such."""
        self.connector.bind_connector_metadata(PlanMetadata(plan))
        self.connector.start_load_kv(SimpleNamespace())  # type: ignore[arg-type]
        failed: set[str] = set()
        if BY_BLOCK:
            sent, received = self.connector.get_finished(set())
        else:
            results = self.connector.get_transfer_results(set())
            sent, received = results.finished_sending, results.finished_recving
            failed = results.failed_recving
        blocks = self.connector.get_block_ids_with_load_errors()
        self.connector.clear_connector_metadata()
        assert not sent, "no block waits for an upload"
        return received or set(), failed, blocks


@pytest.fixture
def steps(tiny_config: Any) -> Steps:
    return Steps(tiny_config)


def test_every_load_ends_once_and_a_failed_one_is_told_as_this_vllm_wants_it(steps: Steps) -> None:
    assert steps.step(StepPlan(loads=(load("good", 1, 2), load("bad", 3, 4)))) == (
        set(),
        set(),
        set(),
    )
    steps.rank.ends = {"good": True, "bad": False}
    ended, failed, blocks = steps.step()
    assert ended == {"good", "bad"}
    assert failed == (set() if BY_BLOCK else {"bad"})
    assert blocks == ({3, 4} if BY_BLOCK else set())
    assert steps.step() == (set(), set(), set())


@pytest.mark.parametrize("when", ["ordered", "polled", "abandoned"])
def test_a_load_that_a_bug_strands_ends_as_failed(steps: Steps, when: str) -> None:
    if when == "abandoned":
        plan = StepPlan(abandons=(LostLoad("r", (3, 4)),))
        ended, failed, blocks = steps.step(plan)
    else:
        if when == "polled":
            steps.step(StepPlan(loads=(load("r", 3, 4),)))
            steps.rank.breaks = True
            ended, failed, blocks = steps.step()
        else:
            steps.worker.broken = "begin"
            ended, failed, blocks = steps.step(StepPlan(loads=(load("r", 3, 4),)))
    assert ended == {"r"}
    assert (failed, blocks) == ((set(), {3, 4}) if BY_BLOCK else ({"r"}, set()))
    assert steps.step() == (set(), set(), set())


def test_vllm_asks_the_hook_of_its_version() -> None:
    assert hasattr(KVConnectorBase_V1, "get_transfer_results") == (not BY_BLOCK)


@pytest.mark.parametrize("ranks_apart", [False, True])
def test_the_scheduler_computes_what_failed_on_any_rank(ranks_apart: bool) -> None:
    """A rank may tell of the failure some steps before the last one has ended the load."""
    scheduler = SchedulerSide(
        Config(bucket="bucket", recompute_gate=False),
        KVGeometry(16, 16, 32),
        may_load=True,
        may_save=True,
    )
    scheduler.set_workers([WorkerHello("n" * 32, slot_count=8, slot_bytes=4096)], 1)
    subject = request("r")
    scheduler.on_new_request(subject)
    scheduler.lookup(subject, 0)
    fetches = scheduler.plan(step()).fetches
    arrived = [JobEnd(f.job_id, JobKind.FETCH, Outcome.OK, 1, 0.1) for f in fetches]
    scheduler.on_output(output(arrived))
    assert scheduler.lookup(subject, 16) == (48, True)
    blocks = SimpleNamespace(get_block_ids=lambda: ([9, 5, 6, 7],))
    scheduler.admitted(subject, blocks, 48)  # type: ignore[arg-type]
    scheduler.plan(step())
    told: dict[str, Any] = (
        {"invalid_block_ids": {5, 6, 7}} if BY_BLOCK else {"failed_recving": {"r"}}
    )
    if ranks_apart and BY_BLOCK:  # later versions hold the failure back themselves
        scheduler.on_output(KVConnectorOutput(**told))
        told = {}
    scheduler.on_output(KVConnectorOutput(finished_recving={"r"}, **told))
    assert scheduler.planner.counters["loads_failed"] == 1
    assert scheduler.lookup(subject, 0) == (0, False), "the answer is a miss by now"
    assert scheduler.broken is None
    scheduler.planner.check()


def test_a_shared_block_of_the_prefix_is_not_told_of_as_failed() -> None:
    """Block 9 above is the engine's own: others may compute with it."""
    scheduler = SchedulerSide(
        Config(bucket="bucket"), KVGeometry(16, 16, 32), may_load=True, may_save=True
    )
    scheduler.set_workers([WorkerHello("n" * 32, slot_count=8, slot_bytes=4096)], 1)
    subject = request("r")
    scheduler.on_new_request(subject)
    scheduler.lookup(subject, 16)
    blocks = SimpleNamespace(get_block_ids=lambda: ([9, 5, 6, 7],))
    scheduler.admitted(subject, blocks, 48)  # type: ignore[arg-type]  # never offered: a bug
    (lost,) = scheduler.plan(step()).abandons
    assert lost == LostLoad("r", (5, 6, 7))
