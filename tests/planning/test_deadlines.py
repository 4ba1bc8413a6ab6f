"""How long a request waits for the bucket."""

from __future__ import annotations

import pytest

from s3kv.planning.kv import NOTHING, WAIT, Answer
from s3kv.planning.pace import PATIENCE_S, Pace, wait_until_s
from tests.planning.desk import Desk


def test_nobody_waits_longer_than_max_wait() -> None:
    desk = Desk(max_wait_s=3.0, gate=False)
    desk.add("r", "aaaa")
    assert desk.lookup("r") == WAIT
    desk.now_s = 2.9
    assert desk.lookup("r") == WAIT
    desk.now_s = 3.0
    assert desk.lookup("r") == NOTHING
    assert desk.planner.counters["deadline_cuts"] == 1
    assert desk.lookup("r") == NOTHING, "asked again because it could not be placed"
    assert desk.planner.counters["deadline_cuts"] == 1


def test_the_clock_starts_when_the_engine_asks() -> None:
    desk = Desk(max_wait_s=3.0)
    desk.add("r", "aaaa")
    desk.planner.prefetch("r", 0, 0.0)
    desk.now_s = 10.0
    assert desk.lookup("r") == WAIT


def test_arrivals_do_not_move_the_deadline() -> None:
    desk = Desk(max_wait_s=3.0, probe_chunks=4)
    desk.add("r", "aaaabbbbccccdddd")
    assert desk.lookup("r") == WAIT
    for fetch in desk.plan().fetches[:3]:
        assert desk.lookup("r") == WAIT
        desk.now_s += 1.0
        desk.end(fetch)
    assert desk.lookup("r") == Answer(False, 12)


def test_unmeasured_the_gate_allows_as_long_as_computing_takes() -> None:
    desk = Desk(max_wait_s=50.0, gate=True, probe_chunks=2)  # 8 tokens/s assumed
    desk.add("r", "aaaabbbb")
    assert desk.lookup("r") == WAIT
    desk.now_s = 0.99
    assert desk.lookup("r") == WAIT
    desk.now_s = 1.0
    assert desk.lookup("r") == NOTHING


def measured(*, seconds_per_chunk: float) -> Desk:
    desk = Desk(max_wait_s=50.0, gate=True, probe_chunks=1)
    desk.add("first", "zzzz")
    desk.lookup("first")
    fetches = desk.plan().fetches
    desk.now_s = seconds_per_chunk
    desk.end(fetches)
    desk.planner.finished("first")
    return desk


def test_a_bucket_slower_than_computing_is_not_waited_for() -> None:
    desk = measured(seconds_per_chunk=0.6)  # computing a chunk takes 0.5 s
    desk.add("r", "aaaa")
    assert desk.lookup("r") == NOTHING
    late = desk.plan().fetches
    assert desk.keys(late) == [desk.key("aaaa")], "it is asked for all the same"
    desk.admit("r", [0, 1])
    desk.end(late)
    assert desk.pinned() == 0, "who has been answered holds nothing"
    desk.add("next", "aaaazz")
    assert desk.lookup("next") == Answer(False, 4)


def test_a_bucket_faster_than_computing_is_waited_for() -> None:
    desk = measured(seconds_per_chunk=0.4)
    desk.add("r", "aaaa")
    assert desk.lookup("r") == WAIT


def test_who_does_not_wait_has_measured_nothing() -> None:
    desk = measured(seconds_per_chunk=0.6)
    before = desk.planner.pace.statistics()
    desk.now_s = 10.0
    for letter in "abcdefgh":
        desk.add(letter, letter * 4)
        assert desk.lookup(letter) == NOTHING
        desk.now_s += 0.001
    assert desk.planner.pace.statistics() == before


def test_who_gives_up_has_measured_a_slow_bucket() -> None:
    desk = Desk(max_wait_s=50.0, gate=True)
    desk.add("r", "a" * 400)
    assert desk.lookup("r") == WAIT
    desk.now_s = 1.0
    assert desk.lookup("r") == NOTHING, "nothing has come for a second"
    desk.add("next", "b" * 400)
    assert desk.lookup("next") == NOTHING


def test_chunks_of_others_are_ahead_in_the_queue() -> None:
    desk = measured(seconds_per_chunk=0.4)
    desk.add("other", "bbbb")
    desk.lookup("other")
    desk.add("r", "aaaa")
    assert desk.lookup("r") == NOTHING, "the second in the queue comes after 0.8 s"


def test_without_the_gate_a_slow_bucket_is_waited_for() -> None:
    desk = Desk(max_wait_s=50.0, gate=False)
    desk.add("first", "zzzz")
    desk.lookup("first")
    fetches = desk.plan().fetches
    desk.now_s = 40.0
    desk.end(fetches)
    desk.add("r", "aaaa")
    assert desk.lookup("r") == WAIT


def test_prefill_is_measured_and_decode_is_not() -> None:
    pace = Pace(prefill_tokens_per_s=8.0)
    pace.step_started(0.0, 4)
    pace.step_ended(1.0)
    assert pace.statistics().prefill_tokens_per_s == 8.0
    for step in range(20):
        pace.step_started(step, 1_000)
        pace.step_ended(step + 0.5)
    assert pace.statistics().prefill_tokens_per_s == pytest.approx(2_000, rel=0.01)


def test_a_step_planned_ahead_starts_when_the_one_before_has_ended() -> None:
    pace = Pace(prefill_tokens_per_s=1_000.0)
    pace.step_started(0.0, 1_000)
    for step in range(1, 20):
        pace.step_started(step - 0.9, 1_000)
        pace.step_ended(float(step))
    assert pace.statistics().prefill_tokens_per_s == pytest.approx(1_000)


def test_an_end_without_a_step_says_nothing() -> None:
    pace = Pace(prefill_tokens_per_s=8.0)
    pace.step_ended(1.0)
    assert pace.statistics().prefill_tokens_per_s == 8.0


def test_only_what_arrives_counts_as_speed() -> None:
    pace = Pace(prefill_tokens_per_s=8.0)
    pace.fetch_started(0.0)
    pace.fetch_ended(1.0, arrived=False, still_inflight=0)
    assert pace.fetch_s(1) is None
    pace.fetch_started(10.0)  # the pause before does not count
    pace.fetch_ended(10.5, arrived=True, still_inflight=0)
    assert pace.fetch_s(4) == pytest.approx(2.0)


@pytest.mark.parametrize(("gate", "until_s"), [(True, 101.0), (False, 110.0)])
def test_the_deadline_is_the_earlier_of_two(gate: bool, until_s: float) -> None:
    pace = Pace(prefill_tokens_per_s=100.0)
    until = wait_until_s(
        pace,
        now_s=100.5,
        started_s=100.0,
        arrival_s=100.4,
        wanted_tokens=100,
        missing_tokens=50,
        chunks_ahead=1,
        max_wait_s=10.0,
        gate=gate,
    )
    assert until == until_s


def test_a_bucket_that_does_not_answer_is_given_a_second_once() -> None:
    desk = Desk(max_wait_s=50.0, gate=True, probe_chunks=4)
    desk.add("r", "aaaabbbbccccddddeeee")  # 2.5 s to compute
    assert desk.lookup("r") == WAIT
    desk.now_s = 0.99
    assert desk.lookup("r") == WAIT
    desk.now_s = PATIENCE_S
    assert desk.lookup("r") == NOTHING
    desk.add("next", "zzzzyyyyxxxx")
    assert desk.lookup("next") == NOTHING, "what the first has seen counts for the next"
    desk.end(desk.plan().fetches)
    desk.add("later", "qqqqwwwweeee")
    assert desk.lookup("later") == WAIT, "it answers again"


def test_the_first_measurement_replaces_the_assumption() -> None:
    pace = Pace(prefill_tokens_per_s=8_000.0)
    pace.step_started(0.0, 1_000)
    pace.step_ended(1.0)
    assert pace.statistics().prefill_tokens_per_s == 1_000
    pace.step_started(1.0, 100)
    pace.step_ended(1.2)
    assert 980 < pace.statistics().prefill_tokens_per_s < 1_000, "a small step weighs little"
