"""Poison jobs: finds the job that crashes the I/O process without losing the jobs beside it.

A suspect is a job that may have crashed the I/O process:

    unknown ──in the process when it died──▶ SUSPECT ──sent again, and ended──▶ unknown
                                                └──the process died of it──▶ POISON

A job that was in the process when it died ends as failed, and its caller may submit it again. It is
then a suspect, and waits until no other suspect is in the process. Other jobs run beside it. A
suspect is poison if the process dies while it is the only suspect in there, and

- the process crashed (it did not get a SIGKILL from outside) and had no other job at all, or
- the process has died this way three times, crashed or killed.

A job that crashes the process is therefore sent twice. An operator or a kernel that keeps killing
the process has to hit the same job's turn three times. After such a kill the suspects are most
likely innocent, so each one that ends doubles the number that may be in the process at once.

A suspicion attaches to the moved object, not to the job's id, and lasts as long as the client.
Pure.
"""

from __future__ import annotations

from collections.abc import Collection

from s3kv.messages import BucketJob, JobKind
from s3kv.types import ChunkKey, ItemShape

Moved = tuple[JobKind, ChunkKey, ItemShape | None]
_DEATHS_OF_POISON = 3
_MOST_SUSPECTS = 4096
_MOST_POISON = 1024
"""Limits. The oldest are forgotten; each of these costs at most two more deaths."""


class PoisonJobs:
    """The suspects of one client. A job is in `waiting` from `hold` until `release` or `drop`."""

    def __init__(self) -> None:
        self.waiting: dict[int, BucketJob] = {}
        self._deaths: dict[Moved, int] = {}
        """Deaths of the process while a suspect was the only one in it, by suspect."""
        self._poison: dict[Moved, None] = {}
        self._sent: set[int] = set()
        self._at_once = 1
        self._most_at_once = 1

    def is_poison(self, job: BucketJob) -> bool:
        return bool(self._poison) and _moved(job) in self._poison

    def hold(self, job: BucketJob) -> bool:
        """Keep the job until its turn if it is a suspect. Returns whether it is one."""
        if not self._deaths or _moved(job) not in self._deaths:
            return False
        self.waiting[job.job_id] = job
        return True

    def drop(self, job_id: int) -> bool:
        """Forget a waiting job, so that it is not sent. Returns False if it is not waiting."""
        return self.waiting.pop(job_id, None) is not None

    def release(self) -> list[BucketJob]:
        """Take out the jobs whose turn has come; fetches first, because requests wait for them."""
        released: list[BucketJob] = []
        while self.waiting and len(self._sent) < self._at_once:
            waiting = self.waiting.values()
            job = next((j for j in waiting if j.kind is JobKind.FETCH), next(iter(waiting)))
            del self.waiting[job.job_id]
            self._sent.add(job.job_id)
            released.append(job)
        return released

    def ended(self, job: BucketJob) -> None:
        """Note that the process survived this job, however the job ended."""
        if job.job_id in self._sent:
            self._sent.discard(job.job_id)
            self._deaths.pop(_moved(job), None)
            self._at_once = min(2 * self._at_once, self._most_at_once)

    def died(self, jobs: Collection[BucketJob], *, crashed: bool) -> None:
        """Note that the process died with these jobs in it. Afterwards no job waits.

        crashed: whether it ended by itself or broke the protocol; False for a SIGKILL.
        """
        suspects = [job for job in jobs if job.job_id in self._sent]
        for job in jobs:
            self._deaths.setdefault(_moved(job), 0)
        while len(self._deaths) > _MOST_SUSPECTS:
            del self._deaths[next(iter(self._deaths))]
        if len(suspects) == 1:
            self._count_death(suspects[0], proven=crashed and len(jobs) == 1)
        self._sent.clear()
        self.waiting.clear()
        self._at_once, self._most_at_once = 1, 1 if crashed else _MOST_SUSPECTS

    def _count_death(self, job: BucketJob, *, proven: bool) -> None:
        moved = _moved(job)
        deaths = self._deaths.get(moved, 0) + 1
        self._deaths[moved] = deaths
        if proven or deaths >= _DEATHS_OF_POISON:
            del self._deaths[moved]
            self._poison[moved] = None
            if len(self._poison) > _MOST_POISON:
                del self._poison[next(iter(self._poison))]


def _moved(job: BucketJob) -> Moved:
    return job.kind, job.key, job.item
