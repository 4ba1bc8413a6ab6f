"""Job of the ledger: work of all ranks on one key, from its plan to the last rank's report."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from s3kv.host.table import Entry
from s3kv.messages import BucketJob, JobEnd, JobKind, SaveJob
from s3kv.types import ChunkKey, ItemShape, Outcome


@dataclass(slots=True, eq=False)
class Job:
    """A job under way. reports_left: outstanding reports, by kind of end: a save ends as SAVE and
    as UPLOAD, any other job as its own kind."""

    job_id: int
    kind: JobKind
    key: ChunkKey
    held: Entry | None
    """Entry that the job fills or reads; None for a use."""
    reports_left: dict[JobKind, int]
    nbytes: int | None = None
    """Bytes that have arrived, for a fetch of unknown length; otherwise None."""
    block_ids: tuple[int, ...] = ()
    attempt: int = 0
    sequence: int = 0
    """Number of this fetch, in the order in which fetches were planned, from 1."""
    began_with: int = 0
    """Fetches under way when this one was planned, including it."""
    fresh_s: float = math.inf
    """The shortest `JobEnd.fresh_s` of any rank."""
    seconds: float = 0.0
    """Longest time that any rank worked on it, without the wait for its turn."""
    source: str = ""
    """`JobEnd.source` of that rank."""
    near: bool = False
    """`BucketJob.near`."""
    asked_bucket: bool = False
    """Whether any rank asked a source beyond this host; see `JobEnd.near`."""
    outcomes: dict[JobKind, Outcome] = field(default_factory=dict)
    waiters: list[Any] = field(default_factory=list)
    """Waiters that joined the fetch, handed back with its end. Opaque to the ledger."""
    about: Any = None
    """The caller's note. Opaque to the ledger."""
    is_computed: bool = False
    """Whether its key was computed meanwhile and not saved, because the index had it as present."""

    @property
    def entry(self) -> Entry:
        """`held` of any job but a use."""
        assert self.held is not None
        return self.held

    @property
    def is_fetch(self) -> bool:
        return self.kind is JobKind.FETCH

    def for_bucket(self, item: ItemShape | None = None) -> BucketJob:
        """The message that makes the I/O process run the job; for a save, its upload."""
        kind = JobKind.UPLOAD if self.kind is JobKind.SAVE else self.kind
        slot = self.held.number if self.held is not None else 0
        return BucketJob(self.job_id, kind, self.key, slot, item, self.near)

    def for_copies(self) -> SaveJob:
        """The message that makes the ranks run a save."""
        return SaveJob(self.job_id, self.key, self.entry.number, self.block_ids)

    def take(self, end: JobEnd) -> bool:
        """Record its end on some ranks. Returns whether all ranks have reported that kind."""
        left = self.reports_left[end.kind] - end.ranks
        assert left >= 0, f"job {end.job_id} ended more often than there are ranks"
        self.reports_left[end.kind] = left
        self.outcomes[end.kind] = max(self.outcomes.get(end.kind, Outcome.OK), end.outcome)
        if end.seconds >= self.seconds:
            self.seconds, self.source = end.seconds, end.source
        self.fresh_s = min(self.fresh_s, end.fresh_s)
        self.asked_bucket |= not end.near
        if self.nbytes is not None:
            self.nbytes += end.nbytes
        return left == 0
