"""A model of vLLM's `TieringOffloadingManager` over a bucket, for the planner of the tier below.

It gives out rows and asks as vLLM does: the primary tier first, then the planner; a HIT allocates a
row at once, and a miss if none is free; loads are flushed at the end of a pass; a store pins its
rows until it is reported. Time is virtual, and every choice is drawn from one seed.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from lab.books import CHECKS
from s3kv.messages import BucketJob, JobEnd, JobKind
from s3kv.planning.breaker import Breaker
from s3kv.planning.index import BucketIndex
from s3kv.planning.offload import OffloadAnswer, OffloadPlanner
from s3kv.planning.pace import Pace
from s3kv.planning.row_transfers import RowKey
from s3kv.types import ChunkKey, Outcome

STEP_S = 0.02
MAX_WAIT_S = 2.0
MOST_WAIT_S = 3 * MAX_WAIT_S
"""Bound of a request's whole wait: for its own fetches, and for rows that another one fetches."""
CHUNK_TOKENS = 128


def name_of(group: int, number: int) -> bytes:
    """vLLM's key of a chunk."""
    return number.to_bytes(4, "big") * 8 + group.to_bytes(4, "big")


def row_key(name: bytes) -> RowKey:
    return RowKey(name, ChunkKey(int.from_bytes(name[-4:], "big"), name[:-4]))


@dataclass(eq=False)
class Row:
    """A row of the primary tier. pins: transfers and copies that use it."""

    number: int
    is_ready: bool = False
    pins: int = 0


@dataclass(eq=False)
class Asker:
    """A request: its chunks in order, by group."""

    name: str
    chains: list[list[bytes]]
    waits_since_s: float | None = None
    hits: int = 0


@dataclass(eq=False)
class Transfer:
    keys: list[bytes]
    is_load: bool


@dataclass(eq=False)
class Primary:
    """The primary tier's rows, by key; the least recently used first."""

    free: list[int]
    rows: OrderedDict[bytes, Row] = field(default_factory=OrderedDict)

    def allocate(self, name: bytes) -> Row | None:
        if not self.free:
            victim = next((k for k, r in self.rows.items() if r.is_ready and not r.pins), None)
            if victim is None:
                return None
            self.free.append(self.rows.pop(victim).number)
        row = self.rows[name] = Row(self.free.pop())
        return row

    def drop(self, name: bytes) -> None:
        self.free.append(self.rows.pop(name).number)


def a_planner(
    rows: int, planner: type[OffloadPlanner] = OffloadPlanner, **settings: Any
) -> OffloadPlanner:
    return planner(
        BucketIndex(capacity=10_000),
        Breaker(),
        Pace(fetches_at_once=8),
        rows=rows,
        chunk_tokens=CHUNK_TOKENS,
        max_wait_s=MAX_WAIT_S,
        **settings,
    )


class Tiering:
    """One engine's manager, its planner, and a bucket. faulty: whether requests to the bucket fail,
    or take long."""

    def __init__(self, seed: int, *, planner: type[OffloadPlanner] = OffloadPlanner) -> None:
        self.rng = random.Random(seed)
        self.now_s = 100.0
        rows = self.rng.choice([4, 12, 40, 200])
        self.primary = Primary(list(range(rows)))
        self.planner = a_planner(rows, planner, is_observed=True)
        self.groups = self.rng.choice([1, 1, 2])
        self.fault_share = self.rng.choice([0.0, 0.0, 0.1, 0.9])
        self.answer_share = self.rng.choice([0.0, 0.02, 0.3, 0.9])
        self.bucket: set[ChunkKey] = set()
        self.transfers: dict[int, Transfer] = {}
        self.jobs: dict[int, BucketJob] = {}
        self.pending: dict[str, list[bytes]] = {}
        self.waiting: list[Asker] = []
        self.copies: list[list[Row]] = []
        self.transfer_ids = iter(range(10**9))
        self.contents: dict[int, bytes] = {}
        """By row, the key of which the I/O process has written the bytes there."""

    # --- what vLLM does --------------------------------------------------------------------

    def arrive(self, name: str, chains: list[list[bytes]]) -> Asker:
        asker = Asker(name, chains)
        self.planner.begin(name)
        self.waiting.append(asker)
        return asker

    def step(self) -> None:
        """One scheduling pass, and what the bucket answers until the next one."""
        self.take_ends()
        scheduled = [asker for asker in self.waiting if self.look_up(asker)]
        self.waiting = [asker for asker in self.waiting if asker not in scheduled]
        for request_id, names in self.pending.items():
            number = next(self.transfer_ids)
            keys = [(row_key(name), self.primary.rows[name].number) for name in names]
            self.transfers[number] = Transfer(names, is_load=True)
            self.send(self.planner.load(number, request_id, keys, self.now_s))
        self.pending = {}
        self.planner.end_pass([asker.name for asker in scheduled], self.now_s)
        self.send(self.planner.uses())
        for asker in scheduled:
            self.compute(asker)
        self.cancel()
        self.answer()
        self.now_s += STEP_S
        CHECKS[OffloadPlanner](self.planner)

    def look_up(self, asker: Asker) -> bool:
        """Look a request up. Returns whether it can be scheduled; otherwise it is asked again."""
        asker.hits, defers = 0, False
        for chain in asker.chains:
            for name in chain:
                answer = self.look_up_key(asker, name)
                defers |= answer is not OffloadAnswer.HIT
                if answer is OffloadAnswer.MISS:
                    defers = any(self.is_pending(n) for n in chain[: chain.index(name)])
                    break
                asker.hits += 1
        if not defers:
            asker.waits_since_s = None
            return True
        if asker.waits_since_s is None:
            asker.waits_since_s = self.now_s
        assert self.now_s - asker.waits_since_s <= MOST_WAIT_S, f"{asker.name} waits for ever"
        return False

    def is_pending(self, name: bytes) -> bool:
        row = self.primary.rows.get(name)
        return row is None or not row.is_ready

    def look_up_key(self, asker: Asker, name: bytes) -> OffloadAnswer:
        row = self.primary.rows.get(name)
        if row is not None:
            return OffloadAnswer.HIT if row.is_ready else OffloadAnswer.RETRY
        end_token = CHUNK_TOKENS * (1 + int.from_bytes(name[:4], "big"))
        answer = self.planner.lookup(asker.name, row_key(name).chunk, end_token, self.now_s)
        if answer is OffloadAnswer.HIT:
            if self.primary.allocate(name) is None:
                return OffloadAnswer.MISS
            self.pending.setdefault(asker.name, []).append(name)
            return OffloadAnswer.RETRY
        return answer

    def compute(self, asker: Asker) -> None:
        """The engine computes a request, and offers the chunks that the primary tier lacks."""
        stored = []
        for chain in asker.chains:
            for name in chain:
                row = self.primary.rows.get(name)
                if row is not None:
                    self.primary.rows.move_to_end(name)
                elif (row := self.primary.allocate(name)) is not None:
                    row.is_ready = True
                    row.pins += 1
                    stored.append(name)
        if stored:
            number = next(self.transfer_ids)
            self.transfers[number] = Transfer(stored, is_load=False)
            keys = [(row_key(name), self.primary.rows[name].number) for name in stored]
            self.send(self.planner.store(number, asker.name, keys, self.now_s))
        self.planner.finish(asker.name)

    def take_ends(self) -> None:
        for end in self.planner.transfers.take_ends():
            transfer = self.transfers.pop(end.transfer_id, None)
            assert transfer is not None, f"transfer {end.transfer_id} was reported twice"
            numbers = {self.primary.rows[name].number for name in transfer.keys}
            used = numbers & {job.slot for job in self.jobs.values() if job.kind is not JobKind.USE}
            assert not used, f"rows {used} are given back and still in use"
            for name in transfer.keys:
                if not transfer.is_load:
                    self.primary.rows[name].pins -= 1
                elif name in end.succeeded or end.is_whole:
                    assert self.contents.get(self.primary.rows[name].number) == name, "wrong bytes"
                    self.primary.rows[name].is_ready = True
                else:
                    self.primary.drop(name)

    # --- what the I/O process and the bucket do ---------------------------------------------

    def send(self, jobs: list[BucketJob]) -> None:
        for job in jobs:
            assert job.job_id not in self.jobs
            self.jobs[job.job_id] = job

    def cancel(self) -> None:
        for job_id in self.planner.transfers.take_cancels():
            if job_id in self.jobs and self.rng.random() < 0.9:  # else it is too late
                self.end(self.jobs[job_id], Outcome.CANCELLED)

    def answer(self) -> None:
        for job in list(self.jobs.values()):
            if self.rng.random() < self.answer_share:
                self.end(job, self.outcome(job))

    def outcome(self, job: BucketJob) -> Outcome:
        if self.rng.random() < self.fault_share:
            return self.rng.choice([Outcome.FAILED, Outcome.DENIED, Outcome.INVALID])
        is_there = job.key in self.bucket
        if job.kind is JobKind.UPLOAD:
            self.bucket.add(job.key)
            return Outcome.EXISTS if is_there else Outcome.OK
        if not is_there:
            return Outcome.MISSING
        return Outcome.OK if job.kind is JobKind.FETCH else Outcome.EXISTS

    def end(self, job: BucketJob, outcome: Outcome) -> None:
        del self.jobs[job.job_id]
        if job.kind is JobKind.FETCH and outcome is Outcome.OK:
            self.contents[job.slot] = job.key.block_hash + job.key.group.to_bytes(4, "big")
        end = JobEnd(job.job_id, job.kind, outcome, 100, 0.05, source="bucket")
        self.planner.on_end(end, self.now_s)


def run(seed: int, planner: type[OffloadPlanner] = OffloadPlanner, steps: int = 400) -> Tiering:
    """Random requests over a few prefixes, with chunks that the bucket loses; at the end everything
    has to come to rest."""
    tiering = Tiering(seed, planner=planner)
    rng = tiering.rng
    for number in range(steps):
        if rng.random() < 0.2:
            first, length = 100 * rng.randrange(6), rng.randrange(1, 30)
            chains = [
                [name_of(group, first + n) for n in range(length)]
                for group in range(tiering.groups)
            ]
            tiering.arrive(f"request-{number}", chains)
        if rng.random() < 0.05 and tiering.bucket:
            tiering.bucket.discard(rng.choice(sorted(tiering.bucket)))
        if rng.random() < 0.02 and tiering.waiting:
            tiering.planner.finish(tiering.waiting.pop().name)  # aborted
        tiering.step()
    for _ in range(int(2 * MOST_WAIT_S / STEP_S)):
        tiering.step()
    assert not tiering.waiting, f"{len(tiering.waiting)} requests never end"
    tiering.answer_share = 1.0
    for _ in range(3):
        tiering.step()
    assert not tiering.transfers
    assert not tiering.planner.transfers.jobs
    return tiering


def is_noticed(mutant: type[OffloadPlanner], seeds: int = 300) -> bool:
    """Whether a run fails with a planner that has a rule taken out."""
    for seed in range(seeds):
        try:
            run(seed, mutant)
        except AssertionError as error:
            print(f"seed {seed}: {error}")
            return True
    return False
