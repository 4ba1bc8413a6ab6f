"""The planner never promises what is not there, whatever engine, ranks and network do."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from s3kv.planning.group_kinds import GroupKind, States
from s3kv.planning.ledger import Ledger
from tests.unit.planning.machine import GroupsMachine, PlannerMachine, StatesMachine, run
from tests.unit.planning.oracle import FINDINGS

TestPlanner = PlannerMachine.TestCase
TestPlannerWithGroups = GroupsMachine.TestCase
TestPlannerWithStates = StatesMachine.TestCase
TestPlanner.settings = settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
TestPlannerWithGroups.settings = settings(TestPlanner.settings, max_examples=40)
TestPlannerWithStates.settings = TestPlannerWithGroups.settings


@pytest.mark.parametrize(
    ("holder", "rule", "without"),
    [(States, "is_saved", GroupKind.is_saved), (Ledger, "fences", lambda self, block_ids: set())],
    ids=["a full block is taken for a state", "no fences"],
)
def test_the_machine_with_states_notices_a_missing_rule(
    holder: type, rule: str, without: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder, rule, without)
    with pytest.raises(FINDINGS):
        run(150, machine=StatesMachine)


@pytest.mark.nightly
@pytest.mark.parametrize("machine", [PlannerMachine, GroupsMachine, StatesMachine])
def test_the_machine_gets_everywhere(machine: type[PlannerMachine]) -> None:
    seen = run(examples=1_000, machine=machine)  # with 300, some seeds fail no load
    assert all(
        seen[what] >= 5
        for what in (
            "aborted while running",
            "aborted while waiting",
            "deadline_cuts",
            "evictions",
            "fences that mattered",
            "fetch CANCELLED",
            "fetch OK",
            "fetches_spared",
            "hit_tokens_bucket",
            "hit_tokens_host",
            "loads",
            "preempted",
            "resets",
            "save FAILED",
            "saves_dropped",
            "unplaced offers",
            "upload FAILED",
            "fetch INVALID",
            "uploads_again",
            "uploads_given_up",
        )
    ), seen
    assert seen["aborted while loading"], seen
    assert seen["loads failed"], seen
    if machine is PlannerMachine:  # with groups there are fewer loads to refuse one
        assert seen["resets refused"], seen
