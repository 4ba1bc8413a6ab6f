"""Block table: records which hash each block of a caller's pool holds. It copies no bytes.

    FREE ──take──▶ in use, no name ──name──▶ in use, named ◀──hold──▶ idle, named
     ▲                   │                                               │
     └───────────────────┴─────────────────── evicted by the next take ──┘

A block is *held* by the caller, who reads or fills it, and *pinned* by the copies that read or
write it. Both nest. A held or pinned block is in use: its name and its bytes stay. Holds and pins
are counted separately, so a caller who releases too often cannot take a block from a copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from s3kv.types import ChunkKey


class BlockError(ValueError):
    """The caller named a block that it does not own. Nothing has changed."""


@dataclass(slots=True)
class _Block:
    key: ChunkKey | None = None
    holds: int = 0
    pins: int = 0

    @property
    def in_use(self) -> bool:
        return bool(self.holds or self.pins)


class BlockTable:
    """The table. Used from one thread. numbers: the blocks of the pool that it may hand out.

    Raises `ValueError` if there is none, or if one is given twice.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        order = list(numbers)
        self._blocks = {number: _Block() for number in order}
        if not order or len(self._blocks) < len(order):
            raise ValueError("give at least one block, and each only once")
        self._free = order[::-1]
        self._named: dict[ChunkKey, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Idle blocks, the longest idle first."""

    def find(self, key: ChunkKey) -> int | None:
        """The block that holds `key`; None if there is none."""
        return self._named.get(key)

    def key_of(self, number: int) -> ChunkKey | None:
        """The name of a block; None if it has none. Raises `BlockError` for an unknown one."""
        return self._block(number).key

    def take(self, *, pinned: bool = False) -> int | None:
        """Take a block to fill, without a name: held once for the caller, or pinned once for a
        copy. None when all are in use."""
        if self._free:
            number = self._free.pop()
        elif self._idle:
            number, _ = self._idle.popitem(last=False)
            key = self._blocks[number].key
            assert key is not None
            del self._named[key]
        else:
            return None
        self._blocks[number] = _Block(holds=not pinned, pins=pinned)
        return number

    def name(self, number: int, key: ChunkKey) -> bool:
        """Name a held block `key`; its content is final. Returns False, and changes nothing, if
        another block already has that name.

        Raises `BlockError` for a block that is not held, or has another name.
        """
        block = self._held(number)
        if block.key not in (None, key):
            raise BlockError(f"block {number} already has another hash: take a new block for this")
        if self._named.setdefault(key, number) != number:
            return False
        block.key = key
        return True

    def name_filled(self, number: int, key: ChunkKey) -> int:
        """Name a pinned block that a copy has filled with `key`. Returns the block that now holds
        `key`, held once more: this block, or another one that was named meanwhile.

        Raises `BlockError` for a block that is not pinned, or has a name.
        """
        block = self._pinned(number)
        if block.key is not None:
            raise BlockError(f"block {number} has a name already: no copy may fill it")
        holder = self._named.setdefault(key, number)
        if holder == number:
            block.key = key
        self.hold(holder)
        return holder

    def hold(self, number: int) -> None:
        """Hold a held or idle block. Raises `BlockError` for one without a name."""
        block = self._block(number)
        if block.key is None:
            raise BlockError(f"block {number} has no name: there is nothing to share")
        block.holds += 1
        self._idle.pop(number, None)

    def release(self, number: int) -> None:
        """Undo one `take` or `hold`. Raises `BlockError` for a block that is not held."""
        self._held(number).holds -= 1
        self._settle(number)

    def pin(self, number: int) -> None:
        """Pin a held block for a copy. Raises `BlockError` for a block that is not held."""
        self._held(number).pins += 1

    def unpin(self, number: int) -> None:
        """Undo one pin, once its copy has ended. Raises `BlockError` for an unpinned block."""
        self._pinned(number).pins -= 1
        self._settle(number)

    def _settle(self, number: int) -> None:
        block = self._blocks[number]
        if block.in_use:
            return
        if block.key is None:
            self._free.append(number)
        else:
            self._idle[number] = None

    def _block(self, number: int) -> _Block:
        if number not in self._blocks:
            raise BlockError(f"block {number} was not given to this store")
        return self._blocks[number]

    def _held(self, number: int) -> _Block:
        block = self._block(number)
        if not block.holds:
            raise BlockError(f"block {number} is not held: it may hold another hash by now")
        return block

    def _pinned(self, number: int) -> _Block:
        block = self._block(number)
        if not block.pins:
            raise BlockError(f"block {number} is not pinned")
        return block
