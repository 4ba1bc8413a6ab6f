"""What one rank counts and times of its own copies and transfers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from s3kv.device.copies import CopyEnds, LoadedEnd, SavedEnd
from s3kv.device.copy_jobs import CopyMark
from s3kv.messages import (
    BucketJob,
    CopyPart,
    JobEnd,
    JobKind,
    LoadJob,
    SaveJob,
    StepPlan,
    StepReport,
)
from s3kv.types import ChunkKey, Outcome
from s3kv.worker.rank import RankWorker

KEY = ChunkKey(0, b"k" * 32)


class Copies:
    def __init__(self) -> None:
        self.ends = CopyEnds([], [])
        self.orders: list[tuple[Any, ...]] = []
        self.waits: list[float] = []
        self.fences: list[int] = []

        self.marks = 0
        self.copier = SimpleNamespace(refused=0)

    def mark(self) -> CopyMark:
        self.marks += 1
        return CopyMark(self.marks, True)

    def wait_load(self, timeout_s: float) -> None:
        self.waits.append(timeout_s)

    def save(self, *order: Any) -> None:
        """Ends when a test says so."""
        self.orders.append(order)

    load = save

    def fence(self, job_ids: Iterable[int]) -> None:
        assert self.orders, "the copies come first"
        self.fences.extend(job_ids)

    def wait_all(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        return True

    def poll(self) -> CopyEnds:
        ends, self.ends = self.ends, CopyEnds([], [])
        return ends


class Client:
    is_due = False

    def __init__(self) -> None:
        self.ends: list[JobEnd] = []
        self.waits: list[float] = []

        self.jobs: list[BucketJob] = []

    def submit(self, job: BucketJob) -> None:
        """Ends when a test says so."""
        self.jobs.append(job)

    def flush(self) -> None:
        """Nothing is sent."""

    def poll(self, linger_s: float) -> list[JobEnd]:
        self.waits.append(linger_s)
        ends, self.ends = self.ends, []
        return ends


class Rig:
    def __init__(
        self,
        block_bytes: dict[int, int] | None = None,
        members: dict[int, tuple[int, ...]] | None = None,
        *,
        uploads: bool = True,
    ) -> None:
        self.now_s = 100.0
        self.copies, self.client = Copies(), Client()
        self.rank = RankWorker(
            copies=self.copies,  # type: ignore[arg-type]
            client=self.client,  # type: ignore[arg-type]
            block_bytes=block_bytes or {0: 1_000},
            uploads=uploads,
            clock=lambda: self.now_s,
            members=members,
        )

    def save(self, *orders: SaveJob, read_first: bool = False) -> None:
        self.rank.begin(StepPlan(saves=orders))
        self.rank.save(orders, read_first=read_first)

    def end(self, *saved: SavedEnd, loaded: Sequence[LoadedEnd] = ()) -> None:
        self.copies.ends = CopyEnds([*saved], [*loaded])
        self.rank.poll()

    def ends(self) -> set[tuple[int, JobKind, Outcome]]:
        self.rank.poll()
        report = self.rank.take_report() or StepReport()
        return {(end.job_id, end.kind, end.outcome) for end in report.ends.values()}


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_uses_are_asked_about_and_move_nothing(rig: Rig) -> None:
    jobs = (BucketJob(7, JobKind.USE, KEY), BucketJob(8, JobKind.USE, KEY))
    rig.rank.begin(StepPlan(jobs=jobs))
    assert rig.client.jobs == [*jobs]
    assert not rig.rank.is_quiet
    rig.client.ends = [
        JobEnd(7, JobKind.USE, Outcome.EXISTS, seconds=0.1, fresh_s=50.0),
        JobEnd(8, JobKind.USE, Outcome.MISSING),
    ]
    rig.rank.poll()
    report = rig.rank.take_report()
    assert report.ends[7, JobKind.USE].fresh_s == 50.0
    assert report.ends[8, JobKind.USE].outcome is Outcome.MISSING
    assert rig.rank.take_seconds() == {}
    assert rig.rank.is_quiet


def test_of_ranks_that_hold_the_same_one_asks() -> None:
    rig = Rig(uploads=False)
    rig.rank.begin(StepPlan(jobs=(BucketJob(7, JobKind.USE, KEY),)))
    assert rig.client.jobs == []
    report = rig.rank.take_report()
    other = StepReport()
    other.add(JobEnd(7, JobKind.USE, Outcome.MISSING, fresh_s=0.0))
    report.merge(other)
    assert report.ends[7, JobKind.USE].outcome is Outcome.MISSING


@pytest.mark.parametrize("numbers", [*itertools.permutations([None, 3, 4])])
def test_merged_reports_have_the_number_of_the_newest_step(numbers: tuple[int | None, ...]) -> None:
    """vLLM may hold a report back until a later step."""
    merged = StepReport()
    for number in numbers:
        merged.merge(StepReport(number=number))
    assert merged.number == 4


def test_loads_and_saves_are_timed_and_weighed(rig: Rig) -> None:
    parts = (CopyPart(0, 0, 0, (1, 2)), CopyPart(0, 1, 0, (3,)))
    rig.rank.load([LoadJob("good", parts), LoadJob("bad", parts)])
    rig.save(SaveJob(1, KEY, 2, (4, 5)), SaveJob(2, KEY, 3, (6, 7)))
    rig.now_s += 0.5
    loaded = LoadedEnd("good", True), LoadedEnd("bad", False)
    rig.end(SavedEnd(1, True, 0.25), SavedEnd(2, False, 9.0), loaded=loaded)
    counters = rig.rank.counters
    assert (counters["load_ok"], counters["load_bytes"]) == (1, 3_000)
    assert (counters["save_ok"], counters["save_failed"], counters["save_bytes"]) == (1, 1, 2_000)
    assert rig.rank.take_loaded() == ({"good", "bad"}, {"bad"})
    assert rig.rank.take_seconds() == {"load_seconds": [0.5], "save_seconds": [0.25]}
    assert rig.rank.take_seconds() == {}


def test_a_rank_is_quiet_once_every_end_has_been_taken(rig: Rig) -> None:
    assert rig.rank.is_quiet
    rig.client.is_due = True
    assert not rig.rank.is_quiet
    rig.client.is_due = False
    rig.rank.load([LoadJob("r", (CopyPart(0, 0, 0, (1,)),))])
    assert not rig.rank.is_quiet, "a load is under way"
    rig.end(loaded=[LoadedEnd("r", True)])
    assert not rig.rank.is_quiet, "its end has not been taken"
    rig.rank.take_loaded()
    assert rig.rank.is_quiet
    rig.save(SaveJob(1, KEY, 2, (4, 5)))
    assert not rig.rank.is_quiet, "a save is under way"
    rig.end(SavedEnd(1, True, 0.25))
    assert not rig.rank.is_quiet, "its upload is under way"
    rig.client.ends = [JobEnd(1, JobKind.UPLOAD, Outcome.OK)]
    rig.rank.poll()
    assert rig.rank.is_quiet


@pytest.mark.parametrize("uploads", [True, False])
def test_what_another_rank_uploads_ends_at_once(uploads: bool) -> None:
    """Saved and ordered again: the scheduler waits for the end on every rank."""
    rig = Rig(uploads=uploads)
    rig.save(SaveJob(1, KEY, 2, (4, 5)), SaveJob(2, KEY, 3, (6, 7)))
    rig.end(SavedEnd(1, True, 0.1), SavedEnd(2, False, 0.1))
    rig.rank.begin(StepPlan(jobs=(BucketJob(3, JobKind.UPLOAD, KEY, 2),)))
    report = rig.rank.take_report()
    ended = {job: end.outcome for (job, kind), end in report.ends.items() if kind is JobKind.UPLOAD}
    refused = {2: Outcome.CANCELLED}
    assert ended == (refused if uploads else refused | {1: Outcome.OK, 3: Outcome.OK})
    assert len(rig.client.jobs) == rig.rank.busy == (2 if uploads else 0)
    assert rig.rank.counters["upload_ok"] == 0, "only what was sent is counted"


def test_only_transfers_that_succeed_are_timed(rig: Rig) -> None:
    jobs = tuple(BucketJob(number, JobKind.FETCH, KEY, number) for number in range(1, 4))
    rig.rank.begin(StepPlan(jobs=jobs))
    rig.client.ends = [
        JobEnd(1, JobKind.FETCH, Outcome.OK, 4_000, 0.1),
        JobEnd(2, JobKind.FETCH, Outcome.MISSING, 0, 0.2),
        JobEnd(3, JobKind.FETCH, Outcome.FAILED, 0, 3.0),
    ]
    rig.rank.poll()
    assert rig.rank.take_seconds() == {"fetch_seconds": [0.1]}
    assert rig.rank.counters["fetch_bytes"] == 4_000
    assert rig.rank.counters["fetch_missing"] == rig.rank.counters["fetch_failed"] == 1


def test_saves_are_fenced_at_once_only_when_told(rig: Rig) -> None:
    rig.save(SaveJob(1, KEY, 2, (4, 5)))
    assert rig.copies.fences == []
    rig.save(SaveJob(2, KEY, 3, (6, 7)), SaveJob(3, KEY, 4, (8, 9)), read_first=True)
    assert rig.copies.fences == [2, 3]


def test_what_is_ordered_while_the_blocks_are_away_touches_nothing_and_ends() -> None:
    rig, parts = Rig(), (CopyPart(0, 0, 0, (1, 2)),)
    rig.save(SaveJob(1, KEY, 2, (4, 5)))
    assert rig.rank.suspend(7.0)
    assert rig.copies.waits == [7.0]
    before = list(rig.copies.orders)
    rig.rank.load([LoadJob("r", parts)])
    rig.save(SaveJob(2, KEY, 3, (6, 7)))
    assert rig.copies.orders == before
    rig.copies.ends = CopyEnds([SavedEnd(1, True, 0.1)], [])
    ends = rig.ends()
    assert rig.rank.take_loaded() == ({"r"}, {"r"})
    assert ends == {
        (1, JobKind.SAVE, Outcome.OK),
        (2, JobKind.SAVE, Outcome.FAILED),
        (2, JobKind.UPLOAD, Outcome.CANCELLED),
    }
    rig.rank.resume()
    rig.rank.load([LoadJob("s", parts)])
    assert len(rig.copies.orders) == len(before) + 1


def test_it_lingers_for_a_load_and_else_for_the_network(rig: Rig) -> None:
    rig.rank.poll(0.5)
    assert (rig.copies.waits, rig.client.waits) == ([], [0.5])
    rig.rank.load([LoadJob("r", (CopyPart(0, 0, 0, (1, 2)),))])
    rig.rank.poll()
    rig.rank.poll(0.25)
    assert (rig.copies.waits, rig.client.waits) == ([0.25], [0.5, 0.0, 0.0])
    rig.end(loaded=[LoadedEnd("r", True)])
    rig.save(SaveJob(1, KEY, 2, (4, 5)))
    rig.rank.poll(0.125)
    assert (rig.copies.waits, rig.client.waits[-1]) == ([0.25], 0.0)


PARTS = (CopyPart(0, 0, 0, (1, 2)),)


def test_the_report_has_the_number_of_the_plan(rig: Rig) -> None:
    rig.rank.begin(StepPlan(number=7))
    assert rig.rank.take_report() == StepReport(number=7)
    rig.rank.begin(StepPlan())
    assert rig.rank.take_report() is None, "a step that is not measured and has no ends"


def marks_of(rig: Rig) -> list[int]:
    return [order[-1].at for order in rig.copies.orders]


def test_a_step_has_one_mark_for_its_loads_and_one_for_its_saves(rig: Rig) -> None:
    saves = tuple(SaveJob(job, KEY, job, (4, 5)) for job in range(3))
    plan = StepPlan(loads=tuple(LoadJob(name, PARTS) for name in "ab"), saves=saves)
    rig.rank.begin(plan)
    assert rig.copies.marks == 1, "the loads' mark is where the step begins"
    rig.rank.load(plan.loads)
    rig.rank.save(plan.saves)
    assert marks_of(rig) == [1, 1, 2, 2, 2]
    rig.rank.begin(StepPlan())
    rig.rank.save(())
    assert rig.copies.marks == 2, "an empty step has none"


def test_the_loads_mark_is_behind_the_fences(rig: Rig) -> None:
    """A load may write to what a fenced save still reads."""
    rig.save(SaveJob(1, KEY, 2, (4, 5)))
    fenced_at: list[int] = []
    rig.copies.fence = lambda jobs: fenced_at.append(rig.copies.marks)  # type: ignore[method-assign]
    before = rig.copies.marks
    rig.rank.begin(StepPlan(fences=(1,), loads=(LoadJob("r", PARTS),)))
    assert fenced_at == [before]
    assert rig.copies.marks == before + 1


def test_loads_wait_for_what_their_step_writes_before_the_forward_where_told(rig: Rig) -> None:
    plan = StepPlan(loads=(LoadJob("r", PARTS),))
    rig.rank.begin(plan)
    rig.rank.load(plan.loads, from_now=True)
    assert marks_of(rig) == [2]


def test_saves_that_the_engine_passes_over_end_as_failed_at_the_next_step(rig: Rig) -> None:
    passed_over = SaveJob(1, KEY, 2, (4, 5))
    rig.rank.begin(StepPlan(saves=(passed_over,)))
    assert rig.ends() == set()
    executed = SaveJob(2, KEY, 3, (6, 7))
    rig.rank.begin(StepPlan(saves=(executed,)))
    assert rig.ends() == {(1, JobKind.SAVE, Outcome.FAILED), (1, JobKind.UPLOAD, Outcome.CANCELLED)}
    rig.rank.save((passed_over,))
    assert rig.copies.orders == [], "it came too late"
    rig.rank.save((executed,))
    rig.rank.begin(StepPlan())
    assert rig.ends() == set()
    rig.copies.ends = CopyEnds([SavedEnd(2, True, 0.1)], [])
    assert rig.ends() == {(2, JobKind.SAVE, Outcome.OK)}
    assert rig.copies.orders[0][:1] == (2,)


def test_a_save_that_is_refused_ends_once(rig: Rig) -> None:
    order = SaveJob(1, KEY, 2, (4, 5))
    rig.rank.begin(StepPlan(saves=(order,)))
    rig.rank.refuse((order,))
    assert len(rig.ends()) == 2
    rig.rank.begin(StepPlan())
    assert rig.ends() == set()


def test_a_save_of_several_groups_ends_with_the_last_of_its_copies() -> None:
    """Objects of key group 1 have the blocks of the groups 0 and 2, half of them each."""
    rig = Rig(block_bytes={0: 1_000, 1: 10, 2: 500}, members={0: (1,), 1: (0, 2)})
    rig.save(SaveJob(3, ChunkKey(1, b"k" * 32), 5, (4, 5, 6, 7)), SaveJob(4, KEY, 9, (8,)))
    copies = [order[:4] for order in rig.copies.orders]
    assert copies == [(6, 0, 5, (4, 5)), (7, 2, 5, (6, 7)), (8, 1, 9, (8,))]
    rig.rank.begin(StepPlan(fences=(3,)))
    assert rig.copies.fences == [6, 7]
    rig.end(SavedEnd(7, True, 0.25))
    assert rig.rank.take_report() is None, "the other half may still be read"
    rig.end(SavedEnd(6, True, 0.5), SavedEnd(8, True, 0.1))
    report = rig.rank.take_report()
    ends = [end for end in report.ends.values() if end.kind is JobKind.SAVE]
    saved = {end.job_id: (end.nbytes, end.seconds) for end in ends}
    assert saved == {3: (3_000, 0.5), 4: (10, 0.1)}


def test_a_save_of_several_groups_fails_with_any_of_its_copies() -> None:
    rig = Rig(block_bytes={0: 1_000, 2: 500}, members={1: (0, 2)})
    rig.save(SaveJob(3, ChunkKey(1, b"k" * 32), 5, (4, 6)))
    rig.end(SavedEnd(6, False, 0.1), SavedEnd(7, True, 0.1))
    assert rig.rank.counters["save_failed"] == 1
    assert rig.rank.busy == 0
