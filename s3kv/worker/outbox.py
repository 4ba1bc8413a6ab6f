"""Outbox: items on their way from an engine to the bucket.

The engine's thread reserves a place, starts a copy of the item to it, and continues. The outbox's
own thread waits for the copy, orders the upload, and records its end; without it an idle engine
would never upload its last items. The thread handles messages, never bytes; those move in the I/O
process. `take_ends`, on the engine's thread, frees the places.

If there is no room, an item is not saved, and the next request that needs it encodes it again.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol

from s3kv.host.room import PAGE_BYTES, Extents
from s3kv.host.slab import Slab
from s3kv.io.client import IoClient
from s3kv.io.failure_log import JobEndLog
from s3kv.messages import BucketJob, ItemReport, JobEnd, JobKind
from s3kv.types import ChunkKey, ItemShape, Outcome, Span

_IDLE_S = 1.0
"""How often an idle outbox polls its I/O process."""
_LINGER_S = 0.005
"""How often the outbox polls its I/O process while items are on their way."""


class Copy(Protocol):
    """A copy to the outbox's slab that was started."""

    def synchronize(self) -> None:
        """Block until all bytes are in place. Raises `RuntimeError` if the device failed."""


class _Parcel(NamedTuple):
    key: ChunkKey
    span: Span
    shape: ItemShape
    copy: Copy
    since_s: float


class Outbox:
    """The outbox of one engine. `client` has been started and has tried the bucket; `close` closes
    client and slab. All methods are for the engine's thread. clock: seconds, monotonic."""

    def __init__(self, client: IoClient, slab: Slab, clock: Callable[[], float]) -> None:
        self._client, self._slab, self._clock = client, slab, clock
        self._failure_log = JobEndLog(clock)
        self._extents = Extents(slab.nbytes // PAGE_BYTES)
        self._parcels: queue.SimpleQueue[_Parcel | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[_Parcel, float | None, JobEnd]] = queue.SimpleQueue()
        self._underway: dict[int, tuple[_Parcel, float]] = {}
        self._io: Counter[str] = Counter()
        """The client's counters as last read by the outbox's thread; replaced, never mutated."""
        self._io_reported: Counter[str] = self._io
        self._drain_s = 0.0
        self._left = 0
        self._thread = threading.Thread(target=self._serve, name="s3kv-outbox", daemon=True)
        self._thread.start()

    @property
    def view(self) -> memoryview:
        """The slab's memory, which contains the places."""
        return self._slab.view

    def place(self, nbytes: int) -> Span | None:
        """Room for an object of `nbytes`, or None. Pass it to `send`."""
        pages = -(-nbytes // PAGE_BYTES)
        if pages > self._extents.largest or not self._thread.is_alive():
            return None
        start = self._extents.allocate(pages)
        return None if start is None else Span(start * PAGE_BYTES, nbytes)

    def send(self, key: ChunkKey, span: Span, shape: ItemShape, copy: Copy) -> None:
        """Upload the bytes that `copy` writes to the place. `take_ends` reports the end."""
        self._parcels.put(_Parcel(key, span, shape, copy, self._clock()))

    def take_ends(self) -> ItemReport:
        """The copies and uploads that have ended since the last call, with the counters of the I/O
        process; frees their places. Does not block."""
        io, counters = self._io, Counter[str]()
        report = ItemReport(counters)
        if io is not self._io_reported:
            counters.update(io - self._io_reported)
            self._io_reported = io
        while not self._ended.empty():
            parcel, copy_s, end = self._ended.get()
            self._extents.free(parcel.span.offset // PAGE_BYTES)
            if copy_s is not None:
                counters["save_ok"] += 1
                counters["save_bytes"] += parcel.shape.nbytes
                report.seconds.setdefault("save_seconds", []).append(copy_s)
            counters[f"upload_{end.outcome.name.lower()}"] += 1
            if end.outcome.is_success:
                counters["upload_bytes"] += parcel.shape.nbytes
                report.seconds.setdefault("upload_seconds", []).append(end.seconds)
                report.uploaded[parcel.key] = end.fresh_s
        return report

    def close(self, drain_timeout_s: float) -> int:
        """Finish uploads within `drain_timeout_s`, then release everything. Returns the number of
        uploads left."""
        self._drain_s = drain_timeout_s
        self._parcels.put(None)
        self._thread.join()
        self._client.close()
        self._slab.close()
        return self._left

    def _serve(self) -> None:
        job_id = 0
        while True:
            try:
                parcel = self._parcels.get(timeout=_LINGER_S if self._underway else _IDLE_S)
            except queue.Empty:
                self._poll()
                continue
            if parcel is None:
                break
            job_id += 1
            self._upload(job_id, parcel)
            self._poll()
        self._left = self._client.drain(self._drain_s)
        self._poll()

    def _upload(self, job_id: int, parcel: _Parcel) -> None:
        try:
            parcel.copy.synchronize()
        except RuntimeError as error:
            detail = f"a copy from the device failed: {error}"
            end = JobEnd(job_id, JobKind.UPLOAD, Outcome.FAILED, detail=detail)
            self._failure_log.note(end)
            self._ended.put((parcel, None, end))
            return
        self._underway[job_id] = parcel, self._clock() - parcel.since_s
        slot = parcel.span.offset // PAGE_BYTES
        self._client.submit(BucketJob(job_id, JobKind.UPLOAD, parcel.key, slot, parcel.shape))
        self._client.flush()

    def _poll(self) -> None:
        for end in self._client.poll():
            self._ended.put((*self._underway.pop(end.job_id), end))
        if self._io != self._client.counters:
            self._io = Counter(self._client.counters)
