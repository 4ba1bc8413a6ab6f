"""Residency log: changes in where chunks are, in the order they happened, for publishing.

It is kept only if it has a reader: KV events for routers, which send requests to the engine that
holds their prefix.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from s3kv.types import ChunkKey


class Residency(enum.Enum):
    """A change of where a chunk is."""

    HOST_STORED = "host stored"
    """Every rank holds it in host memory."""
    HOST_REMOVED = "host removed"
    BUCKET_STORED = "bucket stored"
    """The bucket holds it. Logged at every confirmation, for readers that missed the first. Every
    one but the first follows a `BUCKET_REMOVED`, for readers that count."""
    BUCKET_REMOVED = "bucket removed"
    """The bucket no longer holds it, or holds something else; or a further `BUCKET_STORED`
    follows."""
    NOTHING = "nothing"
    """It was in flight and did not arrive."""


class Origin(NamedTuple):
    """Start of a chunk's fetch or save for a request, as its chunk number `position`."""

    key: ChunkKey
    request_id: str
    position: int


class Change(NamedTuple):
    key: ChunkKey
    residency: Residency


class ResidencyLog(list[Origin | Change]):
    """The entries since the last `take`. For the planner's thread.

    Every chunk has an `Origin` before its first `Change`, and another whenever it comes back.
    """

    def take(self) -> list[Origin | Change]:
        entries = self[:]
        self.clear()
        return entries
