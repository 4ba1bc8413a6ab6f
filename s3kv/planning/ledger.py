"""Ledger: the state of every entry in this engine's host memory, and the jobs that change it.

    absent ──save planned──▶ COPYING ──copied──▶ DIRTY ──upload acknowledged──▶ CLEAN
    CLEAN ──evicted──▶ absent
    absent ──fetch planned──▶ FETCHING ──arrived and verified──▶ CLEAN
    FETCHING ──missing, corrupt, failed──▶ absent      COPYING ──copy failed──▶ absent
    DIRTY ──upload failed──▶ DIRTY, tried again later; given up──▶ CLEAN, and unsaved
    CLEAN and unsaved ──hit, and the bucket takes uploads──▶ DIRTY, tried once
    CLEAN ──used, and gone from the bucket──▶ CLEAN, unsaved and hit

KV-cache chunks, encoder outputs, and the library's blocks all follow these rules. The table holds
the states, and rejects a change that is not an arrow (`host.table.TRANSITIONS`). COPYING and
FETCHING are both RESERVED there; the job that fills the place distinguishes them.

These rules make it safe:
- A place belongs to one entry from the plan that reserves it until every rank has reported every
  end of the job. Until then, jobs may still read or write its memory.
- An entry is usable only in DIRTY and CLEAN, which every rank has confirmed.
- A key that is being fetched is not requested again: a request for it joins the job's waiters.
- While the breaker is open, fetches read only this host's disk, if it has one. An end without the
  bucket carries no information about the bucket.
- A key that is computed during its fetch is saved beside the fetch, which then fills a place
  without a key and is discarded; unless the index has it as present, and waits for the fetch.
- Unsaved entries (`planning.uploads`) may be evicted, so an outage does not fill host memory with
  data that cannot be uploaded. An upload that can never work is given up at once, for good.

Used from one thread. Times are arguments (seconds, monotonic).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from itertools import count
from typing import Literal

from s3kv.host.table import Entry, EntryState, Table
from s3kv.messages import JobEnd, JobKind
from s3kv.planning.breaker import Breaker
from s3kv.planning.index import BucketIndex
from s3kv.planning.job import Job
from s3kv.planning.residency import Change, Residency, ResidencyLog
from s3kv.planning.uploads import Unsaved, UploadRetries
from s3kv.types import ChunkKey, Outcome, Tally

_AGAIN_PER_STEP = 32
"""Maximum number of given-up uploads planned again per step; 5 µs of the engine's thread each."""


class ChunkState(enum.Enum):
    """State of a key in host memory."""

    ABSENT = "absent"
    FETCHING = "fetching"
    COPYING = "copying"
    RESIDENT = "resident"


class Ledger:
    """Ledger of one table and one bucket. world_size: number of ranks that report every end of a
    job; 1 without ranks. may_save: whether objects that are gone may be uploaded again."""

    def __init__(
        self,
        table: Table,
        index: BucketIndex,
        breaker: Breaker,
        *,
        world_size: int,
        may_save: bool = True,
        residency: ResidencyLog | None = None,
    ) -> None:
        self.table = table
        self.residency = residency
        self.index = index
        self.breaker = breaker
        self.unsaved = Unsaved()
        """Resident entries whose upload was given up. Call `unsaved.hit` when one is used."""
        self.counters = Tally()
        self._world_size = world_size
        self._may_save = may_save
        self._jobs: dict[int, Job] = {}
        self._job_of: dict[ChunkKey, Job] = {}
        # Several saves read the same block if a reset has renamed its chunk meanwhile.
        self._saving_blocks: dict[int, tuple[int, ...]] = {}
        self._job_ids = count(1)
        self.fetches_inflight = 0
        self.saves_inflight = 0
        """Number of entries between their planned save and the bucket's answer."""
        self.uses_inflight = 0
        """Number of uses being checked in the bucket. A key may have another job as well."""
        self._retries = UploadRetries()

    def state(self, key: ChunkKey) -> ChunkState:
        entry = self.table.lookup(key)
        if entry is None:
            return ChunkState.ABSENT
        if entry.state is not EntryState.RESERVED:
            return ChunkState.RESIDENT
        return ChunkState.FETCHING if self._job_of[key].is_fetch else ChunkState.COPYING

    @property
    def jobs(self) -> Iterable[Job]:
        """The jobs under way, in the order in which they were planned."""
        return self._jobs.values()

    def fetches_ahead_of(self, jobs: Iterable[Job]) -> int:
        """Number of fetches that end no later than the last of `jobs`, if they end in order."""
        ended = self.counters["fetches"] - self.fetches_inflight
        return max(1, max((job.sequence for job in jobs), default=0) - ended)

    @property
    def has_copies_inflight(self) -> bool:
        """Whether blocks are still being copied. An idle engine has to keep polling meanwhile."""
        return bool(self._saving_blocks)

    @property
    def copies_inflight(self) -> set[int]:
        """Saves whose blocks are still being copied."""
        return {job_id for saves in self._saving_blocks.values() for job_id in saves}

    def fences(self, block_ids: Iterable[int]) -> set[int]:
        """Saves that still read any of these blocks, which are about to be overwritten."""
        saving = self._saving_blocks
        if not saving:
            return set()
        return {job_id for block in block_ids for job_id in saving.get(block, ())}

    def refusal(
        self, key: ChunkKey, now_s: float, *, known: bool = False
    ) -> Literal["absent", "breaker"] | None:
        """The reason not to fetch `key` now, which is also counted; None if it may be fetched.
        absent: the bucket recently answered that it has no such object. known: whether the caller
        has just found the key present in the index."""
        if not known and self.index.is_absent(key, now_s):
            self.counters["fetches_spared"] += 1
            return "absent"
        if not (self.breaker.has_disk or self.breaker.allows(now_s)):
            self.counters["fetches_refused_by_breaker"] += 1
            return "breaker"
        return None

    def plan_fetch(self, key: ChunkKey, now_s: float, nbytes: int | None = None) -> Job | None:
        """Plan the fetch of an absent key for which `refusal` has returned None. nbytes: largest
        length of the object, if the length is known only at the end. Returns None, and changes
        nothing, if there is no room."""
        entry = self._reserve(key, nbytes, replace=False)
        if entry is None:
            self.counters["fetches_without_room"] += 1
            return None
        job = self._register(JobKind.FETCH, key, entry)
        job.nbytes = None if nbytes is None else 0
        job.near = self.breaker.is_near(now_s)
        self.fetches_inflight += 1
        self.counters["fetches"] += 1
        job.sequence = self.counters["fetches"]
        job.began_with = self.fetches_inflight
        return job

    def fetch_job(self, key: ChunkKey) -> Job:
        """The fetch under way for a key in FETCHING."""
        return self._job_of[key]

    def plan_save(self, key: ChunkKey, block_ids: tuple[int, ...]) -> Job | None:
        """Plan the copy of the blocks of an absent key, or of one that is being fetched, and its
        upload. Returns None, and changes nothing, if there is no room."""
        entry = self._reserve(key, None, replace=True)
        if entry is None:
            self.counters["saves_without_room"] += 1
            return None
        job = self._register(JobKind.SAVE, key, entry)
        job.block_ids = block_ids
        self.saves_inflight += 1
        self.counters["saves"] += 1
        for block in block_ids:
            self._saving_blocks[block] = (*self._saving_blocks.get(block, ()), job.job_id)
        return job

    def _reserve(self, key: ChunkKey, nbytes: int | None, *, replace: bool) -> Entry | None:
        """Reserve a place, and account for evicted entries. As `Table.reserve`."""
        reservation = self.table.reserve(key, nbytes, replace=replace)
        if reservation is None:
            return None
        for evicted in reservation.evicted:
            self.counters["evictions"] += 1
            self.unsaved.drop(evicted)
            self._note(evicted, Residency.HOST_REMOVED)
        return reservation.entry

    def plan_due(self, now_s: float, *, max_saves_inflight: int = _AGAIN_PER_STEP) -> list[Job]:
        """Plan the uploads whose next attempt is due, and the checks of used objects that the
        bucket may have deleted (`index.use`). While fewer than `max_saves_inflight` saves are under
        way, also plan one last upload of entries that were hit after their upload was given up."""
        jobs = []
        for retry in self._retries.take_due(now_s):
            if self.index.is_present(retry.entry.key):  # a fetch beside the save has found it
                self._end_save(retry.entry)
            else:
                jobs.append(self._upload(retry.entry, retry.attempt))
        if self.unsaved.wanted:
            most = min(_AGAIN_PER_STEP, max_saves_inflight - self.saves_inflight)
            for key in self.unsaved.take(most, self.breaker, now_s):
                entry = self.table.lookup(key)
                assert entry is not None, f"{key} is unsaved and not resident"
                self.table.mark_dirty(entry)
                self.counters["uploads_again"] += 1
                self.saves_inflight += 1
                jobs.append(self._upload(entry, self._retries.last))
        if self.index.due:
            keys, self.index.due = self.index.due, []
            self.uses_inflight += len(keys)
            jobs += [self._register(JobKind.USE, key, None) for key in keys]
        return jobs

    def _upload(self, entry: Entry, attempt: int) -> Job:
        job = self._register(JobKind.UPLOAD, entry.key, entry)
        job.attempt = attempt
        return job

    def on_end(self, end: JobEnd, now_s: float) -> Job | None:
        """Process a job's end on some ranks. Returns the job if all ranks are done, else None."""
        job = self._jobs[end.job_id]
        if job.take(end) and end.kind is JobKind.SAVE:
            self._copied(job)
        if any(job.reports_left.values()):
            return None
        del self._jobs[job.job_id]
        if self._job_of.get(job.key) is job:
            del self._job_of[job.key]
        if job.kind is JobKind.FETCH:
            self._fetched(job, now_s)
        elif job.kind is JobKind.USE:
            self._asked(job, now_s)
        else:
            self._uploaded(job, now_s)
        return job

    def _copied(self, job: Job) -> None:
        for block in job.block_ids:
            others = tuple(j for j in self._saving_blocks.pop(block) if j != job.job_id)
            if others:
                self._saving_blocks[block] = others
        if job.outcomes[JobKind.SAVE].is_success:
            self.table.commit(job.entry, dirty=True)
            self._note(job.key, Residency.HOST_STORED)

    def _fetched(self, job: Job, now_s: float) -> None:
        self.fetches_inflight -= 1
        outcome = job.outcomes[JobKind.FETCH]
        self.counters[f"fetch_{outcome.name.lower()}"] += 1
        if not job.near:
            self.breaker.saw(outcome, now_s, near=not job.asked_bucket)
        is_replaced = self.table.lookup(job.key) is not job.entry
        if is_replaced or not outcome.is_success:
            self.table.abandon(job.entry)
        if outcome.is_success:
            if not is_replaced:
                self.table.commit(job.entry, dirty=False, nbytes=job.nbytes)
                self._note(job.key, Residency.HOST_STORED)
            self._present(job, now_s)
            self.unsaved.drop(job.key)
            return
        if is_replaced:
            return  # The save's end decides the verdict on the key.
        if job.asked_bucket and outcome in (Outcome.MISSING, Outcome.CORRUPT):
            if job.is_computed:
                self.counters["saves_dropped"] += 1
                self.counters["saves_believed_present"] += 1
            self._absent(job.key, now_s)
        self._note(job.key, Residency.NOTHING)

    def _asked(self, job: Job, now_s: float) -> None:
        """Process the answer to a use. The verdict may have changed since the job was planned."""
        self.uses_inflight -= 1
        outcome = job.outcomes[JobKind.USE]
        if outcome.is_success and self.index.is_present(job.key):
            self.index.note_present(job.key, now_s + job.fresh_s)
        elif outcome is Outcome.MISSING:
            self._absent(job.key, now_s)
            entry = self.table.lookup(job.key)
            if self._may_save and entry is not None and entry.state is EntryState.CLEAN:
                self.unsaved.add(job.key)
                self.unsaved.hit(job.key)

    def _present(self, job: Job, now_s: float) -> None:
        if job.asked_bucket or not self.index.is_present(job.key):
            self._note(job.key, Residency.BUCKET_STORED)
            self.index.note_present(job.key, now_s + job.fresh_s)

    def _absent(self, key: ChunkKey, now_s: float) -> None:
        if self.residency is not None and self.index.is_present(key):
            self._note(key, Residency.BUCKET_REMOVED)
        self.index.note_absent(key, now_s)

    def _uploaded(self, job: Job, now_s: float) -> None:
        if not job.outcomes.get(JobKind.SAVE, Outcome.OK).is_success:
            # One rank could not copy; the uploads of the other ranks have ended.
            self.saves_inflight -= 1
            self.counters["saves_failed"] += 1
            self.table.abandon(job.entry)
            self._note(job.key, Residency.NOTHING)
            return
        outcome = job.outcomes[JobKind.UPLOAD]
        self.counters[f"upload_{outcome.name.lower()}"] += 1
        self.unsaved.saw(outcome, now_s)
        if outcome is not Outcome.DENIED:  # credentials that may not write may still read
            self.breaker.saw(outcome, now_s)
        if outcome.is_success:
            self._present(job, now_s)
        elif not self.index.is_present(job.key):  # else a fetch has found it meanwhile
            is_final = outcome is Outcome.INVALID
            if not is_final and self._retries.failed(job.entry, job.attempt, now_s):
                return
            self.counters["uploads_given_up"] += 1
            if not is_final:
                self.unsaved.add(job.key)
        self._end_save(job.entry)

    def _end_save(self, entry: Entry) -> None:
        self.saves_inflight -= 1
        self.table.mark_clean(entry)

    def _note(self, key: ChunkKey, residency: Residency) -> None:
        if self.residency is not None:
            # Readers count entries: the bucket's last one is withdrawn before the next.
            if residency is Residency.BUCKET_STORED and self.index.is_present(key):
                self.residency.append(Change(key, Residency.BUCKET_REMOVED))
            self.residency.append(Change(key, residency))

    def _register(self, kind: JobKind, key: ChunkKey, entry: Entry | None) -> Job:
        ends = (JobKind.SAVE, JobKind.UPLOAD) if kind is JobKind.SAVE else (kind,)
        reports_left = dict.fromkeys(ends, self._world_size)
        job = Job(next(self._job_ids), kind, key, entry, reports_left)
        self._jobs[job.job_id] = job
        if entry is not None:
            self._job_of[key] = job
        return job
