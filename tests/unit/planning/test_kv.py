"""What the planner offers, loads and saves: an offered chunk stays where it is until nobody can
want it any more, and a chunk is saved once, from blocks that hold it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lab.books import check
from s3kv.messages import BucketJob, JobKind, LoadJob, SaveJob
from s3kv.planning.requests import NOTHING, WAIT, Answer, ScheduledRequest
from s3kv.types import Outcome
from tests.unit.planning.desk import FAILED, MISSING, OK, Desk, load_slots, saving


def offered(**setup: object) -> Desk:
    """Two chunks are offered to "r"; host memory has no other slot."""
    desk = Desk(**{"slots": 2, **setup})
    desk.make_resident("aaaabbbb")
    assert desk.ask("r", "aaaabbbbzz") == Answer(False, 8)
    return desk


def loading(**setup: object) -> tuple[Desk, LoadJob]:
    desk = offered(**setup)
    desk.admit("r", [10, 11, 12, 13, 14], 8)
    (load,) = desk.plan().loads
    return desk, load


def assert_full_for_others(desk: Desk) -> None:
    assert desk.ask("intruder", "xxxx") == NOTHING
    assert desk.fetches() == ()
    desk.planner.finished("intruder")


def assert_free_for_others(desk: Desk) -> None:
    assert desk.pinned() == 0
    assert len(desk.fetches_for("successor", "yyyyzzzz")) == 2


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


def test_after_a_failed_load_the_next_answer_is_a_miss() -> None:
    desk, _ = loading()
    desk.planner.loaded(["r"], failed=["r"])
    assert desk.lookup("r") == NOTHING
    desk.admit("r", [10, 11, 12, 13, 14])
    assert desk.planner.counters["loads_failed"] == 1
    plan = desk.run("r", [10, 11, 12, 13, 14], 0, 10, new=True)
    assert plan.saves == (), "nor is anything of it saved"


def test_a_preempted_request_whose_chunks_have_left_waits_for_them_again() -> None:
    desk = Desk(slots=1)
    desk.make_resident("aaaa")
    assert desk.ask("r", "aaaazz") == Answer(False, 4)
    desk.admit("r", [1, 2, 3], 4)
    desk.plan()
    desk.planner.loaded(["r"])
    desk.make_resident("xxxx")
    assert desk.lookup("r") == WAIT
    desk.end(desk.fetches(), MISSING)
    assert desk.lookup("r") == NOTHING


def test_hits_are_counted_by_where_they_came_from() -> None:
    desk = Desk(probe_chunks=1)
    desk.make_resident("aaaa")
    assert desk.ask("r", "aaaabbbbzz") == WAIT
    desk.end(desk.fetches())
    assert desk.lookup("r", local_tokens=2) == Answer(False, 6)
    desk.admit("r", [0, 1, 2, 3, 4], 6)
    assert desk.planner.bucket_tokens("r", 6) == 4
    assert desk.planner.counters["hit_tokens_bucket"] == 4
    assert desk.planner.counters["hit_tokens_host"] == 2


@pytest.mark.parametrize("bar", [lambda d: d.planner.bar(["r"]), lambda d: d.planner.reset(b"s")])
@pytest.mark.parametrize("moment", ["queued", "waiting", "offered", "loading"])
def test_a_barred_request_neither_loads_nor_saves_any_more(
    bar: Callable[[Desk], None], moment: str
) -> None:
    """Its tokens no longer say what it is computed with. A load under way is of before."""
    blocks = [10, 11, 12, 13, 14]
    if moment == "loading":
        desk, _ = loading(slots=2)
    elif moment == "offered":
        desk = offered(slots=2)
    else:
        desk = Desk(slots=2)
        desk.add("r", "aaaabbbbzz")
        if moment == "waiting":
            assert desk.lookup("r") == WAIT
            desk.end(desk.fetches()[0])
            assert desk.pinned() == 1
    bar(desk)
    assert desk.pinned() == (2 if moment == "loading" else 0)
    if moment == "loading":
        desk.planner.loaded(["r"])
    assert desk.lookup("r") == NOTHING
    desk.admit("r", blocks)
    assert desk.run("r", blocks, 0, 10, new=True).saves == ()
    assert desk.planner.counters["saves_doubtful"] == {"queued": 2, "waiting": 1}.get(moment, 0)
    assert desk.pinned() == 0
    desk.planner.finished("r")
    check(desk.planner)


def test_beyond_max_saves_inflight_they_are_dropped_and_counted() -> None:
    desk = Desk(may_load=False, max_saves_inflight=1)
    (save,) = desk.compute("r", "aaaabbbbcccc", range(6), 0, 12).saves
    assert desk.planner.counters["saves_dropped"] == 2
    desk.copied(save)
    assert desk.compute("next", "dddd", [6, 7], 0, 4).saves == (), "it is not in the bucket yet"
    desk.uploaded(save)
    assert len(desk.compute("last", "eeee", [8, 9], 0, 4).saves) == 1


def computed_while_fetched(**setup: object) -> tuple[Desk, BucketJob, SaveJob]:
    """The only step of a request has computed two chunks; the second is still being fetched."""
    desk = Desk(**{"probe_chunks": 2, **setup})
    first, fetch = desk.fetches_for("r", "aaaabbbbzzzz")
    desk.end(first, MISSING)
    assert not desk.lookup("r").wait
    desk.admit("r")
    first_save, save = desk.run("r", [0, 1, 2, 3], 0, 8, new=True).saves
    desk.planner.finished("r")
    assert (save.key, save.block_ids) == (fetch.key, (2, 3))
    assert len({first_save.slot, save.slot, fetch.slot}) == 3, "the fetch may still write"
    desk.copied(first_save)
    desk.uploaded(first_save)
    return desk, fetch, save


@pytest.mark.parametrize("outcome", [OK, MISSING, FAILED, Outcome.CORRUPT, Outcome.CANCELLED])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1, 2, 0)])
def test_a_chunk_computed_during_its_fetch_is_saved_beside_it(
    outcome: Outcome, order: tuple[int, ...]
) -> None:
    desk, fetch, save = computed_while_fetched()
    ends = (
        lambda: desk.end(fetch, outcome),
        lambda: desk.copied(save),
        lambda: desk.uploaded(save, Outcome.EXISTS if outcome is OK else OK),
    )
    for number in order:
        ends[number]()
    assert desk.ask("next", "aaaabbbbzz") == Answer(False, 8)
    assert desk.planner.ledger.index.is_present(save.key)
    assert desk.planner.counters["saves_dropped"] == 0


def test_a_request_that_waits_for_the_fetch_takes_the_copy() -> None:
    desk, fetch, save = computed_while_fetched()
    assert desk.ask("next", "aaaabbbbzz") == Answer(False, 4), "the copy is under way"
    desk.copied(save)
    assert desk.lookup("next") == Answer(False, 8)
    desk.end(fetch, MISSING)
    assert desk.lookup("next") == Answer(False, 8)


def test_a_request_that_has_joined_the_fetch_takes_the_copy() -> None:
    desk = Desk(probe_chunks=1)
    for request_id in ("r", "next"):
        assert desk.ask(request_id, "aaaazz") == WAIT
    (fetch,) = desk.fetches()
    desk.admit("r")  # the engine may admit without an answer
    (save,) = desk.run("r", [0, 1], 0, 4, new=True).saves
    desk.copied(save)
    desk.end(fetch, MISSING)
    assert desk.lookup("next") == Answer(False, 4)
    assert desk.planner.bucket_tokens("next", 4) == 0


def test_a_copy_that_fails_beside_a_fetch_leaves_the_chunk_to_the_next_request() -> None:
    desk, fetch, save = computed_while_fetched()
    desk.end(save, FAILED, kind=JobKind.SAVE)
    desk.uploaded(save, Outcome.CANCELLED)
    desk.end(fetch)
    (again,) = desk.fetches_for("next", "aaaabbbbzz")
    desk.end(again)
    assert desk.lookup("next") == Answer(False, 8)


def test_without_room_beside_the_fetch_the_save_is_dropped_and_counted() -> None:
    desk = Desk(probe_chunks=1, slots=1)
    (fetch,) = desk.fetches_for("r", "aaaazz")
    desk.admit("r")
    assert desk.run("r", [0, 1], 0, 4, new=True).saves == ()
    assert desk.planner.counters["saves_dropped"] == 1
    assert desk.planner.counters["saves_without_room"] == 1
    desk.end(fetch)
    assert desk.ask("next", "aaaazz") == Answer(False, 4), "what is fetched serves others as before"


@pytest.mark.parametrize("outcome", [OK, MISSING])
def test_what_the_bucket_is_believed_to_hold_is_not_saved_and_counted_if_it_does_not(
    outcome: Outcome,
) -> None:
    desk = Desk(slots=2)
    desk.make_resident("aaaa", "bbbbcccc")
    (fetch,) = desk.fetches_for("r", "aaaazz")
    desk.admit("r")
    assert desk.run("r", [0, 1], 0, 4, new=True).saves == ()
    desk.end(fetch, outcome)
    dropped = int(outcome is MISSING)
    assert desk.planner.counters["saves_dropped"] == dropped
    assert desk.planner.counters["saves_believed_present"] == dropped


def saving_for_nobody(**setup: object) -> tuple[Desk, SaveJob]:
    """Blocks 0 and 1 are being copied for a request that is gone."""
    desk, save = saving(**setup)
    desk.planner.finished("r")
    desk.add("next", "xxxxyyyy")
    return desk, save


def test_blocks_that_are_only_read_are_not_fenced() -> None:
    desk, _ = saving_for_nobody()
    plan = desk.compute("same", "aaaazz", [0, 1, 2], 4, 2)
    assert plan.fences == (), "the first two blocks are a local hit"


def test_a_block_that_two_saves_read_is_fenced_until_both_have_read_it() -> None:
    desk, first = saving_for_nobody()
    desk.planner.reset(b"salt")  # and the engine keeps its own cache
    (second,) = desk.compute("same", "aaaazz", [0, 1, 2], 4, 2).saves
    assert second.block_ids == first.block_ids
    desk.copied(second)
    assert desk.compute("other", "xxxx", [1, 3], 0, 3).fences == (first.job_id,)


@pytest.mark.parametrize("outcome", [Outcome.OK, FAILED])
def test_blocks_that_have_been_copied_are_not_fenced(outcome: Outcome) -> None:
    desk, save = saving_for_nobody(world_size=2)
    assert desk.planner.ledger.has_copies_inflight
    desk.end(save, outcome, kind=JobKind.SAVE, ranks=1)
    desk.admit("next")
    step = ScheduledRequest("next", ([0, 1],), True, 0, 3)
    assert desk.plan(step).fences, "one rank still reads them"
    desk.end(save, kind=JobKind.SAVE, ranks=1)
    assert desk.plan(step).fences == ()
    assert not desk.planner.ledger.has_copies_inflight
