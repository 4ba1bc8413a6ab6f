"""How long a request waits for the bucket."""

from __future__ import annotations

import pytest

from s3kv.planning.deadline import GAIN, LATE, PATIENCE_S
from s3kv.planning.pace import FetchTime, Pace
from s3kv.planning.requests import NOTHING, WAIT, Answer
from s3kv.types import Outcome
from tests.plans import fetches_of
from tests.unit.planning.desk import MISSING, OK, Desk


def test_nobody_waits_longer_than_max_wait() -> None:
    desk = Desk(max_wait_s=3.0, gate=False)
    assert desk.ask("r", "aaaa") == WAIT
    desk.now_s = 2.9
    assert desk.lookup("r") == WAIT
    desk.now_s = 3.0
    assert desk.lookup("r") == NOTHING
    assert desk.planner.counters["deadline_cuts"] == 1
    assert desk.lookup("r") == NOTHING, "asked again because it could not be placed"
    assert desk.planner.counters["deadline_cuts"] == 1


def measured(*, seconds_per_chunk: float, **setup: object) -> Desk:
    """Computing a chunk takes 0.5 s; up to four fetches are sent at once."""
    desk = Desk(max_wait_s=50.0, gate=True, **{"probe_chunks": 1, **setup})
    desk.ask("first", "zzzz")
    desk.now_s = seconds_per_chunk
    desk.end(desk.fetches(), seconds=seconds_per_chunk)
    desk.planner.finished("first")
    return desk


@pytest.mark.parametrize("outcome", [OK, Outcome.CANCELLED])
def test_a_bucket_slower_than_computing_is_not_waited_for(outcome: Outcome) -> None:
    desk = measured(seconds_per_chunk=0.6)
    assert desk.ask("r", "aaaa") == NOTHING
    late = fetches_of(plan := desk.plan())
    assert desk.keys(late) == [desk.key("aaaa")], "it is asked for all the same"
    assert (plan.withdrawals, plan.cancels) == (tuple(fetch.job_id for fetch in late), ())
    desk.admit("r", [0, 1])
    desk.end(late, outcome)
    assert desk.pinned() == 0, "who has been answered holds nothing"
    assert desk.planner.ledger.table.statistics().reserved == 0
    assert desk.ask("next", "aaaazz") == (Answer(False, 4) if outcome is OK else NOTHING)


@pytest.mark.parametrize(("is_placed", "answer"), [(True, WAIT), (False, NOTHING)])
def test_a_prompt_is_before_others_once_it_is_placed(is_placed: bool, answer: Answer) -> None:
    """The engine also asks, in every step, about one that waits for an image."""
    desk = measured(seconds_per_chunk=0.6)
    assert desk.ask("other", "aaaa") == NOTHING
    if is_placed:
        desk.admit("other")
    assert desk.ask("r", "bbbb") == answer


def test_what_has_been_under_way_for_long_is_expected_soon() -> None:
    desk = measured(seconds_per_chunk=0.6, probe_chunks=4)
    first, _ = desk.fetches_for("r", "aaaabbbb")
    desk.now_s += 0.5
    desk.end(first, seconds=0.5)
    assert desk.lookup("r") == WAIT, "for a chunk that takes longer than computing it, but not now"


@pytest.mark.parametrize(
    ("probe_chunks", "chunks", "answer"),
    [
        (4, 4, WAIT),  # they take longer to come than one takes to compute, and come together
        (1, 2, NOTHING),  # the second can be requested after the first: 1.2 s
    ],
)
def test_all_that_is_missing_is_weighed(probe_chunks: int, chunks: int, answer: Answer) -> None:
    desk = measured(seconds_per_chunk=0.6, probe_chunks=probe_chunks)
    assert desk.ask("r", "aaaabbbbccccdddd"[: 4 * chunks]) == answer


def test_chunks_of_others_are_ahead_in_the_queue() -> None:
    desk = measured(seconds_per_chunk=0.4, probe_chunks=4)
    assert desk.ask("other", "bbbbccccddddeeee") == WAIT
    assert desk.ask("r", "aaaa") == NOTHING, (
        "the fifth, where four are sent at once, comes after 0.5 s"
    )


def test_giving_up_counts_until_something_arrives() -> None:
    pace = Pace(prefill_tokens_per_s=8.0, fetches_at_once=4)
    assert pace.forecast(1, 0).all_s is None
    pace.gave_up(0.2, 1)
    assert pace.forecast(1, 0).all_s == pytest.approx(0.4), "twice what was waited in vain"
    pace.gave_up(1.2, 16)  # four times four
    assert pace.forecast(1, 0).all_s == pytest.approx(0.8), "and more with every attempt"
    pace.fetched(OK, 0.5, began_with=1, ended_with=1)
    assert pace.forecast(1, 0).all_s == pytest.approx(0.5), "until one arrives"
    pace.gave_up(0.1, 1)
    assert pace.forecast(1, 0).all_s == pytest.approx(0.5), "less than is known to be needed"


def test_what_somebody_else_waits_for_is_not_withdrawn() -> None:
    desk = measured(seconds_per_chunk=0.1)
    assert desk.ask("r", "aaaa" * 4) == WAIT
    desk.now_s += 0.2
    assert desk.ask("other", "aaaa" * 4) == WAIT
    desk.now_s += 0.81
    assert desk.lookup("r") == NOTHING
    assert desk.plan().withdrawals == ()


def test_prefill_is_measured_and_decode_is_not() -> None:
    pace = Pace(prefill_tokens_per_s=8.0, fetches_at_once=4)
    pace.step_ended(1.0, pace.step_started(0.0, 4))
    assert pace.prefill_tokens_per_s == 8.0
    for step in range(20):
        pace.step_ended(step + 0.5, pace.step_started(step, 1_000))
    assert pace.prefill_tokens_per_s == pytest.approx(2_000, rel=0.01)


def test_a_step_planned_ahead_starts_when_the_one_before_has_ended() -> None:
    pace = Pace(prefill_tokens_per_s=1_000.0, fetches_at_once=4)
    under_way = pace.step_started(0.0, 1_000)
    for step in range(1, 20):
        following = pace.step_started(step - 0.9, 1_000)
        pace.step_ended(float(step), under_way)
        under_way = following
    assert pace.prefill_tokens_per_s == pytest.approx(1_000)


def test_a_step_starts_when_one_that_is_not_measured_has_ended() -> None:
    pace = Pace(prefill_tokens_per_s=8.0, fetches_at_once=4)
    number = pace.step_started(0.0, 1_000)
    pace.step_ended(0.5, None)
    pace.step_ended(1.0, number)
    assert pace.prefill_tokens_per_s == pytest.approx(2_000)


@pytest.mark.parametrize("untold", [(0,), (0, 0, 1), (1_600,), (1_600,) * 20])
def test_steps_whose_end_is_not_told_of_do_not_count(untold: tuple[int, ...]) -> None:
    """Engines do not tell of steps that compute nothing. Each wait has some."""
    pace = Pace(prefill_tokens_per_s=8.0, fetches_at_once=4)
    for step in range(10):
        for tokens in untold:
            pace.step_started(step, tokens)
        number = pace.step_started(step + 0.1, 1_000)
        pace.step_ended(step + 0.6, number)
        pace.step_started(step + 0.6, 1)  # the first token that is decoded
        pace.step_ended(step + 0.61, None)
    assert pace.prefill_tokens_per_s == pytest.approx(2_000)


def test_an_answer_that_nothing_is_there_bounds_a_fetch_until_one_arrives() -> None:
    pace = Pace(prefill_tokens_per_s=8.0, fetches_at_once=4)
    pace.fetch.ended(MISSING, 1, 0.2)
    pace.fetch.ended(MISSING, 1, 0.4)
    assert pace.forecast(1, 0).all_s == pytest.approx(0.3)
    pace.gave_up(0.2, 1)
    assert pace.forecast(1, 0).all_s == pytest.approx(0.4)
    pace.fetched(OK, 0.1, began_with=1, ended_with=1)
    assert pace.forecast(1, 0).all_s == pytest.approx(0.1)


@pytest.mark.parametrize(("absent", "answer"), [(5, WAIT), (2, WAIT), (1, NOTHING)])
def test_an_absent_chunk_ends_a_wait_for_the_few_before_it(absent: int, answer: Answer) -> None:
    """Half of them are expected to be there, and computing a chunk takes half a second."""
    desk = Desk(max_wait_s=50.0, gate=True, probe_chunks=8)
    fetches = desk.fetches_for("r", "aaaabbbbccccddddeeeeffff")
    desk.end(fetches[absent], MISSING, seconds=0.3)
    assert desk.lookup("r") == answer
    desk.end(fetches[0])
    desk.planner.finished("r")
    assert desk.ask("next", "aaaab") == Answer(False, 4), "what comes later serves the next request"


def test_an_idle_engine_that_finds_nothing_ends_its_waits_at_an_absence() -> None:
    """Beside other requests a wait costs nothing, and one hit says that there may be others."""
    desk = Desk(max_wait_s=50.0, gate=True, probe_chunks=8)

    def wait_after_an_absence(letter: str, outcome: Outcome) -> Answer:
        fetches = desk.fetches_for(letter, "".join(4 * chr(ord(letter) + n) for n in range(6)))
        desk.end(fetches[5], MISSING, seconds=0.3)
        answer = desk.lookup(letter)
        desk.end(fetches[0], outcome, seconds=0.3)
        desk.end(fetches[1:5], MISSING, seconds=0.3)
        desk.planner.finished(letter)
        return answer

    first = [wait_after_an_absence(chr(ord("A") + 6 * n), MISSING) for n in range(9)]
    assert first[0] == WAIT
    assert first[-1] == NOTHING
    desk.planner.pace.step_started(desk.now_s, 1)  # beside a request in decode
    assert desk.planner.pace.forecast(1, 0).absent_share == 0.0
    wait_after_an_absence("\u1000", OK)
    assert wait_after_an_absence("\u2000", MISSING) == WAIT


def test_a_chunk_that_is_there_shows_that_those_before_it_are() -> None:
    desk = Desk(max_wait_s=50.0, gate=True, probe_chunks=8)
    fetches = desk.fetches_for("r", "aaaabbbbcccc")
    desk.end(fetches[1], seconds=0.3)
    desk.end(fetches[2], MISSING, seconds=0.3)
    assert desk.lookup("r") == WAIT, "for the first, of which nothing is known but that"
    assert desk.planner._requests["r"].lookups[0].unproven == 0


def test_a_read_that_is_late_is_not_expected_soon() -> None:
    desk = Desk(max_wait_s=50.0, gate=True, probe_chunks=8)
    fetches = desk.fetches_for("r", "aaaabbbbcccc")
    desk.now_s = 0.2
    desk.end(fetches[1:], MISSING, seconds=0.3)
    assert desk.lookup("r") == WAIT, "the first is due in 0.1 s, and worth 0.25 s"
    desk.now_s = LATE * 0.3 - 0.01
    assert desk.lookup("r") == WAIT
    desk.now_s = LATE * 0.3
    assert desk.lookup("r") == NOTHING
    assert desk.ask("next", "xxxxyyyyzzzz") == WAIT, "a wait that stopped paying is no measurement"
    assert desk.planner.pace.forecast(1, 0).all_s == pytest.approx(0.3)


def test_chunks_behind_an_absent_one_are_not_waited_for() -> None:
    """Five are on their way, and take longer than computing them; the first alone does not."""
    desk = measured(seconds_per_chunk=0.2, probe_chunks=8)
    for n in (1, 2, 3, 4):
        desk.planner.pace.fetched(OK, 0.2 * n, began_with=n, ended_with=n)
    desk.end(desk.fetches_for("r", "aaaabbbbccccddddeeee")[1], MISSING)
    lookup = desk.planner._requests["r"].lookups[0]
    assert desk.planner.ledger.fetches_ahead_of(lookup.awaited()) == 1


def test_latency_and_bandwidth_are_told_apart() -> None:
    """Fetches that take 0.1 s each and 0.02 s for each that shares the network with them."""
    pace = Pace(prefill_tokens_per_s=8.0, fetches_at_once=32)
    for n in (1, 4, 16, 2, 8, 1, 30, 3):
        pace.fetched(OK, 0.1 + 0.02 * n, began_with=n, ended_with=n)
    assert pace.forecast(1, 0).all_s == pytest.approx(0.12)
    assert pace.forecast(1, 3).all_s == pytest.approx(0.48), "three rounds before it"
    # Of 32 sent together, 16.5 are under way on average.
    assert pace.forecast(32, 0).all_s == pytest.approx(0.1 + 0.02 * 16.5)
    assert pace.forecast(64, 0).all_s == pytest.approx(2 * (0.1 + 0.02 * 16.5))


def test_a_near_source_says_nothing_about_the_bucket() -> None:
    fetch = FetchTime()
    fetch.add(1, 0.001, "disk")
    assert fetch.at(1) == pytest.approx(0.001), "nobody else has answered yet"
    fetch.add(1, 0.01, "peer")
    assert fetch.at(1) == pytest.approx(0.01), "the last that answered"
    fetch.add(1, 0.5, "bucket")
    fetch.add(1, 0.001, "disk")
    assert fetch.at(1) == pytest.approx(0.5)
    fetch.add(1, 0.5, "")
    assert fetch.at(1) == pytest.approx(0.5), "who names no source is the bucket"


def test_an_absence_and_a_wait_in_vain_are_of_all_sources() -> None:
    fetch = FetchTime()
    fetch.add(1, 0.5)
    fetch.gave_up(1.0)
    assert fetch.at(1) == pytest.approx(2.0)
    fetch.add(1, 0.001, "disk")
    assert fetch.at(1) == pytest.approx(0.5), "something arrives again"


def test_the_slowest_rank_names_the_source_of_a_chunk() -> None:
    desk = Desk(world_size=2)
    near, far = desk.fetches_for("r", "aaaabbbb")
    for fetch, source in ((far, "bucket"), (near, "disk")):
        desk.end(fetch, ranks=1, seconds=0.5, source=source)
        desk.end(fetch, ranks=1, seconds=0.1, source="peer")
    assert sorted(desk.planner.pace.fetch._lines) == ["bucket", "disk"]


def test_load_makes_no_fetch_faster_and_no_time_is_below_nothing() -> None:
    fetch = FetchTime()
    fetch.add(1, 0.3)
    fetch.add(9, 0.1)
    assert fetch.at(1) == fetch.at(9) == pytest.approx(0.2)
    fetch = FetchTime()
    fetch.add(9, 0.1)
    fetch.add(11, 0.9)
    assert fetch.at(0) == pytest.approx(0.0)


def test_a_bucket_that_does_not_answer_is_given_a_second_once() -> None:
    desk = Desk(max_wait_s=50.0, gate=True, probe_chunks=4)
    desk.add("r", "aaaabbbbccccddddeeee")  # 2.5 s to compute
    assert desk.lookup("r") == WAIT
    desk.now_s = 0.99
    assert desk.lookup("r") == WAIT
    desk.now_s = PATIENCE_S
    assert desk.lookup("r") == NOTHING
    desk.admit("r")
    assert desk.ask("next", "zzzzyyyyxxxx") == WAIT, "the engine has the first to compute"
    fetches = desk.fetches()
    desk.now_s += 2.5
    assert desk.lookup("next") == NOTHING, "what the first has seen counts for the next"
    desk.end(fetches)
    assert desk.ask("later", "qqqqwwwweeee") == WAIT, "it answers again"


def test_the_first_measurement_replaces_the_assumption() -> None:
    pace = Pace(prefill_tokens_per_s=8_000.0, fetches_at_once=4)
    pace.step_ended(1.0, pace.step_started(0.0, 1_000))
    assert pace.prefill_tokens_per_s == 1_000
    pace.step_ended(1.2, pace.step_started(1.0, 100))
    assert 980 < pace.prefill_tokens_per_s < 1_000, "a small step weighs little"


def test_an_engine_computes_what_has_begun() -> None:
    pace = Pace(prefill_tokens_per_s=100.0, fetches_at_once=4)
    pace.new_tokens += 300
    assert pace.queue(5.0, 1 / 10) == (0, 30)
    pace.step_started(7.0, 100, left_tokens=50)
    assert [pace.queue(now_s, 1) for now_s in (7.0, 8.0, 9.0)] == [(150, 0), (50, 0), (0, 0)]


def prefill(pace: Pace, *steps: tuple[int, float]) -> None:
    """Run steps of so many tokens, each at so many tokens a second."""
    now_s = 0.0
    for tokens, tokens_per_s in steps:
        number = pace.step_started(now_s, tokens)
        now_s += tokens / tokens_per_s
        pace.step_ended(now_s, number)


def test_the_first_long_prompt_corrects_the_speed_of_short_ones() -> None:
    """After two short prompts the first long one gives up too early. Its chunks arrive while it is
    computed, and take 0.4 s. Computing the next one takes 0.74 s, so it should wait."""
    pace = Pace(prefill_tokens_per_s=8_000.0, fetches_at_once=32)
    prefill(pace, (100, 4_600), (100, 4_600), (1_600, 2_080))
    for _ in range(12):
        pace.fetched(OK, 0.4, began_with=6, ended_with=6)
    fetch_s = pace.forecast(12, rounds=0).all_s
    assert fetch_s is not None
    assert fetch_s < GAIN * pace.compute_s(1_536)
    assert pace.compute_s(1_536) == pytest.approx(0.74, rel=0.02)


@pytest.mark.parametrize("short_tokens_per_s", [2_000.0, 20_000.0])
def test_short_prompts_between_long_ones_change_little(short_tokens_per_s: float) -> None:
    pace = Pace(prefill_tokens_per_s=8_000.0, fetches_at_once=4)
    prefill(pace, *[*[(100, short_tokens_per_s)] * 20, (1_600, 8_000.0)] * 5)
    assert pace.prefill_tokens_per_s == pytest.approx(8_000, rel=0.2)


def test_a_disk_that_answers_is_expected_to_answer() -> None:
    """So a bucket that does not pay keeps nobody from waiting for the disk."""
    pace = Pace(fetches_at_once=8)
    for _ in range(5):
        pace.fetched(Outcome.OK, 1.0, 1, 1, "bucket")
    assert pace.forecast(1, 0).all_s == pytest.approx(1.0)
    for _ in range(30):
        pace.fetched(Outcome.OK, 0.01, 1, 1, "disk", near=True)
    assert pace.forecast(1, 0).all_s == pytest.approx(0.01, rel=0.3)
    assert pace.forecast(1, 0, near=True).all_s == pytest.approx(0.01)
    for _ in range(30):
        pace.fetched(Outcome.OK, 1.0, 1, 1, "bucket")
    assert pace.forecast(1, 0).all_s == pytest.approx(1.0, rel=0.01)
