"""What is asked of the bucket, when, and by whom."""

from __future__ import annotations

import pytest

from s3kv.planning.requests import NOTHING, WAIT, Answer
from s3kv.types import Outcome
from tests.plans import fetches_of
from tests.unit.planning.desk import CHUNK, FAILED, MISSING, Desk

LONG = "aaaabbbbccccddddeeeeffffgggghhhh"  # eight chunks


def test_the_window_opens_with_what_arrives() -> None:
    desk = Desk(probe_chunks=2)
    first = desk.fetches_for("r", LONG)
    assert desk.keys(first) == [desk.key(LONG[:4]), desk.key(LONG[:8])]
    assert desk.lookup("r") == WAIT
    assert desk.fetches() == ()
    desk.end(first[:1])  # the window is 4 now, from the second chunk on
    assert desk.lookup("r") == WAIT
    second = desk.fetches()
    assert desk.keys(second) == [desk.key(LONG[:n]) for n in (12, 16, 20)]
    desk.end([*first[1:], *second])
    assert desk.lookup("r") == WAIT
    assert len(desk.fetches()) == 3


def test_the_window_is_open_where_the_bucket_is_known_to_hold_the_prefix() -> None:
    desk = Desk(probe_chunks=1, slots=8)
    desk.make_resident(LONG)
    desk.make_resident("x" * 32)  # pushes all of it out of host memory
    assert len(desk.fetches_for("r", LONG)) == 8


def letters(chunks: int, first: int = 0x100) -> str:
    return "".join(chr(first + n) * CHUNK for n in range(chunks))


def known(desk: Desk, chunks: int) -> str:
    """A prompt that the bucket is known to have."""
    prompt = letters(chunks)
    for n in range(1, chunks + 1):
        desk.planner.ledger.index.note_present(desk.key(prompt[: n * CHUNK]))
    return prompt


@pytest.mark.parametrize("is_known", [True, False])
def test_a_lookup_orders_a_long_prefix_in_several_steps(is_known: bool) -> None:
    desk = Desk(probe_chunks=100, slots=128)
    assert desk.ask("r", known(desk, 100) if is_known else letters(100)) == WAIT
    asked = []
    for count in (64, 32, 4, 0):  # and the engine has other requests to look up
        fetches = desk.fetches()
        assert len(fetches) == count
        asked += fetches
    desk.end(asked)
    assert desk.lookup("r") == Answer(False, 100 * CHUNK)


def test_when_a_request_arrives_all_is_ordered_at_once() -> None:
    desk = Desk(slots=512)
    desk.add("r", known(desk, 300))
    desk.planner.prefetch("r", 0, 0.0)
    assert len(desk.fetches()) == 256
    assert desk.fetches() == ()


def test_nothing_more_is_asked_for_a_request_that_is_gone() -> None:
    desk = Desk(slots=128)
    assert desk.ask("r", known(desk, 100)) == WAIT
    desk.planner.finished("r")
    plan = desk.plan()
    assert len(fetches_of(plan)) == len(plan.cancels) == 32
    assert desk.fetches() == ()


@pytest.mark.parametrize("outcome", [MISSING, Outcome.CORRUPT])
def test_a_chunk_that_is_not_there_is_not_asked_for_again_for_a_while(outcome: Outcome) -> None:
    desk = Desk(probe_chunks=1)
    desk.end(desk.fetches_for("first", "aaaa"), outcome)
    assert desk.lookup("first") == NOTHING
    desk.now_s = 19.9
    assert desk.ask("second", "aaaa") == NOTHING
    assert desk.fetches() == ()
    desk.now_s = 20.0
    assert len(desk.fetches_for("third", "aaaa")) == 1


def test_a_failure_ends_the_prefix_and_is_not_remembered() -> None:
    desk = Desk()
    desk.end(desk.fetches_for("first", "aaaa"), FAILED)
    assert desk.lookup("first") == NOTHING
    assert desk.ask("second", "aaaa") == WAIT


def test_one_flight_for_all_and_to_each_its_own() -> None:
    desk = Desk(probe_chunks=8, slots=64)
    shared = "aaaabbbb"
    tails = "cdefghijklmnopqrstuvwxyzABCDEFGH"
    for letter in tails:
        assert desk.ask(letter, shared + letter * 4) == WAIT
    fetches = desk.fetches()
    assert len(tails) == 32
    assert len(fetches) == len(set(desk.keys(fetches))) == 2 + 32
    desk.end(fetches[:3])  # what they share, and the tail of the first
    assert desk.lookup("c") == Answer(False, 12)
    assert all(desk.lookup(letter) == WAIT for letter in tails[1:])
    desk.end(fetches[4])
    assert desk.lookup("e") == Answer(False, 12)
    assert desk.lookup("d") == WAIT, "its own tail is still missing"
    assert desk.fetches() == ()


def test_what_was_refused_at_arrival_is_asked_for_at_the_first_lookup() -> None:
    desk = Desk(slots=2, probe_chunks=2)
    desk.ask("first", "aaaabbbb")
    desk.add("second", "cccc")
    desk.planner.prefetch("second", 0, 0.0)
    desk.end(desk.fetches(), MISSING)
    assert desk.lookup("second") == WAIT
    assert desk.keys(desk.fetches()) == [desk.key("cccc")]


def test_prefetch_leaves_half_of_host_memory_alone() -> None:
    desk = Desk(slots=4, probe_chunks=2)
    for name in ("aaaabbbb", "ccccdddd"):
        desk.add(name, name)
        desk.planner.prefetch(name, 0, 0.0)
    assert len(desk.fetches()) == 2


def test_prefetch_of_one_long_prefix_leaves_half_of_host_memory_alone() -> None:
    desk = Desk(slots=8, probe_chunks=4)
    desk.add("queued", known(desk, 8))
    desk.planner.prefetch("queued", 0, 0.0)
    assert len(desk.fetches()) == 4
    assert desk.fetches() == (), "nor in later steps"
    assert len(desk.fetches_for("scheduled", "aaaabbbbccccdddd")) == 4
    assert desk.planner.counters["fetches_without_room"] == 0


def test_a_local_hit_moves_the_start() -> None:
    desk = Desk(probe_chunks=1)
    assert desk.ask("r", LONG, local_tokens=6) == WAIT
    fetches = desk.fetches()
    assert desk.keys(fetches) == [desk.key(LONG[:8])], "the chunk it is in the middle of"
    desk.end(fetches)
    desk.lookup("r", local_tokens=6)
    desk.end(desk.fetches(), MISSING)
    assert desk.lookup("r", local_tokens=6) == Answer(False, 2)


def test_an_unplaced_request_is_offered_what_has_arrived_since() -> None:
    desk = Desk(probe_chunks=3, max_wait_s=1.0)
    fetches = desk.fetches_for("r", LONG[:12])
    desk.end(fetches[:1])
    desk.now_s = 1.0
    assert desk.lookup("r") == Answer(False, 4)
    desk.end(fetches[1])
    assert desk.lookup("r") == Answer(False, 8), "without waiting for the third"


def test_the_fetches_of_an_aborted_request_are_cancelled() -> None:
    desk = Desk(probe_chunks=2)
    fetches = desk.fetches_for("r", "aaaabbbb")
    desk.planner.finished("r")
    assert set(desk.plan().cancels) == {fetch.job_id for fetch in fetches}
    assert desk.planner.ledger.table.statistics().reserved == 2, "until they have really ended"
    desk.end(fetches, Outcome.CANCELLED)
    assert desk.planner.ledger.table.statistics().reserved == 0


def test_what_others_wait_for_is_not_cancelled() -> None:
    desk = Desk(probe_chunks=2)
    desk.add("r", "aaaabbbb")
    desk.add("other", "aaaacccc")
    desk.lookup("r")
    desk.lookup("other")
    fetches = desk.fetches()
    desk.planner.finished("r")
    assert desk.plan().cancels == (fetches[1].job_id,)


def test_who_joins_before_the_cancel_is_sent_keeps_the_fetch() -> None:
    desk = Desk()
    desk.ask("r", "aaaa")
    desk.plan()
    desk.planner.finished("r")
    assert desk.ask("late", "aaaa") == WAIT
    assert desk.plan().cancels == ()


def test_who_joins_a_cancelled_fetch_asks_again() -> None:
    desk = Desk()
    fetches = desk.fetches_for("r", "aaaa")
    desk.planner.finished("r")
    desk.plan()
    assert desk.ask("late", "aaaa") == WAIT
    desk.end(fetches, Outcome.CANCELLED)
    assert desk.lookup("late") == WAIT
    again = desk.fetches()
    assert desk.keys(again) == [desk.key("aaaa")]
    desk.end(again)
    assert desk.lookup("late") == Answer(False, 4)


def test_without_leave_to_load_nothing_is_asked_for() -> None:
    desk = Desk(may_load=False)
    desk.add("r", "aaaa")
    desk.planner.prefetch("r", 0, 0.0)
    assert desk.lookup("r") == NOTHING
    assert desk.fetches() == ()
