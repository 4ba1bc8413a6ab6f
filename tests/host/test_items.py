"""The table of unequal items: possession, pins, and what making room may cost."""

from __future__ import annotations

import random

import pytest

from s3kv.host.items import PAGE_BYTES, Item, ItemError, ItemTable
from s3kv.types import ChunkKey

MIB = 2**20


def key(number: int) -> ChunkKey:
    return ChunkKey(0, number.to_bytes(4, "big"))


def resident(table: ItemTable, number: int, nbytes: int) -> Item:
    item = table.reserve(key(number), nbytes)
    assert item is not None
    table.commit(item)
    return item


@pytest.mark.parametrize("eviction", ["lru", "sieve"])
@pytest.mark.parametrize("seed", range(8))
def test_no_history_makes_the_slab_smaller(eviction: str, seed: int) -> None:
    """Sizes from one page to half of the slab, pins that come and go: every placement that fails
    has a pinned item or one being filled in its way, none evicts more than it may, and in the end
    the largest item still fits.
    """
    draw = random.Random(seed)
    table = ItemTable(4 * MIB, eviction)
    filling: list[Item] = []
    pinned: list[Item] = []
    for number in range(600):
        nbytes = int(PAGE_BYTES * 2 ** draw.uniform(0, 9)) + draw.randrange(PAGE_BYTES)
        before = {k: i for k, i in table._items.items()}
        item = table.reserve(key(number), nbytes)
        gone = [i.nbytes for k, i in before.items() if table.lookup(k) is None]
        pages = -(-nbytes // PAGE_BYTES)
        # The items of one region, or one that is larger than a region by itself.
        assert sum(-(-n // PAGE_BYTES) for n in gone) < 2 * pages or len(gone) == 1, (seed, number)
        if item is None:
            assert filling or pinned, f"seed {seed}: refused with nothing in the way"
        else:
            filling.append(item)
        if filling and draw.random() < 0.9:
            done = filling.pop(draw.randrange(len(filling)))
            if draw.random() < 0.1:
                table.abandon(done)
            else:
                table.commit(done)
                if draw.random() < 0.3:
                    table.pin(done)
                    pinned.append(done)
        if len(pinned) > 6:
            table.unpin(pinned.pop(draw.randrange(len(pinned))))
        if number % 50 == 0:
            table.check()
    for item in filling:
        table.abandon(item)
    for item in pinned:
        table.unpin(item)
    table.check()
    assert table.reserve(key(10**6), table.largest_bytes) is not None, f"seed {seed}"
    table.check()


def test_the_least_recently_used_goes_first() -> None:
    table = ItemTable(4 * PAGE_BYTES, "lru")
    items = [resident(table, n, PAGE_BYTES) for n in range(4)]
    table.pin(items[0])
    table.unpin(items[0])
    assert table.reserve(key(9), PAGE_BYTES) is not None
    assert table.lookup(key(1)) is None
    assert table.lookup(key(0)) is items[0]


def test_pinned_items_and_those_being_filled_stay() -> None:
    table = ItemTable(4 * PAGE_BYTES, "lru")
    pinned = resident(table, 0, 2 * PAGE_BYTES)
    table.pin(pinned)
    filling = table.reserve(key(1), 2 * PAGE_BYTES)
    assert filling is not None
    assert table.reserve(key(2), PAGE_BYTES) is None
    assert (table.lookup(key(0)), table.lookup(key(1))) == (pinned, filling)
    table.unpin(pinned)
    assert table.reserve(key(2), PAGE_BYTES) is not None
    assert table.evictions == 1


def test_small_items_cost_small_places() -> None:
    table = ItemTable(MIB, "lru")
    for number in range(MIB // PAGE_BYTES // 2):
        assert table.reserve(key(number), PAGE_BYTES + 1) is not None
    assert table.free_bytes == 0


def test_what_is_too_large_is_refused_and_evicts_nothing() -> None:
    table = ItemTable(MIB, "lru")
    resident(table, 0, 100_000)
    assert table.reserve(key(1), table.largest_bytes + 1) is None
    assert table.lookup(key(0)) is not None


def test_broken_rules_are_refused() -> None:
    table = ItemTable(MIB, "lru")
    item = table.reserve(key(0), 10)
    assert item is not None
    with pytest.raises(ItemError, match="a place already"):
        table.reserve(key(0), 10)
    for event in (table.pin, table.unpin):
        with pytest.raises(ItemError, match="not in the state"):
            event(item)
    table.commit(item)
    for event in (table.commit, table.abandon):
        with pytest.raises(ItemError, match="not in the state"):
            event(item)
    with pytest.raises(ItemError, match="not pinned"):
        table.unpin(item)
    gone = table.reserve(key(1), 10)
    assert gone is not None
    table.abandon(gone)
    with pytest.raises(ItemError, match="gone"):
        table.commit(gone)
    table.check()
