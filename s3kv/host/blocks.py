"""Which hash lies in which block of a caller's pool. Bookkeeping only: no bytes, no copies.

    FREE ──take──▶ in use, no name ──name──▶ in use, named ◀──hold──▶ idle, named
     ▲                   │                                               │
     └───────────────────┴─────────────────── evicted by the next take ──┘

A block is *held* by the caller, who reads or fills it, and *pinned* by the copies that read or
write it. Both nest, and while there is one of either the block is in use: its name and its bytes
stay. They are counted apart, so that a caller who releases too often takes nothing from under a
copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from s3kv.types import ChunkKey


class BlockError(ValueError):
    """The caller named a block that is not its own. Nothing has changed."""


@dataclass(slots=True)
class _Block:
    key: ChunkKey | None = None
    holds: int = 0
    pins: int = 0

    @property
    def in_use(self) -> bool:
        return bool(self.holds or self.pins)


@dataclass(frozen=True, slots=True)
class BlockStatistics:
    """free + idle + used is all of them.

    idle: under a name and in nobody's use, so that the next in need may have them. used: held or
    pinned. evictions: names removed for another hash, since the start.
    """

    free: int
    idle: int
    used: int
    evictions: int


class BlockTable:
    """One thread's. numbers: the blocks of the pool that the table may hand out.

    Raises `ValueError` when there is none, or one comes twice.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        order = list(numbers)
        self._blocks = {number: _Block() for number in order}
        if not order or len(self._blocks) < len(order):
            raise ValueError("there has to be a block, and each only once")
        self._free = order[::-1]
        self._named: dict[ChunkKey, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """The one idle longest comes first."""
        self._evictions = 0

    # --- questions

    def find(self, key: ChunkKey) -> int | None:
        """The block that holds `key`."""
        return self._named.get(key)

    def key_of(self, number: int) -> ChunkKey | None:
        """The name of a block, None without one. Raises `BlockError` for one that is not ours."""
        return self._block(number).key

    def statistics(self) -> BlockStatistics:
        """O(1)."""
        free, idle = len(self._free), len(self._idle)
        return BlockStatistics(free, idle, len(self._blocks) - free - idle, self._evictions)

    # --- events

    def take(self) -> int | None:
        """A block without a name for the caller to fill, held once. None when all are in use."""
        number = self._vacated()
        if number is not None:
            self._blocks[number].holds = 1
        return number

    def take_pinned(self) -> int | None:
        """As `take`, pinned and not held: to be filled by a copy, and no business of the caller."""
        number = self._vacated()
        if number is not None:
            self._blocks[number].pins = 1
        return number

    def name(self, number: int, key: ChunkKey) -> bool:
        """The held block holds `key` from now on, and nobody writes to it any more. False, and
        nothing changed, when another block has that name already.

        Raises `BlockError` for a block that is not held, or has another name.
        """
        block = self._held(number)
        if block.key not in (None, key):
            raise BlockError(f"block {number} has another hash already: take a new block for this")
        if self._named.setdefault(key, number) != number:
            return False
        block.key = key
        return True

    def name_filled(self, number: int, key: ChunkKey) -> int:
        """A copy has filled the pinned block, which has no name, with `key`. Returns the block that
        holds `key` now, held once more: this one, or another that was named meanwhile.

        Raises `BlockError` for a block that is not pinned, or has a name.
        """
        block = self._pinned(number)
        if block.key is not None:
            raise BlockError(f"block {number} was not for a copy to fill")
        holder = self._named.setdefault(key, number)
        if holder == number:
            block.key = key
        self.hold(holder)
        return holder

    def hold(self, number: int) -> None:
        """Once more, or an idle one again. Raises `BlockError` for one that has no name."""
        block = self._block(number)
        if block.key is None:
            raise BlockError(f"block {number} holds nothing that could be shared")
        block.holds += 1
        self._idle.pop(number, None)

    def release(self, number: int) -> None:
        """One `take` or `hold` less. Raises `BlockError` for a block that is not held."""
        self._held(number).holds -= 1
        self._settle(number)

    def pin(self, number: int) -> None:
        """A copy of a held block begins. Raises `BlockError` for one that is not held."""
        self._held(number).pins += 1

    def unpin(self, number: int) -> None:
        """The copy has ended. Raises `BlockError` for one that is not pinned."""
        self._pinned(number).pins -= 1
        self._settle(number)

    def check(self) -> None:
        """Derive every index anew; raise AssertionError where they differ. For tests."""
        blocks = self._blocks.items()
        assert self._named == {b.key: n for n, b in blocks if b.key is not None}
        assert set(self._idle) == {n for n, b in blocks if b.key is not None and not b.in_use}
        assert sorted(self._free) == sorted(
            n for n, b in blocks if b.key is None and not b.in_use
        ), "the free list is not the blocks nobody names or uses"

    # --- inside

    def _vacated(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not self._idle:
            return None
        number, _ = self._idle.popitem(last=False)
        key = self._blocks[number].key
        assert key is not None
        del self._named[key]
        self._blocks[number].key = None
        self._evictions += 1
        return number

    def _settle(self, number: int) -> None:
        block = self._blocks[number]
        if block.in_use:
            return
        if block.key is None:
            self._free.append(number)
        else:
            self._idle[number] = None

    def _block(self, number: int) -> _Block:
        block = self._blocks.get(number)
        if block is None:
            raise BlockError(f"block {number} was not given to this store")
        return block

    def _held(self, number: int) -> _Block:
        block = self._block(number)
        if not block.holds:
            raise BlockError(f"block {number} is not held: it may be somebody else's by now")
        return block

    def _pinned(self, number: int) -> _Block:
        block = self._block(number)
        if not block.pins:
            raise BlockError(f"block {number} is not pinned")
        return block
