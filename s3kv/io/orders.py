"""Orders: the jobs of one client, each from the call that orders it to the report of its end.

    ordered ──may be sent──▶ in the process ──JobEnd──▶ ended
       │                        └──process died──▶ ended, FAILED or INVALID
       ├──a suspect──▶ waiting for its turn ──▶ in the process
       │                        └──cancelled──▶ ended, CANCELLED
       └──condemned, or no process──▶ ended, INVALID or FAILED

A suspect is a job that may have crashed the I/O process. The culprit has to be found without losing
the jobs beside it:

    unknown ──in the process when it died──▶ SUSPECT ──sent again, and ended──▶ unknown
                                                └──the process died of it──▶ CONDEMNED

A job that was in the process when it died ends as failed, and its caller may order it again. It is
then a suspect, and waits until no other suspect is in the process. Other jobs run beside it. A
suspect is condemned if the process dies while it is the only suspect in there, and

- the process crashed (it did not get a SIGKILL from outside) and had no other job at all, or
- the process has died this way three times, crashed or killed.

A job that crashes the process is therefore sent twice. An operator or a kernel that keeps killing
the process has to hit the same job's turn three times. After such a kill the suspects are most
likely innocent, so each one that ends doubles the number that may be in the process at once.

A suspicion attaches to the moved object, not to the job's id, and lasts as long as the client.
Pure, except for `Complaints`: the client moves the messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable

from s3kv.io.formats import Formats
from s3kv.io.wire import Look, Order, WireError
from s3kv.messages import JobEnd, JobKind
from s3kv.types import ItemShape, Outcome, once_a_minute

logger = logging.getLogger("s3kv")

Cargo = tuple[JobKind, int, bytes, ItemShape | None]

_DEATHS_TO_CONDEMN = 3
_MOST_SUSPECTS = 4096
_MOST_CONDEMNED = 1024
"""Limits. The oldest are forgotten; each of these costs at most two more deaths."""


_CONDEMNED = "this job crashes the I/O process, so it is not sent any more"
_TROUBLE = (Outcome.CORRUPT, Outcome.FAILED, Outcome.INVALID)


class Orders:
    """Ordered jobs. Each is held once, as outstanding or as ended."""

    def __init__(self, formats: Formats, clock: Callable[[], float]) -> None:
        self._formats = formats
        self._complaints = Complaints(clock)
        self._suspects = Suspects()
        self._outstanding: dict[int, Order] = {}
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

    def add(self, job: Order, why_down: str) -> bool:
        """Add a job. Returns True if the caller must send it now; otherwise it waits, or has ended.

        why_down: why no process can take the job; empty if one can. Raises `ValueError` if a job
        with this id has not ended, and what `Formats.of` raises; nothing has changed then.
        """
        if job.job_id in self._outstanding:
            raise ValueError(f"job {job.job_id} has not ended yet")
        if not isinstance(job, Look):
            self._formats.of(job)
        if self._suspects.is_condemned(job):
            self._end(job, Outcome.INVALID, _CONDEMNED)
            return False
        if why_down:
            self._end(job, Outcome.FAILED, why_down)
            return False
        self._outstanding[job.job_id] = job
        return not self._suspects.hold(job)

    def release(self) -> list[Order]:
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
        """Note the death of the process: all outstanding jobs end. crashed: see `Suspects.died`."""
        waiting = self._suspects.waiting.keys()
        inside = [job for job_id, job in self._outstanding.items() if job_id not in waiting]
        self._suspects.died(inside, crashed=crashed)
        for job in self._outstanding.values():
            if self._suspects.is_condemned(job):
                self._end(job, Outcome.INVALID, f"{_CONDEMNED}: {why}")
            else:
                self._end(job, Outcome.FAILED, why)
        self._outstanding.clear()

    def take_ends(self) -> list[JobEnd]:
        """Take the ends since the last call. Failures that a person should know of are logged."""
        ended, self._ended = self._ended, []
        for end in ended:
            self._complaints.note(end)
        return ended

    def forget(self) -> None:
        """Forget all jobs. Their ends are never returned."""
        self._outstanding.clear()
        self._suspects.waiting.clear()
        self._ended.clear()

    def _end(self, job: Order, outcome: Outcome, detail: str) -> None:
        self._ended.append(JobEnd(job.job_id, job.kind, outcome, detail=detail))


class Suspects:
    """The suspects of one client. A job is in `waiting` from `hold` until `release` or `drop`."""

    def __init__(self) -> None:
        self.waiting: dict[int, Order] = {}
        self._deaths: dict[Cargo, int] = {}
        """Deaths of the process while a suspect was the only one in it, by suspect."""
        self._condemned: dict[Cargo, None] = {}
        self._sent: set[int] = set()
        self._at_once = 1
        self._most_at_once = 1

    def is_condemned(self, job: Order) -> bool:
        return bool(self._condemned) and _cargo(job) in self._condemned

    def hold(self, job: Order) -> bool:
        """Keep the job until its turn if it is a suspect. Returns whether it is one."""
        if not self._deaths or _cargo(job) not in self._deaths:
            return False
        self.waiting[job.job_id] = job
        return True

    def drop(self, job_id: int) -> bool:
        """Forget a waiting job, so that it is not sent. Returns False if it is not waiting."""
        return self.waiting.pop(job_id, None) is not None

    def release(self) -> list[Order]:
        """Take out the jobs whose turn has come; fetches first, because requests wait for them."""
        released: list[Order] = []
        while self.waiting and len(self._sent) < self._at_once:
            waiting = self.waiting.values()
            job = next((j for j in waiting if j.kind is JobKind.FETCH), next(iter(waiting)))
            del self.waiting[job.job_id]
            self._sent.add(job.job_id)
            released.append(job)
        return released

    def ended(self, job: Order) -> None:
        """Note that the process survived this job, however the job ended."""
        if job.job_id in self._sent:
            self._sent.discard(job.job_id)
            self._deaths.pop(_cargo(job), None)
            self._at_once = min(2 * self._at_once, self._most_at_once)

    def died(self, jobs: Collection[Order], *, crashed: bool) -> None:
        """Note that the process died with these jobs in it. Afterwards no job waits.

        crashed: whether it ended by itself or broke the protocol; False for a SIGKILL.
        """
        on_trial = [job for job in jobs if job.job_id in self._sent]
        self._suspect(jobs)
        if len(on_trial) == 1:
            self._try(on_trial[0], proven=crashed and len(jobs) == 1)
        self._sent.clear()
        self.waiting.clear()
        self._at_once, self._most_at_once = 1, 1 if crashed else _MOST_SUSPECTS

    def _suspect(self, jobs: Iterable[Order]) -> None:
        for job in jobs:
            self._deaths.setdefault(_cargo(job), 0)
        while len(self._deaths) > _MOST_SUSPECTS:
            del self._deaths[next(iter(self._deaths))]

    def _try(self, job: Order, *, proven: bool) -> None:
        cargo = _cargo(job)
        deaths = self._deaths.get(cargo, 0) + 1
        self._deaths[cargo] = deaths
        if proven or deaths >= _DEATHS_TO_CONDEMN:
            del self._deaths[cargo]
            self._condemned[cargo] = None
            if len(self._condemned) > _MOST_CONDEMNED:
                del self._condemned[next(iter(self._condemned))]


def _cargo(job: Order) -> Cargo:
    return job.kind, job.group, job.block_hash, job.item


class Complaints:
    """Logs each kind of failure at most once a minute, because an outage fails thousands of jobs. A
    denial is logged once until that kind of job succeeds again, because a person has to act first.
    clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._is_due = once_a_minute(clock)
        self._denied: set[JobKind] = set()

    def note(self, end: JobEnd) -> None:
        """Note the end of a job."""
        kind, outcome = end.kind, end.outcome
        if outcome.is_success and kind in self._denied:
            self._denied.discard(kind)
            logger.warning("s3kv: %s is allowed again", kind.value)
        elif outcome is Outcome.DENIED and kind not in self._denied:
            self._denied.add(kind)
            logger.error("s3kv: %s denied; serving goes on without it: %s", kind.value, end.detail)
        elif outcome in _TROUBLE and self._is_due((kind, outcome)):
            logger.warning("s3kv: %s %s: %s", kind.value, outcome.name.lower(), end.detail)
