"""Items on their way from an engine to the bucket.

The engine's thread asks for a place, has the item copied there, and goes on. One thread of the
outbox waits for the copy, orders the upload, and frees the place when it has ended: without it an
engine that has nothing more to do would keep what it encoded last. It handles messages, never
bytes; those move in the I/O process.

When there is no room, an item is not saved, and whoever needs it next encodes it again.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol

from s3kv.host.extents import Extents
from s3kv.host.items import PAGE_BYTES
from s3kv.host.slab import Slab
from s3kv.io.client import IoClient
from s3kv.io.complaints import Complaints
from s3kv.types import ChunkKey, ItemShape, Outcome, Span

logger = logging.getLogger("s3kv")

_IDLE_S = 1.0
"""How often an idle outbox looks after its I/O process."""
_LINGER_S = 0.005
"""What a new item may wait for its order while others are on their way."""


class Copy(Protocol):
    """A copy to the outbox's slab that was started."""

    def wait(self) -> None:
        """Return when all bytes are in place. Raises `RuntimeError` when the device failed."""


class _Parcel(NamedTuple):
    key: ChunkKey
    span: Span
    shape: ItemShape
    copy: Copy
    since_s: float


class _End(NamedTuple):
    """copy_s: None for a copy that failed."""

    parcel: _Parcel
    outcome: Outcome
    nbytes: int
    copy_s: float | None
    upload_s: float


class OutboxEnds(NamedTuple):
    """What has happened since the last time: counts, by outcome and of the I/O process; keys the
    bucket now holds; how long copies and uploads that succeeded took, by metric."""

    counters: Counter[str]
    uploaded: list[ChunkKey]
    seconds: dict[str, list[float]]


class Outbox:
    """`client` has been started and tried the bucket; client and slab are closed by `close`.

    Methods are for the engine's thread. clock: seconds, monotonic.
    """

    def __init__(self, client: IoClient, slab: Slab, clock: Callable[[], float]) -> None:
        self._client = client
        self._slab = slab
        self._clock = clock
        self._extents = Extents(slab.nbytes // PAGE_BYTES)
        self._parcels: queue.SimpleQueue[_Parcel | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[_End] = queue.SimpleQueue()
        self._complaints = Complaints(clock)
        self._underway: dict[int, tuple[_Parcel, float]] = {}
        self._io: Counter[str] = Counter()
        """The client's counters as the outbox's thread saw them last; replaced, never changed."""
        self._io_told: Counter[str] = self._io
        self._drain_s = 0.0
        self._left = 0
        self._thread = threading.Thread(target=self._serve, name="s3kv-outbox", daemon=True)
        self._thread.start()

    @property
    def view(self) -> memoryview:
        """The slab that places are in."""
        return self._slab.view

    def place(self, nbytes: int) -> Span | None:
        """Room for an object of that length, or None. To be given to `send`, or to `put_back`."""
        pages = -(-nbytes // PAGE_BYTES)
        if pages > self._extents.largest or not self._thread.is_alive():
            return None
        start = self._extents.allocate(pages)
        return None if start is None else Span(start * PAGE_BYTES, nbytes)

    def put_back(self, span: Span) -> None:
        """Nothing was copied to this place after all."""
        self._extents.free(span.offset // PAGE_BYTES)

    def send(self, key: ChunkKey, span: Span, shape: ItemShape, copy: Copy) -> None:
        """Upload what `copy` brings to the place. `take_ends` tells what became of it."""
        self._parcels.put(_Parcel(key, span, shape, copy, self._clock()))

    def take_ends(self) -> OutboxEnds:
        """What has ended since the last call; frees the places. Does not block."""
        ends = OutboxEnds(Counter(), [], {})
        while not self._ended.empty():
            self._tell(self._ended.get(), ends)
        io = self._io
        if io is not self._io_told:
            ends.counters.update(io - self._io_told)
            self._io_told = io
        return ends

    def _tell(self, end: _End, ends: OutboxEnds) -> None:
        parcel, outcome = end.parcel, end.outcome
        self.put_back(parcel.span)
        if end.copy_s is not None:
            ends.counters["save_ok"] += 1
            ends.counters["save_bytes"] += parcel.shape.nbytes
            ends.seconds.setdefault("save_seconds", []).append(end.copy_s)
        ends.counters[f"upload_{outcome.name.lower()}"] += 1
        if outcome.is_success:
            ends.counters["upload_bytes"] += end.nbytes
            ends.seconds.setdefault("upload_seconds", []).append(end.upload_s)
            ends.uploaded.append(parcel.key)

    def close(self, drain_timeout_s: float) -> int:
        """Finish uploads within that time, then give everything back. Returns those left."""
        self._drain_s = drain_timeout_s
        self._parcels.put(None)
        self._thread.join()
        self._client.close()
        self._slab.close()
        return self._left

    # --- the outbox's thread ---------------------------------------------------------------

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
            parcel.copy.wait()
        except RuntimeError as error:
            end = _End(parcel, Outcome.FAILED, 0, None, 0.0)
            self._end(end, f"copy from the device: {error}")
            return
        self._underway[job_id] = parcel, self._clock() - parcel.since_s
        self._client.upload(job_id, parcel.key, parcel.span.offset, parcel.shape)
        self._client.flush()

    def _poll(self) -> None:
        for done in self._client.poll():
            parcel, copy_s = self._underway.pop(done.job_id)
            nbytes = parcel.shape.nbytes
            self._end(_End(parcel, done.outcome, nbytes, copy_s, done.seconds), done.detail)
        if self._io != self._client.counters:
            self._io = Counter(self._client.counters)

    def _end(self, end: _End, detail: str) -> None:
        self._complaints.note("upload", end.outcome, detail)
        self._ended.put(end)
