"""Bucket index: a record of the chunks that the bucket has or lacks, kept without requests to it.

There are two verdicts, both hints. *Present* (s3kv uploaded or fetched the chunk) saves an upload
and opens the whole fetch window at once. *Absent* (a GET returned 404) saves further requests for a
while. A wrong hint costs one request or one recomputed chunk, never wrong data, because the object
of a GET is verified against the full hash. Python's hash of the key is therefore enough here, and
a known chunk takes less than 120 bytes.

Uses of a chunk in the tiers above do not reach the bucket, which may delete the chunk meanwhile. A
present verdict therefore has an expiry time. The first use after that time puts the chunk on `due`,
the list of chunks to check in the bucket.

A verdict is about the bucket alone. An end without the bucket (`JobEnd.near`) gives none: an
absence on this host has no effect. A chunk found there is a copy of one that the bucket had. It
counts as present until `JobEnd.fresh_s`, unless it already has a present verdict. The first use
after that checks the bucket, and a chunk that the bucket has lost is uploaded again.
"""

from __future__ import annotations

import math

from s3kv.types import ChunkKey

ASK_AGAIN_S = 60.0
"""Time after which a chunk in use is checked again, if the bucket has not answered."""
_USES_AT_ONCE = 4
"""Maximum length of `BucketIndex.due`. A further use counts only when it recurs."""


class BucketIndex:
    """Verdicts on chunks. Scheduler process, one thread.

    Verdicts are kept in two generations, each with at most `capacity / 2` present ones and half as
    many absent ones. A full young generation becomes the old one, and the previous old one is
    forgotten. An expired present verdict still counts for `is_present`, but not for `verdict`. An
    absent one expires after `miss_ttl_s`, and its generation with its first verdict. Raises
    `ValueError` for a capacity below 2. A full index of the default capacity takes 300 MB.
    """

    __slots__ = (
        *("_absent_old", "_absent_young", "_expires_s", "_generation_size", "_miss_ttl_s"),
        *("_old", "_young", "due"),
    )

    def __init__(self, *, capacity: int = 2_000_000, miss_ttl_s: float = 20.0) -> None:
        if capacity < 2:
            raise ValueError(f"capacity is {capacity}: allowed is 2 or more")
        self._generation_size = capacity // 2
        self._miss_ttl_s = miss_ttl_s
        self._young: dict[int, float] = {}
        self._old: dict[int, float] = {}
        """Expiry times of present verdicts."""
        self._absent_young: dict[int, float] = {}
        self._absent_old: dict[int, float] = {}
        """Expiry times of absent verdicts."""
        self._expires_s = math.inf
        """The first of these times in the young generation."""
        self.due: list[ChunkKey] = []
        """Chunks in use whose present verdict has expired. The caller takes them."""

    def __len__(self) -> int:
        return sum(map(len, (self._young, self._old, self._absent_young, self._absent_old)))

    def note_present(self, key: ChunkKey, until_s: float = math.inf) -> None:
        """Note that the bucket holds the chunk. until_s: time from which it may have expired."""
        name = hash(key)
        self._absent_young.pop(name, None)
        self._absent_old.pop(name, None)
        if name not in self._young:
            if len(self._young) >= self._generation_size:
                self._old = self._young
                self._young = {}
            self._old.pop(name, None)
        self._young[name] = until_s

    def use(self, key: ChunkKey, now_s: float) -> None:
        """Record a use of the chunk in a tier above the bucket. If its present verdict has expired,
        the chunk becomes `due`."""
        if self._until_s(hash(key)) <= now_s and len(self.due) < _USES_AT_ONCE:
            self.note_present(key, now_s + ASK_AGAIN_S)
            self.due.append(key)

    def _until_s(self, name: int) -> float:
        """Expiry time of the chunk's present verdict; infinity if it has none."""
        until_s = self._young.get(name)
        return self._old.get(name, math.inf) if until_s is None else until_s

    def note_absent(self, key: ChunkKey, now_s: float) -> None:
        """Record that the bucket answered at `now_s` that it has no such chunk."""
        name = hash(key)
        self._young.pop(name, None)
        self._old.pop(name, None)
        if len(self._absent_young) >= self._generation_size // 2 or now_s >= self._expires_s:
            self._absent_old, self._absent_young = self._absent_young, {}
        until_s = now_s + self._miss_ttl_s
        if not self._absent_young:
            self._expires_s = until_s
        self._absent_young[name] = until_s
        self._absent_old.pop(name, None)

    def is_present(self, key: ChunkKey) -> bool:
        name = hash(key)
        return name in self._young or name in self._old

    def is_absent(self, key: ChunkKey, now_s: float) -> bool:
        name = hash(key)
        until_s = self._absent_young.get(name) or self._absent_old.get(name, -math.inf)
        return now_s < until_s

    def verdict(self, key: ChunkKey, now_s: float) -> bool | None:
        """The verdict: True for present, False for absent, None if nothing is known."""
        if self.is_present(key):
            return True if now_s < self._until_s(hash(key)) else None
        return False if self.is_absent(key, now_s) else None

    def forget(self) -> None:
        """Forget every verdict."""
        for verdicts in (self._young, self._old, self._absent_young, self._absent_old):
            verdicts.clear()
        self.due.clear()
