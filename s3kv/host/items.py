"""Which item of which size is where in a slab: the slot table's protocol for unequal sizes.

    reserve ──▶ RESERVED ── commit ──▶ RESIDENT ── evicted for a reserve ──▶ gone
                    └────── abandon ──▶ gone

An item is what one encoder made of one image or clip: kilobytes to tens of megabytes. Bookkeeping
only: no bytes, no I/O, no clock.

Room for an item is made by evicting what the policy gives up first, and with it what shares its
region (`host.extents`): either one item that is larger than the new one, or items that together
take less than twice its room. That bounds what a placement can push out, whatever the history,
so fragmentation cannot grow.
"""

from __future__ import annotations

from collections.abc import ItemsView
from dataclasses import dataclass
from typing import Literal

from s3kv.host.extents import Extents, order_of, region_of
from s3kv.host.policy import EvictionPolicy, make_policy
from s3kv.types import ChunkKey, Span

PAGE_BYTES = 4096
"""An object's header is one page, so the smallest item has two."""


class ItemError(AssertionError):
    """The caller broke the protocol of `ItemTable`. A bug, to be fixed and not handled."""


@dataclass(slots=True, eq=False)
class Item:
    """Possession of a part of the slab, from `reserve` until `abandon` or eviction."""

    key: ChunkKey
    start: int
    nbytes: int
    resident: bool = False
    pins: int = 0
    is_fresh: bool = True
    """Nobody has used it since it was filled."""

    @property
    def span(self) -> Span:
        """Its place in the slab, in bytes."""
        return Span(self.start * PAGE_BYTES, self.nbytes)

    def use(self) -> Literal["bucket", "host"]:
        """The tier it is served from: the bucket the first time after it was filled."""
        was_fresh, self.is_fresh = self.is_fresh, False
        return "bucket" if was_fresh else "host"


@dataclass(frozen=True, slots=True)
class ItemStatistics:
    """Bytes of the slab by what they hold (free + filling + resident is all of it), and of the
    resident ones those of items with a pin. Rounded up to what an item occupies."""

    free_bytes: int
    filling_bytes: int
    resident_bytes: int
    pinned_bytes: int


class ItemTable:
    """Items in a slab of `nbytes`. Scheduler process, one thread.

    eviction: "lru" or "sieve". Policies that count slots cannot weigh items of unequal size.
    """

    def __init__(self, nbytes: int, eviction: str) -> None:
        self._extents = Extents(max(1, nbytes // PAGE_BYTES))
        self._policy: EvictionPolicy = make_policy(eviction, self._extents.count)
        self._items: dict[ChunkKey, Item] = {}
        self._at: dict[int, Item] = {}
        self._filling_pages = self._pinned_pages = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def largest_bytes(self) -> int:
        """The largest item there is ever room for."""
        return self._extents.largest * PAGE_BYTES

    @property
    def free_bytes(self) -> int:
        return self._extents.free_pages * PAGE_BYTES

    def statistics(self) -> ItemStatistics:
        """O(1)."""
        resident = self._extents.count - self._extents.free_pages - self._filling_pages
        return ItemStatistics(
            self.free_bytes,
            self._filling_pages * PAGE_BYTES,
            resident * PAGE_BYTES,
            self._pinned_pages * PAGE_BYTES,
        )

    def lookup(self, key: ChunkKey) -> Item | None:
        """The item, resident or being filled (`Item.resident`)."""
        return self._items.get(key)

    def items(self) -> ItemsView[ChunkKey, Item]:
        """All there are, for tests and statistics."""
        return self._items.items()

    def reserve(self, key: ChunkKey, nbytes: int) -> Item | None:
        """A place to fill with `nbytes`. None, and nothing changed, when what is in the way is
        being filled or pinned, or the slab is too small.
        """
        if key in self._items:
            raise ItemError(f"reserve of {key}: it has a place already")
        pages = _pages(nbytes)
        if pages > self._extents.largest:
            return None
        start = self._extents.allocate(pages)
        if start is None:
            if not self._make_room(pages):
                return None
            start = self._extents.allocate(pages)
            assert start is not None, "an empty region holds what it was emptied for"
        item = Item(key, start, nbytes)
        self._filling_pages += self._extents.pages(start)
        self._items[key] = self._at[start] = item
        return item

    def commit(self, item: Item, nbytes: int | None = None) -> None:
        """Filled and verified. nbytes: what it is, if that is less than what was reserved."""
        self._require(item, resident=False)
        self._filling_pages -= self._extents.pages(item.start)
        if nbytes is not None and nbytes != item.nbytes:
            if nbytes > item.nbytes:
                raise ItemError(f"{item}: filled with {nbytes} bytes")
            self._extents.shrink(item.start, _pages(nbytes))
            item.nbytes = nbytes
        item.resident = True
        self._policy.inserted(item.start, item.key)

    def abandon(self, item: Item) -> None:
        """It was not filled, and nothing will write to its place any more."""
        self._require(item, resident=False)
        self._filling_pages -= self._extents.pages(item.start)
        self._remove(item)

    def pin(self, item: Item) -> None:
        """It stays where it is until as many `unpin`s. Counts as a use."""
        self._require(item, resident=True)
        if not item.pins:
            self._pinned_pages += self._extents.pages(item.start)
        item.pins += 1
        self._policy.touched(item.start)

    def unpin(self, item: Item) -> None:
        self._require(item, resident=True)
        if not item.pins:
            raise ItemError(f"unpin of {item}: it is not pinned")
        item.pins -= 1
        if not item.pins:
            self._pinned_pages -= self._extents.pages(item.start)

    def _require(self, item: Item, *, resident: bool) -> None:
        if self._items.get(item.key) is not item or item.resident is not resident:
            raise ItemError(f"{item}: gone, or not in the state for this")

    def _make_room(self, pages: int) -> bool:
        first = self._policy.evict(lambda start: self._victims(start, pages) is not None)
        if first is None:
            return False
        for item in self._victims(first, pages) or ():
            if item.start != first:
                self._policy.removed(item.start)
            self._remove(item)
            self.evictions += 1
        return True

    def _victims(self, start: int, pages: int) -> list[Item] | None:
        """What leaves when the item at `start` is to make room for `pages`; None if it cannot."""
        order, order_at = order_of(pages), self._order_at
        if order_at(start) > order:
            victims = [self._at[start]]
        else:
            begin, end = region_of(start, pages)
            starts = self._extents.within(begin, end)
            if end > self._extents.count or order_at(starts[0]) > order:
                return None  # of a larger item in it: that makes room when its own turn comes
            victims = [self._at[s] for s in starts]
        return victims if all(v.resident and not v.pins for v in victims) else None

    def _order_at(self, start: int) -> int:
        return order_of(self._extents.pages(start))

    def _remove(self, item: Item) -> None:
        del self._items[item.key]
        del self._at[item.start]
        self._extents.free(item.start)

    def check(self) -> None:
        """Derive everything anew; raise AssertionError where it differs. For tests."""
        self._extents.check()
        assert {i.start for i in self._items.values()} == set(self._at)
        for item in self._items.values():
            assert self._extents.pages(item.start) == _pages(item.nbytes)
            assert item.resident == (item.start in self._policy)
            assert item.resident or not item.pins
        assert len(self._policy) == sum(i.resident for i in self._items.values())
        pages = self._extents.pages
        filling = sum(pages(i.start) for i in self._items.values() if not i.resident)
        pinned = sum(pages(i.start) for i in self._items.values() if i.pins)
        assert (filling, pinned) == (self._filling_pages, self._pinned_pages)


def _pages(nbytes: int) -> int:
    return max(1, -(-nbytes // PAGE_BYTES))
