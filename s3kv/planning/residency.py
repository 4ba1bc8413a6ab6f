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
    """The bucket holds it; logged every time it shows that, for readers who missed the first. Each
    time but the first comes after a `BUCKET_REMOVED`, for readers who count."""
    BUCKET_REMOVED = "bucket removed"
    """The bucket turned out to hold it no longer, or to hold something else; or it has shown it
    again."""
    NOTHING = "nothing"
    """It was on its way and did not arrive."""


class Origin(NamedTuple):
    """A chunk was put on its way for a request, as its chunk number `position`."""

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
