"""Types that every part of s3kv shares.

The module does no I/O, and imports neither torch, vLLM, asyncio nor a network client.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

ENGINE_LOG = "s3kv.engine"
"""Logger of lines that all ranks of an engine would log alike."""


def default_chunk_tokens(block_tokens: int) -> int:
    """Tokens per chunk if no setting says so: the multiple of the block size nearest to 256."""
    return max(1, round(256 / block_tokens)) * block_tokens


class Tally(Counter[str]):
    """Counters by name. `version` grows with every change, so a reader that runs in every step need
    not compare them all."""

    version = 0

    def __setitem__(self, name: str, value: int) -> None:
        self.version += 1
        super().__setitem__(name, value)

    def update(self, *more: Any, **named: int) -> None:
        self.version += 1  # the first update bypasses `__setitem__`
        super().update(*more, **named)


def once_a_minute(clock: Callable[[], float]) -> Callable[[object], bool]:
    """A function that allows each kind of thing once a minute. clock: seconds, monotonic."""
    last_s: dict[object, float] = {}

    def is_due(kind: object) -> bool:
        now_s = clock()
        due = now_s - last_s.get(kind, float("-inf")) >= 60.0
        if due:
            last_s[kind] = now_s
        return due

    return is_due


def fastest_s(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """Seconds of the fastest of three calls, a microsecond or more. clock: in seconds."""

    def taken_s() -> float:
        begin_s = clock()
        call()
        return clock() - begin_s

    return max(min(taken_s() for _ in range(3)), 1e-6)


class ChunkKey(NamedTuple):
    """Identity of one chunk inside a namespace, the same on every rank.

    `block_hash` is vLLM's hash of the last block of the chunk. That hash covers the whole prefix,
    so equal keys mean equal tokens from the start of the prompt to the end of the chunk.
    """

    group: int
    block_hash: bytes


class Span(NamedTuple):
    """A range of the slab, in bytes from its start."""

    offset: int
    nbytes: int


class ItemShape(NamedTuple):
    """Shape of an item's object: the rows of its tensor, and its length in bytes (for a fetch, its
    maximum length)."""

    rows: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Location:
    """The tiers that hold an object. bucket: None if the bucket has not been checked yet, or so
    long ago that the object may have been deleted."""

    device: bool
    host: bool
    bucket: bool | None


class Outcome(enum.IntEnum):
    """The outcome of a job. Larger is worse: the outcome over all ranks is the maximum."""

    OK = 0
    EXISTS = 1
    """The bucket already held the object (an upload that was not needed). Success."""
    MISSING = 2
    """The bucket has no such object. A miss, and an answer."""
    CANCELLED = 3
    """Given up before it was sent, or stopped on request. Implies nothing about the bucket."""
    CORRUPT = 4
    """The object failed verification. A miss; the object must not be fetched again."""
    DENIED = 5
    """Credentials or permissions forbid it. Retrying does not help until they are changed."""
    FAILED = 6
    """Anything else: the network, the server, a copy. May work later."""
    INVALID = 7
    """The job itself is at fault: its key, place or size is wrong, or it crashes the I/O process.
    It can never succeed, whatever the bucket does, and is not retried."""

    @property
    def is_success(self) -> bool:
        return self <= Outcome.EXISTS


_ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64"), 8),
    **dict.fromkeys(("F32", "I32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16"), 2),
    **dict.fromkeys(("U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
}


def item_bytes(dtype: str) -> int:
    """Bytes of one number of a safetensors dtype. Raises `ValueError` for one s3kv cannot store."""
    if dtype not in _ITEM_BYTES:
        raise ValueError(f"dtype {dtype!r} is not one of {sorted(_ITEM_BYTES)}")
    return _ITEM_BYTES[dtype]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of an object: a safetensors dtype name and a row-major shape.

    layers: the layers that make up each of its blocks, in order; empty for a tensor without blocks.
    order: for a layer, one letter per dimension of its page, such as "NHC"; see `device.layout`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    layers: tuple[TensorSpec, ...] = ()
    order: str = ""

    def __post_init__(self) -> None:
        item_bytes(self.dtype)

    @classmethod
    def of_layers(cls, name: str, blocks: int, layers: tuple[TensorSpec, ...]) -> TensorSpec:
        """Blocks of these layers as one tensor: `[blocks, layers, …page]` if the layers are alike,
        otherwise `[blocks, bytes]` of U8."""
        first = layers[0]
        if len({(layer.dtype, layer.shape, layer.order) for layer in layers}) == 1:
            return cls(name, first.dtype, (blocks, len(layers), *first.shape), layers)
        return cls(name, "U8", (blocks, sum(layer.nbytes for layer in layers)), layers)

    @property
    def nbytes(self) -> int:
        return _ITEM_BYTES[self.dtype] * prod(self.shape)


def laid_out(tensors: Iterable[TensorSpec]) -> Iterator[tuple[TensorSpec, int, int]]:
    """The tensors, each with its first byte and its end in a payload that has them back to back."""
    begin = 0
    for tensor in tensors:
        yield tensor, begin, begin + tensor.nbytes
        begin += tensor.nbytes
