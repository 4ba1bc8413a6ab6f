"""The life of every chunk this engine knows, and the jobs that move chunks along.

    absent ──save planned──▶ COPYING ──copied──▶ DIRTY ──upload acknowledged──▶ CLEAN
    CLEAN ──evicted──▶ absent
    absent ──fetch planned──▶ FETCHING ──arrived and verified──▶ CLEAN
    FETCHING ──missing, corrupt, failed──▶ absent      COPYING ──copy failed──▶ absent
    DIRTY ──upload failed──▶ DIRTY, tried again later; given up──▶ CLEAN

The slot table holds the states and refuses what is not an arrow (`host.slots.TRANSITIONS`);
COPYING and FETCHING are its RESERVED, told apart by the job that fills the slot.

Rules that make it safe:
- A slot belongs to one chunk from the plan that reserves it until every rank has reported every
  end of the job: only then can nothing touch its bytes any more.
- A chunk is usable only in DIRTY and CLEAN, which every rank has confirmed.
- One job per chunk: whoever wants a chunk that is already on its way joins its waiters.

Scheduler process, one thread. Time comes in as an argument (seconds, monotonic).
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from s3kv.host.slots import Slot, SlotState, SlotTable
from s3kv.messages import FetchOrder, JobEnd, JobKind, SaveOrder, UploadOrder
from s3kv.planning.breaker import Breaker
from s3kv.planning.index import BucketIndex
from s3kv.planning.residency import Residency, ResidencyLog
from s3kv.types import ChunkKey, Outcome

_UPLOAD_RETRY_S = (1.0, 4.0, 15.0, 60.0)
"""Pauses before an upload is tried again; after the last the chunk is given up (it stays
resident, and may be evicted). Longer than a store's hiccup, short enough that an outage does not
leave host memory full of chunks that cannot leave."""


class ChunkState(enum.Enum):
    """Where a chunk is in its life, as far as host memory goes."""

    ABSENT = "absent"
    FETCHING = "fetching"
    COPYING = "copying"
    RESIDENT = "resident"


@dataclass(slots=True)
class Job:
    """One order on its way. `ranks_left` counts, per kind of end, the ranks still to report."""

    job_id: int
    key: ChunkKey
    slot: Slot
    ranks_left: dict[JobKind, int]
    block_ids: tuple[int, ...] = ()
    attempt: int = 0
    sequence: int = 0
    """Of a fetch: how many fetches had been ordered when it was."""
    began_with: int = 0
    """Of a fetch: how many were under way when it was ordered, it included."""
    seconds: float = 0.0
    """The longest any rank was at it, waiting for its turn not counted."""
    outcomes: dict[JobKind, Outcome] = field(default_factory=dict)
    waiters: list[Any] = field(default_factory=list)
    """Opaque to the ledger: whoever joined a fetch, handed back with its end."""

    @property
    def is_fetch(self) -> bool:
        return JobKind.FETCH in self.outcomes or JobKind.FETCH in self.ranks_left


class ChunkLedger:
    """Which chunks are in host memory or on their way, and what has to be done for them."""

    def __init__(
        self,
        slots: SlotTable,
        index: BucketIndex,
        breaker: Breaker,
        *,
        world_size: int,
        residency: ResidencyLog | None = None,
    ) -> None:
        self.slots = slots
        self.residency = residency
        self.index = index
        self.breaker = breaker
        self.counters: Counter[str] = Counter()
        self._world_size = world_size
        self._jobs: dict[int, Job] = {}
        self._job_of: dict[ChunkKey, Job] = {}
        # Several saves read one block when a reset has given its chunk another name meanwhile.
        self._saving_blocks: dict[int, tuple[int, ...]] = {}
        self._next_job_id = 1
        self._fetches_inflight = 0
        self._saves_inflight = 0
        self._retries: list[tuple[float, int, ChunkKey, int]] = []
        self._fetch_orders: list[FetchOrder] = []
        self._save_orders: list[SaveOrder] = []

    # --- questions -------------------------------------------------------------------------

    def state(self, key: ChunkKey) -> ChunkState:
        slot = self.slots.lookup(key)
        if slot is None:
            return ChunkState.ABSENT
        if self.slots.state(slot) is not SlotState.RESERVED:
            return ChunkState.RESIDENT
        return ChunkState.FETCHING if self._job_of[key].is_fetch else ChunkState.COPYING

    @property
    def fetches_inflight(self) -> int:
        return self._fetches_inflight

    def fetches_ahead_of(self, jobs: Iterable[Job]) -> int:
        """Fetches that will end no later than the last of `jobs`, if they end in order."""
        ended = self.counters["fetches"] - self._fetches_inflight
        return max(1, max((job.sequence for job in jobs), default=0) - ended)

    @property
    def saves_inflight(self) -> int:
        """Chunks between their save order and the bucket's answer."""
        return self._saves_inflight

    @property
    def has_copies_inflight(self) -> bool:
        """Blocks are still being copied to slots, so an idle engine has to keep polling."""
        return bool(self._saving_blocks) or bool(self._save_orders)

    def fences(self, block_ids: Sequence[int]) -> set[int]:
        """The saves that still read one of these blocks, which are about to be overwritten."""
        saving = self._saving_blocks
        if not saving:
            return set()
        return {job_id for block in block_ids for job_id in saving.get(block, ())}

    # --- orders ----------------------------------------------------------------------------

    def plan_fetch(self, key: ChunkKey) -> Job | None:
        """Order the chunk from the bucket. None, and nothing changed, when no slot is free."""
        job = self._reserve(key, {JobKind.FETCH: self._world_size})
        if job is None:
            self.counters["fetches_without_slot"] += 1
            return None
        self._fetches_inflight += 1
        self.counters["fetches"] += 1
        job.sequence = self.counters["fetches"]
        job.began_with = self._fetches_inflight
        self._fetch_orders.append(FetchOrder(job.job_id, key, job.slot.number))
        return job

    def fetch_job(self, key: ChunkKey) -> Job:
        """The fetch that is under way for a chunk in FETCHING."""
        job = self._job_of[key]
        assert job.is_fetch, job
        return job

    def plan_save(self, key: ChunkKey, block_ids: tuple[int, ...]) -> bool:
        """Order the blocks copied and uploaded. False, and nothing changed, without a slot."""
        ends = {JobKind.SAVE: self._world_size, JobKind.UPLOAD: self._world_size}
        job = self._reserve(key, ends)
        if job is None:
            self.counters["saves_without_slot"] += 1
            return False
        job.block_ids = block_ids
        self._saves_inflight += 1
        self.counters["saves"] += 1
        for block in block_ids:
            self._saving_blocks[block] = (*self._saving_blocks.get(block, ()), job.job_id)
        self._save_orders.append(SaveOrder(job.job_id, key, job.slot.number, block_ids))
        return True

    def take_fetches(self) -> tuple[FetchOrder, ...]:
        orders, self._fetch_orders = tuple(self._fetch_orders), []
        return orders

    def take_saves(self) -> tuple[SaveOrder, ...]:
        orders, self._save_orders = tuple(self._save_orders), []
        return orders

    def take_uploads(self, now_s: float) -> tuple[UploadOrder, ...]:
        """Uploads whose time to be tried again has come."""
        orders = []
        while self._retries and self._retries[0][0] <= now_s:
            _, _, key, attempt = heapq.heappop(self._retries)
            slot = self.slots.lookup(key)
            assert slot is not None, "a dirty chunk cannot leave its slot"
            job = self._register(key, slot, {JobKind.UPLOAD: self._world_size})
            job.attempt = attempt
            orders.append(UploadOrder(job.job_id, key, slot.number))
        return tuple(orders)

    # --- ends ------------------------------------------------------------------------------

    def on_end(self, end: JobEnd, now_s: float) -> Job | None:
        """Take in one job's end on some ranks; the job itself once no rank is left, else None."""
        job = self._jobs[end.job_id]
        left = job.ranks_left[end.kind] - end.ranks
        assert left >= 0, f"job {end.job_id} ended more often than there are ranks"
        job.ranks_left[end.kind] = left
        job.outcomes[end.kind] = max(job.outcomes.get(end.kind, Outcome.OK), end.outcome)
        job.seconds = max(job.seconds, end.seconds)
        if left == 0 and end.kind is JobKind.SAVE:
            self._copied(job)
        if any(job.ranks_left.values()):
            return None
        del self._jobs[job.job_id]
        del self._job_of[job.key]
        if JobKind.FETCH in job.outcomes:
            self._fetched(job, now_s)
        else:
            self._uploaded(job, now_s)
        return job

    def _copied(self, job: Job) -> None:
        for block in job.block_ids:
            others = tuple(j for j in self._saving_blocks.pop(block) if j != job.job_id)
            if others:
                self._saving_blocks[block] = others
        if job.outcomes[JobKind.SAVE].is_success:
            self.slots.commit(job.slot, dirty=True)
            self._note(job.key, Residency.HOST_STORED)

    def _fetched(self, job: Job, now_s: float) -> None:
        self._fetches_inflight -= 1
        outcome = job.outcomes[JobKind.FETCH]
        self.counters[f"fetch_{outcome.name.lower()}"] += 1
        self.breaker.saw(outcome, now_s)
        if outcome.is_success:
            self.slots.commit(job.slot, dirty=False)
            self._note(job.key, Residency.HOST_STORED)
            self._found_in_bucket(job.key)
            return
        self.slots.abandon(job.slot)
        if outcome in (Outcome.MISSING, Outcome.CORRUPT):
            if self.residency is not None and self.index.is_present(job.key):
                self._note(job.key, Residency.BUCKET_REMOVED)
            self.index.note_absent(job.key, now_s)
        self._note(job.key, Residency.NOTHING)

    def _uploaded(self, job: Job, now_s: float) -> None:
        if not job.outcomes.get(JobKind.SAVE, Outcome.OK).is_success:
            # Some rank could not copy; the others' uploads have ended, so the slot is free now.
            self._saves_inflight -= 1
            self.counters["saves_failed"] += 1
            self.slots.abandon(job.slot)
            self._note(job.key, Residency.NOTHING)
            return
        outcome = job.outcomes[JobKind.UPLOAD]
        self.counters[f"upload_{outcome.name.lower()}"] += 1
        if outcome is not Outcome.DENIED:  # who may not write may still read
            self.breaker.saw(outcome, now_s)
        if outcome.is_success:
            self._saves_inflight -= 1
            self.slots.mark_clean(job.slot)
            self._found_in_bucket(job.key)
        elif job.attempt < len(_UPLOAD_RETRY_S):
            due_s = now_s + _UPLOAD_RETRY_S[job.attempt]
            retry = (due_s, job.job_id, job.key, job.attempt + 1)
            heapq.heappush(self._retries, retry)
        else:
            self._saves_inflight -= 1
            self.counters["uploads_given_up"] += 1
            self.slots.mark_clean(job.slot)
            self._note(job.key, Residency.HOST_ONLY)

    # --- shared ----------------------------------------------------------------------------

    def _found_in_bucket(self, key: ChunkKey) -> None:
        self._note(key, Residency.BUCKET_STORED)
        self.index.note_present(key)

    def _note(self, key: ChunkKey, residency: Residency) -> None:
        if self.residency is not None:
            self.residency.change(key, residency)

    def _reserve(self, key: ChunkKey, ends: dict[JobKind, int]) -> Job | None:
        reservation = self.slots.reserve(key)
        if reservation is None:
            return None
        if reservation.evicted is not None:
            self.counters["evictions"] += 1
            self._note(reservation.evicted, Residency.HOST_REMOVED)
        return self._register(key, reservation.slot, ends)

    def _register(self, key: ChunkKey, slot: Slot, ends: dict[JobKind, int]) -> Job:
        job = Job(self._next_job_id, key, slot, ends)
        self._next_job_id += 1
        self._jobs[job.job_id] = job
        self._job_of[key] = job
        return job

    def check(self) -> None:
        """Re-derive what is derived and raise AssertionError where it differs."""
        self.slots.check()
        jobs = self._jobs.values()
        fetching = sum(job.is_fetch for job in jobs)
        assert fetching == self._fetches_inflight, (fetching, self._fetches_inflight)
        saving = len(jobs) - fetching + len(self._retries)
        assert saving == self._saves_inflight, (saving, self._saves_inflight)
        filling = sum(self.slots.state(job.slot) is SlotState.RESERVED for job in jobs)
        assert filling == self.slots.statistics().reserved, "a reserved slot has no job"
        assert saving >= self.slots.statistics().dirty, "a dirty chunk is on its way nowhere"
        assert {job.key for job in jobs} == set(self._job_of)
        copying = [job for job in jobs if job.ranks_left.get(JobKind.SAVE)]
        readers = {(block, job.job_id) for job in copying for block in job.block_ids}
        fenced = {(block, job) for block, ids in self._saving_blocks.items() for job in ids}
        assert readers == fenced, readers ^ fenced
