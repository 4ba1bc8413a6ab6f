"""Ends of loads, reported by request through `get_transfer_results`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker import kv_connector_model_runner_mixin as first_runner

from lab.books import check
from s3kv.connectors.kv_translate import PlanMetadata
from s3kv.messages import EMPTY_PLAN, CopyPart, LoadJob, SaveJob, StepPlan, StepReport
from s3kv.types import ChunkKey, Outcome
from tests.contract.test_kv import connector
from tests.contract.test_kv_scheduler import ended, looked_up, output, request, step
from tests.contract.test_kv_scheduler import side as scheduler_side
from tests.contract.test_kv_worker import side


class Rank:
    """Ends loads as in `ends`. breaks: raise, as a bug of ours would."""

    is_quiet = False

    def __init__(self) -> None:
        self.ends: dict[str, bool] = {}
        self.breaks = False
        self.counters: dict[str, int] = {"internal_errors": 0}
        self.saved = 0
        self._loading: set[str] = set()

    def begin(self, plan: StepPlan) -> None:
        pass

    def save(self, orders: Any, *, read_first: bool) -> None:
        self.saved += len(orders)

    def take_report(self) -> StepReport:
        return StepReport(number=self.saved)

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


def load(name: str, *blocks: int) -> LoadJob:
    """Of two parts, as of two chunks."""
    parts = (CopyPart(0, 0, 0, blocks[:1]), CopyPart(0, 1, 0, blocks[1:]))
    return LoadJob(name, parts)


class Steps:
    """A worker's connector, called as vLLM's runner calls it in a step."""

    def __init__(self, vllm_config: Any) -> None:
        self.rank = Rank()
        self.worker = side(vllm_config, self.rank)
        self.connector = connector(KVConnectorRole.WORKER, self.worker)

    def step(self, plan: StepPlan = EMPTY_PLAN) -> tuple[set[str], set[str]]:
        """Requests whose load has ended, and those whose load has failed."""
        self.connector.handle_preemptions(PlanMetadata(plan))
        self.connector.bind_connector_metadata(PlanMetadata(plan))
        self.connector.start_load_kv(SimpleNamespace())  # type: ignore[arg-type]
        results = self.connector.get_transfer_results(set())
        assert not self.connector.get_block_ids_with_load_errors(), "they would be reported twice"
        self.connector.clear_connector_metadata()
        assert not results.finished_sending, "no block waits for an upload"
        return results.finished_recving or set(), results.failed_recving


@pytest.fixture
def steps(tiny_config: Any) -> Steps:
    return Steps(tiny_config)


def test_every_load_ends_once_and_a_failed_one_as_failed(steps: Steps) -> None:
    assert steps.step(StepPlan(loads=(load("good", 1, 2), load("bad", 3, 4)))) == (set(), set())
    steps.rank.ends = {"good": True, "bad": False}
    assert steps.step() == ({"good", "bad"}, {"bad"})
    assert steps.step() == (set(), set())


@pytest.mark.parametrize("when", ["ordered", "polled", "abandoned"])
def test_a_load_that_a_bug_strands_ends_as_failed(steps: Steps, when: str) -> None:
    plan = StepPlan(loads=(load("r", 3, 4),))
    if when == "abandoned":
        plan = StepPlan(abandons=("r",))
    elif when == "ordered":
        steps.worker.broken = "_begin"
    assert steps.step(plan) == (set(), set())
    steps.rank.breaks = when == "polled"
    assert steps.step() == ({"r"}, {"r"})
    assert steps.step() == (set(), set())


SAVE = SaveJob(1, ChunkKey(0, b"k" * 32), 1, (2,))


@pytest.mark.parametrize("handling", [False, True], ids=["plain", "within an error's handler"])
def test_a_step_that_fails_saves_nothing_and_loses_no_report(
    steps: Steps, handling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's first runner calls the hooks of a step that fails, and discards their answers: the KV
    of the layers that have not run is that of another request."""
    monkeypatch.setattr(first_runner, "get_kv_transfer_group", lambda: steps.connector)
    monkeypatch.setattr(first_runner, "get_forward_context", SimpleNamespace)

    def run(plan: StepPlan, error: Exception | None = None) -> Any:
        metadata = PlanMetadata(plan)
        output: Any = SimpleNamespace(
            kv_connector_metadata=metadata, has_sync_kv_loads=False, finished_req_ids=set()
        )
        steps.connector.handle_preemptions(metadata)
        with first_runner.KVConnectorModelRunnerMixin._get_kv_connector_output(output) as answer:
            if error is not None:
                raise error
        return answer

    @contextlib.contextmanager
    def caller() -> Iterator[None]:
        """Of an engine in the process: it may be about to deal with an error of its own."""
        if not handling:
            yield
            return
        try:
            int("")
        except ValueError:
            yield

    with caller():
        steps.rank.ends = {"r": True}
        with pytest.raises(ZeroDivisionError):
            run(StepPlan(saves=(SAVE,)), ZeroDivisionError())
        assert steps.rank.saved == 0
        answer = run(StepPlan(saves=(SAVE,)))
        assert answer.finished_recving == {"r"}
        assert answer.kv_connector_worker_meta.report.number == steps.rank.saved == 1


def test_a_load_that_a_failed_step_passes_over_ends_as_failed(steps: Steps) -> None:
    """vLLM's second runner starts loads after the forward, and then not at all."""
    steps.connector.handle_preemptions(PlanMetadata(StepPlan(loads=(load("r", 3, 4),))))
    assert steps.step() == ({"r"}, {"r"})
    assert steps.step() == (set(), set())


@pytest.mark.parametrize("failing", [0, 1])
def test_the_scheduler_computes_what_failed_on_any_rank(failing: int) -> None:
    """vLLM holds a failure back until the last rank has ended the load."""
    scheduler, subject = scheduler_side(), request("r")
    looked_up(scheduler, subject)
    scheduler.on_output(output(ended(scheduler.plan(step()), Outcome.OK, Outcome.OK)))
    assert scheduler.lookup(subject, 16) == (48, True)
    blocks = SimpleNamespace(get_block_ids=lambda: ([9, 5, 6, 7],))
    scheduler.admitted(subject, blocks, 48)  # type: ignore[arg-type]
    scheduler.plan(step())
    ranks = KVOutputAggregator(2)
    for rank in range(2):
        told = KVConnectorOutput(
            finished_recving={"r"}, failed_recving={"r"} if rank == failing else set()
        )
        outputs = [ModelRunnerOutput([], {}), ModelRunnerOutput([], {})]
        outputs[rank].kv_connector_output = told
        scheduler.on_output(ranks.aggregate(outputs, 0).kv_connector_output)
    assert scheduler.planner.counters["loads_failed"] == 1
    assert scheduler.lookup(subject, 0) == (0, False), "the answer is a miss by now"
    assert scheduler.broken is None
    check(scheduler.planner)
