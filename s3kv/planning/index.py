"""Bucket index: our beliefs about what the bucket holds, kept without asking it.

There are two verdicts, both hints. *Present* (we put the chunk there, or fetched it) saves an
upload and opens the whole fetch window at once. *Absent* (a GET said 404) saves asking again for a
while. A wrong hint costs one request or one recomputed chunk, never wrong data, because the object
of a GET is verified against the full hash. So eight bytes of the hash are enough here, which keeps
a known chunk under 150 bytes.
"""

from __future__ import annotations

from s3kv.types import ChunkKey

_PREFIX_BYTES = 8


class BucketIndex:
    """Verdicts on chunks. Scheduler process, one thread.

    Present verdicts are kept in two generations of at most `capacity / 2` each. When the young one
    is full, it becomes the old one, and the previous old one is forgotten. Absent verdicts expire
    after `miss_ttl_s`; there are at most `capacity / 2` of them, too, and the oldest go first.
    Raises `ValueError` for a capacity below 2.
    """

    __slots__ = ("_absent_until", "_generation_size", "_miss_ttl_s", "_old", "_young")

    def __init__(self, *, capacity: int, miss_ttl_s: float) -> None:
        if capacity < 2:
            raise ValueError(f"capacity is {capacity}: allowed is 2 or more")
        self._generation_size = capacity // 2
        self._miss_ttl_s = miss_ttl_s
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()
        self._absent_until: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old) + len(self._absent_until)

    def note_present(self, key: ChunkKey) -> None:
        """Note that the bucket holds the chunk."""
        prefix = _short(key)
        self._absent_until.pop(prefix, None)
        if prefix in self._young:
            return
        if len(self._young) >= self._generation_size:
            self._old = self._young
            self._young = set()
        self._young.add(prefix)
        self._old.discard(prefix)

    def note_absent(self, key: ChunkKey, now_s: float) -> None:
        """Note that the bucket said at `now_s` that it has no such chunk."""
        prefix = _short(key)
        self._young.discard(prefix)
        self._old.discard(prefix)
        self._absent_until.pop(prefix, None)
        self._absent_until[prefix] = now_s + self._miss_ttl_s
        self._forget_expired(now_s)

    def is_present(self, key: ChunkKey) -> bool:
        prefix = _short(key)
        return prefix in self._young or prefix in self._old

    def is_absent(self, key: ChunkKey, now_s: float) -> bool:
        until_s = self._absent_until.get(_short(key))
        return until_s is not None and now_s < until_s

    def verdict(self, key: ChunkKey, now_s: float) -> bool | None:
        """The verdict: True for present, False for absent, None if nothing is known."""
        if self.is_present(key):
            return True
        return False if self.is_absent(key, now_s) else None

    def forget(self) -> None:
        """Forget every verdict."""
        self._young.clear()
        self._old.clear()
        self._absent_until.clear()

    def _forget_expired(self, now_s: float) -> None:
        # The time to live is constant, so insertion order is the order of expiry.
        while self._absent_until:
            oldest = next(iter(self._absent_until))
            expired = self._absent_until[oldest] <= now_s
            if not expired and len(self._absent_until) <= self._generation_size:
                return
            del self._absent_until[oldest]


def _short(key: ChunkKey) -> bytes:
    if key.group == 0:
        return key.block_hash[:_PREFIX_BYTES]
    return key.group.to_bytes(1, "little") + key.block_hash[: _PREFIX_BYTES - 1]
