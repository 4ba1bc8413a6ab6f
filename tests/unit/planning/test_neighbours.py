"""Beside another connector, which may load what this one does not, and may be wrong."""

from __future__ import annotations

import pytest

from s3kv.planning.requests import NOTHING, ScheduledRequest
from tests.unit.planning.desk import MISSING, Desk
from tests.unit.planning.test_kv import saving_for_nobody


def test_blocks_another_connector_may_load_to_are_fenced_before_it_does() -> None:
    desk, save = saving_for_nobody()
    assert desk.lookup("next") == NOTHING
    desk.admit("next", [5, 6, 7, 1])
    assert desk.plan().fences == (save.job_id,)


def test_blocks_the_engine_has_itself_are_not_fenced() -> None:
    desk, _ = saving_for_nobody()
    assert desk.ask("same", "aaaazz", local_tokens=4) == NOTHING
    desk.admit("same", [0, 1, 2])
    assert desk.plan().fences == ()


def test_nothing_is_saved_of_what_is_loaded_while_the_step_runs() -> None:
    desk = Desk()
    desk.ask("r", "aaaabbbbcccc")
    desk.admit("r", range(6))
    assert desk.run("r", range(6), 4, 4, new=True).saves == ()
    assert desk.run("r", [], 8, 4, new=False).saves == ()
    assert desk.lookup("r") == NOTHING


def test_what_was_loaded_before_the_step_is_saved() -> None:
    """As NIXL does: a request is scheduled when its load has gone well."""
    desk = Desk(may_load=False)
    desk.ask("r", "aaaabbbbcccc")
    desk.admit("r", range(4))
    assert desk.plan().saves == ()
    desk.planner.loaded(["r"])
    desk.admit("r", range(6))
    assert len(desk.run("r", range(6), 8, 4, new=True).saves) == 3


def test_a_planner_that_takes_over_serves_whoever_comes_from_then_on() -> None:
    early = Desk(may_load=False, may_save=False)
    early.add("first", "aaaabbbb")
    early.lookup("first")
    early.admit("first", range(4))
    assert early.run("first", range(4), 0, 4, new=True).saves == ()
    desk = Desk(may_load=False)
    desk.hashes = early.hashes
    desk.planner.adopt(early.planner)
    desk.ask("second", "bbbb")
    desk.admit("second", [4, 5])
    (save,) = desk.run("second", [4, 5], 0, 4, new=True).saves
    desk.planner.finished("second")
    # The first one goes on, is fenced, and neither saved nor looked up. Its blocks are not known.
    assert desk.plan(ScheduledRequest("first", (), False, 4, 4)).saves == ()
    assert desk.planner.counters["saves_doubtful"] == 1
    plan = desk.run("first", [5], 4, 4, new=False)
    assert plan.saves == ()
    assert plan.fences == (save.job_id,)
    assert desk.lookup("first") == NOTHING
    desk.planner.finished("first")


def another_loads(desk: Desk) -> ScheduledRequest:
    """Another connector loads the first eight tokens of "a" within the step, into blocks 1 to 4."""
    assert desk.ask("a", "aaaabbbbcc") == NOTHING
    desk.admit("a", [1, 2, 3, 4, 5])
    return ScheduledRequest("a", ([1, 2, 3, 4, 5],), True, 8, 2)


def shares(desk: Desk) -> ScheduledRequest:
    """The engine has these tokens for "b" in its own cache: they are the same blocks."""
    assert desk.ask("b", "aaaabbbbdddd", local_tokens=8) == NOTHING
    desk.admit("b", [1, 2, 3, 4, 6, 7])
    return ScheduledRequest("b", ([1, 2, 3, 4, 6, 7],), True, 8, 4)


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_what_is_loaded_while_the_step_runs_is_not_saved_for_another_request(order: slice) -> None:
    desk = Desk(may_load=False)
    steps = [another_loads(desk), shares(desk)]
    assert desk.plan(*steps[order]).saves == ()


def test_a_hit_that_ends_within_a_block_is_no_load() -> None:
    """Lookups are told of whole blocks; the engine copies the one that the hit ends in. Whether it
    copies what another connector loads is not known."""
    desk = Desk(may_load=False, block_tokens=4)
    steps = []
    for name, blocks in [("a", [1, 2]), ("b", [3, 4]), ("c", [5, 6])]:
        desk.ask(name, name * 8)
        desk.admit(name, blocks)
        steps.append(ScheduledRequest(name, (blocks,), True, 2, 6))
    copied = frozenset({1, 3})
    assert len(desk.planner.plan(steps[:1], 0.0, copied, copied).saves) == 2
    desk.lookup("b")
    desk.lookup("c")
    assert desk.planner.plan(steps[1:], 0.0, copied, copied).saves == ()


def test_nor_is_it_saved_in_the_next_step() -> None:
    """It may be planned before the engine knows how the load has ended."""
    desk = Desk(may_load=False)
    desk.plan(another_loads(desk))
    assert desk.plan(shares(desk)).saves == ()


def test_blocks_that_are_computed_are_saved_again() -> None:
    desk = Desk(may_load=False)
    desk.plan(another_loads(desk))
    desk.planner.finished("a")
    desk.ask("b", "xxxxyyyy")
    desk.admit("b", [1, 2, 3, 4])
    assert len(desk.run("b", [1, 2, 3, 4], 0, 8, new=True).saves) == 2


def test_blocks_that_are_loaded_from_here_are_trusted_again() -> None:
    desk = Desk()
    desk.make_resident("xxxxyyyy")
    desk.end(desk.fetches_for("a", "aaaabbbbcc"), MISSING)
    assert desk.lookup("a") == NOTHING
    desk.admit("a", [1, 2, 3, 4, 5])
    desk.run("a", [1, 2, 3, 4, 5], 8, 2, new=True)
    desk.planner.finished("a")
    desk.add("b", "xxxxyyyyzzzz")
    while desk.lookup("b").wait:
        desk.end(desk.fetches(), MISSING)
    desk.admit("b", [1, 2, 3, 4], 8)
    desk.plan()
    desk.planner.loaded(["b"])
    desk.admit("b", [1, 2, 3, 4, 6, 7])
    assert len(desk.run("b", [1, 2, 3, 4, 6, 7], 8, 4, new=True).saves) == 1
