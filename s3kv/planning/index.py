"""Bucket index: our beliefs about what the bucket holds, kept without asking it.

There are two verdicts, both hints. *Present* (we put the chunk there, or fetched it) saves an
upload and opens the whole fetch window at once. *Absent* (a GET said 404) saves asking again for a
while. A wrong hint costs one request or one recomputed chunk, never wrong data, because the object
of a GET is verified against the full hash. So eight bytes of the hash are enough here, which keeps
a known chunk under 120 bytes.

The bucket sees no use of a chunk that is served above it, and may have deleted the chunk meanwhile.
So "present" is good until a time that comes with it. The first use after that puts the chunk on a
list of those that the bucket is asked about.

A verdict is on the bucket alone. An end without the bucket (`JobEnd.near`) is none: an absence on
this host counts for nothing. What is there is a copy of what the bucket had. So it counts as
present until `JobEnd.fresh_s`, unless the bucket is known to have it. The first use after that asks
the bucket, and what the bucket has lost is uploaded again.
"""

from __future__ import annotations

import math

from s3kv.types import ChunkKey

ASK_AGAIN_S = 60.0
"""Time until the bucket is asked again about a chunk in use, if it has not answered."""
_USES_AT_ONCE = 4
"""Most entries of `BucketIndex.due`. Further uses count when they recur."""
_PREFIX_BYTES = 8


class BucketIndex:
    """Verdicts on chunks. Scheduler process, one thread.

    Verdicts are kept in two generations, present ones of at most `capacity / 2` each and absent
    ones of half of that. When the young one is full, it becomes the old one, and the previous old
    one is forgotten. A present verdict that is out of date still counts, but no longer as knowledge
    (`verdict`). An absent one expires after `miss_ttl_s`, and a generation with its first verdict.
    Raises `ValueError` for a capacity below 4. A full index of the default one takes 300 MB.
    """

    __slots__ = (
        *("_absent_old", "_absent_young", "_expires_s", "_generation_size", "_miss_ttl_s"),
        *("_old", "_young", "due"),
    )

    def __init__(self, *, capacity: int = 2_000_000, miss_ttl_s: float = 20.0) -> None:
        if capacity < 4:
            raise ValueError(f"capacity is {capacity}: allowed is 4 or more")
        self._generation_size = capacity // 2
        self._miss_ttl_s = miss_ttl_s
        self._young: dict[bytes, float] = {}
        self._old: dict[bytes, float] = {}
        """The times until which present verdicts are good."""
        self._absent_young: dict[bytes, float] = {}
        self._absent_old: dict[bytes, float] = {}
        """The times until which absent verdicts are good."""
        self._expires_s = math.inf
        """The first of these times in the young generation."""
        self.due: list[ChunkKey] = []
        """Chunks in use whose present verdict is out of date. The caller takes them."""

    def __len__(self) -> int:
        return sum(map(len, (self._young, self._old, self._absent_young, self._absent_old)))

    def note_present(self, key: ChunkKey, until_s: float = math.inf) -> None:
        """Note that the bucket holds the chunk. until_s: time from which it may have expired."""
        prefix = _short(key)
        self._absent_young.pop(prefix, None)
        self._absent_old.pop(prefix, None)
        if prefix not in self._young:
            if len(self._young) >= self._generation_size:
                self._old = self._young
                self._young = {}
            self._old.pop(prefix, None)
        self._young[prefix] = until_s

    def use(self, key: ChunkKey, now_s: float) -> None:
        """Note that the chunk is served from above the bucket. If the bucket holds it, as far as
        is known, and the verdict is out of date, the chunk becomes `due`."""
        if self._until_s(_short(key)) <= now_s and len(self.due) < _USES_AT_ONCE:
            self.note_present(key, now_s + ASK_AGAIN_S)
            self.due.append(key)

    def _until_s(self, prefix: bytes) -> float:
        """The time until which the chunk is known to be present; infinity also if it is not."""
        until_s = self._young.get(prefix)
        return self._old.get(prefix, math.inf) if until_s is None else until_s

    def note_absent(self, key: ChunkKey, now_s: float) -> None:
        """Note that the bucket said at `now_s` that it has no such chunk."""
        prefix = _short(key)
        self._young.pop(prefix, None)
        self._old.pop(prefix, None)
        if len(self._absent_young) >= self._generation_size // 2 or now_s >= self._expires_s:
            self._absent_old, self._absent_young = self._absent_young, {}
        until_s = now_s + self._miss_ttl_s
        if not self._absent_young:
            self._expires_s = until_s
        self._absent_young[prefix] = until_s
        self._absent_old.pop(prefix, None)

    def is_present(self, key: ChunkKey) -> bool:
        prefix = _short(key)
        return prefix in self._young or prefix in self._old

    def is_absent(self, key: ChunkKey, now_s: float) -> bool:
        prefix = _short(key)
        until_s = self._absent_young.get(prefix) or self._absent_old.get(prefix, -math.inf)
        return now_s < until_s

    def verdict(self, key: ChunkKey, now_s: float) -> bool | None:
        """The verdict: True for present, False for absent, None if nothing is known."""
        if self.is_present(key):
            return True if now_s < self._until_s(_short(key)) else None
        return False if self.is_absent(key, now_s) else None

    def forget(self) -> None:
        """Forget every verdict."""
        for verdicts in (self._young, self._old, self._absent_young, self._absent_old):
            verdicts.clear()
        self.due.clear()


def _short(key: ChunkKey) -> bytes:
    if key.group == 0:
        return key.block_hash[:_PREFIX_BYTES]
    return key.group.to_bytes(1, "little") + key.block_hash[: _PREFIX_BYTES - 1]
