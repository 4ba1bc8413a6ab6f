"""The page allocator: nothing overlaps, nothing is lost, and an empty slab is whole."""

from __future__ import annotations

import random
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.books import check
from s3kv.host.room import PAGE_BYTES, EqualSlots, Extents, order_of, region_of, room_for


@settings(max_examples=300)
@given(count=st.integers(1, 200), draws=st.lists(st.integers(0, 2**16), max_size=60))
def test_every_page_has_one_owner_and_all_come_back(count: int, draws: list[int]) -> None:
    extents = Extents(count)
    held: dict[int, int] = {}
    for draw in draws:
        if draw % 3 == 0 and held:
            start = sorted(held)[draw % len(held)]
            extents.free(start)
            del held[start]
        else:
            pages = 1 + draw % extents.largest
            start_or_none = extents.allocate(pages)
            if start_or_none is not None:
                held[start_or_none] = pages
        check(extents)
        assert extents._taken == held
    for start in list(held):
        extents.free(start)
    check(extents)
    assert extents.allocate(extents.largest) is not None, "it is whole again"


@settings(max_examples=200)
@given(count=st.integers(1, 130), pages=st.integers(1, 130), seed=st.integers(0, 2**16))
def test_an_extent_fits_wherever_its_region_is_free(count: int, pages: int, seed: int) -> None:
    """The other direction of what the table relies on: it fails only where no region is free."""
    draw = random.Random(seed)
    extents = Extents(count)
    taken = [s for _ in range(draw.randrange(20)) if (s := extents.allocate(1)) is not None]
    for start in draw.sample(taken, len(taken) // 2):
        extents.free(start)
    regions = [region_of(page, pages) for page in range(0, count, 1 << order_of(pages))]
    free = any(end <= count and not extents.within(start, end) for start, end in regions)
    assert (extents.allocate(pages) is not None) == free


def test_what_reaches_into_a_region_is_within_it() -> None:
    extents = Extents(32)
    long, short = extents.allocate(9), extents.allocate(2)
    assert extents.within(long + 8, long + 9) == [long]
    assert extents.within(*region_of(short, 2)) == [short]
    assert extents.within(long, long + 16) == sorted(
        s for s in (long, short) if long <= s < long + 16
    )


def test_an_extent_costs_the_same_among_many_others() -> None:
    """A rank of a host with 2 TiB has half a million, and the engine's thread allocates them."""

    def seconds(count: int) -> float:
        extents = Extents(2 * count)
        starts = [s for _ in range(count) if (s := extents.allocate(2)) is not None]
        began = process_time()
        for start in random.Random(1).sample(starts, 2_000):
            extents.free(start)
            assert extents.allocate(2) == start
        return process_time() - began

    assert min(seconds(200_000) for _ in range(2)) < 8 * min(seconds(2_000) for _ in range(2))


def test_entries_that_fit_a_unit_have_equal_slots_and_others_have_extents() -> None:
    assert isinstance(room_for(8, 9_000, (9_000, 100)), EqualSlots)
    assert isinstance(room_for(8, PAGE_BYTES, ()), EqualSlots)
    assert isinstance(room_for(8, PAGE_BYTES, (100, PAGE_BYTES + 1)), Extents)
    with pytest.raises(ValueError, match="need pages"):
        room_for(8, 9_000, (9_001,))


def test_nonsense_is_refused() -> None:
    extents = Extents(8)
    with pytest.raises(ValueError, match="0 pages"):
        extents.allocate(0)
    with pytest.raises(KeyError):
        extents.free(3)
    assert extents.allocate(9) is None
