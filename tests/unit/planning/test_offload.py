"""The planner of the tier, by example. Under vLLM's manager it is in `tests.system.sim.tiers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lab.books import CHECKS
from s3kv.messages import BucketJob, JobEnd, JobKind
from s3kv.planning.breaker import Breaker
from s3kv.planning.index import BucketIndex
from s3kv.planning.offload import OffloadAnswer, OffloadPlanner
from s3kv.planning.pace import Pace
from s3kv.planning.requests import RequestLimits
from s3kv.planning.row_transfers import RowKey
from s3kv.types import ChunkKey, Outcome

HIT, RETRY, MISS = OffloadAnswer.HIT, OffloadAnswer.RETRY, OffloadAnswer.MISS

CHUNK_TOKENS = 128
MAX_WAIT_S = 2.0


def name_of(group: int, number: int) -> bytes:
    """vLLM's key of a chunk."""
    return number.to_bytes(4, "big") * 8 + group.to_bytes(4, "big")


def row_key(name: bytes) -> RowKey:
    return RowKey(name, ChunkKey(int.from_bytes(name[-4:], "big"), name[:-4]))


class Desk:
    """A planner with 256 rows, whose passes and answers the test makes by hand. requests: the names
    of those that have begun, a letter each."""

    def __init__(self, requests: str = "", *, rows: int = 256, **more: Any) -> None:
        self.now_s = 10.0
        self.planner = OffloadPlanner(
            BucketIndex(capacity=10_000),
            Breaker(),
            Pace(fetches_at_once=8),
            rows=rows,
            chunk_tokens=CHUNK_TOKENS,
            max_wait_s=MAX_WAIT_S,
            **more,
        )
        self.transfers = 0
        for name in requests:
            self.planner.begin(name)

    def look_up(self, request: str, *numbers: int, group: int = 0) -> list[OffloadAnswer]:
        keys = [row_key(name_of(group, number)).chunk for number in numbers]
        ends = [CHUNK_TOKENS * (1 + number) for number in numbers]
        lookup, now_s = self.planner.lookup, self.now_s
        return [lookup(request, key, end, now_s) for key, end in zip(keys, ends, strict=True)]

    def rows(self, *numbers: int, group: int = 0) -> list[tuple[RowKey, int]]:
        keys = [row_key(name_of(group, number)) for number in numbers]
        ends = [CHUNK_TOKENS * (1 + number) for number in numbers]
        return [(key._replace(end_token=e), e) for key, e in zip(keys, ends, strict=True)]

    def load(self, request: str, *numbers: int, group: int = 0) -> list[BucketJob]:
        self.transfers += 1
        rows = self.rows(*numbers, group=group)
        return self.planner.load(self.transfers, request, rows, self.now_s)

    def store(self, request: str, *numbers: int) -> list[BucketJob]:
        self.transfers += 1
        return self.planner.store(self.transfers, request, self.rows(*numbers), self.now_s)

    def end(self, jobs: list[BucketJob], outcome: Outcome = Outcome.OK, **more: Any) -> None:
        for job in jobs:
            self.planner.on_end(JobEnd(job.job_id, job.kind, outcome, 7, 0.01, **more), self.now_s)

    def end_pass(self, *scheduled: str) -> None:
        self.planner.end_pass(scheduled, self.now_s)
        CHECKS[OffloadPlanner](self.planner)


def test_unknown_chunks_are_probed_in_a_window_that_doubles() -> None:
    desk = Desk("abc", rows=128)
    assert desk.look_up("a", *range(20)) == [HIT] * 8 + [RETRY] * 12
    assert desk.look_up("b", *range(30, 39)) == [HIT] * 8 + [RETRY]
    assert desk.look_up("c", 40) == [RETRY], "all probes together have an eighth of the rows"
    jobs = desk.load("a", *range(8))
    desk.end_pass()
    desk.end(jobs[:1])
    assert desk.look_up("a", *range(8, 30)).count(HIT) == 9
    desk.end_pass()
    desk.end(jobs[1:], Outcome.MISSING)
    assert desk.look_up("a", 1, 2) == [MISS, MISS]


def test_a_scan_from_the_front_ends_after_the_first_retry_once_its_keys_are_counted() -> None:
    desk = Desk("a", rows=128)
    assert desk.look_up("a", *range(20)) == [HIT] * 8 + [RETRY] * 12
    jobs = desk.load("a", *range(8))
    desk.end_pass()
    for _ in range(2):
        # The scan that vLLM repeats in the same pass has to wait again.
        assert [desk.look_up("a", 8, 9, 10) for _ in range(2)] == 2 * [[RETRY, MISS, MISS]]
        # A scan from the end asks for earlier keys later, and one of another group for its own.
        assert desk.look_up("a", 7, group=1) == [RETRY]
        desk.end_pass()
    assert desk.look_up("a", 19, 18, 17) == [RETRY] * 3
    desk.end_pass()
    desk.end(jobs)
    assert desk.look_up("a", *range(8, 20)) == [HIT] * 12


def test_a_prompt_is_computed_once_no_fetch_of_it_is_under_way() -> None:
    """vLLM stores no chunk whose row awaits a fetch, so the bucket would never get it."""
    desk = Desk("a", rows=128)
    assert desk.look_up("a", *range(9)) == [HIT] * 8 + [RETRY]
    first, *others = desk.load("a", *range(8))
    desk.end_pass()
    desk.end([first], Outcome.MISSING)
    assert desk.look_up("a", 8) == [RETRY], "no probe begins behind an absent chunk"
    desk.end_pass()
    assert desk.look_up("a", 0) == [RETRY]
    desk.end_pass()
    desk.end(others, Outcome.MISSING)
    assert desk.look_up("a", 0) == [MISS]


def test_known_chunks_take_no_probe() -> None:
    desk = Desk()
    for number in range(100):
        desk.planner.index.note_present(row_key(name_of(0, number)).chunk)
    desk.planner.begin("a")
    assert desk.look_up("a", *range(100)) == [HIT] * 100


def test_a_second_group_is_probed_after_the_first_and_known_by_it() -> None:
    desk = Desk("a")
    assert desk.look_up("a", *range(8)) == [HIT] * 8
    assert desk.look_up("a", 7, 6, group=1) == [RETRY, RETRY]
    desk.end(desk.load("a", *range(8)))
    desk.end_pass()
    assert desk.look_up("a", 7, 6, group=1) == [HIT, HIT]


def test_rows_that_others_hold_are_waited_for_and_too_many_are_a_miss() -> None:
    desk = Desk("ab", rows=16)
    for number in range(40):
        desk.planner.index.note_present(row_key(name_of(0, number)).chunk)
    assert desk.look_up("a", *range(10)) == [HIT] * 10
    assert desk.look_up("b", *range(20, 26)) == [HIT] * 4 + [RETRY] * 2
    desk.load("a", *range(10))
    desk.end_pass("a")
    # The promises to "b" have come to nothing: it has loaded none of them.
    assert desk.planner.counters["fetches_without_room"] == 4
    assert desk.look_up("b", *range(24, 40)) == [HIT] * 14 + [MISS] * 2


def test_a_request_that_resumes_holds_its_rows_until_it_has_them_all() -> None:
    """vLLM's first model runner does not say that such a request begins."""
    desk = Desk("abcde", rows=16)
    for number in range(40):
        desk.planner.index.note_present(row_key(name_of(0, number)).chunk)
    desk.end_pass("a")
    for before, after in ("bc", "de"):
        desk.now_s += MAX_WAIT_S  # computed, and preempted; it may wait as long again
        chunks = range(10) if before == "b" else range(10, 20)
        assert desk.look_up("a", *chunks) == [HIT] * 10
        jobs = desk.load("a", *chunks)
        assert desk.look_up(before, *range(30, 40)) == [HIT] * 4 + [RETRY] * 6
        desk.end_pass()
        assert not desk.planner.transfers.take_cancels()
        desk.planner.finish(before)
        desk.end(jobs)
        desk.end_pass()
        assert desk.look_up(after, *range(26, 40)) == [HIT] * 14
        desk.end_pass()


def test_a_wait_ends_and_cancels_its_fetches() -> None:
    """And nobody begins to wait for what was just given up."""
    desk = Desk("abc")
    desk.look_up("a", 1, 2)
    jobs = desk.load("a", 1, 2)
    desk.end_pass()
    desk.now_s += MAX_WAIT_S + 1
    desk.end_pass()
    assert desk.planner.transfers.take_cancels() == [job.job_id for job in jobs]
    assert not desk.planner.transfers.take_ends()
    desk.end(jobs[:1])
    desk.end(jobs[1:], Outcome.CANCELLED)
    (end,) = desk.planner.transfers.take_ends()
    assert (end.is_whole, end.succeeded, end.nbytes) == (False, (name_of(0, 1),), 7)
    assert desk.look_up("a", 3) == [MISS]
    assert desk.planner.counters["deadline_cuts"] == 1
    assert desk.look_up("b", 2) == [MISS]
    desk.now_s += MAX_WAIT_S
    desk.end_pass()
    assert desk.look_up("c", 2) == [HIT]


def test_uploads_alone_pause_again_and_again_while_the_store_fails() -> None:
    desk, sent = Desk(), 0
    for second in range(600):
        desk.now_s += 1.0
        jobs = desk.store("a", second)
        sent += len(jobs)
        desk.end(jobs, Outcome.FAILED)
    assert 20 < sent < 60, "two a minute"


@pytest.mark.parametrize(
    ("before", "sent", "dropped"),
    [
        (lambda desk: None, 3, {}),
        (lambda desk: desk.planner.index.note_present(row_key(name_of(0, 1)).chunk), 2, {}),
        (lambda desk: desk.store("b", *range(100, 164)), 0, {"saves_dropped": 3}),
        (
            lambda desk: [desk.planner.breaker.failed(desk.now_s) for _ in range(9)],
            0,
            {"saves_dropped": 3, "saves_refused_by_breaker": 3},
        ),
    ],
    ids=["all", "one is there", "too many", "store fails"],
)
def test_a_store_uploads_the_missing_or_is_shed(
    before: Callable[[Desk], Any], sent: int, dropped: dict[str, int]
) -> None:
    desk = Desk()
    before(desk)
    jobs = desk.store("a", 1, 2, 3)
    assert [job.kind for job in jobs] == [JobKind.UPLOAD] * sent
    desk.end(jobs)
    end = next(e for e in desk.planner.transfers.take_ends() if e.transfer_id == desk.transfers)
    assert end.is_whole is not bool(dropped)
    assert {
        n: v for n, v in desk.planner.counters.items() if n.startswith("saves_") and v
    } == dropped


def test_a_reset_bars_the_requests_that_live() -> None:
    desk = Desk("a")
    desk.end(desk.store("a", 1), fresh_s=0.0)
    desk.planner.use(row_key(name_of(0, 1)), desk.now_s)
    desk.planner.reset()
    desk.end_pass()  # the books: nothing is kept of that use
    desk.planner.begin("b")
    assert [desk.look_up(name, 5) for name in "ab"] == [[MISS], [HIT]]
    assert desk.store("a", 2) == []
    assert desk.planner.counters["saves_after_reset"] == 1
    assert len(desk.store("b", 1)) == 1


def test_fetches_of_a_request_that_has_ended_are_cancelled_when_they_are_late() -> None:
    """Others may wait for the same rows."""
    desk = Desk("a")
    desk.look_up("a", 1)
    (job,) = desk.load("a", 1)
    desk.planner.finish("a")
    desk.end_pass()
    assert desk.planner.transfers.take_cancels() == []
    desk.now_s += MAX_WAIT_S
    desk.end_pass()
    assert desk.planner.transfers.take_cancels() == [job.job_id]


def test_limits_of_a_request() -> None:
    """vLLM itself looks up no more than so many tokens after those in its own cache."""
    desk = Desk()
    for name, most in (("a", 0), ("b", 128)):
        desk.planner.begin(name, RequestLimits(load_tokens=most))
    assert [desk.look_up(name, 9) for name in "ab"] == [[MISS], [HIT]]


@pytest.mark.parametrize("ends_at_once", [False, True])
@pytest.mark.parametrize("save_tokens", [None, 0])
@pytest.mark.parametrize(
    ("first", "stores"),
    [(0, [range(8)]), (0, [range(3), range(3, 8)]), (4, [range(8)]), (9, [range(8)])],
    ids=["all", "in two transfers", "but what vLLM's own cache has", "nothing"],
)
def test_prefill_is_measured_and_decoding_is_not(
    first: int, stores: list[range], save_tokens: int | None, ends_at_once: bool
) -> None:
    desk = Desk()
    desk.planner.begin("a", RequestLimits(save_tokens))
    desk.look_up("a", first)
    desk.end_pass("a")
    for _ in range(2):
        desk.end_pass()
    desk.now_s += 2.0
    for chunks in stores:
        assert bool(desk.store("a", *chunks)) is (save_tokens is None)
        desk.now_s += 1e-6
    if ends_at_once:
        desk.planner.finish("a")
    desk.end_pass()
    speed = (8 - first) * CHUNK_TOKENS / 2 if first < 8 else 8000.0
    assert desk.planner.pace.prefill_tokens_per_s == pytest.approx(speed)
    for _ in range(CHUNK_TOKENS):
        desk.end_pass()
    desk.now_s += 50.0
    desk.store("a", 9)
    desk.end_pass()
    assert desk.planner.pace.prefill_tokens_per_s == pytest.approx(speed)
    desk.end_pass("a")  # after a preemption; vLLM offers again what the primary tier has lost
    desk.now_s += 0.01
    desk.store("a", *range(10))
    desk.end_pass()
    assert desk.planner.pace.prefill_tokens_per_s == pytest.approx(speed)


def test_a_wait_is_patient_until_prefill_is_measured() -> None:
    """And no longer than computing takes after that."""
    desk = Desk()
    for name, computed_s in (("a", None), ("b", 0.1)):
        desk.planner.begin(name)
        if computed_s is not None:
            desk.look_up(name, 100)
            desk.end_pass(name)
            desk.now_s += computed_s
            desk.store(name, *range(100, 108))
        chunks = range(8) if name == "a" else range(20, 28)
        desk.look_up(name, *chunks)
        jobs = desk.load(name, *chunks)
        desk.end_pass()
        desk.now_s += 0.5  # less than patience, more than eight chunks take at that speed
        desk.end_pass()
        assert (jobs[0].job_id in desk.planner.transfers.take_cancels()) is (name == "b")


def measured() -> Desk:
    """A desk whose engine has computed eight chunks in 0.8 s."""
    desk = Desk("m")
    desk.look_up("m", 0)
    desk.end_pass("m")
    desk.now_s += 0.8
    desk.store("m", *range(8))
    desk.end_pass()
    return desk


def test_a_request_waits_while_the_engine_computes_those_before_it() -> None:
    desk, jobs = measured(), {}
    desk.planner.pace.gave_up(0.5, 8)  # so fetches are expected to take a second
    for name, first in (("a", 10), ("b", 20)):
        desk.planner.begin(name)
        desk.look_up(name, *range(first, first + 8))
        jobs[name] = desk.load(name, *range(first, first + 8))
    desk.end_pass()
    assert desk.planner.transfers.take_cancels() == [job.job_id for job in jobs["a"]]


@pytest.mark.parametrize("groups", [1, 4])
def test_prompts_at_once_give_up_a_stalled_bucket_one_after_another(groups: int) -> None:
    """Each waits while the engine is assumed to compute those before it: 0.128 s for 8 chunks."""
    desk = Desk("abcd", groups=groups)
    for place, name in enumerate("abcd"):
        desk.look_up(name, *range(10 * place, 10 * place + 8))
        desk.load(name, *range(10 * place, 10 * place + 8))
    closed = []
    while len(closed) < 4:
        desk.end_pass()
        closed += [desk.now_s - 10.0] * (len(desk.planner.transfers.take_cancels()) // 8)
        desk.now_s += 0.01
    assert closed == pytest.approx([1.0 + place * 0.13 / groups for place in range(4)], abs=0.05)


def test_a_request_waits_behind_none_that_came_later() -> None:
    """It has no fetch, because theirs are all the probes there may be."""
    desk = Desk("abc", rows=128)
    for name, first in (("b", 10), ("c", 20)):
        desk.look_up(name, *range(first, first + 8))
        desk.load(name, *range(first, first + 8))
    while desk.look_up("a", 1) == [RETRY]:
        desk.end_pass()
        desk.now_s += 0.01
    assert desk.now_s == pytest.approx(11.0, abs=0.05)


@pytest.mark.parametrize(("arriving", "given_up"), [("a", 0), ("b", 8), ("", 16)])
def test_arrivals_before_its_own_make_a_request_patient(arriving: str, given_up: int) -> None:
    """The trial wait of "d", a minute after the last arrival or trial, is no arrival."""
    desk, fetches = Desk("abcd", rows=128), {}
    desk.now_s = 59.5
    for name, chunks in (("a", range(8)), ("b", range(10, 18))):
        desk.look_up(name, *chunks)
        fetches[name] = desk.load(name, *chunks)
    desk.look_up("c", 20)
    desk.end_pass()
    desk.now_s += 0.7
    desk.look_up("c", 20)
    desk.look_up("d", 30)
    desk.end(fetches.get(arriving, [])[:1])
    for _ in range(3):
        desk.end_pass()
        desk.now_s += 0.31
    assert len(desk.planner.transfers.take_cancels()) == given_up
    assert desk.look_up("c", 20) != [MISS], "it has no fetch yet, so all are before it"


def test_a_bucket_that_stalled_is_tried_again_after_a_minute() -> None:
    """The fetches of a wait that is refused at once are cancelled, and measure nothing."""
    desk = measured()

    def is_refused(number: int, outcome: Outcome) -> bool:
        name, chunks = str(number), range(10 * number, 10 * number + 8)
        desk.planner.begin(name)
        desk.look_up(name, *chunks)
        jobs = desk.load(name, *chunks)
        desk.end_pass()
        at_once = bool(desk.planner.transfers.take_cancels())
        desk.now_s += 1
        desk.end(jobs, Outcome.CANCELLED if at_once else outcome)
        desk.end_pass()
        desk.planner.finish(name)
        return at_once

    assert not is_refused(1, Outcome.OK)
    desk.planner.pace.gave_up(10.0, 8)
    assert all(is_refused(number, Outcome.OK) for number in range(2, 50))
    desk.now_s += 60
    assert not is_refused(50, Outcome.OK)
    assert not is_refused(51, Outcome.OK)


def test_a_store_with_holes_measures_nothing() -> None:
    desk = Desk("a")
    desk.look_up("a", 1, 2)
    found, absent = desk.load("a", 1, 2)
    desk.end([found])
    desk.end([absent], Outcome.MISSING)
    before = desk.planner.pace.prefill_tokens_per_s
    desk.end_pass("a")
    desk.now_s += 1.0
    desk.store("a", 2)
    assert desk.planner.pace.prefill_tokens_per_s == before


def test_changes_are_what_the_bucket_turned_out_to_have() -> None:
    desk = Desk("a", is_observed=True)
    desk.end(desk.store("a", 1), fresh_s=0.0)
    assert desk.store("a", 1) == []  # it is there, and the use is asked about
    (use,) = desk.planner.uses()
    assert use == BucketJob(use.job_id, JobKind.USE, ChunkKey(0, name_of(0, 1)[:-4]))
    desk.end(desk.load("a", 1), Outcome.MISSING)
    assert desk.planner.changes == [(name_of(0, 1), True), (name_of(0, 1), False)]
    desk.end([use], Outcome.MISSING)
    assert desk.planner.index.verdict(use.key, desk.now_s) is False


@pytest.mark.parametrize("reset", [False, True])
def test_a_chunk_in_use_that_the_bucket_has_lost_is_a_change(reset: bool) -> None:
    """A use from before a reset is of a key that is out of reach."""
    desk = Desk(is_observed=True)
    desk.end(desk.store("a", 1), fresh_s=0.0)
    desk.planner.use(row_key(name_of(0, 1)), desk.now_s)
    uses = desk.planner.uses()
    if reset:
        desk.planner.reset()
        desk.planner.changes.clear()
    desk.end(uses, Outcome.OK if reset else Outcome.MISSING)
    assert desk.planner.changes == ([] if reset else [(name_of(0, 1), n) for n in (True, False)])
