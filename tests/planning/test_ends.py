"""Ends of jobs on several ranks, in any order; what is tried again; what a reset leaves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from s3kv.host.slots import SlotState
from s3kv.messages import JobEnd, JobKind, SaveOrder, StepReport
from s3kv.planning.breaker import BreakerState
from s3kv.planning.kv import NOTHING, WAIT, Answer
from s3kv.planning.ledger import ChunkState
from s3kv.types import Outcome
from tests.planning.desk import FAILED, MISSING, OK, Desk

SAVE, UPLOAD = JobKind.SAVE, JobKind.UPLOAD


def saving(**setup: object) -> tuple[Desk, SaveOrder]:
    desk = Desk(**{"may_load": False, **setup})
    desk.add("r", "aaaa")
    desk.admit("r")
    (save,) = desk.run("r", [0, 1], 0, 4, new=True).saves
    return desk, save


def interleavings(first: Sequence[object], second: Sequence[object]) -> list[list[object]]:
    """All ways to merge two ranks' ends, each in its own order."""
    length = len(first) + len(second)
    merged = []
    for places in itertools.combinations(range(length), len(first)):
        ones, twos = iter(first), iter(second)
        merged.append([next(ones) if i in places else next(twos) for i in range(length)])
    return merged


GOOD = [(SAVE, OK), (UPLOAD, OK)]
NOT_COPIED = [(SAVE, FAILED), (UPLOAD, Outcome.CANCELLED)]
NOT_SENT = [(SAVE, OK), (UPLOAD, FAILED)]


@pytest.mark.parametrize("ends", interleavings(GOOD, GOOD), ids=str)
def test_a_chunk_is_resident_when_all_ranks_have_copied_it(
    ends: list[tuple[JobKind, Outcome]],
) -> None:
    desk, save = saving(world_size=2)
    ledger, key = desk.planner.ledger, desk.key("aaaa")
    copies = uploads = 0
    for kind, outcome in ends:
        desk.end(save, outcome, kind=kind, ranks=1)
        copies += kind is SAVE
        uploads += kind is UPLOAD
        resident = ledger.state(key) is ChunkState.RESIDENT
        assert resident == (copies == 2)
        assert ledger.index.is_present(key) == (uploads == 2)
    slot = ledger.slots.lookup(key)
    assert slot is not None
    assert ledger.slots.state(slot) is SlotState.CLEAN


@pytest.mark.parametrize("ends", interleavings(GOOD, NOT_COPIED), ids=str)
def test_a_slot_is_free_when_nothing_of_a_failed_save_uses_it_any_more(
    ends: list[tuple[JobKind, Outcome]],
) -> None:
    desk, save = saving(world_size=2)
    for kind, outcome in ends:
        assert desk.planner.ledger.slots.statistics().reserved == 1
        desk.end(save, outcome, kind=kind, ranks=1)
    assert desk.planner.ledger.state(desk.key("aaaa")) is ChunkState.ABSENT
    assert desk.planner.ledger.slots.statistics().free == 16
    assert not desk.planner.ledger.index.is_present(desk.key("aaaa")), "not on all ranks"


@pytest.mark.parametrize("ends", interleavings(GOOD, NOT_SENT), ids=str)
def test_an_upload_that_failed_on_one_rank_is_repeated_on_all(
    ends: list[tuple[JobKind, Outcome]],
) -> None:
    desk, save = saving(world_size=2)
    for kind, outcome in ends:
        desk.end(save, outcome, kind=kind, ranks=1)
    assert not desk.planner.ledger.index.is_present(desk.key("aaaa"))
    desk.now_s = 1.0
    (upload,) = desk.plan().uploads
    desk.end(upload, Outcome.EXISTS, ranks=1)
    assert not desk.planner.ledger.index.is_present(desk.key("aaaa"))
    desk.end(upload, OK, ranks=1)
    assert desk.planner.ledger.index.is_present(desk.key("aaaa"))


def test_reports_of_ranks_that_were_merged_on_the_way_count_for_all() -> None:
    desk, save = saving(world_size=2)
    report = StepReport()
    for _ in range(2):
        other = StepReport()
        other.add(JobEnd(save.job_id, SAVE, OK, 10, 0.1))
        report.merge(other)
    desk.planner.on_report(report, 0.0)
    assert desk.planner.ledger.state(desk.key("aaaa")) is ChunkState.RESIDENT


@pytest.mark.parametrize("order", [(OK, MISSING), (MISSING, OK), (OK, FAILED), (FAILED, OK)])
def test_a_fetch_counts_when_it_arrived_on_all_ranks(order: tuple[Outcome, Outcome]) -> None:
    desk = Desk(world_size=2)
    desk.add("r", "aaaa")
    desk.lookup("r")
    (fetch,) = desk.plan().fetches
    desk.end(fetch, order[0], ranks=1)
    assert desk.lookup("r") == WAIT
    assert desk.planner.ledger.slots.statistics().reserved == 1
    desk.end(fetch, order[1], ranks=1)
    assert desk.lookup("r") == NOTHING
    assert desk.planner.ledger.slots.statistics().reserved == 0


def test_one_end_too_many_is_an_error() -> None:
    desk, save = saving(world_size=2)
    desk.end(save, kind=SAVE, ranks=2)
    with pytest.raises(AssertionError, match="more often"):
        desk.end(save, kind=SAVE, ranks=1)


# ---- uploads are tried again


def test_uploads_are_tried_again_less_and_less_often_and_then_given_up() -> None:
    desk, save = saving(slots=1)
    desk.copied(save)
    desk.uploaded(save, FAILED)
    for pause_s in (1.0, 4.0, 15.0, 60.0):
        desk.now_s += pause_s - 0.1
        assert desk.plan().uploads == ()
        assert desk.planner.ledger.saves_inflight == 1
        desk.now_s += 0.1
        (upload,) = desk.plan().uploads
        assert (upload.key, upload.slot) == (save.key, save.slot)
        desk.end(upload, Outcome.DENIED)
    assert desk.planner.counters["uploads_given_up"] == 1
    assert desk.planner.ledger.saves_inflight == 0
    desk.now_s += 1_000
    assert desk.plan().uploads == ()
    desk.add("next", "bbbb")
    desk.admit("next")
    assert len(desk.run("next", [2, 3], 0, 4, new=True).saves) == 1, "its slot can be had now"


def test_a_chunk_stays_in_host_memory_and_usable_while_its_upload_is_tried_again() -> None:
    desk, save = saving(slots=1, may_load=True)
    desk.copied(save)
    desk.uploaded(save, FAILED)
    desk.add("other", "xxxx")
    assert desk.lookup("other") == NOTHING
    desk.add("same", "aaaa")
    assert desk.lookup("same") == Answer(False, 4)


# ---- the breaker


def broken() -> Desk:
    """Three fetches have failed in a row."""
    desk = Desk(probe_chunks=3)
    desk.add("unlucky", "aaaabbbbcccc")
    desk.lookup("unlucky")
    desk.end(desk.plan().fetches, FAILED)
    assert desk.planner.ledger.breaker.state is BreakerState.OPEN
    return desk


def fetches_for(desk: Desk, prompt: str) -> int:
    desk.add(prompt, prompt)
    desk.lookup(prompt)
    return len(desk.plan().fetches)


def test_an_open_breaker_asks_for_nothing_and_nobody_waits() -> None:
    desk = broken()
    desk.add("r", "xxxx")
    assert desk.lookup("r") == NOTHING
    assert desk.plan().fetches == ()


def test_after_a_pause_one_fetch_finds_out() -> None:
    desk = broken()
    desk.now_s = 0.5
    desk.add("r", "xxxxyyyy")
    assert desk.lookup("r") == WAIT
    fetches = desk.plan().fetches
    assert len(fetches) == 1
    desk.end(fetches, MISSING)
    assert desk.planner.ledger.breaker.state is BreakerState.CLOSED, "an answer is an answer"
    assert fetches_for(desk, "ddddeeeeffff") == 3


def test_a_failed_attempt_doubles_the_pause() -> None:
    desk = broken()
    desk.now_s = 0.5
    desk.add("r", "xxxx")
    desk.lookup("r")
    desk.end(desk.plan().fetches, FAILED)
    desk.now_s = 1.4
    assert fetches_for(desk, "yyyy") == 0
    desk.now_s = 1.5
    assert fetches_for(desk, "zzzz") == 1


def test_uploads_tell_the_breaker_too() -> None:
    desk, save = saving(may_load=True)
    desk.copied(save)
    desk.uploaded(save, FAILED)
    for _ in range(2):
        desk.now_s += 100
        desk.end(desk.plan().uploads, FAILED)
    assert desk.planner.ledger.breaker.state is BreakerState.OPEN


# ---- reset


def test_after_a_reset_nothing_of_before_is_reachable() -> None:
    desk = Desk()
    desk.make_resident("aaaa")
    desk.planner.reset(b"salt")
    desk.add("r", "aaaa")
    assert desk.lookup("r") == WAIT, "it has to ask the bucket"
    (fetch,) = desk.plan().fetches
    assert fetch.key != desk.key("aaaa")
    assert len(fetch.key.block_hash) == 32


def test_jobs_in_flight_during_a_reset_bring_nothing_back() -> None:
    desk = Desk(probe_chunks=1)
    desk.add("old", "aaaa")
    desk.lookup("old")
    (fetch,) = desk.plan().fetches
    desk.add("computing", "bbbb")
    desk.admit("computing")
    (save,) = desk.run("computing", [0, 1], 0, 4, new=True).saves
    desk.planner.reset(b"salt")
    desk.end(fetch)
    desk.copied(save)
    desk.uploaded(save)
    assert desk.lookup("old") == NOTHING
    for prompt in ("aaaa", "bbbb"):
        desk.add(f"new {prompt}", prompt)
        assert desk.lookup(f"new {prompt}") == WAIT
    assert not {fetch.key, save.key} & set(desk.keys(desk.plan().fetches))
    assert desk.pinned() == 0


@pytest.mark.parametrize("state", ["waiting", "offered", "loading", "computing"])
def test_requests_of_before_a_reset_neither_load_nor_save(state: str) -> None:
    desk = Desk()
    desk.add("r", "aaaabbbb")
    if state != "computing":
        assert desk.lookup("r") == WAIT
        if state != "waiting":
            desk.end(desk.plan().fetches)
            assert desk.lookup("r") == Answer(False, 8)
        if state == "loading":
            desk.admit("r", [0, 1, 2, 3], 8)
            desk.plan()
    desk.planner.reset(b"salt")
    desk.planner.check()
    if state == "loading":
        assert desk.pinned() == 2, "the copy is under way"
        desk.planner.loaded(["r"])
    assert desk.pinned() == 0
    assert desk.lookup("r") == NOTHING
    desk.admit("r", [0, 1, 2, 3])
    assert desk.run("r", [0, 1, 2, 3], 0, 8, new=True).saves == ()


def test_two_resets_have_nothing_in_common() -> None:
    keys = set()
    for salt in (b"", b"one", b"two"):
        desk = Desk()
        if salt:
            desk.planner.reset(salt)
        desk.add("r", "aaaa")
        desk.lookup("r")
        keys.update(desk.keys(desk.plan().fetches))
    assert len(keys) == 3
