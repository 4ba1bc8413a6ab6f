"""LRU: the order in which entries leave host memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class LRU:
    """Numbers of the resident entries' places, the least recently used first; insertion counts as
    a use.

    Pure: no clock, no randomness, and no knowledge of bytes, pins or the bucket. One
    `host.table.Table` owns it, in one process and thread. The caller guarantees that `inserted`
    names a place the queue does not hold, that `touched` and `removed` name one it does, and that
    `evictable` does not call the queue.

    The chunks of one prompt form a chain, and a tail without its head is useless. So the user of a
    chain touches it *from its tail to its head*, and the chain is evicted from its tail.
    """

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        # A linked list with an index, in C: every operation is O(1), and iteration from the front
        # stays so after removals there, which it does not for a plain dict.
        self._queue: OrderedDict[int, None] = OrderedDict()

    def inserted(self, number: int) -> None:
        """Add `number`, whose place has been filled."""
        self._queue[number] = None

    def touched(self, number: int) -> None:
        """Note a use of the entry at `number`."""
        self._queue.move_to_end(number)

    def removed(self, number: int) -> None:
        """Forget `number`, whose place was emptied without `evict`."""
        del self._queue[number]

    def evict(self, evictable: Callable[[int], bool]) -> int | None:
        """Remove and return the first evictable number; None, after a pass over all, if none is."""
        # Numbers passed over keep their places. They are few: dirty and pinned entries are recent.
        number = next(filter(evictable, self._queue), None)
        if number is not None:
            del self._queue[number]
        return number

    def __contains__(self, number: int) -> bool:
        return number in self._queue

    def __len__(self) -> int:
        return len(self._queue)
