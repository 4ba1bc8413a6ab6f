"""Eviction policies: the order in which entries leave host memory.

A policy knows an entry by the number of its place, and never sees bytes, pins or the bucket. Every
operation is O(1), amortised over the entries that an `evict` passes. Pure: no clock, no randomness;
the same calls give the same order. One `host.table.Table` owns it, in one process and thread.

Both keep their queues in `OrderedDict`s used as ordered sets. An `OrderedDict` is a linked
list with an index, in C: first, append, move to the end and removal from the middle are O(1), and
iteration from the front stays O(1) after removals there, which it does not for a plain dict.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

_Queue = OrderedDict[int, None]


class EvictionPolicy(Protocol):
    """Order of the resident entries' places, which are slots from 0 to capacity - 1.

    The caller guarantees that `inserted` names a slot the policy does not hold, that `touched` and
    `removed` name one it does, and that `evictable` does not call the policy. The policy
    guarantees that `evict` returns, whatever `evictable` answers.

    The chunks of one prompt form a chain, and a tail without its head is useless. So the user of a
    chain touches it *from its tail to its head*, which makes heads the most recent. `LRU` evicts
    such a chain strictly from its tail. `SIEVE` keeps used slots and otherwise evicts in order of
    insertion: it keeps a head that more requests share than the tail, but between equals it evicts
    the slot inserted first.
    """

    def inserted(self, slot: int) -> None:
        """Add `slot`, which has been filled. Adding does not count as a use."""

    def touched(self, slot: int) -> None:
        """Note a use of the entry in `slot`."""

    def removed(self, slot: int) -> None:
        """Forget `slot`, which was emptied without `evict`."""

    def evict(self, evictable: Callable[[int], bool]) -> int | None:
        """Remove and return the first evictable slot in the policy's order.

        Returns None if no slot is evictable, after passes over all slots; a caller that knows this
        should not ask. Slots passed over stay, in an order the policy chooses.
        """

    def __contains__(self, slot: int) -> bool: ...

    def __len__(self) -> int: ...


class LRU:
    """Least recently used first; insertion counts as a use."""

    __slots__ = ("_queue",)

    def __init__(self, capacity: int) -> None:
        self._queue: _Queue = OrderedDict()

    def inserted(self, slot: int) -> None:
        self._queue[slot] = None

    def touched(self, slot: int) -> None:
        self._queue.move_to_end(slot)

    def removed(self, slot: int) -> None:
        del self._queue[slot]

    def evict(self, evictable: Callable[[int], bool]) -> int | None:
        # Slots passed over keep their places. They are few: dirty and pinned slots are recent.
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

    A one-pass scan evicts entries that have been used only once, since new slots join the same
    queue: unsuited to slabs that see many long prompts once.
    """

    __slots__ = ("_ahead", "_passed", "_used")

    def __init__(self, capacity: int) -> None:
        self._ahead: _Queue = OrderedDict()
        self._passed: _Queue = OrderedDict()
        self._used = bytearray(capacity)

    def inserted(self, slot: int) -> None:
        self._used[slot] = 0
        self._ahead[slot] = None

    def touched(self, slot: int) -> None:
        self._used[slot] = 1

    def removed(self, slot: int) -> None:
        del (self._ahead if slot in self._ahead else self._passed)[slot]
        self._wrap()

    def evict(self, evictable: Callable[[int], bool]) -> int | None:
        # Two rounds: the first may have to clear every bit. A slot that is not evictable is passed
        # like a used one but keeps its bit, since it could not have been evicted.
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
        """Move the hand from behind the newest slot to the oldest, before a newer one comes."""
        if not self._ahead:
            self._ahead, self._passed = self._passed, self._ahead

    def __contains__(self, slot: int) -> bool:
        return slot in self._ahead or slot in self._passed

    def __len__(self) -> int:
        return len(self._ahead) + len(self._passed)


_POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {"lru": LRU, "sieve": SIEVE}


def make_policy(name: str, capacity: int) -> EvictionPolicy:
    """The policy that the setting `eviction` names, for `capacity` slots."""
    return _POLICIES[name](capacity)
