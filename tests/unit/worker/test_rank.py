"""What one rank counts and times of its own copies and transfers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from s3kv.device.copies import CopyEnds, LoadedEnd, SavedEnd
from s3kv.messages import FetchOrder, JobEnd, JobKind, LoadOrder, LoadPart, SaveOrder, StepPlan
from s3kv.types import ChunkKey, Outcome
from s3kv.worker.rank import RankWorker

KEY = ChunkKey(0, b"k" * 32)


class Copies:
    def __init__(self) -> None:
        self.ends = CopyEnds([], [])
        self.orders: list[tuple[Any, ...]] = []
        self.waits: list[float] = []
        self.fences: list[int] = []

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
    def __init__(self) -> None:
        self.ends: list[JobEnd] = []
        self.waits: list[float] = []

    def fetch(self, *order: Any) -> None:
        """Ends when a test says so."""

    upload = fetch

    def flush(self) -> None:
        """Nothing is sent."""

    def poll(self, linger_s: float) -> list[JobEnd]:
        self.waits.append(linger_s)
        ends, self.ends = self.ends, []
        return ends


class Rig:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.copies, self.client = Copies(), Client()
        self.rank = RankWorker(
            copies=self.copies,  # type: ignore[arg-type]
            client=self.client,  # type: ignore[arg-type]
            slot_bytes=4096,
            block_bytes={0: 1_000},
            clock=lambda: self.now_s,
        )


def test_loads_and_saves_are_timed_and_weighed() -> None:
    rig = Rig()
    parts = (LoadPart(0, 0, 0, (1, 2)), LoadPart(0, 1, 0, (3,)))
    rig.rank.load([LoadOrder("good", parts), LoadOrder("bad", parts)])
    rig.rank.save([SaveOrder(1, KEY, 2, (4, 5)), SaveOrder(2, KEY, 3, (6, 7))])
    rig.now_s += 0.5
    rig.copies.ends = CopyEnds(
        [SavedEnd(1, True, 0.25), SavedEnd(2, False, 9.0)],
        [LoadedEnd("good", True), LoadedEnd("bad", False)],
    )
    rig.rank.poll()
    counters = rig.rank.counters
    assert (counters["load_ok"], counters["load_bytes"]) == (1, 3_000)
    assert (counters["save_ok"], counters["save_failed"], counters["save_bytes"]) == (1, 1, 2_000)
    assert rig.rank.take_loaded() == ({"good", "bad"}, {"bad"})
    assert rig.rank.take_seconds() == {"load_seconds": [0.5], "save_seconds": [0.25]}
    assert rig.rank.take_seconds() == {}


def test_only_transfers_that_succeed_are_timed() -> None:
    rig = Rig()
    fetches = tuple(FetchOrder(number, KEY, number) for number in range(1, 4))
    rig.rank.begin(StepPlan(fetches=fetches))
    rig.client.ends = [
        JobEnd(1, JobKind.FETCH, Outcome.OK, 4_000, 0.1),
        JobEnd(2, JobKind.FETCH, Outcome.MISSING, 0, 0.2),
        JobEnd(3, JobKind.FETCH, Outcome.FAILED, 0, 3.0),
    ]
    rig.rank.poll()
    assert rig.rank.take_seconds() == {"fetch_seconds": [0.1]}
    assert rig.rank.counters["fetch_bytes"] == 4_000
    assert rig.rank.counters["fetch_missing"] == rig.rank.counters["fetch_failed"] == 1


def test_saves_are_fenced_at_once_only_when_told() -> None:
    rig = Rig()
    rig.rank.save([SaveOrder(1, KEY, 2, (4, 5))])
    assert rig.copies.fences == []
    rig.rank.save([SaveOrder(2, KEY, 3, (6, 7)), SaveOrder(3, KEY, 4, (8, 9))], read_first=True)
    assert rig.copies.fences == [2, 3]


def test_what_is_ordered_while_the_blocks_are_away_touches_nothing_and_ends() -> None:
    rig, parts = Rig(), (LoadPart(0, 0, 0, (1, 2)),)
    rig.rank.save([SaveOrder(1, KEY, 2, (4, 5))])
    assert rig.rank.suspend(7.0)
    assert rig.copies.waits == [7.0]
    before = list(rig.copies.orders)
    rig.rank.load([LoadOrder("r", parts)])
    rig.rank.save([SaveOrder(2, KEY, 3, (6, 7))])
    assert rig.copies.orders == before
    rig.copies.ends = CopyEnds([SavedEnd(1, True, 0.1)], [])
    rig.rank.poll()
    assert rig.rank.take_loaded() == ({"r"}, {"r"})
    report = rig.rank.take_report()
    assert report is not None
    ends = {(end.job_id, end.kind, end.outcome) for end in report.ends.values()}
    assert ends == {
        (1, JobKind.SAVE, Outcome.OK),
        (2, JobKind.SAVE, Outcome.FAILED),
        (2, JobKind.UPLOAD, Outcome.CANCELLED),
    }
    rig.rank.resume()
    rig.rank.load([LoadOrder("s", parts)])
    assert len(rig.copies.orders) == len(before) + 1


def test_it_lingers_for_a_load_and_else_for_the_network() -> None:
    rig = Rig()
    rig.rank.poll(0.5)
    assert (rig.copies.waits, rig.client.waits) == ([], [0.5])
    rig.rank.load([LoadOrder("r", (LoadPart(0, 0, 0, (1, 2)),))])
    rig.rank.poll()
    rig.rank.poll(0.25)
    assert (rig.copies.waits, rig.client.waits) == ([0.25], [0.5, 0.0, 0.0])
    rig.copies.ends = CopyEnds([], [LoadedEnd("r", True)])
    rig.rank.poll()
    rig.rank.save([SaveOrder(1, KEY, 2, (4, 5))])
    rig.rank.poll(0.125)
    assert (rig.copies.waits, rig.client.waits[-1]) == ([0.25], 0.0)
