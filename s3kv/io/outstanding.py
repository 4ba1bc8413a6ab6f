"""Outstanding jobs of one client, each from the call that submits it to the report of its end.

    submitted ──▶ in the process ──JobEnd──▶ ended
       │                  └──process died──▶ ended, FAILED
       └──poison, or no process──▶ ended, INVALID or FAILED

A poison job crashes the I/O process. It was in the process at `_CRASHES` crashes, and has never
ended in between. It is identified by the object that it moves, so a job that was with the culprit
at every crash is also given up, at the cost of a miss or an upload. A SIGKILL from outside is not a
crash, and neither is the exit of a process that could not serve.

Pure, except for `JobEndLog`: the client moves the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from s3kv.io.failure_log import JobEndLog
from s3kv.io.wire import WireError
from s3kv.messages import BucketJob, JobEnd, JobKind
from s3kv.types import ChunkKey, ItemShape, Outcome

Moved = tuple[JobKind, ChunkKey, ItemShape | None]
_CRASHES = 3
_MOST_COUNTED = 4096
"""The oldest are forgotten; each forgotten one costs at most three more crashes."""
_IS_POISON = "this job crashes the I/O process, so it is not sent any more"


class OutstandingJobs:
    """Submitted jobs. Each is held once, as outstanding or as ended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._failure_log = JobEndLog(clock)
        self._poison = PoisonJobs()
        self._outstanding: dict[int, BucketJob] = {}
        self._ended: list[JobEnd] = []

    def __len__(self) -> int:
        """Number of jobs whose end has not been taken."""
        return len(self._outstanding) + len(self._ended)

    @property
    def any_outstanding(self) -> bool:
        return bool(self._outstanding)

    def of(self, *kinds: JobKind) -> set[int]:
        """Ids of the jobs of these kinds that have not ended."""
        return {i for i, job in self._outstanding.items() if job.kind in kinds}

    def uploaded(self) -> set[int]:
        """Ids of the successful jobs whose ends have not been taken."""
        return {end.job_id for end in self._ended if end.outcome.is_success}

    def add(self, job: BucketJob, why_down: str) -> bool:
        """Add a job. Returns True if the caller must send it; otherwise it has ended.

        why_down: why no process can take the job; empty if one can. Raises `ValueError`, and
        changes nothing, if a job with this id has not ended.
        """
        if job.job_id in self._outstanding:
            raise ValueError(f"job {job.job_id} has not ended yet")
        if self._poison.is_poison(job):
            self._end(job, Outcome.INVALID, _IS_POISON)
            return False
        if why_down:
            self._end(job, Outcome.FAILED, why_down)
            return False
        self._outstanding[job.job_id] = job
        return True

    def has(self, job_id: int) -> bool:
        """Whether the process has the job."""
        return job_id in self._outstanding

    def ended(self, end: JobEnd) -> None:
        """Note a job's end from the process. Raises `WireError` if the process has no such job."""
        job = self._outstanding.get(end.job_id)
        if job is None or job.kind is not end.kind:
            raise WireError(f"{end.kind.value} {end.job_id} has ended, or was never sent, and ends")
        del self._outstanding[end.job_id]
        self._poison.ended(job)
        self._ended.append(end)

    def died(self, why: str, *, crashed: bool) -> None:
        """Note the death of the process: all outstanding jobs end.

        crashed: whether it ended by itself or broke the protocol; False for a SIGKILL, and for a
        process that could not serve.
        """
        if crashed:
            self._poison.crashed(self._outstanding.values())
        for job in self._outstanding.values():
            self._end(job, Outcome.FAILED, why)
        self._outstanding.clear()

    def take_ends(self) -> list[JobEnd]:
        """Take the ends since the last call. Failures that concern an operator are logged."""
        ended, self._ended = self._ended, []
        for end in ended:
            self._failure_log.note(end)
        return ended

    def forget(self) -> None:
        """Forget all jobs. Their ends are never returned."""
        self._outstanding.clear()
        self._ended.clear()

    def _end(self, job: BucketJob, outcome: Outcome, detail: str) -> None:
        self._ended.append(JobEnd(job.job_id, job.kind, outcome, detail=detail))


class PoisonJobs:
    """Crash counts of one client's jobs, for the life of the client."""

    def __init__(self) -> None:
        self._crashes: dict[Moved, int] = {}

    def is_poison(self, job: BucketJob) -> bool:
        return bool(self._crashes) and self._crashes.get(_moved(job), 0) >= _CRASHES

    def ended(self, job: BucketJob) -> None:
        """Note that the process survived this job, however the job ended."""
        if self._crashes:
            self._crashes.pop(_moved(job), None)

    def crashed(self, jobs: Collection[BucketJob]) -> None:
        """Note that the process ended by itself, or broke the protocol, with these jobs in it."""
        for job in jobs:
            self._crashes[_moved(job)] = self._crashes.pop(_moved(job), 0) + 1
        while len(self._crashes) > _MOST_COUNTED:
            del self._crashes[next(iter(self._crashes))]


def _moved(job: BucketJob) -> Moved:
    return job.kind, job.key, job.item
