"""Wire protocol between a worker and its I/O process.

A stream socket between the two carries frames in both directions:

    bytes 0..4   length of the rest, unsigned, little-endian, at most `MAX_FRAME_BYTES`
    bytes 4..    MessagePack array of messages, each an array whose first item is its tag

The worker sends `Handshake` first. The I/O process answers `Ready` once, when it has tried the
bucket; jobs may be sent before that. Every `BucketJob` is answered by one `JobEnd`, every `Ping` by
one `Stats`. The worker sends nothing after `Drain`; `Drained` is the last answer. Objects are in
the slab, and are not sent over the socket.

Both ends have the same version and run on one machine, so the protocol has no version.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from s3kv.config import Config
from s3kv.errors import (
    ConfigError,
    IoProcessError,
    S3KVError,
    StoreDenied,
    StoreMissing,
    StoreUnavailable,
)
from s3kv.host.room import PAGE_BYTES
from s3kv.messages import BucketJob, JobEnd
from s3kv.objects.integrity import XXH3, Integrity
from s3kv.objects.rearranging import Pages
from s3kv.types import TensorSpec

START_TIMEOUT_S = 20.0
"""Longest wait of an I/O process for the bucket at start."""
MAX_FRAME_BYTES = 2**20
"""Largest frame a peer accepts. `Handshake` is the largest message: about 60 bytes per layer."""
_MESSAGES_PER_FRAME = 1024
"""Most messages in a frame. It keeps frames of job messages (under 200 bytes each, `JobEnd` with a
detail under 800) below the maximum."""
MAX_DETAIL_BYTES = 700
"""Longest detail sent. It fits a key of about 150 characters and the advice at the end."""


def truncated(detail: str) -> str:
    """Return as much of a text, which may come from any source, as a message can carry."""
    return detail.encode("utf-8", "replace")[:MAX_DETAIL_BYTES].decode("utf-8", "ignore")


class WireError(S3KVError):
    """Violation of this protocol by the peer. The connection cannot be used any more."""


class Handshake(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Configuration of the I/O process.

    groups: number of a set of KV-cache groups to the tensors of its chunks, as in `ChunkFormat`.
    shard: KV heads and layers in this rank's objects, as in their keys.
    item_dtype: dtype of items (`objects.item_format`), for a process that moves items instead of
        chunks; None: it moves chunks.
    integrity: how objects are sealed and verified.
    manifest: the namespace's manifest, to be written and compared; empty if another rank does it.
    shapes: shards of all ranks, to be listed in the namespace beside the manifest.
    first_blocks: by group number, the first block of a chunk that its objects hold; else 0.
    slot_bytes: distance between slots, the first of which is at offset 0 of the slab.
    is_borrowed: whether the slab is memory of another owner, whose slots hold only payloads. The
        I/O process then keeps the headers, and retries an upload for as long as a fetch, because
        no other layer does.
    pages: common features of the pages of all parallel sizes in this namespace; None: the namespace
        is for one size only.
    """

    config: Config
    namespace_prefix: str
    namespace_digest: str
    shard: str
    groups: dict[int, tuple[TensorSpec, ...]]
    item_dtype: str | None = None
    integrity: Integrity = XXH3
    manifest: bytes = b""
    shapes: tuple[str, ...] = ()
    first_blocks: dict[int, int] = {}
    slot_bytes: int = PAGE_BYTES
    pages: Pages | None = None
    is_borrowed: bool = False


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Request to end a job soon, because it has no waiter left. It still ends with a `JobEnd`.
    if_waiting: only if it has not begun; otherwise nothing changes."""

    job_id: int
    if_waiting: bool = False


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Request to give up all fetches and finish the uploads, and to give up the remaining uploads
    after `timeout_s`."""

    timeout_s: float


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Request for `Stats`; the answer shows that the process lives."""


Trouble = Literal["config", "denied", "missing", "unavailable", "defect"]
TROUBLES: dict[type[S3KVError], Trouble] = {
    ConfigError: "config",
    StoreDenied: "denied",
    StoreMissing: "missing",
    StoreUnavailable: "unavailable",
    IoProcessError: "defect",
}
"""Kinds of trouble at start, by the error that the worker raises."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Result of trying the bucket.

    serving: False if the I/O process exits because of the trouble.
    trouble: None if the bucket can be used.
    message: description of the trouble for a person.
    known: whether the namespace has objects; False if there is trouble.
    """

    serving: bool
    trouble: Trouble | None
    message: str
    known: bool = False


class Drained(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """End of a drain: no job runs any more. left: number of uploads that were given up."""

    left: int


class Stats(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """State and counters of one I/O process.

    waiting: jobs waiting now. running, running_bytes: jobs running now, and the bytes of their
        objects. window: requests that may run at once now.
    counters: sums since the process started, by the name of their metric; `cost_usd` in 10⁻⁹
        dollars, `io_requests` by "io_requests|verb|answer" (`stores.traffic`).
    """

    waiting: int
    running: int
    running_bytes: int
    window: int
    counters: dict[str, int]


Down = Handshake | BucketJob | Cancel | Drain | Ping
Up = Ready | JobEnd | Drained | Stats

_encoder = msgspec.msgpack.Encoder()


def encode(messages: list[Down] | list[Up]) -> bytes:
    """Frames that carry `messages` in order; no bytes if there are no messages."""
    step = _MESSAGES_PER_FRAME
    return b"".join(_frame(messages[i : i + step]) for i in range(0, len(messages), step))


def _frame(messages: list[Any]) -> bytes:
    body = _encoder.encode(messages)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"messages of {len(body)} bytes do not fit into a frame")
    return len(body).to_bytes(4, "little") + body


class FrameReader:
    """Turns received bytes into messages, however the stream splits them.

    Holds one incomplete frame at most. Do not use it after a `WireError`.
    """

    def __init__(self, direction: Any) -> None:
        """direction: `Down` or `Up`, the type of messages that the peer may send."""
        self._decoder: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(list[direction])
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterable[Any]:
        """The messages that `data` completes, in order. Raises `WireError` for invalid data."""
        self._pending += data
        messages: list[Any] = []
        start = 0
        while len(self._pending) - start >= 4:
            length = int.from_bytes(self._pending[start : start + 4], "little")
            if length > MAX_FRAME_BYTES:
                raise WireError(
                    f"a frame of {length} bytes is announced: at most {MAX_FRAME_BYTES}"
                )
            if len(self._pending) - start - 4 < length:
                break
            messages += self._decode(start + 4, length)
            start += 4 + length
        del self._pending[:start]
        return messages

    def _decode(self, start: int, length: int) -> list[Any]:
        with memoryview(self._pending) as view, view[start : start + length] as body:
            try:
                return self._decoder.decode(body)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise WireError(f"a frame holds no known messages: {error}") from error
