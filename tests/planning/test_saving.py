"""Which chunks are saved, from which blocks, once; and what must not be overwritten meanwhile."""

from __future__ import annotations

import pytest

from s3kv.messages import FetchOrder, JobKind, SaveOrder
from s3kv.planning.kv import ScheduledRequest
from s3kv.types import Outcome
from tests.planning.desk import FAILED, MISSING, Desk


def computing(prompt: str, **setup: object) -> Desk:
    """A request "r" with this prompt, of which nothing is cached and nothing computed."""
    desk = Desk(**{"may_load": False, **setup})
    desk.add("r", prompt)
    desk.admit("r")
    return desk


def test_full_chunks_are_saved_from_their_blocks() -> None:
    desk = computing("aaaabbbbcc")
    saves = desk.run("r", [5, 6, 7, 8, 9], 0, 10, new=True).saves
    assert [(save.key, save.block_ids) for save in saves] == [
        (desk.key("aaaa"), (5, 6)),
        (desk.key("aaaabbbb"), (7, 8)),
    ]


def test_chunked_prefill_saves_what_each_step_completes() -> None:
    desk = computing("aaaabbbbcccc")
    assert desk.keys(desk.run("r", [0, 1, 2], 0, 5, new=True).saves) == [desk.key("aaaa")]
    assert desk.run("r", [3], 5, 2, new=False).saves == ()
    (save,) = desk.run("r", [4], 7, 2, new=False).saves
    assert (save.key, save.block_ids) == (desk.key("aaaabbbb"), (2, 3))


def test_a_decode_that_crosses_the_end_of_a_chunk_saves_it() -> None:
    desk = computing("aaabbb")
    desk.run("r", [0, 1, 2], 0, 6, new=True)
    desk.grow("r", "aaabbbc")
    assert desk.run("r", [3], 6, 1, new=False).saves == ()
    desk.grow("r", "aaabbbcd")
    (save,) = desk.run("r", [], 7, 1, new=False).saves
    assert (save.key, save.block_ids) == (desk.key("aaabbbcd"), (2, 3))


def test_drafts_that_may_be_rejected_are_not_saved() -> None:
    desk = computing("aaaabb")
    desk.run("r", [0, 1, 2], 0, 6, new=True)
    desk.grow("r", "aaaabbb")
    assert desk.run("r", [3, 4], 6, 4, new=False).saves == (), "one token and three drafts"
    desk.grow("r", "aaaabbbc")  # two drafts were rejected
    (save,) = desk.run("r", [], 7, 4, new=False).saves
    assert save.block_ids == (2, 3)


def test_a_token_that_is_known_a_step_later_is_saved_then() -> None:
    desk = computing("aaaabbb")
    desk.run("r", [0, 1, 2, 3], 0, 7, new=True)
    assert desk.run("r", [], 7, 1, new=False).saves == (), "its token has not come back yet"
    desk.grow("r", "aaaabbbc")
    assert len(desk.run("r", [4], 8, 1, new=False).saves) == 1


@pytest.mark.parametrize("sizes", [(8, 2, 2), (8, 4, 2), (8, 4, 4), (8, 8, 2), (8, 8, 8)])
def test_a_chunk_may_be_several_blocks_and_hash_blocks(sizes: tuple[int, int, int]) -> None:
    chunk, block, hashed = sizes
    desk = computing("aaaaaaaabbbbbbbb", chunk_tokens=chunk, block_tokens=block, hash_tokens=hashed)
    blocks = list(range(16 // block))
    saves = desk.run("r", blocks, 0, 16, new=True).saves
    half = len(blocks) // 2
    assert desk.keys(saves) == [desk.key("a" * 8), desk.key("a" * 8 + "b" * 8)]
    assert [save.block_ids for save in saves] == [tuple(blocks[:half]), tuple(blocks[half:])]


def test_nothing_is_saved_twice() -> None:
    desk = computing("aaaabb")
    (save,) = desk.run("r", [0, 1, 2], 0, 6, new=True).saves
    desk.add("same", "aaaabb")
    desk.admit("same")
    assert desk.run("same", [3, 4, 5], 0, 6, new=True).saves == (), "it is being copied"
    desk.copied(save)
    desk.add("again", "aaaabb")
    desk.admit("again")
    assert desk.run("again", [6, 7, 8], 0, 6, new=True).saves == (), "it is in host memory"
    desk.uploaded(save)


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.EXISTS])
def test_what_the_bucket_is_known_to_have_is_not_saved(outcome: Outcome) -> None:
    desk = computing("aaaa", slots=1)
    (save,) = desk.run("r", [0, 1], 0, 4, new=True).saves
    desk.copied(save)
    desk.uploaded(save, outcome)
    desk.add("other", "bbbb")
    desk.admit("other")
    assert len(desk.run("other", [2, 3], 0, 4, new=True).saves) == 1, "in the only slot"
    desk.add("again", "aaaa")
    desk.admit("again")
    assert desk.run("again", [4, 5], 0, 4, new=True).saves == ()
    assert desk.planner.counters["saves_dropped"] == 0


def test_a_preempted_request_goes_on_where_it_was_in_its_new_blocks() -> None:
    desk = computing("aaaabbbbcccc")
    desk.run("r", [0, 1, 2], 0, 6, new=True)
    desk.admit("r")
    assert desk.run("r", [10, 11, 12], 0, 6, new=True).saves == ()
    (save,) = desk.run("r", [13], 6, 2, new=False).saves
    assert save.block_ids == (12, 13)


def test_without_a_slot_saves_are_dropped_and_counted() -> None:
    desk = computing("aaaabbbbcccc", slots=2)
    assert len(desk.run("r", list(range(6)), 0, 12, new=True).saves) == 2
    assert desk.planner.counters["saves_dropped"] == 1


def test_beyond_max_saves_inflight_they_are_dropped_and_counted() -> None:
    desk = computing("aaaabbbbcccc", max_saves_inflight=1)
    (save,) = desk.run("r", list(range(6)), 0, 12, new=True).saves
    assert desk.planner.counters["saves_dropped"] == 2
    desk.copied(save)
    desk.add("next", "dddd")
    desk.admit("next")
    assert desk.run("next", [6, 7], 0, 4, new=True).saves == (), "it is not in the bucket yet"
    desk.uploaded(save)
    desk.add("last", "eeee")
    desk.admit("last")
    assert len(desk.run("last", [8, 9], 0, 4, new=True).saves) == 1


def test_without_leave_to_save_nothing_is_saved() -> None:
    desk = computing("aaaa", may_save=False)
    assert desk.run("r", [0, 1], 0, 4, new=True).saves == ()


def undecided() -> tuple[Desk, FetchOrder]:
    """The request has computed two chunks; the fetch of the second is still under way."""
    desk = Desk(probe_chunks=2)
    desk.add("r", "aaaabbbbzzzz")
    desk.lookup("r")
    first, second = desk.plan().fetches
    desk.end(first, MISSING)
    assert not desk.lookup("r").wait
    desk.admit("r")
    plan = desk.run("r", [0, 1, 2, 3], 0, 8, new=True)
    assert desk.keys(plan.saves) == [desk.key("aaaa")]
    return desk, second


def test_a_chunk_computed_during_its_fetch_is_saved_when_that_finds_nothing() -> None:
    desk, fetch = undecided()
    desk.end(fetch, MISSING)
    (save,) = desk.run("r", [4], 8, 1, new=False).saves
    assert (save.key, save.block_ids) == (desk.key("aaaabbbb"), (2, 3))
    assert desk.run("r", [], 9, 1, new=False).saves == ()


def test_a_chunk_computed_during_its_fetch_is_not_saved_when_it_arrives() -> None:
    desk, fetch = undecided()
    desk.end(fetch)
    assert desk.run("r", [4], 8, 1, new=False).saves == ()


def test_after_a_preemption_an_undecided_chunk_has_to_be_computed_again_first() -> None:
    desk, fetch = undecided()
    desk.end(fetch, MISSING)
    desk.lookup("r")
    desk.admit("r")
    assert desk.run("r", [10, 11, 12], 0, 6, new=True).saves == ()
    (save,) = desk.run("r", [13], 6, 2, new=False).saves
    assert save.block_ids == (12, 13)


# ---- fences


def saving(**setup: object) -> tuple[Desk, SaveOrder]:
    """Blocks 0 and 1 are being copied for a request that is gone."""
    desk = computing("aaaa", **setup)
    (save,) = desk.run("r", [0, 1], 0, 4, new=True).saves
    desk.planner.finished("r")
    desk.add("next", "xxxxyyyy")
    return desk, save


def test_a_new_request_in_blocks_that_are_being_copied_is_fenced() -> None:
    desk, save = saving()
    desk.admit("next")
    assert desk.run("next", [1, 2], 0, 3, new=True).fences == (save.job_id,)


def test_appended_blocks_are_fenced_in_the_step_that_appends_them() -> None:
    desk, save = saving()
    desk.admit("next")
    assert desk.run("next", [3], 0, 2, new=True).fences == ()
    assert desk.run("next", [0], 2, 2, new=False).fences == (save.job_id,)
    assert desk.run("next", [4], 4, 2, new=False).fences == ()


def test_the_blocks_a_load_goes_to_are_fenced() -> None:
    desk, save = saving(may_load=True)
    desk.make_resident("xxxxyyyy")
    assert desk.lookup("next").tokens == 8
    desk.admit("next", [6, 7, 8, 1], 8)
    assert desk.plan().fences == (save.job_id,)


def test_blocks_that_are_only_read_are_not_fenced() -> None:
    desk, _ = saving()
    desk.add("same", "aaaazz")
    desk.admit("same")
    plan = desk.run("same", [0, 1, 2], 4, 2, new=True)
    assert plan.fences == (), "the first two blocks are a local hit"


def test_one_save_is_fenced_once_however_many_of_its_blocks_are_reused() -> None:
    desk, save = saving()
    desk.admit("next")
    assert desk.run("next", [0, 1], 0, 4, new=True).fences == (save.job_id,)


def test_a_block_that_two_saves_read_is_fenced_until_both_have_read_it() -> None:
    desk, first = saving()
    desk.planner.reset(b"salt")  # and the engine keeps its own cache
    desk.add("same", "aaaazz")
    desk.admit("same")
    (second,) = desk.run("same", [0, 1, 2], 4, 2, new=True).saves
    assert second.block_ids == first.block_ids
    desk.copied(second)
    desk.add("other", "xxxx")
    desk.admit("other")
    assert desk.run("other", [1, 3], 0, 3, new=True).fences == (first.job_id,)


@pytest.mark.parametrize("outcome", [Outcome.OK, FAILED])
def test_blocks_that_have_been_copied_are_not_fenced(outcome: Outcome) -> None:
    desk, save = saving(world_size=2)
    assert desk.planner.has_copies_inflight
    desk.end(save, outcome, kind=JobKind.SAVE, ranks=1)
    desk.admit("next")
    step = ScheduledRequest("next", [0, 1], True, 0, 3)
    assert desk.plan(step).fences, "one rank still reads them"
    desk.end(save, kind=JobKind.SAVE, ranks=1)
    assert desk.plan(step).fences == ()
    assert not desk.planner.has_copies_inflight
