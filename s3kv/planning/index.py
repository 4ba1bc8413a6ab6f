"""What we believe the bucket holds, without asking it.

Two kinds of verdict, both hints. *Present* (we put it there, or fetched it): saves an upload and
opens the whole fetch window at once. *Absent* (a GET said 404): saves asking again for a while.
A wrong hint costs one request or one recomputed chunk, never wrong data, because what a GET
delivers is verified against the full hash. That is why eight bytes of the hash are enough here,
and they keep a known chunk under 150 bytes.
"""

from __future__ import annotations

from s3kv.types import ChunkKey

_PREFIX_BYTES = 8


class BucketIndex:
    """Verdicts on chunks. Scheduler process, one thread.

    Present verdicts are kept in two generations of at most `capacity / 2` each; when the young
    one is full it becomes the old one and the old one is forgotten. Absent verdicts expire after
    `miss_ttl_s` and are at most `capacity / 2` too; the oldest go first.
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
        """The bucket holds the chunk, as of now."""
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
        """The bucket said at `now_s` that it has no such chunk."""
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
        """True for present, False for absent, None for nothing known."""
        if self.is_present(key):
            return True
        return False if self.is_absent(key, now_s) else None

    def forget(self) -> None:
        """Know nothing any more."""
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
