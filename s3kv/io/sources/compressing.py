"""Compression of objects before their upload, where it pays off and as far as it keeps up.

One or two threads encode. An object that finds their queue full is uploaded plain, and so is every
object while the process drains: compression delays no upload and causes none to be given up. With
`compress: auto`, objects are also uploaded plain while the bucket delivers nearly as fast as this
host decodes (`speeds`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from typing import Literal

from s3kv.config import MAX_INFLIGHT_BYTES, Config
from s3kv.errors import ConfigError
from s3kv.io.sources.executors import started
from s3kv.io.sources.reception import Decoder
from s3kv.io.sources.speeds import pays
from s3kv.io.sources.staging import StagingMemory
from s3kv.io.sources.transfer_job import TransferJob
from s3kv.objects import compression
from s3kv.objects.compression import Codec
from s3kv.objects.envelope import Envelope
from s3kv.place import Place, copy_bytes
from s3kv.stores.http.threads import NETWORK_THREADS
from s3kv.stores.lanes import ended

_log = logging.getLogger("s3kv.io")

CompressSetting = Literal["auto", "on", "off"]
DECODING_THREADS = max(2, NETWORK_THREADS)
"""Two on small hosts: an engine that waits for a hit leaves its cores free."""
ENCODING_THREADS = max(1, NETWORK_THREADS // 2)
MOST_PER_THREAD = 2
"""Maximum number of objects queued or encoded per thread. More uploads would wait for a core."""
MOST_ENCODED_BYTES = MAX_INFLIGHT_BYTES // 2
"""Limit on memory for compressed objects being uploaded: enough for all uploads at once."""


class Compressor:
    """Encoder of the uploads of one worker. Belongs to one asyncio loop.

    decoder: has the codec, and the speeds that decide. executor: encodes; needed with a codec.
    encoders: number of its threads. threads: number of objects that are decoded at once.
    bytes_per_s: decoding speed of one thread, assumed until objects have been decoded.
    pads: whether objects are padded, because they will be encrypted.
    """

    def __init__(
        self,
        mode: CompressSetting,
        decoder: Decoder,
        executor: Executor | None = None,
        *,
        encoders: int = 1,
        threads: int = 1,
        bytes_per_s: float = 1.0,
        pads: bool = False,
    ) -> None:
        self.in_hurry = False
        self.counters = dict.fromkeys(
            ("io_encoded", "io_encoded_bytes", "io_encoded_stored_bytes"), 0
        ) | {f"io_left_plain|{why}": 0 for why in compression.PLAIN_REASONS}
        self._mode, self._pads = mode, pads
        self.decoder = decoder
        self._executor = executor
        self._threads, self._first_speed = threads, bytes_per_s
        self._memory = StagingMemory(MOST_ENCODED_BYTES)
        self._waiting, self._most_waiting = 0, MOST_PER_THREAD * encoders
        self._pays = True

    @contextlib.asynccontextmanager
    async def stored(self, job: TransferJob) -> AsyncIterator[Place]:
        """The object to upload for a job whose plain object is in its place: that one, or a
        compressed one in other memory, valid during the block. The payload must not change
        meanwhile; after a cancellation nothing reads it any more."""
        envelope, codec = self.decoder.envelope(job.format), self.decoder.codec
        if envelope is None or codec is None or self._mode == "off":
            yield job.place
            return
        buffer, why = None, "fast_wire"
        if self._is_worth_it():
            is_free = self._waiting < self._most_waiting and not self.in_hurry
            buffer, why = self._memory.take(job.nbytes) if is_free else None, "busy"
        if buffer is None:
            self.counters[f"io_left_plain|{why}"] += 1
            yield job.place
            return
        try:
            if nbytes := await self._encode(job, envelope, codec, buffer):
                self.counters["io_encoded"] += 1
                self.counters["io_encoded_bytes"] += job.nbytes
                self.counters["io_encoded_stored_bytes"] += nbytes
                yield Place.of(memoryview(buffer)[:nbytes])
            else:
                self.counters["io_left_plain|no_gain"] += 1
                yield job.place
        finally:
            self._memory.give_back(buffer)

    async def _encode(
        self, job: TransferJob, envelope: Envelope, codec: Codec, buffer: bytearray
    ) -> int:
        """Length of the compressed object in `buffer`; 0 if it would not be shorter."""
        over = threading.Event()

        def encode() -> int:
            parts = envelope.encode(
                job.place, job.block_hash, codec, over.is_set, is_padded=self._pads
            )
            return copy_bytes(parts, buffer) if parts else 0

        assert self._executor is not None
        encoding = asyncio.wrap_future(self._executor.submit(encode))
        self._waiting += 1
        try:
            await asyncio.wait([encoding])
            return encoding.result()
        finally:
            over.set()
            try:
                await ended([encoding])
            finally:
                self._waiting -= 1

    def _is_worth_it(self) -> bool:
        if self._mode == "on":
            return True
        speeds = self.decoder.speeds
        wire = speeds.wire_bytes_per_s
        decoding = self._threads * (speeds.decoding_bytes_per_s or self._first_speed)
        worth_it = pays(wire, decoding, before=self._pays)
        if worth_it is not self._pays:
            self._pays = worth_it
            said = "compress is auto: objects are now %s (bucket %.2f GB/s, decoding %.2f GB/s)"
            how = "compressed" if worth_it else "uploaded plain"
            _log.info(said, how, (wire or 0.0) / 1e9, decoding / 1e9)
        return worth_it

    def close(self) -> None:
        """End the threads, when no job runs any more."""
        self.decoder.close()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


def open_compressor(config: Config, clock: Callable[[], float]) -> Compressor:
    """The compressor that the settings require. Imports the codec even if `compress` is "off", to
    read compressed objects; this takes some tenths of a second. Raises `ConfigError` if `compress`
    is "on" without a codec, or if the system refuses a thread."""
    found = compression.codec() if config.integrity != "none" else None
    if found is None:
        if config.compress == "on":
            raise ConfigError(f"compress is 'on', and {compression.NO_CODEC}, or set 'auto'")
        return Compressor("off", Decoder(clock))
    executor = started(DECODING_THREADS, "s3kv-decode")
    decoder = Decoder(clock, found, executor, seals=config.disk_path is not None)
    return Compressor(
        config.compress,
        decoder,
        started(ENCODING_THREADS, "s3kv-encode"),
        encoders=ENCODING_THREADS,
        threads=DECODING_THREADS,
        bytes_per_s=compression.decoding_speed(found, clock) if config.compress == "auto" else 1.0,
        pads=config.encryption != "off",
    )
