"""Which job goes next: the I/O process's queue, without any I/O.

Fetches make a request wait, uploads make nobody wait. So:

1. A waiting fetch goes before every waiting upload,
2. but after `FETCHES_PER_UPLOAD` fetches in a row that passed a waiting upload, an upload goes:
   uploads are slow under load, never starved.
3. Uploads hold at most half of the requests and half of the bytes, so that a fetch which comes
   after a burst of uploads does not find everything taken.
4. Uploads are in no hurry, and each that runs takes cores and memory bandwidth from the engine: one
   goes at a time, and one more for every `UPLOADS_PER_STREAM` that wait, so that a burst is spread
   out and a backlog is not allowed to grow. At the end of the process they hurry.
5. A job that is larger than a limit on bytes goes when it is alone.

Within its kind every job keeps its turn: none overtakes one that waits for bytes.
"""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from dataclasses import dataclass, field

from s3kv.objects.codec import ChunkFormat
from s3kv.objects.items import ItemFormat

FETCHES_PER_UPLOAD = 16
"""Costs fetches 6 % of their places at the worst."""


UPLOADS_PER_STREAM = 8
"""With four, a prompt of twelve chunks went up in three streams at first and cost a prompt computed
on two shared cores 8 % instead of 6 to 7 %. A backlog of half of what may be on its way by default
(`max_saves_inflight`) brings all upload places into use."""


class Direction(enum.Enum):
    FETCH = "fetch"
    UPLOAD = "upload"


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One object to move. buffer: its place in the slab, `format.object_bytes` long."""

    job_id: int
    direction: Direction
    key: str
    block_hash: bytes
    format: ChunkFormat | ItemFormat
    buffer: memoryview
    due_s: float = math.inf
    """After that it is not tried again. The loop's clock."""

    @property
    def nbytes(self) -> int:
        return self.format.object_bytes


@dataclass(slots=True)
class _Places:
    """How much may run at once, and how much does."""

    max_requests: int
    max_bytes: int
    requests: int = 0
    nbytes: int = 0

    def fit(self, job: Job) -> bool:
        return self.requests == 0 or (
            self.requests < self.max_requests and self.nbytes + job.nbytes <= self.max_bytes
        )

    def take(self, job: Job) -> None:
        self.requests += 1
        self.nbytes += job.nbytes

    def give_back(self, job: Job) -> None:
        self.requests -= 1
        self.nbytes -= job.nbytes


@dataclass(slots=True)
class _Line:
    """The jobs of one direction that wait, in order of arrival, and those that run."""

    waiting: OrderedDict[int, Job] = field(default_factory=OrderedDict)
    running: dict[int, Job] = field(default_factory=dict)

    def first(self) -> Job | None:
        return next(iter(self.waiting.values()), None)


class JobQueue:
    """Jobs that wait and jobs that run. A job is in here from `add` until `withdraw` or `end`.

    max_requests, max_bytes: what may run at once, of both directions together. Of requests,
    `limit_requests` may make it less.
    """

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._places = _Places(max_requests, max_bytes)
        self._upload_places = _Places(max(1, max_requests // 2), max_bytes // 2)
        self._lines = {direction: _Line() for direction in Direction}
        self._fetches_in_a_row = 0
        self.in_hurry = False
        """Nothing is left to be spared: as many uploads at once as there are places."""

    def limit_requests(self, max_requests: int) -> None:
        """From now on so many may run at once; more that run already are left alone."""
        self._places.max_requests = max_requests
        self._upload_places.max_requests = max(1, max_requests // 2)

    @property
    def has_spare(self) -> bool:
        """Whether a place is free that no job wants."""
        return not self.waiting and self._places.requests < self._places.max_requests

    def take_spare(self) -> None:
        """Take a place for a second request of a running job. It has the job's bytes."""
        self._places.requests += 1

    def give_back_spare(self) -> None:
        self._places.requests -= 1

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

    def ids(self, direction: Direction) -> tuple[int, ...]:
        """All jobs of this direction, those that run first."""
        line = self._lines[direction]
        return (*line.running, *line.waiting)

    def add(self, job: Job) -> None:
        """Put `job` at the end of its line. Its id is none of those in here."""
        self._lines[job.direction].waiting[job.job_id] = job

    def take(self) -> Job | None:
        """Start the job whose turn it is; None when none waits or there is no place for it."""
        job = self._whose_turn()
        if job is None or not self._places.fit(job):
            return None
        line = self._lines[job.direction]
        del line.waiting[job.job_id]
        line.running[job.job_id] = job
        self._places.take(job)
        if job.direction is Direction.UPLOAD:
            self._upload_places.take(job)
        passed = job.direction is Direction.FETCH and self._lines[Direction.UPLOAD].waiting
        self._fetches_in_a_row = self._fetches_in_a_row + 1 if passed else 0
        return job

    def _whose_turn(self) -> Job | None:
        fetch = self._lines[Direction.FETCH].first()
        upload = self._lines[Direction.UPLOAD].first()
        if upload is None or not self._has_upload_stream or not self._upload_places.fit(upload):
            return fetch
        if fetch is None or self._fetches_in_a_row >= FETCHES_PER_UPLOAD:
            return upload
        return fetch

    @property
    def _has_upload_stream(self) -> bool:
        line = self._lines[Direction.UPLOAD]
        streams = 1 + (len(line.waiting) - 1) // UPLOADS_PER_STREAM
        return self.in_hurry or len(line.running) < streams

    def withdraw(self, job_id: int) -> Job | None:
        """Take out a job that waits; None when it does not wait (any more)."""
        for line in self._lines.values():
            job = line.waiting.pop(job_id, None)
            if job is not None:
                return job
        return None

    def end(self, job: Job) -> None:
        """A running job has ended; its place is free."""
        del self._lines[job.direction].running[job.job_id]
        self._places.give_back(job)
        if job.direction is Direction.UPLOAD:
            self._upload_places.give_back(job)
