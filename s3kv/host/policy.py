"""Which slot leaves host memory first: order, and nothing else.

A policy knows slots as small ints and never sees bytes, pins or the bucket. Every operation is
O(1), amortised over the slots an `evict` has to pass. Pure: no clock, no randomness; the same
calls give the same order. The one owner is a `SlotTable`, in its process and thread.

All three keep their queues in `OrderedDict`s used as ordered sets. It is a linked list with an
index, in C: first, append, move to the end and removal from the middle are O(1), and iteration
from the front stays O(1) after removals there, which it does not for a plain dict.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from s3kv.types import ChunkKey

_Queue = OrderedDict[int, None]


class EvictionPolicy(Protocol):
    """An order over slots in 0 … capacity - 1.

    The caller guarantees that `inserted` names a slot the policy does not hold, that `touched` and
    `removed` name one it does, and that `evictable` does not call the policy. The policy
    guarantees that `evict` returns, whatever `evictable` answers.

    The chunks of one prompt form a chain, and a tail without its head is useless. So whoever uses
    a chain touches it *from its tail to its head*: heads are then the most recent. `LRU` evicts
    such a chain strictly from its tail. `SIEVE` and `S3FIFO` count uses and otherwise go by order
    of insertion, so they keep a head that more requests share than the tail, but between equals
    they evict what was inserted first.
    """

    def inserted(self, slot: int, key: ChunkKey) -> None:
        """`slot` now holds `key`. This alone does not count as a use."""

    def touched(self, slot: int) -> None:
        """The chunk in `slot` was used."""

    def removed(self, slot: int) -> None:
        """`slot` was emptied for a reason other than `evict`: forget it as though never there."""

    def evict(self, evictable: Callable[[int], bool]) -> int | None:
        """Take out the slot that should go first among the evictable ones, and return it.

        None when there is none; that costs passes over all slots, so a caller that can tell
        without asking should not ask. Slots passed over stay, in an order the policy chooses.
        """

    def __contains__(self, slot: int) -> bool: ...

    def __len__(self) -> int: ...


class LRU:
    """Least recently used first; insertion counts as a use."""

    __slots__ = ("_queue",)

    def __init__(self, capacity: int) -> None:
        self._queue: _Queue = OrderedDict()

    def inserted(self, slot: int, key: ChunkKey) -> None:
        self._queue[slot] = None

    def touched(self, slot: int) -> None:
        self._queue.move_to_end(slot)

    def removed(self, slot: int) -> None:
        del self._queue[slot]

    def evict(self, evictable: Callable[[int], bool]) -> int | None:
        # What is passed over keeps its place. It is little: dirty and pinned slots are recent.
        slot = next(filter(evictable, self._queue), None)
        if slot is not None:
            del self._queue[slot]
        return slot

    def __contains__(self, slot: int) -> bool:
        return slot in self._queue

    def __len__(self) -> int:
        return len(self._queue)


class SIEVE:
    """SIEVE, from Zhang et al., "SIEVE is Simpler than LRU", NSDI '24, algorithm 1.

    One queue in order of insertion, a bit per slot for "used since the hand passed", and a hand
    that goes from the oldest to the newest and round again: it clears set bits and evicts at the
    first clear one, where it stays. Slots are never moved, so a use costs one byte written.

    The paper's list with a hand inside is two queues here: what the hand has passed on this round,
    and what is still ahead of it. At the newest slot the first becomes the second.

    A one-pass scan pushes out what has been used only once, since new slots sit in the same queue:
    not for slabs that see many long prompts once.
    """

    __slots__ = ("_ahead", "_passed", "_used")

    def __init__(self, capacity: int) -> None:
        self._ahead: _Queue = OrderedDict()
        self._passed: _Queue = OrderedDict()
        self._used = bytearray(capacity)

    def inserted(self, slot: int, key: ChunkKey) -> None:
        self._used[slot] = 0
        self._ahead[slot] = None

    def touched(self, slot: int) -> None:
        self._used[slot] = 1

    def removed(self, slot: int) -> None:
        del (self._ahead if slot in self._ahead else self._passed)[slot]
        self._wrap()

    def evict(self, evictable: Callable[[int], bool]) -> int | None:
        # Two rounds: the first may have to clear every bit. A slot that is not evictable is passed
        # like a used one, and keeps its bit, since nobody could have evicted it.
        for _ in range(2 * len(self)):
            slot, _ = self._ahead.popitem(last=False)
            is_evictable = evictable(slot)
            if is_evictable and not self._used[slot]:
                self._wrap()
                return slot
            if is_evictable:
                self._used[slot] = 0
            self._passed[slot] = None
            self._wrap()
        return None

    def _wrap(self) -> None:
        """Past the newest slot the hand is at the oldest, before anything newer comes."""
        if not self._ahead:
            self._ahead, self._passed = self._passed, self._ahead

    def __contains__(self, slot: int) -> bool:
        return slot in self._ahead or slot in self._passed

    def __len__(self) -> int:
        return len(self._ahead) + len(self._passed)


class S3FIFO:
    """S3-FIFO, from Yang et al., "FIFO queues are all you need for cache eviction", SOSP '23,
    algorithm 1 and section 4.

    A small queue takes what is new. At its end, what was used more than once moves to the main
    queue and the rest leaves, so one-hit wonders never reach the main queue. A ghost queue
    remembers the keys that left the small queue, and a key that comes back while it is remembered
    goes to the main queue directly. The main queue gives a slot another round per use, at most 3.

    Sizes are the paper's: the small queue 10 % of the slots, ghosts as many as the main queue has
    slots. The small queue grows beyond that while slots are being filled, and shrinks first.
    """

    __slots__ = ("_ghosts", "_hashes", "_main", "_small", "_small_count", "_uses")

    def __init__(self, capacity: int) -> None:
        self._small: _Queue = OrderedDict()
        self._main: _Queue = OrderedDict()
        self._small_count = max(1, capacity // 10)
        self._ghosts = _GhostQueue(max(1, capacity - self._small_count))
        self._hashes = array("q", bytes(8 * capacity))
        self._uses = bytearray(capacity)

    def inserted(self, slot: int, key: ChunkKey) -> None:
        self._uses[slot] = 0
        self._hashes[slot] = hash(key)
        queue = self._main if self._ghosts.forget(self._hashes[slot]) else self._small
        queue[slot] = None

    def touched(self, slot: int) -> None:
        if self._uses[slot] < 3:
            self._uses[slot] += 1

    def removed(self, slot: int) -> None:
        del (self._small if slot in self._small else self._main)[slot]

    def evict(self, evictable: Callable[[int], bool]) -> int | None:
        slot = None
        if len(self._small) < self._small_count:
            slot = self._evict_main(evictable)
        if slot is None:
            slot = self._evict_small(evictable)
        if slot is None:
            # Even if it was asked before: the small queue may have moved all it had to it.
            slot = self._evict_main(evictable)
        return slot

    def _evict_small(self, evictable: Callable[[int], bool]) -> int | None:
        for _ in range(len(self._small)):
            slot = next(iter(self._small))
            if self._uses[slot] > 1:
                del self._small[slot]
                self._uses[slot] = 0
                self._main[slot] = None
            elif evictable(slot):
                del self._small[slot]
                self._ghosts.remember(self._hashes[slot])
                return slot
            else:
                self._small.move_to_end(slot)
        return None

    def _evict_main(self, evictable: Callable[[int], bool]) -> int | None:
        # At most three rounds use up the uses of every slot, the fourth evicts. A slot that is not
        # evictable goes round like a used one, and keeps its uses.
        for _ in range(4 * len(self._main)):
            slot = next(iter(self._main))
            if evictable(slot):
                if not self._uses[slot]:
                    del self._main[slot]
                    return slot
                self._uses[slot] -= 1
            self._main.move_to_end(slot)
        return None

    def __contains__(self, slot: int) -> bool:
        return slot in self._small or slot in self._main

    def __len__(self) -> int:
        return len(self._small) + len(self._main)


class _GhostQueue:
    """Which of the last `count` key hashes remembered were not forgotten since.

    64-bit hashes stand for the keys: two keys that share one (a chance of 2**-64 each) only put a
    chunk into the wrong queue. `_positions` maps a hash to its place in the ring; a place whose
    hash was forgotten or remembered anew meanwhile no longer maps back and is overwritten as is.
    """

    __slots__ = ("_next", "_positions", "_ring")

    def __init__(self, count: int) -> None:
        self._ring = array("q", bytes(8 * count))
        self._positions: dict[int, int] = {}
        self._next = 0

    def remember(self, key_hash: int) -> None:
        position, self._next = self._next, (self._next + 1) % len(self._ring)
        if self._positions.get(self._ring[position]) == position:
            del self._positions[self._ring[position]]
        self._ring[position] = key_hash
        self._positions[key_hash] = position

    def forget(self, key_hash: int) -> bool:
        """Whether it was remembered."""
        return self._positions.pop(key_hash, None) is not None


_POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": LRU,
    "sieve": SIEVE,
    "s3fifo": S3FIFO,
}


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """The policy that the setting `eviction` names, for `capacity` slots."""
    return _POLICIES[name](capacity)
