"""Ends of jobs on several ranks, in any order, and what is tried again."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from s3kv.messages import BucketJob, JobEnd, JobKind, SaveJob, StepReport
from s3kv.planning.breaker import BreakerState
from s3kv.planning.ledger import ChunkState
from s3kv.types import Outcome
from tests.plans import uploads_of
from tests.unit.planning.desk import FAILED, MISSING, OK, Desk, saving

SAVE = JobKind.SAVE


def test_reports_of_ranks_that_were_merged_on_the_way_count_for_all() -> None:
    desk, save = saving(world_size=3)
    report = StepReport()
    for seconds in (0.1, 0.3, 0.2):
        other = StepReport()
        other.add(JobEnd(save.job_id, SAVE, OK, 10, seconds, source=f"after {seconds} s"))
        report.merge(other)
    (end,) = report.ends.values()
    assert (end.seconds, end.source, end.ranks) == (0.3, "after 0.3 s", 3)
    desk.planner.on_report(report, 0.0)
    assert desk.planner.ledger.state(desk.key("aaaa")) is ChunkState.RESIDENT


def test_one_end_too_many_is_an_error() -> None:
    desk, save = saving(world_size=2)
    desk.end(save, kind=SAVE, ranks=2)
    with pytest.raises(AssertionError, match="more often"):
        desk.end(save, kind=SAVE, ranks=1)


def test_uploads_are_tried_again_less_and_less_often_and_then_given_up() -> None:
    desk, save = saving(slots=1)
    desk.copied(save)
    desk.uploaded(save, FAILED)
    for pause_s in (1.0, 4.0, 15.0, 60.0):
        desk.now_s += pause_s - 0.1
        assert desk.uploads() == ()
        assert desk.planner.ledger.saves_inflight == 1
        desk.now_s += 0.1
        (upload,) = desk.uploads()
        assert (upload.key, upload.slot) == (save.key, save.slot)
        desk.end(upload, Outcome.DENIED)
    assert desk.planner.counters["uploads_given_up"] == 1
    assert desk.planner.ledger.saves_inflight == 0
    desk.now_s += 1_000
    assert desk.uploads() == ()
    assert len(desk.compute("next", "bbbb", [2, 3], 0, 4).saves) == 1, "its slot can be had now"


def given_up(**setup: object) -> tuple[Desk, SaveJob]:
    """A resident chunk, "aaaa", that an outage of more than 80 s has kept from the bucket."""
    desk, save = saving(**setup)
    desk.copied(save)
    desk.uploaded(save, FAILED)
    for pause_s in (1.0, 4.0, 15.0, 60.0):
        desk.now_s += pause_s
        desk.end(desk.uploads(), FAILED)
    assert desk.planner.counters["uploads_given_up"] == 1
    return desk, save


def hit(desk: Desk, name: str, prompt: str = "aaaa") -> tuple[BucketJob, ...]:
    """Another request has this prompt, and its blocks already; the uploads of its step."""
    desk.add(name, prompt)
    desk.admit(name)
    return uploads_of(desk.run(name, list(range(len(prompt) // 2)), 0, len(prompt), new=True))


def test_after_a_long_outage_a_hit_uploads_what_was_given_up() -> None:
    desk, save = given_up()
    assert desk.planner.ledger.table.statistics().dirty == 0, "it may be evicted meanwhile"
    uploads = hit(desk, "r2")
    assert [(upload.key, upload.slot) for upload in uploads] == [(save.key, save.slot)]
    assert desk.planner.ledger.saves_inflight == 1
    assert desk.planner.ledger.table.statistics().dirty == 1, "and not now"
    assert hit(desk, "r3") == (), "it is on its way"
    desk.end(uploads)
    assert desk.planner.ledger.index.is_present(save.key)
    assert desk.planner.ledger.saves_inflight == 0
    assert hit(desk, "r4") == ()
    assert desk.planner.counters["uploads_again"] == 1


def test_what_is_loaded_from_host_memory_is_hit_too() -> None:
    desk, save = given_up(may_load=True)
    assert desk.ask("r2", "aaaabb").tokens == 4
    desk.admit("r2", [2, 3, 4], 4)
    desk.plan()
    desk.planner.loaded(["r2"])
    desk.admit("r2")
    (upload,) = uploads_of(desk.run("r2", [2, 3, 4], 4, 2, new=True))
    assert upload.key == save.key


def test_while_the_outage_goes_on_hits_upload_less_and_less_often() -> None:
    """A thousand hits in an hour and a half, of which one in five minutes is tried."""
    desk, save = given_up()
    tries = []
    for number in range(1_000):
        desk.now_s += 5.0
        for upload in hit(desk, f"hit {number}"):
            tries.append(desk.now_s)
            desk.end(upload, Outcome.DENIED)
    pauses = [after - before for before, after in itertools.pairwise(tries)]
    assert pauses[:5] == [60.0, 120.0, 240.0, 300.0, 300.0]
    assert set(pauses[5:]) == {300.0}
    assert desk.planner.ledger.saves_inflight == 0
    desk.now_s += 300.0
    (upload,) = hit(desk, "the last")
    desk.end(upload)
    assert desk.planner.ledger.index.is_present(save.key)


def test_nothing_is_uploaded_again_while_the_breaker_is_open() -> None:
    desk, save = given_up()
    breaker = desk.planner.ledger.breaker
    desk.now_s += 100.0
    while breaker.state is not BreakerState.OPEN or not breaker.is_open(desk.now_s):
        breaker.allows(desk.now_s)
        breaker.failed(desk.now_s)
    assert hit(desk, "r2") == ()
    desk.now_s += 30.0
    (upload,) = hit(desk, "r3")
    assert upload.key == save.key, "nothing else may ever ask a store of which all is resident"
    desk.end(upload)
    assert breaker.state is BreakerState.CLOSED


def test_a_store_that_is_back_is_not_stormed() -> None:
    """One upload finds out; then as many at once as saves may be on their way."""
    prompts = [letter * 4 for letter in "abcdefgh"]
    desk = Desk(may_load=False, max_saves_inflight=8)
    for number, prompt in enumerate(prompts):
        saves = desk.compute(prompt, prompt, [2 * number, 2 * number + 1], 0, 4).saves
        desk.copied(saves)
        desk.uploaded(saves, FAILED)
    while desk.planner.ledger.saves_inflight:
        desk.now_s += 60.0
        desk.end(desk.uploads(), FAILED)
    assert len(desk.planner.ledger.unsaved) == 8
    desk.planner._settings = dataclasses.replace(desk.planner._settings, max_saves_inflight=3)
    desk.now_s += 100.0
    uploads = [u for n, prompt in enumerate(prompts) for u in hit(desk, f"again {n}", prompt)]
    assert len(uploads) == 1
    desk.end(uploads)
    counts = []
    while desk.planner.ledger.unsaved:
        orders = desk.uploads()
        counts.append(len(orders))
        desk.end(orders)
    assert counts == [3, 3, 1], "each of them was hit before"


def test_what_can_never_be_uploaded_is_given_up_at_once_and_for_good() -> None:
    desk, save = saving()
    desk.copied(save)
    desk.uploaded(save, Outcome.INVALID)
    ledger = desk.planner.ledger
    assert (ledger.saves_inflight, desk.planner.counters["uploads_given_up"]) == (0, 1)
    desk.now_s += 1_000.0
    assert hit(desk, "r2") == ()
    assert not ledger.index.is_present(save.key)
    assert ledger.breaker.state is BreakerState.CLOSED, "it says nothing about the bucket"


def test_after_a_pause_one_fetch_finds_out() -> None:
    desk = Desk(probe_chunks=3)
    desk.end(desk.fetches_for("unlucky", "aaaabbbbcccc"), FAILED)
    assert desk.planner.ledger.breaker.state is BreakerState.OPEN
    desk.now_s = 0.5
    fetches = desk.fetches_for("r", "xxxxyyyy")
    assert len(fetches) == 1
    desk.end(fetches, MISSING)
    assert desk.planner.ledger.breaker.state is BreakerState.CLOSED, "an answer is an answer"
    assert len(desk.fetches_for("next", "ddddeeeeffff")) == 3


def test_uploads_tell_the_breaker_too() -> None:
    desk, save = saving(may_load=True)
    desk.copied(save)
    desk.uploaded(save, FAILED)
    for _ in range(2):
        desk.now_s += 100
        desk.end(desk.uploads(), FAILED)
    assert desk.planner.ledger.breaker.state is BreakerState.OPEN
