"""Job queue of the I/O process: chooses the next job, and does no I/O.

Requests wait for fetches, but not for uploads. Hence these rules:

1. A waiting fetch goes before every waiting upload.
2. After `FETCHES_PER_UPLOAD` fetches in a row have passed a waiting upload, an upload goes next.
   Uploads are slow under load, but never starved.
3. Uploads hold at most half of the requests and half of the bytes, so a fetch after a burst of
   uploads finds a free place.
4. A running upload takes cores and memory bandwidth from the engine, and is not urgent. One runs at
   a time, plus one for every `UPLOADS_PER_STREAM` that wait: a burst is spread out, and a backlog
   does not grow. This limit is lifted when the process drains.
5. A running fetch may borrow free places for further requests. Each fetch, waiting or running, has
   an equal share of the places, so that the first of several takes none from the others.
6. A job that is larger than a limit on bytes runs when no other job does.

Jobs of one kind run in order of arrival: none overtakes one that waits for bytes.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from s3kv.io.sources.transfer_job import Borrowed, TransferJob
from s3kv.messages import JobKind

FETCHES_PER_UPLOAD = 16
"""Fetches that may pass a waiting upload. Uploads take at most 6 % of the places from fetches."""

UPLOADS_PER_STREAM = 8
"""Waiting uploads per further running one. A lower number slows the engine: with four, a prompt of
twelve chunks started three uploads at once, and a prompt computed on two shared cores took 8 %
longer instead of 6 to 7 %. Half of the maximum number of saves uses all upload places."""


@dataclass(slots=True)
class _Places:
    """Places for running jobs: the limits, and their present use."""

    max_requests: int
    max_bytes: int
    requests: int = 0
    nbytes: int = 0

    def fit(self, job: TransferJob) -> bool:
        return self.requests == 0 or (
            self.requests < self.max_requests and self.nbytes + job.nbytes <= self.max_bytes
        )

    def take(self, job: TransferJob) -> None:
        self.requests += 1
        self.nbytes += job.nbytes

    def give_back(self, job: TransferJob) -> None:
        self.requests -= 1
        self.nbytes -= job.nbytes


@dataclass(slots=True)
class _Line:
    """The jobs of one kind: the waiting ones in order of arrival, and the running ones."""

    waiting: OrderedDict[int, TransferJob] = field(default_factory=OrderedDict)
    running: dict[int, TransferJob] = field(default_factory=dict)

    def first(self) -> TransferJob | None:
        return next(iter(self.waiting.values()), None)


class JobQueue:
    """The waiting and running jobs. It holds a job from `add` until `withdraw` or `end`.

    max_requests, max_bytes: limits on the running jobs of both kinds together.
    `limit_requests` changes the limit on requests. before: a queue of fetches that may move on to
    this one. They already count in the shares of the places.
    """

    def __init__(self, max_requests: int, max_bytes: int, before: JobQueue | None = None) -> None:
        self._before = before
        self._places = _Places(max_requests, max_bytes)
        self._upload_places = _Places(max(1, max_requests // 2), max_bytes // 2)
        self._lines = {kind: _Line() for kind in (JobKind.FETCH, JobKind.UPLOAD)}
        self._fetches_in_a_row = 0
        self.in_hurry = False
        """True while the process drains: uploads then use all their places."""

    def limit_requests(self, max_requests: int) -> None:
        """Change the limit on requests that run at once. Running ones above it continue."""
        self._places.max_requests = max_requests
        self._upload_places.max_requests = max(1, max_requests // 2)

    @property
    def has_spare(self) -> bool:
        """Whether a place is free and no fetch needs it. Uploads wait beside free places."""
        is_free = self._places.requests < self._places.max_requests
        return is_free and not self._lines[JobKind.FETCH].waiting

    @property
    def waiting(self) -> int:
        return sum(len(line.waiting) for line in self._lines.values())

    @property
    def running(self) -> int:
        return self._places.requests

    @property
    def running_bytes(self) -> int:
        return self._places.nbytes

    def __contains__(self, job_id: int) -> bool:
        return any(
            job_id in line.waiting or job_id in line.running for line in self._lines.values()
        )

    def ids(self, kind: JobKind) -> tuple[int, ...]:
        """Ids of all jobs of this kind, the running ones first."""
        line = self._lines[kind]
        return (*line.running, *line.waiting)

    def add(self, job: TransferJob) -> None:
        """Put `job` at the end of its line. No job in the queue may have its id."""
        self._lines[job.kind].waiting[job.job_id] = job

    def take(self) -> TransferJob | None:
        """Start the next job and return it. None if no job waits, or there is no place for it."""
        job = self._whose_turn()
        if job is None or not self._places.fit(job):
            return None
        line = self._lines[job.kind]
        del line.waiting[job.job_id]
        line.running[job.job_id] = job
        self._places.take(job)
        if job.kind is JobKind.UPLOAD:
            self._upload_places.take(job)
        passed = job.kind is JobKind.FETCH and self._lines[JobKind.UPLOAD].waiting
        self._fetches_in_a_row = self._fetches_in_a_row + 1 if passed else 0
        return job

    def _whose_turn(self) -> TransferJob | None:
        fetch = self._lines[JobKind.FETCH].first()
        line = self._lines[JobKind.UPLOAD]
        upload, streams = line.first(), 1 + (len(line.waiting) - 1) // UPLOADS_PER_STREAM
        has_stream = self.in_hurry or len(line.running) < streams
        if upload is None or not has_stream or not self._upload_places.fit(upload):
            return fetch
        return upload if fetch is None or self._fetches_in_a_row >= FETCHES_PER_UPLOAD else fetch

    def withdraw(self, job_id: int) -> TransferJob | None:
        """Remove and return a waiting job. None if no waiting job has this id."""
        for line in self._lines.values():
            if (job := line.waiting.pop(job_id, None)) is not None:
                return job
        return None

    @contextlib.contextmanager
    def borrowed(self, freed: Callable[[], None], wanted: int) -> Iterator[Borrowed]:
        """Take places for up to `wanted` further requests of one running fetch, during the block.
        freed: called whenever one of them becomes free."""
        line, places = self._lines[JobKind.FETCH], self._places
        coming = 0 if self._before is None else self._before.running + self._before.waiting
        share = places.max_requests // (len(line.running) + len(line.waiting) + coming) - 1
        count = left = max(0, min(wanted, share, places.max_requests - places.requests))
        places.requests += count

        def give_back() -> None:
            nonlocal left
            if left:
                left -= 1
                places.requests -= 1
                freed()

        try:
            yield count, give_back
        finally:
            while left:
                give_back()

    def end(self, job: TransferJob) -> None:
        """Free the place of a running job that has ended."""
        del self._lines[job.kind].running[job.job_id]
        self._places.give_back(job)
        if job.kind is JobKind.UPLOAD:
            self._upload_places.give_back(job)
