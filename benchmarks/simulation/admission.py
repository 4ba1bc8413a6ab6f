"""Admission: which chunks the engines of a fleet upload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from s3kv.types import ChunkKey

RULES = ("all", "second_use")


class Admission:
    """The rule `all` admits every chunk; `second_use` those that two requests have asked for.

    It flatters `second_use`: each engine knows what all others were asked for, and a chunk that is
    asked for again is uploaded from the host memory in which it still is, at once.
    """

    def __init__(self, rule: str) -> None:
        self._second_use = rule == "second_use"
        self._asked: Counter[bytes] = Counter()
        self._withheld: dict[bytes, tuple[ChunkKey, Callable[[ChunkKey], None]]] = {}

    def ask(self, hashes: Sequence[bytes]) -> None:
        """Note that a request asks for these chunks."""
        if not self._second_use:
            return
        self._asked.update(hashes)
        for block_hash in hashes:
            held = self._withheld.pop(block_hash, None)
            if held is not None:
                key, upload = held
                upload(key)

    def allows(self, block_hash: bytes) -> bool:
        return not self._second_use or self._asked[block_hash] > 1

    def withhold(self, key: ChunkKey, upload: Callable[[ChunkKey], None]) -> None:
        """Call `upload` when the chunk is asked for again."""
        self._withheld[key.block_hash] = (key, upload)
