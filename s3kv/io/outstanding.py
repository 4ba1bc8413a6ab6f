"""Outstanding jobs of one client, each from the call that submits it to the report of its end.

    submitted ──may be sent──▶ in the process ──JobEnd──▶ ended
       │                          └──process died──▶ ended, FAILED or INVALID
       ├──a suspect──▶ waiting for its turn ──▶ in the process
       │                          └──cancelled──▶ ended, CANCELLED
       └──poison, or no process──▶ ended, INVALID or FAILED

A suspect is a job that may have crashed the I/O process (`io.poison_jobs`). Pure, except for
`JobEndLog`: the client moves the messages.
"""

from __future__ import annotations

from collections.abc import Callable

from s3kv.io.failure_log import JobEndLog
from s3kv.io.poison_jobs import PoisonJobs
from s3kv.io.wire import WireError
from s3kv.messages import BucketJob, JobEnd, JobKind
from s3kv.types import Outcome

_IS_POISON = "this job crashes the I/O process, so it is not sent any more"


class OutstandingJobs:
    """Submitted jobs. Each is held once, as outstanding or as ended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._failure_log = JobEndLog(clock)
        self._suspects = PoisonJobs()
        self._outstanding: dict[int, BucketJob] = {}
        self._ended: list[JobEnd] = []

    def __len__(self) -> int:
        """Number of jobs whose end has not been taken."""
        return len(self._outstanding) + len(self._ended)

    @property
    def any_outstanding(self) -> bool:
        return bool(self._outstanding)

    @property
    def any_waiting(self) -> bool:
        """Whether suspects wait for their turn."""
        return bool(self._suspects.waiting)

    def uploads(self) -> set[int]:
        """Ids of the uploads that have not ended."""
        return {i for i, job in self._outstanding.items() if job.kind is JobKind.UPLOAD}

    def uploaded(self) -> set[int]:
        """Ids of the successful jobs whose ends have not been taken."""
        return {end.job_id for end in self._ended if end.outcome.is_success}

    def add(self, job: BucketJob, why_down: str) -> bool:
        """Add a job. Returns True if the caller must send it now; otherwise it waits, or has ended.

        why_down: why no process can take the job; empty if one can. Raises `ValueError` if a job
        with this id has not ended; nothing has changed then.
        """
        if job.job_id in self._outstanding:
            raise ValueError(f"job {job.job_id} has not ended yet")
        if self._suspects.is_poison(job):
            self._end(job, Outcome.INVALID, _IS_POISON)
            return False
        if why_down:
            self._end(job, Outcome.FAILED, why_down)
            return False
        self._outstanding[job.job_id] = job
        return not self._suspects.hold(job)

    def release(self) -> list[BucketJob]:
        """Take out the waiting jobs whose turn has come; the caller sends them."""
        return self._suspects.release() if self._suspects.waiting else []

    def cancel(self, job_id: int) -> bool:
        """Cancel a job. A job that waits here ends now. Returns True if the process has the job, so
        that the caller must send a cancellation."""
        if not self._suspects.drop(job_id):
            return job_id in self._outstanding
        self._end(self._outstanding.pop(job_id), Outcome.CANCELLED, "cancelled before it was sent")
        return False

    def cancel_waiting(self, *, uploads_too: bool) -> int:
        """End the waiting fetches, and with `uploads_too` the waiting uploads. Returns the number
        of uploads that were waiting."""
        waiting = [*self._suspects.waiting.values()]
        uploads = [job for job in waiting if job.kind is JobKind.UPLOAD]
        for job in waiting if uploads_too else [job for job in waiting if job not in uploads]:
            self.cancel(job.job_id)
        return len(uploads)

    def ended(self, end: JobEnd) -> None:
        """Note a job's end from the process. Raises `WireError` if the process has no such job."""
        job = self._outstanding.get(end.job_id)
        if job is None or job.kind is not end.kind:
            raise WireError(f"{end.kind.value} {end.job_id} has ended, or was never sent, and ends")
        del self._outstanding[end.job_id]
        self._suspects.ended(job)
        self._ended.append(end)

    def died(self, why: str, *, crashed: bool) -> None:
        """Note the death of the process: all outstanding jobs end.

        crashed: see `PoisonJobs.died`.
        """
        waiting = self._suspects.waiting.keys()
        inside = [job for job_id, job in self._outstanding.items() if job_id not in waiting]
        self._suspects.died(inside, crashed=crashed)
        for job in self._outstanding.values():
            if self._suspects.is_poison(job):
                self._end(job, Outcome.INVALID, f"{_IS_POISON}: {why}")
            else:
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
        self._suspects.waiting.clear()
        self._ended.clear()

    def _end(self, job: BucketJob, outcome: Outcome, detail: str) -> None:
        self._ended.append(JobEnd(job.job_id, job.kind, outcome, detail=detail))
