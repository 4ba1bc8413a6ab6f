"""Reception of objects: where their bytes land, and their verification and decoding meanwhile.

A plain object fills its place, and is digested on the event loop. A compressed one is shorter. It
lands at the end of its place, and threads decode it to the front, segment by segment, while the
rest arrives (`objects.envelope`). The length of an object, known before its first byte, shows which
of the two it is.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future

from s3kv.io.sources.speeds import Speeds
from s3kv.io.sources.transfer_job import TransferJob
from s3kv.objects.codec import ChunkFormat, Gathering
from s3kv.objects.compression import Codec
from s3kv.objects.envelope import Decoding, Envelope
from s3kv.objects.headers import Mismatch
from s3kv.objects.item_format import ItemFormat
from s3kv.place import Place
from s3kv.stores.lanes import ended
from s3kv.stores.store import UNREADABLE

_COUNTERS = ("io_decoded", "io_decoded_bytes", "io_decoded_stored_bytes")


class Decoder:
    """The threads that decode, the compressed forms of this worker's formats, and the speeds of
    receiving and decoding. Belongs to one asyncio loop.

    clock: in seconds, called in any thread. With a codec, not a loop's, which may stand still.
    codec: None if there is none. executor: decodes several objects at once; needed with a codec.
    seals: whether the place of a compressed object also receives the header of the plain one.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        codec: Codec | None = None,
        executor: Executor | None = None,
        *,
        seals: bool = False,
    ) -> None:
        self.clock, self.codec, self.seals = clock, codec, seals
        self._executor = executor
        self.speeds = Speeds()
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self._envelopes: dict[tuple[int, str], Envelope | None] = {}

    def envelope(self, form: ChunkFormat | ItemFormat) -> Envelope | None:
        """The compressed form of objects of this format; None if it has none."""
        if isinstance(form, ItemFormat):  # its width follows from the length of its object
            return None
        key = form.coverage, form.shard
        if key not in self._envelopes:
            self._envelopes[key] = Envelope.of(form)
        return self._envelopes[key]

    def run(self, call: Callable[[], None]) -> Future[None] | None:
        """Run `call` in one of the threads. Without a codec it is short, and is run at once."""
        if self._executor is not None:
            return self._executor.submit(call)
        call()
        return None

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


class Reception:
    """Reception of one object in the place of a job. `land` and `progress` may be called in any
    thread, the others on the loop. Until `stop` has ended, a thread may be writing to the place."""

    def __init__(self, decoder: Decoder, job: TransferJob) -> None:
        self._decoder, self._job = decoder, job
        self._envelope = decoder.envelope(job.format)
        self._lock = threading.RLock()  # an executor may run a call at once
        self._nbytes: int | None = None
        self._decoding: Decoding | None = None
        self._gathering: Gathering | None = None
        self._prefix_bytes = 0
        """Length of the object's prefix that has arrived."""
        self._behind: dict[int, int] = {}
        """Ends of the ranges that have arrived after a gap, by their starts."""
        self._is_decoding = self._is_over = False
        self._future: Future[None] | None = None
        """The last call in a thread."""
        self._landed_s = self._decoding_s = 0.0

    def land(self, nbytes: int, bounds: range | None = None) -> Place | None:
        """The memory for the bytes `bounds` (None: all) of the object, which has `nbytes`. None if
        earlier bytes were of an object of another length."""
        job = self._job
        with self._lock:
            if self._nbytes is None:
                self._nbytes, self._landed_s = nbytes, self._decoder.clock()
                if self._envelope is not None and nbytes < job.nbytes:
                    self._decoding = Decoding(
                        self._envelope, job.place, nbytes, job.block_hash, self._decoder.codec
                    )
            elif nbytes != self._nbytes:
                return None
        begin, end = (bounds.start, bounds.stop) if bounds else (0, job.nbytes)
        if self._decoding is None:
            return job.place.cut(begin, min(end, nbytes))
        return self._decoding.place_of(range(begin, min(end, nbytes)))

    def progress(self, nbytes: int) -> None:
        """Note that the first `nbytes` of the object are in the place."""
        with self._lock:
            self._prefix_bytes = max(self._prefix_bytes, nbytes)
            self._wake()

    def came(self, bounds: range) -> None:
        """Record that these bytes of the object are in the place. Ranges may arrive in any order,
        each once. Not for an object whose arrival `progress` records."""
        if self._decoding is None:
            if self._nbytes == self._job.nbytes and isinstance(self._job.format, ChunkFormat):
                if self._gathering is None:
                    job = self._job
                    self._gathering = Gathering(self._job.format, job.place, job.block_hash)
                self._gathering.arrived(bounds.start, bounds.stop)
            return
        with self._lock:
            self._behind[bounds.start] = bounds.stop
            while self._prefix_bytes in self._behind:
                self._prefix_bytes = self._behind.pop(self._prefix_bytes)
            self._wake()

    def _wake(self) -> None:
        """Start decoding in a thread, unless one is decoding already. The lock is held."""
        if not self._is_decoding and self._has_work:
            self._is_decoding = True
            self._future = self._decoder.run(self._decode)

    @property
    def _has_work(self) -> bool:
        decoding = self._decoding
        if decoding is None or decoding.is_done or self._is_over:
            return False
        return decoding.wanted_bytes <= self._prefix_bytes

    def _decode(self) -> None:
        """Decode all bytes that have arrived, in a thread. Calls do not overlap."""
        decoding, job = self._decoding, self._job
        assert decoding is not None
        begin_s = self._decoder.clock()
        goes_on = True
        while goes_on:
            decoding.advance(self._prefix_bytes, lambda: self._is_over)
            if self._decoder.seals and decoding.is_right:
                job.format.seal(job.place, job.block_hash)
            end_s = self._decoder.clock()
            with self._lock:
                self._decoding_s, begin_s = self._decoding_s + end_s - begin_s, end_s
                self._is_decoding = goes_on = self._has_work

    def is_of(self, nbytes: int) -> bool:
        """Whether the object that has landed is one of this length."""
        return nbytes == self._nbytes

    async def check(self, nbytes: int) -> Mismatch | None:
        """Verify the object of `nbytes`, once all have arrived, as `ChunkFormat.check` does."""
        job, decoder = self._job, self._decoder
        if not self.is_of(nbytes):
            return "encryption" if nbytes == UNREADABLE else "length"
        if nbytes <= job.nbytes:
            decoder.speeds.received(nbytes, self._landed_s, decoder.clock())
        if self._gathering is not None:
            return self._gathering.check(nbytes)
        if self._decoding is None:
            return job.format.check(job.place, nbytes, job.block_hash)
        self.progress(nbytes)
        if self._future is not None:
            await asyncio.wrap_future(self._future)
        if self._decoding.is_right:
            decoder.speeds.decoded(job.nbytes, self._decoding_s)
            decoder.counters["io_decoded"] += 1
            decoder.counters["io_decoded_bytes"] += job.nbytes
            decoder.counters["io_decoded_stored_bytes"] += nbytes
        return self._decoding.reason

    async def stop(self) -> None:
        """End the reception. Nothing writes to the place afterwards."""
        self._is_over = True
        if self._future is not None and not self._future.cancel():  # it may not have begun
            await ended([asyncio.wrap_future(self._future)])
