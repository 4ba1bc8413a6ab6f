"""Which pages of a slab are taken, for things of different sizes: a buddy allocator, trimmed.

An extent of n pages begins at a multiple of p, the smallest power of two that is not below n, and
takes n pages, not p: what is left of the p goes back as smaller blocks. So less than a page is
lost inside an extent, and free blocks meet their buddies again when their neighbours leave: a
slab that is empty is whole, whatever happened in it before.

What an extent of n pages needs is a *region*: p pages that begin at a multiple of p. Whoever wants
room where none is can therefore look at one region: an extent that has a page in it either lies
inside, or has a higher order, and is then longer than the region.

Pure bookkeeping: pages are numbers.
"""

from __future__ import annotations

from bisect import bisect_left, insort


class Extents:
    """Extents of a slab of `count` pages. One thread."""

    __slots__ = ("_free", "_starts", "_taken", "count", "free_pages")

    def __init__(self, count: int) -> None:
        self.count = count
        self.free_pages = 0
        self._taken: dict[int, int] = {}
        self._starts: list[int] = []
        """The keys of `_taken`, sorted."""
        self._free: list[set[int]] = [set() for _ in range(count.bit_length() + 1)]
        """By order: where free blocks of 2**order pages begin."""
        self._give_back(0, count)

    def __len__(self) -> int:
        return len(self._taken)

    @property
    def largest(self) -> int:
        """Pages of the largest extent there can be: more than half of the slab, or all of it."""
        return 1 << (self.count.bit_length() - 1)

    def allocate(self, pages: int) -> int | None:
        """Take `pages` pages in a row; the first of them, or None where no region is free.

        From the smallest free block that serves, so that small extents do not spread over regions
        that a large one will need. Raises `ValueError` below one page.
        """
        if pages < 1:
            raise ValueError(f"an extent of {pages} pages")
        for order in range(order_of(pages), len(self._free)):
            if self._free[order]:
                start = self._free[order].pop()
                self.free_pages -= 1 << order
                self._taken[start] = pages
                insort(self._starts, start)
                self._give_back(start + pages, (1 << order) - pages)
                return start
        return None

    def free(self, start: int) -> None:
        """Give an extent back. Raises `KeyError` when none begins at `start`."""
        self._give_back(start, self._taken.pop(start))
        del self._starts[bisect_left(self._starts, start)]

    def shrink(self, start: int, pages: int) -> None:
        """Keep the first `pages` pages of an extent and give the others back. Its place is from
        then on what `allocate` would have chosen a place for. Raises `KeyError`, `ValueError`.
        """
        before = self._taken[start]
        if not 1 <= pages <= before:
            raise ValueError(f"an extent of {before} pages cannot become one of {pages}")
        self._taken[start] = pages
        self._give_back(start + pages, before - pages)

    def pages(self, start: int) -> int:
        """The length of the extent that begins at `start`. Raises `KeyError`."""
        return self._taken[start]

    def within(self, start: int, end: int) -> list[int]:
        """Where the extents begin that have a page in [start, end), in order."""
        first, last = bisect_left(self._starts, start), bisect_left(self._starts, end)
        if first and self._starts[first - 1] + self._taken[self._starts[first - 1]] > start:
            first -= 1
        return self._starts[first:last]

    def _give_back(self, start: int, pages: int) -> None:
        """Make these pages free blocks: as large as alignment allows, joined with their buddies."""
        self.free_pages += pages
        end = start + pages
        while start < end:
            order = (end - start).bit_length() - 1
            if start:
                order = min(order, (start & -start).bit_length() - 1)
            self._join(start, order)
            start += 1 << order

    def _join(self, start: int, order: int) -> None:
        while True:
            buddy = start ^ (1 << order)
            if buddy not in self._free[order]:
                break
            self._free[order].remove(buddy)
            start = min(start, buddy)
            order += 1
        self._free[order].add(start)

    def check(self) -> None:
        """Derive everything anew; raise AssertionError where it differs. For tests."""
        owners = [0] * self.count
        for start, pages in self._taken.items():
            assert start % (1 << order_of(pages)) == 0, f"the extent at {start} is misaligned"
            for page in range(start, start + pages):
                owners[page] += 1
        free = 0
        for order, starts in enumerate(self._free):
            for start in starts:
                assert start % (1 << order) == 0, f"the free block at {start} is misaligned"
                assert start ^ (1 << order) not in starts, "buddies that were not joined"
                free += 1 << order
                for page in range(start, start + (1 << order)):
                    owners[page] += 1
        assert owners == [1] * self.count, "a page is taken twice, or lost"
        assert free == self.free_pages
        assert self._starts == sorted(self._taken)


def order_of(pages: int) -> int:
    """The smallest order whose blocks hold `pages` pages."""
    return (pages - 1).bit_length()


def region_of(page: int, pages: int) -> tuple[int, int]:
    """The region around `page` in which an extent of `pages` pages would have its place."""
    order = order_of(pages)
    start = page >> order << order
    return start, start + (1 << order)
