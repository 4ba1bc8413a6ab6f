"""What a worker and its I/O process say to each other.

A stream socket of their own carries frames in both directions:

    bytes 0..4   length of the rest, unsigned, little-endian, at most `MAX_FRAME_BYTES`
    bytes 4..    MessagePack array of messages, each an array whose first item is its tag

The worker says `Hello` first. The I/O process answers `Ready` once, when it has tried the bucket;
jobs may be sent before that. Every `Fetch` and every `Upload` is answered by exactly one `Done`,
every `Ping` by a `Stats`. After `Drain` nothing else is sent down; `Drained` is the last
answer. Object bytes never pass here: they are in the slab.

Both ends are of one version and one machine, so there is no version in the protocol.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from s3kv.config import Config
from s3kv.errors import S3KVError
from s3kv.objects.integrity import XXH3, Integrity
from s3kv.types import ItemShape, Outcome, TensorSpec

MAX_FRAME_BYTES = 2**20
"""What a peer has to be ready to hold. `Hello` is the largest message: about 60 bytes per layer."""
_MESSAGES_PER_FRAME = 1024
"""Keeps frames of job messages (under 200 bytes each, `Done` with a detail under 800) below
the maximum."""
MAX_DETAIL_CHARS = 700
"""A key is about 150; the advice at the end of the message must not be what is cut off."""


class WireError(S3KVError):
    """The peer sent what is no frame of this protocol. The connection is of no use any more."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Everything the I/O process needs to know.

    groups: KV-cache group to the tensors of its chunks, as in `ChunkFormat`.
    shard: this rank's part of every chunk.
    item_dtype: of items (`objects.items`), for a process that moves those instead of chunks.
    integrity: how objects are sealed and verified.
    manifest: what the namespace is, to be written and compared; empty where another rank does it.
    """

    config: Config
    namespace_prefix: str
    namespace_digest: str
    shard: str
    groups: dict[int, tuple[TensorSpec, ...]]
    item_dtype: str | None = None
    integrity: Integrity = XXH3
    manifest: bytes = b""


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Fill the slab from `offset` with the object of a chunk, or of an item if it has an `item`
    shape. `job_id` is unique among the jobs not yet done, uploads included."""

    job_id: int
    group: int
    block_hash: bytes
    offset: int
    item: ItemShape | None = None


class Upload(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Write the header of the chunk or item whose payload is behind its place at `offset`, and
    send the object."""

    job_id: int
    group: int
    block_hash: bytes
    offset: int
    item: ItemShape | None = None


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Nobody waits for this job any more. It still ends with its `Done`."""

    job_id: int


class Withdraw(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """As `Cancel`, but only if the job has not begun; otherwise nothing changes."""

    job_id: int


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Give up all fetches, finish the uploads, but give those up, too, after `timeout_s`."""

    timeout_s: float


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Are you there?"""


Trouble = Literal["config", "denied", "missing", "unavailable", "defect"]
"""What can be wrong at start; all but the last are one of the errors in `s3kv.errors`."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The bucket has been tried.

    trouble: None when it can be used.
    message: the same in words for a person.
    serving: False when the I/O process exits because of it.
    """

    serving: bool
    trouble: Trouble | None
    message: str


class Done(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A job has ended: nothing reads or writes its part of the slab on its behalf any more.

    nbytes: object bytes moved over the network by the last attempt; 0 unless it succeeded.
    seconds: from its first attempt to its end, retries included, the wait for its turn not.
    detail: for a person, why it did not succeed; empty when it did.
    reason: what was wrong with an object that did not verify (`codec.Refusal`), also when a second
        reading did; "quarantined" when it is known to be bad and was not read; otherwise empty.
    """

    job_id: int
    outcome: Outcome
    nbytes: int
    seconds: float
    detail: str
    reason: str = ""


class Drained(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Nothing runs any more. left: uploads that were given up."""

    left: int


class Stats(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Counters of one I/O process since it started.

    waiting, running, running_bytes: jobs now.
    retries: attempts after the first. throttled: answers that asked for fewer requests.
    window: requests that may run at once now. window_cuts: how often it has been made smaller.
    hedges: reads sent a second time because they were late. hedges_won: those that were faster.
    refresh_done, refresh_failed, refresh_skipped: as `refreshing.Refresher` counts them.
    defects: exceptions nobody had foreseen. cpu_s: processor time of the process.
    requests: sent to the store, by "verb|answer" (`objects.traffic`). cost_nanousd: what they are
        taken to cost, in 10⁻⁹ dollars.
    """

    waiting: int
    running: int
    running_bytes: int
    retries: int
    throttled: int
    window: int
    window_cuts: int
    hedges: int
    hedges_won: int
    refresh_done: int
    refresh_failed: int
    refresh_skipped: int
    defects: int
    cpu_s: float
    requests: dict[str, int]
    cost_nanousd: int


Down = Hello | Fetch | Upload | Cancel | Withdraw | Drain | Ping
Up = Ready | Done | Drained | Stats

_encoder = msgspec.msgpack.Encoder()


def encode(messages: list[Down] | list[Up]) -> bytes:
    """Frames that carry `messages` in order; no bytes when there are none."""
    if len(messages) <= _MESSAGES_PER_FRAME:
        return _frame(messages) if messages else b""
    step = _MESSAGES_PER_FRAME
    return b"".join(_frame(messages[i : i + step]) for i in range(0, len(messages), step))


def _frame(messages: list[Any]) -> bytes:
    body = _encoder.encode(messages)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"messages of {len(body)} bytes do not fit into a frame")
    return len(body).to_bytes(4, "little") + body


class FrameReader:
    """Turns received bytes into messages, however the stream cuts them up.

    Holds one incomplete frame at most. After a `WireError` it is of no use any more.
    """

    def __init__(self, direction: Any) -> None:
        """direction: `Down` or `Up`, what the peer is allowed to say."""
        self._decoder: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(list[direction])
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterable[Any]:
        """The messages that `data` completes, in order. Raises `WireError` on anything else."""
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
