"""An offered chunk stays where it is until nobody can want it any more, and no longer."""

from __future__ import annotations

import pytest

from s3kv.messages import LoadOrder, LoadPart
from s3kv.planning.kv import NOTHING, WAIT, Answer
from tests.planning.desk import MISSING, Desk, load_slots


def offered(**setup: object) -> Desk:
    """Two chunks are offered to "r"; host memory has no other slot."""
    desk = Desk(**{"slots": 2, **setup})
    desk.make_resident("aaaabbbb")
    desk.add("r", "aaaabbbbzz")
    assert desk.lookup("r") == Answer(False, 8)
    return desk


def loading(**setup: object) -> tuple[Desk, LoadOrder]:
    desk = offered(**setup)
    desk.admit("r", [10, 11, 12, 13, 14], 8)
    (load,) = desk.plan().loads
    return desk, load


def assert_full_for_others(desk: Desk) -> None:
    desk.add("intruder", "xxxx")
    assert desk.lookup("intruder") == NOTHING
    assert desk.plan().fetches == ()
    desk.planner.finished("intruder")


def assert_free_for_others(desk: Desk) -> None:
    assert desk.pinned() == 0
    desk.add("successor", "yyyyzzzz")
    assert desk.lookup("successor") == WAIT
    assert len(desk.plan().fetches) == 2


def test_an_offer_stands_until_the_engine_decides() -> None:
    desk = offered()
    assert_full_for_others(desk)
    assert desk.lookup("r") == Answer(False, 8), "could not be placed and is asked about again"
    assert_full_for_others(desk)


def test_a_load_is_of_the_offered_chunks_into_the_blocks_given() -> None:
    desk, load = loading()
    slots = [desk.planner.ledger.slots.lookup(desk.key(p)) for p in ("aaaa", "aaaabbbb")]
    assert all(slots)
    assert load == LoadOrder(
        "r",
        (
            LoadPart(0, slots[0].number, 0, (10, 11)),  # type: ignore[union-attr]
            LoadPart(0, slots[1].number, 0, (12, 13)),  # type: ignore[union-attr]
        ),
    )
    assert desk.plan().loads == (), "it is ordered once"


def test_a_local_hit_in_the_middle_of_a_chunk_loads_the_rest_of_it() -> None:
    desk = Desk()
    desk.make_resident("aaaabbbb")
    desk.add("r", "aaaabbbbzz")
    assert desk.lookup("r", local_tokens=2) == Answer(False, 6)
    desk.admit("r", [10, 11, 12, 13, 14], 6)
    (load,) = desk.plan().loads
    assert [(part.first_block, part.block_ids) for part in load.parts] == [
        (1, (11,)),
        (0, (12, 13)),
    ]


def test_the_engine_may_take_less_than_it_was_offered() -> None:
    desk = offered()
    desk.admit("r", [10, 11, 12], 6)
    (load,) = desk.plan().loads
    assert [part.block_ids for part in load.parts] == [(10, 11), (12,)]
    desk.planner.loaded(["r"])
    assert_free_for_others(desk)


def test_a_load_keeps_its_chunks_until_its_end() -> None:
    desk, _ = loading()
    assert_full_for_others(desk)
    desk.admit("r", [10, 11, 12, 13, 14])  # the engine admits again, without tokens
    assert_full_for_others(desk)
    desk.planner.loaded(["r"])
    assert_free_for_others(desk)


def test_a_request_that_finishes_while_loading_keeps_its_chunks_until_the_load_ends() -> None:
    desk, load = loading()
    desk.planner.finished("r")
    assert_full_for_others(desk)
    assert len(set(load_slots(load))) == desk.pinned() == 2
    desk.planner.loaded(["r"], failed=["r"])
    assert_free_for_others(desk)


def test_an_admission_without_tokens_gives_the_offer_back() -> None:
    desk = offered()
    desk.admit("r", [10, 11, 12, 13, 14])
    assert_free_for_others(desk)


def test_a_request_aborted_with_an_offer_gives_it_back() -> None:
    desk = offered()
    desk.planner.finished("r")
    assert_free_for_others(desk)


@pytest.mark.parametrize("asked", [False, True])
def test_a_request_aborted_while_chunks_arrive_gives_them_back(asked: bool) -> None:
    desk = Desk(slots=2)
    desk.add("r", "aaaabbbb")
    desk.planner.prefetch("r", 0, 0.0)
    if asked:
        assert desk.lookup("r") == WAIT
    fetches = desk.plan().fetches
    desk.end(fetches[0])
    assert desk.pinned() == 1, "leased on arrival"
    desk.planner.finished("r")
    desk.end(fetches[1])
    assert_free_for_others(desk)


def test_a_request_that_was_never_asked_about_leaves_nothing() -> None:
    desk = Desk(slots=2)
    desk.make_resident("aaaabbbb")
    desk.add("r", "aaaabbbb")
    desk.planner.prefetch("r", 0, 0.0)
    assert desk.pinned() == 2
    desk.planner.finished("r")
    assert_free_for_others(desk)


def test_after_a_failed_load_the_next_answer_is_a_miss() -> None:
    desk, _ = loading()
    desk.planner.loaded(["r"], failed=["r"])
    assert desk.lookup("r") == NOTHING
    desk.admit("r", [10, 11, 12, 13, 14])
    assert desk.planner.counters["loads_failed"] == 1
    plan = desk.run("r", [10, 11, 12, 13, 14], 0, 10, new=True)
    assert plan.saves == (), "nor is anything of it saved"


@pytest.mark.parametrize("again", ["aborted", "placed", "loaded"])
def test_a_preempted_request_is_offered_its_prefix_anew(again: str) -> None:
    desk, first = loading()
    desk.planner.loaded(["r"])
    desk.admit("r", [10, 11, 12, 13, 14])
    desk.run("r", [10, 11, 12, 13, 14], 8, 2, new=True)
    assert desk.lookup("r") == Answer(False, 8), "preempted: the engine has none of it any more"
    assert_full_for_others(desk)
    if again == "aborted":
        desk.planner.finished("r")
    elif again == "placed":
        desk.admit("r", [20, 21, 22, 23, 24])
    else:
        desk.admit("r", [20, 21, 22, 23, 24], 8)
        (second,) = desk.plan().loads
        assert load_slots(second) == load_slots(first)
        desk.planner.loaded(["r"])
    assert_free_for_others(desk)


def test_a_preempted_request_whose_chunks_have_left_waits_for_them_again() -> None:
    desk = Desk(slots=1)
    desk.make_resident("aaaa")
    desk.add("r", "aaaazz")
    assert desk.lookup("r") == Answer(False, 4)
    desk.admit("r", [1, 2, 3], 4)
    desk.plan()
    desk.planner.loaded(["r"])
    desk.make_resident("xxxx")
    assert desk.lookup("r") == WAIT
    desk.end(desk.plan().fetches, MISSING)
    assert desk.lookup("r") == NOTHING


def test_hits_are_counted_by_where_they_came_from() -> None:
    desk = Desk(probe_chunks=1)
    desk.make_resident("aaaa")
    desk.add("r", "aaaabbbbzz")
    assert desk.lookup("r") == WAIT
    desk.end(desk.plan().fetches)
    assert desk.lookup("r", local_tokens=2) == Answer(False, 6)
    desk.admit("r", [0, 1, 2, 3, 4], 6)
    assert desk.planner.bucket_tokens("r", 6) == 4
    assert desk.planner.counters["hit_tokens_bucket"] == 4
    assert desk.planner.counters["hit_tokens_host"] == 2
