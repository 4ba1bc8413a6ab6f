"""Room in a slab: two allocators with one interface. Used from one thread. A place is one or more
consecutive units, named by the number of its first.

`EqualSlots` has slots of one size. `Extents` has pages, for entries of different sizes: a buddy
allocator that returns the unused end of each block.

An extent of n pages begins at a multiple of p, the smallest power of two that is not below n, and
takes n pages, not p: the rest of the p goes back as smaller blocks. So less than a page is lost
inside an extent. Free blocks join their buddies again when their neighbours leave, so an empty slab
is always one whole.

An extent of n pages needs a *region*: p pages that begin at a multiple of p. To make room, a caller
need clear only one region: an extent with a page in it either lies inside, or has a higher order
and is longer than the region.

Pure bookkeeping: places are numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

PAGE_BYTES = 4096
"""An object's header is one page, so the smallest extent that holds an object has two."""


def room_for(count: int, unit_bytes: int, entry_bytes: Collection[int]) -> Room:
    """The room for entries of these lengths in a slab of `count` units: equal slots if a unit holds
    any of them, otherwise extents. Raises `ValueError` if the units are not pages then."""
    if all(nbytes <= unit_bytes for nbytes in entry_bytes):
        return EqualSlots(count, unit_bytes)
    if unit_bytes != PAGE_BYTES:
        raise ValueError(f"units of {unit_bytes} bytes: entries of several units need pages")
    return Extents(count)


class EqualSlots:
    """Room for entries of one size: places of one slot, `unit_bytes`. Contract: see `Extents`."""

    __slots__ = ("_free", "count", "unit_bytes")

    largest = 1

    def __init__(self, count: int, unit_bytes: int = 1) -> None:
        self.count = count
        self.unit_bytes = unit_bytes
        self._free = list(range(count - 1, -1, -1))

    def allocate(self, units: int) -> int | None:
        return self._free.pop() if self._free else None

    def free(self, number: int) -> None:
        self._free.append(number)

    def shrink(self, number: int, units: int) -> None:
        """Do nothing: a slot has one unit, and keeps it."""

    def clearing(self, number: int, units: int) -> Sequence[int]:
        return (number,)


class Extents:
    """Room for entries of different sizes: extents in a slab of `count` pages."""

    __slots__ = ("_free", "_taken", "count")

    unit_bytes = PAGE_BYTES

    def __init__(self, count: int) -> None:
        self.count = count
        self._taken: dict[int, int] = {}
        self._free: list[set[int]] = [set() for _ in range(count.bit_length() + 1)]
        """For each order, the first pages of the free blocks of 2**order pages."""
        self._give_back(0, count)

    @classmethod
    def of(cls, nbytes: int) -> Extents:
        """The extents of a slab of `nbytes`: its whole pages, at least one."""
        return cls(max(1, nbytes // PAGE_BYTES))

    @property
    def largest(self) -> int:
        """Pages of the largest possible extent: more than half of the slab, or all of it."""
        return 1 << (self.count.bit_length() - 1)

    def allocate(self, units: int) -> int | None:
        """Take `units` pages in a row, from the smallest free block that fits, so that small
        extents do not spread over regions that large ones need. Returns the first of them, or None
        if no region is free. Raises `ValueError` for less than one page."""
        if units < 1:
            raise ValueError(f"an extent of {units} pages")
        for order in range(order_of(units), len(self._free)):
            if self._free[order]:
                start = self._free[order].pop()
                self._taken[start] = units
                self._give_back(start + units, (1 << order) - units)
                return start
        return None

    def free(self, number: int) -> None:
        """Give an extent back. Raises `KeyError` if none begins at `number`."""
        self._give_back(number, self._taken.pop(number))

    def shrink(self, number: int, units: int) -> None:
        """Keep the first `units` pages of an extent, as if `allocate` had made it that long. Raises
        `KeyError` if no extent begins at `number`, `ValueError` for less than one page or more than
        it has."""
        before = self._taken[number]
        if not 1 <= units <= before:
            raise ValueError(f"an extent of {before} pages cannot become one of {units}")
        self._taken[number] = units
        self._give_back(number + units, before - units)

    def clearing(self, number: int, units: int) -> Sequence[int]:
        """The extents to free, including `number`, so that one of `units` pages fits there; none if
        freeing that extent cannot make room. It is one larger extent, or the extents of a region,
        which together take less than twice `units` pages. This bounds what a placement can evict,
        so fragmentation cannot grow."""
        order, taken = order_of(units), self._taken
        if order_of(taken[number]) > order:
            return (number,)
        begin, end = region_of(number, units)
        starts = self.within(begin, end)
        if end > self.count or order_of(taken[starts[0]]) > order:
            return ()  # a larger extent begins in it, and makes room when its turn comes
        return starts

    def within(self, start: int, end: int) -> list[int]:
        """First pages of the extents with a page in [start, end), in order."""
        found, page = [], start
        while page < min(end, self.count):
            for order, blocks in enumerate(self._free):  # of the extent or free block around it
                first = page >> order << order
                pages = 1 << order if first in blocks else self._taken.get(first, 0)
                if page < first + pages:
                    break
            found += [first] if first in self._taken else []
            page = first + pages
        return found

    def _give_back(self, start: int, pages: int) -> None:
        """Free these pages, in blocks as large as alignment allows, joined with their buddies."""
        end = start + pages
        while start < end:
            order = (end - start).bit_length() - 1
            if start:
                order = min(order, (start & -start).bit_length() - 1)
            self._join(start, order)
            start += 1 << order

    def _join(self, start: int, order: int) -> None:
        while (buddy := start ^ (1 << order)) in self._free[order]:
            self._free[order].remove(buddy)
            start = min(start, buddy)
            order += 1
        self._free[order].add(start)


Room: TypeAlias = EqualSlots | Extents


def order_of(pages: int) -> int:
    """The smallest order whose blocks hold `pages` pages."""
    return (pages - 1).bit_length()


def region_of(page: int, pages: int) -> tuple[int, int]:
    """The region around `page` that an extent of `pages` pages would need, as [start, end)."""
    order = order_of(pages)
    start = page >> order << order
    return start, start + (1 << order)
