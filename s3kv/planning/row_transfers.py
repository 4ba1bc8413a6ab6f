"""vLLM's transfers to and from rows of its primary tier, and their jobs in the I/O process.

    load, store ──▶ one job for each key that has to move ──the last has ended──▶ one report

A row belongs to a job until the job's end is processed, and a transfer is reported once, after the
last of its jobs. Nothing therefore reads or writes a row after its return to vLLM. Pure; times are
arguments (seconds, monotonic).
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from s3kv.messages import BucketJob, JobEnd, JobKind
from s3kv.types import ChunkKey


class RowKey(NamedTuple):
    """A key by its name in vLLM and by its name in the bucket. end_token: number of the prompt's
    tokens up to the end of the chunk; None if not known."""

    name: bytes
    chunk: ChunkKey
    end_token: int | None = None


RowKeys = Sequence[tuple[RowKey, int]]
"""Keys, each with the number of its row."""


class TransferEnd(NamedTuple):
    """End of a transfer. is_whole: whether every key was moved or did not have to move. succeeded:
    names of the moved keys. seconds: from its start to its end."""

    transfer_id: int
    is_whole: bool
    succeeded: tuple[bytes, ...]
    seconds: float
    nbytes: int


@dataclass(slots=True)
class RowTransfer:
    """A transfer under way. jobs_left: its jobs that have not ended."""

    transfer_id: int
    request_id: str
    is_load: bool
    began_s: float
    jobs_left: int = 0
    is_whole: bool = True
    succeeded: list[bytes] = field(default_factory=list)
    nbytes: int = 0


@dataclass(slots=True)
class RowJob:
    """A job of the I/O process on one row. is_probe: the bucket was not known to have the chunk.
    began_with: fetches under way at its start, itself included. near: `BucketJob.near`."""

    key: RowKey
    transfer: RowTransfer
    near: bool
    is_probe: bool = False
    began_with: int = 0


class RowTransfers:
    """The transfers of one tier that have not been reported. fetches: their fetches under way."""

    def __init__(self) -> None:
        self.fetches = 0
        self.jobs: dict[int, RowJob] = {}
        """Jobs under way, by number; for reading only."""
        self.cancels: list[int] = []
        """Jobs to cancel. Each still ends."""
        self._transfers: dict[int, RowTransfer] = {}
        self._job_ids = count(1)
        self._ends: list[TransferEnd] = []

    @property
    def uploads(self) -> int:
        """Their uploads under way."""
        return len(self.jobs) - self.fetches

    def is_behind(self, own: Mapping[ChunkKey, int]) -> bool:
        """Whether other fetches ordered before the last of `own` are under way; any, if none is."""
        ids, jobs = set(own.values()), self.jobs.items()
        last = max(ids, default=math.inf)
        return any(job.transfer.is_load and i < last and i not in ids for i, job in jobs)

    def begin(
        self, transfer_id: int, request_id: str, now_s: float, *, is_load: bool
    ) -> RowTransfer:
        """Begin a transfer. Call `end_if_done` when its jobs have been added."""
        transfer = RowTransfer(transfer_id, request_id, is_load, now_s)
        self._transfers[transfer_id] = transfer
        return transfer

    def add(self, transfer: RowTransfer, key: RowKey, row: int, *, near: bool = False) -> BucketJob:
        """Add the job that moves a key to or from its row."""
        self.fetches += transfer.is_load
        kind = JobKind.FETCH if transfer.is_load else JobKind.UPLOAD
        job = BucketJob(self.new_id(), kind, key.chunk, row, near=near)
        self.jobs[job.job_id] = RowJob(key, transfer, near, began_with=self.fetches)
        transfer.jobs_left += 1
        return job

    def new_id(self) -> int:
        """The number of the next job, on a row or not."""
        return next(self._job_ids)

    def job_ended(self, end: JobEnd) -> RowJob:
        """Process the end of a job. Nothing reads or writes its row on its behalf any more."""
        job = self.jobs.pop(end.job_id)
        transfer = job.transfer
        self.fetches -= transfer.is_load
        if end.outcome.is_success:
            transfer.succeeded.append(job.key.name)
            transfer.nbytes += end.nbytes
        transfer.is_whole &= end.outcome.is_success
        transfer.jobs_left -= 1
        return job

    def end_if_done(self, transfer: RowTransfer, now_s: float) -> None:
        """Report a transfer whose jobs have all ended."""
        if transfer.jobs_left:
            return
        number, succeeded = transfer.transfer_id, tuple(transfer.succeeded)
        del self._transfers[number]
        seconds = now_s - transfer.began_s
        end = TransferEnd(number, transfer.is_whole, succeeded, seconds, transfer.nbytes)
        self._ends.append(end)

    def cancel_loads(self, began_before_s: float, but_of: Container[str] = ()) -> None:
        """Cancel the fetches of loads begun by `began_before_s`, except of requests in `but_of`."""
        loads = (t for t in self._transfers.values() if t.is_load and t.began_s <= began_before_s)
        if late := {load.transfer_id for load in loads if load.request_id not in but_of}:
            self.cancels += [i for i, job in self.jobs.items() if job.transfer.transfer_id in late]

    def take_ends(self) -> list[TransferEnd]:
        """Take the transfers that have ended since the last call, each once."""
        ends, self._ends = self._ends, []
        return ends

    def take_cancels(self) -> list[int]:
        """Take the jobs to cancel."""
        cancels, self.cancels = self.cancels, []
        return cancels
