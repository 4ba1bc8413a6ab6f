"""Which slot leaves host memory first: order, and nothing else.

A policy knows slots as small ints and never sees bytes, pins or the bucket. Every operation is
O(1), amortised over the slots an `evict` has to pass. Pure: no clock, no randomness; the same
calls give the same order. The one owner is a `SlotTable`, in its process and thread.

All three keep their queues in `OrderedDict`s used as ordered sets. It is a linked list with an
index, in C: first, append, move to the end and removal from the middle are O(1), and iteration
from the front stays O(1) after removals there, which it does not for a plain dict.
"""

from __future__ import annotations

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


_POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {"lru": LRU}


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """The policy that the setting `eviction` names, for `capacity` slots."""
    return _POLICIES[name](capacity)
