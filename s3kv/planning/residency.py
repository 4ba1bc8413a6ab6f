"""What became of chunks, in the order in which it happened, for whoever publishes it.

Kept only where somebody takes it: routers that send requests to the engine that holds their prefix.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from s3kv.messages import JobKind
from s3kv.types import ChunkKey


class Residency(enum.Enum):
    """A change of where a chunk is."""

    HOST_STORED = "host stored"
    """Every rank holds it in host memory."""
    HOST_REMOVED = "host removed"
    BUCKET_STORED = "bucket stored"
    """The bucket holds it; said every time it has shown that, for who has missed the first."""
    BUCKET_REMOVED = "bucket removed"
    """The bucket turned out not to hold it any more, or to hold something else."""
    HOST_ONLY = "host only"
    """Its upload was given up."""
    NOTHING = "nothing"
    """It was on its way and did not arrive."""


class Origin(NamedTuple):
    """A chunk was put on its way for a request: the one at `position`, counted in chunks.

    kind: FETCH or SAVE.
    """

    key: ChunkKey
    kind: JobKind
    request_id: str
    position: int


class Change(NamedTuple):
    key: ChunkKey
    residency: Residency


class ResidencyLog:
    """Entries since the last `take`. The planner's thread.

    Every chunk has its `Origin` before its first `Change`, and again whenever it comes back.
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: list[Origin | Change] = []

    def origin(self, key: ChunkKey, kind: JobKind, request_id: str, position: int) -> None:
        self._entries.append(Origin(key, kind, request_id, position))

    def change(self, key: ChunkKey, residency: Residency) -> None:
        self._entries.append(Change(key, residency))

    def take(self) -> list[Origin | Change]:
        entries, self._entries = self._entries, []
        return entries
