"""Poison jobs: finds the job that ends the I/O process without losing the jobs beside it.

A suspect is a job that may have ended the I/O process:

    unknown ──in the process when it died──▶ SUSPECT ──sent again, and ended──▶ unknown
                                                └──the process died of it twice──▶ POISON

A job that was in the process when it died ends as failed, and its caller may submit it again. It is
then a suspect, and waits until no other suspect is in the process. Other jobs run beside it. A
suspect is poison if the process has died twice while it was in there: it is sent three times in
all. An operator or a kernel that keeps killing the process has to hit the same job's turn twice.

A suspicion attaches to the moved object, not to the job's id, and lasts as long as the client.
Pure.
"""

from __future__ import annotations

from collections.abc import Collection

from s3kv.messages import BucketJob, JobKind
from s3kv.types import ChunkKey, ItemShape

Moved = tuple[JobKind, ChunkKey, ItemShape | None]
_DEATHS_OF_POISON = 2
_MOST_SUSPECTS = 4096
"""Limit. The oldest are forgotten; each of these costs at most three more deaths."""


class PoisonJobs:
    """The suspects of one client. A job is in `waiting` from `hold` until `release` or `drop`."""

    def __init__(self) -> None:
        self.waiting: dict[int, BucketJob] = {}
        self._deaths: dict[Moved, int] = {}
        """Deaths of the process while a suspect was in it again, by suspect."""
        self._sent: int | None = None

    def is_poison(self, job: BucketJob) -> bool:
        return bool(self._deaths) and self._deaths.get(_moved(job), 0) >= _DEATHS_OF_POISON

    def hold(self, job: BucketJob) -> bool:
        """Keep the job until its turn if it is a suspect. Returns whether it is one."""
        if not self._deaths or _moved(job) not in self._deaths:
            return False
        self.waiting[job.job_id] = job
        return True

    def drop(self, job_id: int) -> bool:
        """Forget a waiting job, so that it is not sent. Returns False if it is not waiting."""
        return self.waiting.pop(job_id, None) is not None

    def release(self) -> BucketJob | None:
        """Take out the job whose turn has come; fetches first, because requests wait for them."""
        if not self.waiting or self._sent is not None:
            return None
        waiting = self.waiting.values()
        job = next((j for j in waiting if j.kind is JobKind.FETCH), next(iter(waiting)))
        self._sent = job.job_id
        return self.waiting.pop(job.job_id)

    def ended(self, job: BucketJob) -> None:
        """Note that the process survived this job, however the job ended."""
        if job.job_id == self._sent:
            self._sent = None
            self._deaths.pop(_moved(job), None)

    def died(self, jobs: Collection[BucketJob]) -> None:
        """Note the death of the process with these jobs. Those that wait are not sent."""
        for job in jobs:
            moved = _moved(job)
            self._deaths[moved] = self._deaths.pop(moved, 0) + (job.job_id == self._sent)
        while len(self._deaths) > _MOST_SUSPECTS:
            del self._deaths[next(iter(self._deaths))]
        self._sent = None
        self.waiting.clear()


def _moved(job: BucketJob) -> Moved:
    return job.kind, job.key, job.item
