"""Failed uploads: those that wait for their next attempt, and those that were given up.

    failed ──pause──▶ due ──failed──▶ … ──failed after the last pause──▶ given up: UNSAVED
    UNSAVED ──hit──▶ WANTED ──taken──▶ uploading ──acknowledged──▶ saved
       └──────────────┴──evicted──▶ absent

An unsaved key is only in host memory, and may be evicted. Its upload is tried again only after a
hit, which shows that the data is worth it.

The caller (`most`) and a separate breaker limit the uploads that are tried again. The breaker
counts only uploads, and every kind of failure. While writes fail or are denied, it lets one upload
through per pause; the pause doubles from 30 s to 5 min. A successful upload closes the breaker.

Pure; used from one thread.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import NamedTuple

from s3kv.host.table import Entry
from s3kv.planning.breaker import Breaker
from s3kv.types import ChunkKey, Outcome

UPLOAD_RETRY_S = (1.0, 4.0, 15.0, 60.0)
"""Pauses before the next attempts of an upload. If the last attempt fails, the upload is given up;
the entry stays resident, and may be evicted. Their sum is longer than a store's hiccup, and short
enough that an outage does not fill host memory with data that cannot be uploaded."""
_FIRST_PAUSE_S = 30.0
_LONGEST_PAUSE_S = 300.0


class Retry(NamedTuple):
    """An upload to try again at `due_s`. entry: dirty, so it keeps its place. attempt: number of
    attempts that have failed."""

    due_s: float
    number: int
    entry: Entry
    attempt: int


class UploadRetries(list[Retry]):
    """Heap of the uploads that wait for their next attempt."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = count()

    @property
    def last(self) -> int:
        """The number of the last attempt; the first one is 0."""
        return len(UPLOAD_RETRY_S)

    def failed(self, entry: Entry, attempt: int, now_s: float) -> bool:
        """Note that an attempt has failed. Returns False if it was the last."""
        if attempt >= self.last:
            return False
        due_s = now_s + UPLOAD_RETRY_S[attempt]
        heapq.heappush(self, Retry(due_s, next(self._numbers), entry, attempt + 1))
        return True

    def take_due(self, now_s: float) -> list[Retry]:
        """Remove and return the uploads that are due."""
        due = []
        while self and self[0].due_s <= now_s:
            due.append(heapq.heappop(self))
        return due


class Unsaved(set[ChunkKey]):
    """Resident keys that may be evicted and, as far as is known, are not in the bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: dict[ChunkKey, None] = {}
        """Keys that `take` may return, in the order of their hits. For callers to read only."""
        self._writes = Breaker(
            threshold=1, first_pause_s=_FIRST_PAUSE_S, longest_pause_s=_LONGEST_PAUSE_S
        )

    def drop(self, key: ChunkKey) -> None:
        """Remove `key`: it has been evicted, is in the bucket, or is being uploaded."""
        self.discard(key)
        self.wanted.pop(key, None)

    def hit(self, key: ChunkKey) -> None:
        """Note a use of `key`. Does nothing for a key that is not in the set."""
        if key in self:
            self.wanted[key] = None

    def saw(self, outcome: Outcome, now_s: float) -> None:
        """Note the outcome of an upload of any key."""
        self._writes.saw(outcome, now_s)

    def take(self, most: int, store: Breaker, now_s: float) -> list[ChunkKey]:
        """Remove and return up to `most` keys to upload now, in the order of their hits. store:
        breaker of the store as a whole; while it is open, no key is returned."""
        taken: list[ChunkKey] = []
        while self.wanted and len(taken) < most:
            if store.is_open(now_s) or not self._writes.allows(now_s):
                break
            key = next(iter(self.wanted))
            self.drop(key)
            taken.append(key)
        return taken
