"""Poison jobs: jobs that crash the I/O process, found by counting.

A job that was in the process at `_CRASHES` crashes, and has never ended in between, is not sent
any more. It is known by the object that it moves, so a job that was beside the culprit each time is
given up with it: a miss, or an upload less. A SIGKILL from outside is no crash, nor is the end of a
process that could not serve. Pure.
"""

from __future__ import annotations

from collections.abc import Collection

from s3kv.messages import BucketJob, JobKind
from s3kv.types import ChunkKey, ItemShape

Moved = tuple[JobKind, ChunkKey, ItemShape | None]
_CRASHES = 3
_MOST_COUNTED = 4096
"""The oldest are forgotten; each of these costs at most three more crashes."""


class PoisonJobs:
    """The crashes that the jobs of one client were in, for as long as the client lives."""

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
