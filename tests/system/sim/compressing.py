"""Compression in virtual time: a codec of a few lines, and threads that are tasks of the loop.

The codec and its threads are those of one simulated process: they stop and die with it. Between any
two segments, and in the middle of one that is decoded, all others may run.
"""

from __future__ import annotations

import asyncio
import json
import random
import zlib
from collections.abc import Callable
from concurrent.futures import Executor, Future
from itertools import accumulate, pairwise
from typing import Any, Literal

from s3kv.io.sources.compressing import Compressor, CompressSetting
from s3kv.io.sources.reception import Decoder
from s3kv.messages import JobKind
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.envelope import Envelope
from s3kv.place import Place
from tests.system.sim.memory_disk import BlockingCall, Killed
from tests.system.sim.store import Connection
from tests.system.sim.weather import CLEAR

Form = Literal["compressed", "plain", "unreadable"]
"""Of a process: it compresses its uploads; it does not; nor can it decode those of others."""
MIXTURES: tuple[tuple[Form, ...], ...] = (
    ("compressed",),
    ("compressed", "compressed", "plain"),
    ("compressed", "compressed", "plain", "unreadable"),
    ("compressed", "unreadable"),
    ("plain",),
)
"""Of the processes of a fleet."""
SEGMENTS_BYTES = (24, 32, 48, 100)
_SLOWEST_S = (0.0, 0.1, 0.5)
"""Longest pause between two segments, by process."""
_RAW = -9
"""Without a header and a checksum, which are longer than the segments."""


class Deflate:
    """A codec that is pure and the same everywhere. It leaves a fifth of all segments alone, as if
    they did not shrink."""

    def encode(self, segment: memoryview, item_bytes: int) -> bytes | None:
        if zlib.crc32(segment) % 5 == 0:
            return None
        deflating = zlib.compressobj(1, zlib.DEFLATED, _RAW)
        data = deflating.compress(segment) + deflating.flush()
        return data if len(data) < len(segment) else None

    def decode(self, data: memoryview, target: memoryview, item_bytes: int) -> bool:
        try:
            target[:] = zlib.decompress(data, _RAW)
        except (zlib.error, ValueError):
            return False
        return True


class WatchedCodec:
    """The codec of a process. pause: lets others run. check_slot: sees the memory of every
    segment that a job of this kind is about to use."""

    def __init__(
        self, pause: Callable[[], None], check_slot: Callable[[memoryview, JobKind], None]
    ) -> None:
        self._pause, self._check_slot = pause, check_slot
        self._codec = Deflate()

    def encode(self, segment: memoryview, item_bytes: int) -> bytes | None:
        self._pause()
        self._check_slot(segment, JobKind.UPLOAD)
        return self._codec.encode(segment, item_bytes)

    def decode(self, data: memoryview, target: memoryview, item_bytes: int) -> bool:
        decoded = bytearray(len(target))
        half = len(target) // 2
        is_right = self._codec.decode(data, memoryview(decoded), item_bytes)
        for part in (slice(0, half), slice(half, None)):
            self._pause()
            self._check_slot(target, JobKind.FETCH)
            target[part] = decoded[part]
        return is_right


class VirtualThreads(Executor):
    """The threads of one process. One call runs after another, or every one at once if there are
    many. hastens: whether calls end before `submit` does."""

    def __init__(
        self, connection: Connection, rng: random.Random, *, many: bool, hastens: bool
    ) -> None:
        self._connection, self._rng = connection, rng
        self._many, self._hastens = many, hastens
        self._slowest_s = rng.choice(_SLOWEST_S)
        self._last: asyncio.Task[None] | None = None
        self._is_closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self._hastens:
            future.set_running_or_notify_cancel()
            future.set_result(fn(*args, **kwargs))
            return future
        before = None if self._many else self._last
        work = BlockingCall(lambda: fn(*args, **kwargs))
        self._last = asyncio.get_running_loop().create_task(self._run(work, future, before))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_closed = cancel_futures

    def pause(self) -> None:
        """In a call: let others run. Does not come back in a process that is dead."""
        call = getattr(BlockingCall.running, "call", None)
        if call is None:
            return
        if self._connection.alive:
            call.pause(self._pause_s)
        if not self._connection.alive:
            self._connection.seen["killed while coding"] += 1
            raise Killed

    @property
    def _pause_s(self) -> float:
        is_busy = self._connection.weather is not CLEAR
        return self._slowest_s * self._rng.random() ** 2 if is_busy else 0.0

    async def _run(
        self, work: BlockingCall, future: Future[Any], before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        await self._connection._sleep(self._pause_s)
        if self._is_closed or not future.set_running_or_notify_cancel():
            future.cancel()
            return
        try:
            while (pause_s := work.step()) is not None:
                await self._connection._sleep(pause_s)
        except asyncio.CancelledError:
            while not self._connection.alive and work.step() is not None:
                pass
            raise
        if work.error is None:
            future.set_result(work.result)
        else:
            future.set_exception(work.error)


def compressor_of(
    form: Form,
    connection: Connection,
    rng: random.Random,
    clock: Callable[[], float],
    check_slot: Callable[[memoryview, JobKind], None],
    *,
    seals: bool,
    pads: bool,
) -> Compressor | None:
    """The compressor of a process; None if it has no codec."""
    connection.decodes = form != "unreadable"
    if not connection.decodes:
        return None
    hastens = rng.random() < 0.2
    decoding = VirtualThreads(connection, rng, many=True, hastens=hastens)
    encoding = VirtualThreads(connection, rng, many=False, hastens=hastens)
    codec = WatchedCodec(decoding.pause, check_slot)
    decoder = Decoder(clock, codec, decoding, seals=seals)
    mode: CompressSetting = "on" if form == "compressed" else "off"
    return Compressor(mode, decoder, encoding, pads=pads)


def compressed(layout: ChunkFormat, data: bytes, block_hash: bytes) -> bytes:
    """The compressed form of a plain object; this itself if it has none that is shorter."""
    place = Place.of(bytearray(data), layout.header_bytes)
    envelope = Envelope.of(layout)
    parts = envelope and envelope.encode(place, block_hash, Deflate(), lambda: False)
    return b"".join(parts) if parts else data


def payload_of(data: bytes, header_bytes: int, segment_bytes: int) -> bytes:
    """The payload of an object, decoded if it is compressed. By the rules of the format alone, and
    by nothing of the code under test. Of one tensor."""
    if not is_compressed(data):
        return data[header_bytes:]
    length = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:length])
    lengths = [int(text, 16) for text in header["__metadata__"]["s3kv.stored"].split(",")]
    (tensor,) = json.loads(header["__metadata__"]["s3kv.tensors"]).values()
    nbytes = tensor["data_offsets"][1]
    sizes = [min(segment_bytes, nbytes - at) for at in range(0, nbytes, segment_bytes)]
    padding = len(data) - length - sum(lengths)
    bounds = list(pairwise(accumulate(lengths, initial=length + max(0, padding))))
    if any(data[length : bounds[0][0]]) or bounds[-1][1] != len(data) or len(sizes) != len(lengths):
        return b"the lengths do not add up"
    stored = (data[begin:end] for begin, end in bounds)
    return b"".join(
        part if len(part) == size else zlib.decompress(part, _RAW)
        for part, size in zip(stored, sizes, strict=True)
    )


def is_compressed(data: bytes) -> bool:
    return b'"s3kv.codec"' in data[: 8 + int.from_bytes(data[:8], "little")]
