"""Time, the network, the bucket, and the I/O process that moves one engine's objects.

The network: every request waits for its first byte, then its body shares the link of its engine,
one link per direction, equally with all others (processor sharing), and no connection gets more
than `connection_bytes_per_s`. The order in which requests start, and how many run at once, are
s3kv's own: `s3kv.io.server.jobs.JobQueue`. The bucket never fails, throttles or forgets.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.simulation.expiry import KeptBucket
from s3kv.io.server.jobs import JobQueue
from s3kv.io.sources.transfer_job import TransferJob
from s3kv.messages import BucketJob, JobEnd, JobKind
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.compression import SEGMENT_BYTES
from s3kv.place import Place
from s3kv.types import Outcome

if TYPE_CHECKING:
    from benchmarks.simulation.disk import Disk

_NOWHERE = Place.of(b"")
ENCODED_BYTES_PER_S, DECODED_BYTES_PER_S = 0.6e9, 2.5e9
"""Plain bytes that a core compresses, and those that it gets back; as `benchmarks.compression`
measures them."""


class Timeline:
    """Simulated time: actions happen in the order of their times, then of their being planned."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._actions: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        self._planned += 1
        heapq.heappush(self._actions, (time_s, self._planned, action))

    def run(self) -> None:
        while self._actions:
            self.now_s, _, action = heapq.heappop(self._actions)
            action()


class Link:
    """One direction of an engine's network, shared equally by whatever flies."""

    def __init__(
        self, timeline: Timeline, *, bytes_per_s: float, connection_bytes_per_s: float
    ) -> None:
        self._timeline = timeline
        self._bytes_per_s = bytes_per_s
        self._connection_bytes_per_s = connection_bytes_per_s
        # All flights have the same speed, so one figure serves them all: how many bytes a flight
        # that had always been here would have got by now. A flight ends at a value of it.
        self._served = 0.0
        self._served_at_s = 0.0
        self._flights: list[tuple[float, int, Callable[[], None]]] = []
        self._started = 0
        self._version = 0

    def set_speed(self, bytes_per_s: float) -> None:
        """From now on."""
        self._serve()
        self._bytes_per_s = bytes_per_s
        self._plan()

    def carry(self, nbytes: int, on_end: Callable[[], None]) -> None:
        self._serve()
        self._started += 1
        heapq.heappush(self._flights, (self._served + nbytes, self._started, on_end))
        self._plan()

    @property
    def _flight_bytes_per_s(self) -> float:
        return min(self._connection_bytes_per_s, self._bytes_per_s / len(self._flights))

    def _serve(self) -> None:
        now_s = self._timeline.now_s
        if self._flights:
            self._served += (now_s - self._served_at_s) * self._flight_bytes_per_s
        self._served_at_s = now_s

    def _plan(self) -> None:
        """Look again when the next flight ends, if none has come or gone until then."""
        self._version += 1
        if self._flights:
            left_s = (self._flights[0][0] - self._served) / self._flight_bytes_per_s
            end_s = self._timeline.now_s + max(0.0, left_s)
            self._timeline.at(end_s, partial(self._end_first, self._version))

    def _end_first(self, version: int) -> None:
        if version != self._version:
            return
        self._serve()
        _, _, on_end = heapq.heappop(self._flights)
        self._plan()
        on_end()


class Bucket:
    """Objects by block hash, and the requests made, by verb and outcome. kept: holds the objects if
    the bucket has a budget."""

    def __init__(self, kept: KeptBucket | None = None) -> None:
        self.objects: set[bytes] = set()
        self.requests: Counter[str] = Counter()
        self.kept = kept

    def has(self, block_hash: bytes, place: int, now_s: float) -> bool:
        if self.kept is not None:
            return self.kept.get(block_hash, place, now_s)
        return block_hash in self.objects

    def add(self, block_hash: bytes, place: int, now_s: float) -> bool:
        """Returns whether the object is new."""
        if self.kept is not None:
            return self.kept.put(block_hash, place, now_s)
        is_new = block_hash not in self.objects
        self.objects.add(block_hash)
        return is_new


@dataclass(frozen=True, slots=True)
class Network:
    """first_byte_s is the median of a lognormal distribution of shape `first_byte_sigma`."""

    first_byte_s: float
    first_byte_sigma: float
    bytes_per_s: float
    connection_bytes_per_s: float

    def latency_s(self, rng: random.Random) -> float:
        return self.first_byte_s * math.exp(rng.gauss(0.0, self.first_byte_sigma))


@dataclass(frozen=True, slots=True)
class Form:
    """An object in the bucket and on the wire. nbytes: its length. encode_s: from the payload to
    the first byte that can be sent. decode_s: from the last byte to the payload."""

    nbytes: int
    encode_s: float = 0.0
    decode_s: float = 0.0

    @classmethod
    def of(cls, layout: ChunkFormat, share: float) -> Form:
        """Compressed to this share of the plain object; 1.0: the plain object itself."""
        if share == 1.0:
            return cls(layout.object_bytes)
        encode_s = layout.payload_bytes / ENCODED_BYTES_PER_S
        decode_s = SEGMENT_BYTES / DECODED_BYTES_PER_S
        return cls(int(layout.object_bytes * share), encode_s, decode_s)


class IoProcess:
    """Moves one engine's objects; says what ended through `on_end`."""

    def __init__(
        self,
        timeline: Timeline,
        bucket: Bucket,
        network: Network,
        queue: JobQueue,
        layout: ChunkFormat,
        form: Form,
        rng: random.Random,
        place: int,
        on_end: Callable[[JobEnd], None],
    ) -> None:
        self.disk: Disk | None = None
        self.near: set[bytes] = set()
        """Objects that were last fetched from the disk."""
        self._timeline = timeline
        self._bucket = bucket
        self._network = network
        self._queue = queue
        self._layout = layout
        self._form = form
        self._rng = rng
        self._place = place
        self._on_end = on_end
        self._cancelled: set[int] = set()
        self._links = {
            kind: Link(
                timeline,
                bytes_per_s=network.bytes_per_s,
                connection_bytes_per_s=network.connection_bytes_per_s,
            )
            for kind in (JobKind.FETCH, JobKind.UPLOAD)
        }

    def set_speed(self, bytes_per_s: float) -> None:
        """Of the network, in either direction, from now on."""
        for link in self._links.values():
            link.set_speed(bytes_per_s)

    def submit(self, job: BucketJob) -> None:
        block_hash = job.key.block_hash
        self._queue.add(TransferJob(job.job_id, job.kind, "", block_hash, self._layout, _NOWHERE))
        self._start()

    def cancel(self, job_id: int) -> None:
        """It ends at once if it waits; if it runs, where its next byte would have come."""
        if not self.withdraw(job_id) and job_id in self._queue:
            self._cancelled.add(job_id)

    def withdraw(self, job_id: int) -> bool:
        """It ends at once if it waits. False if it does not."""
        if self._queue.withdraw(job_id) is None:
            return False
        self._on_end(JobEnd(job_id, JobKind.FETCH, Outcome.CANCELLED, 0, 0.0))
        return True

    def _start(self) -> None:
        while (job := self._queue.take()) is not None:
            now_s = self._timeline.now_s
            disk = self.disk if job.kind is JobKind.FETCH else None
            if disk and disk.read(job.block_hash, partial(self._was_read, job, now_s)):
                continue
            answer_s = now_s + self._network.latency_s(self._rng)
            answer_s += self._form.encode_s if job.kind is JobKind.UPLOAD else 0.0
            self._timeline.at(answer_s, partial(self._answered, job, now_s))

    def _was_read(self, job: TransferJob, started_s: float) -> None:
        if self._bucket.kept is not None:
            self._bucket.kept.use(job.block_hash, self._place, self._timeline.now_s)
        outcome = Outcome.CANCELLED if job.job_id in self._cancelled else Outcome.OK
        self._ended(job, started_s, outcome, "disk")

    def _answered(self, job: TransferJob, started_s: float) -> None:
        if job.job_id in self._cancelled:
            self._bucket.requests["get_cancelled"] += 1
            self._ended(job, started_s, Outcome.CANCELLED)
            return
        if job.kind is JobKind.FETCH and not self._bucket.has(
            job.block_hash, self._place, self._timeline.now_s
        ):
            self._bucket.requests["get_404"] += 1
            self._ended(job, started_s, Outcome.MISSING)
            return
        self._links[job.kind].carry(self._form.nbytes, partial(self._sent, job, started_s))

    def _sent(self, job: TransferJob, started_s: float) -> None:
        if job.kind is JobKind.FETCH and self._form.decode_s:
            end_s = self._timeline.now_s + self._form.decode_s
            self._timeline.at(end_s, partial(self._carried, job, started_s))
        else:
            self._carried(job, started_s)

    def _carried(self, job: TransferJob, started_s: float) -> None:
        outcome = Outcome.OK
        if job.job_id in self._cancelled:
            self._bucket.requests["get_cancelled"] += 1
            outcome = Outcome.CANCELLED
        elif job.kind is JobKind.FETCH:
            self._bucket.requests["get_hit"] += 1
        elif self._bucket.add(job.block_hash, self._place, self._timeline.now_s):
            self._bucket.requests["put_new"] += 1
        else:
            # Another engine was first. Its answer comes after the body, as with most servers.
            self._bucket.requests["put_exists"] += 1
            outcome = Outcome.EXISTS
        if self.disk is not None and outcome is not Outcome.CANCELLED:
            self.disk.offer(job.block_hash, job.kind)
        self._ended(job, started_s, outcome)

    def _ended(
        self, job: TransferJob, started_s: float, outcome: Outcome, source: str = ""
    ) -> None:
        self._queue.end(job)
        self._cancelled.discard(job.job_id)
        nbytes = job.nbytes if outcome.is_success else 0
        seconds = self._timeline.now_s - started_s
        if outcome is Outcome.OK and job.kind is JobKind.FETCH:
            (self.near.add if source else self.near.discard)(job.block_hash)
        end = JobEnd(job.job_id, job.kind, outcome, nbytes, seconds, source=source)
        end.near = bool(source)
        self._on_end(end)
        self._start()
