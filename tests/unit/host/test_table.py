"""The table against its transition table, a plain-dict model, and by example: first in a room of
equal slots, then what is different where sizes differ."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lab.books import check
from s3kv.host.room import PAGE_BYTES, EqualSlots, Extents
from s3kv.host.table import TRANSITIONS, Entry, EntryState, Table, TableError
from s3kv.types import ChunkKey
from tests.machines import play

FREE, RESERVED, CLEAN, DIRTY = EntryState


def key(number: int, group: int = 0) -> ChunkKey:
    return ChunkKey(group, number.to_bytes(4, "big"))


def resident(table: Table, number: int, *, nbytes: int | None = None, dirty: bool = False) -> Entry:
    entry = table.reserve(key(number), nbytes).entry
    table.commit(entry, dirty=dirty)
    return entry


def pin_and_unpin(table: Table, slot: Entry) -> None:
    table.pin(slot)
    table.unpin(slot)


EVENTS: dict[str, Callable[[Table, Entry], None]] = {
    "commit": lambda table, slot: table.commit(slot, dirty=False),
    "commit dirty": lambda table, slot: table.commit(slot, dirty=True),
    "abandon": lambda table, slot: table.abandon(slot),
    "mark_clean": lambda table, slot: table.mark_clean(slot),
    "mark_dirty": lambda table, slot: table.mark_dirty(slot),
    "pin": lambda table, slot: table.pin(slot),
    "unpin": pin_and_unpin,
    "touch": lambda table, slot: table.touch_chain([slot]),
}


def test_every_event_is_tried() -> None:
    assert set(TRANSITIONS) == set(EVENTS) | {"reserve", "evict"}, "those two name no slot"


def test_a_prefix_is_pinned_as_far_as_it_is_resident() -> None:
    table = Table(EqualSlots(4))
    slots = [resident(table, n, dirty=n == 2) for n in (1, 2, 3)]
    table.pin(slots[1])
    missing = table.reserve(key(4)).entry
    assert table.pin_prefix(0, [key(n).block_hash for n in (1, 2, 3, 4)], start=1) == slots[1:]
    assert [slot.pins for slot in slots] == [0, 2, 1]
    check(table)
    table.abandon(missing)
    for slot in (*slots[1:], slots[1]):
        table.unpin(slot)
    assert table.statistics().pinned == 0
    check(table)


def test_pinned_places_are_passed_over_once() -> None:
    table = Table(EqualSlots(4))
    slots = [resident(table, number) for number in range(4)]
    for slot in slots[:2]:
        table.pin(slot)
    assert table.reserve(key(4)).evicted == [key(2)]
    for slot in slots[:2]:
        table.unpin(slot)
    assert [table.reserve(key(n)).evicted for n in (5, 6)] == [[key(3)], [key(0)]]
    check(table)


def test_a_chain_leaves_from_its_tail() -> None:
    table = Table(EqualSlots(4))
    table.touch_chain([resident(table, number) for number in range(4)])
    evicted = [table.reserve(key(number)).evicted for number in range(4, 8)]
    assert evicted == [[key(3)], [key(2)], [key(1)], [key(0)]]


def test_a_chain_with_an_entry_that_is_gone_touches_nothing() -> None:
    table = Table(EqualSlots(3))
    chain = [resident(table, number) for number in range(3)]
    resident(table, 9)
    with pytest.raises(TableError, match="gone"):
        table.touch_chain(chain)
    assert table.reserve(key(10)).evicted == [key(1)]


@dataclass
class Modelled:
    slot: Entry
    state: EntryState
    pins: int = 0

    @property
    def is_evictable(self) -> bool:
        return self.state is CLEAN and not self.pins


class SlotMachine(RuleBasedStateMachine):
    """The model is a dict of what each key holds, and the resident keys in order of use. Handles
    are never forgotten, so that every event is also tried with stale ones; whatever the transition
    table forbids must be refused."""

    @initialize(count=st.integers(1, 8))
    def start(self, count: int) -> None:
        self.count = count
        self.table = Table(EqualSlots(count))
        self.entries: dict[ChunkKey, Modelled] = {}
        self.order: list[ChunkKey] = []
        self.handles: list[tuple[ChunkKey, Entry]] = []

    def find(self, number: int) -> tuple[ChunkKey, Entry, Modelled | None]:
        of, slot = self.handles[number % len(self.handles)]
        entry = self.entries.get(of)
        return of, slot, entry if entry is not None and entry.slot is slot else None

    @rule(number=st.integers(0, 11), group=st.integers(0, 1))
    def reserve(self, number: int, group: int) -> None:
        of = key(number, group)
        if of in self.entries:
            with pytest.raises(TableError):
                self.table.reserve(of)
            return
        has_room = len(self.entries) < self.count
        reservation = self.table.reserve(of)
        if reservation is None:
            assert not has_room
            assert not any(entry.is_evictable for entry in self.entries.values())
            return
        slot, evicted = reservation
        assert len(evicted) == (0 if has_room else 1)
        for gone in evicted:
            assert gone == next(of for of in self.order if self.entries[of].is_evictable)
            self.order.remove(gone)
            entry = self.entries.pop(gone)
            assert entry.slot.number == slot.number
        self.entries[of] = Modelled(slot, RESERVED)
        self.handles.append((of, slot))

    @rule(event=st.sampled_from(sorted(EVENTS)), number=st.integers(0, 200))
    def event(self, event: str, number: int) -> None:
        if not self.handles:
            return
        of, slot, entry = self.find(number)
        after = TRANSITIONS[event].get(entry.state) if entry is not None else None
        if entry is None or after is None:
            with pytest.raises(TableError):
                EVENTS[event](self.table, slot)
            return
        EVENTS[event](self.table, slot)
        entry.state = after
        entry.pins += event == "pin"
        if after is FREE:
            del self.entries[of]
        elif event in ("commit", "commit dirty"):
            self.order.append(of)
        elif event == "touch":
            self.order.remove(of)
            self.order.append(of)

    @rule(number=st.integers(0, 200))
    def unpin(self, number: int) -> None:
        if not self.handles:
            return
        _, slot, entry = self.find(number)
        if entry is None or not entry.pins:
            with pytest.raises(TableError):
                self.table.unpin(slot)
            return
        self.table.unpin(slot)
        entry.pins -= 1

    @rule(numbers=st.lists(st.integers(0, 11), max_size=8), group=st.integers(0, 1))
    def prefix(self, numbers: list[int], group: int) -> None:
        expected = []
        for number in numbers:
            entry = self.entries.get(key(number, group))
            if entry is None or entry.state is RESERVED:
                break
            expected.append(entry.slot)
        found = self.table.pin_prefix(group, [key(number).block_hash for number in numbers], 0)
        for slot in found:
            self.table.unpin(slot)
        assert found == expected

    @invariant()
    def agrees_with_the_model(self) -> None:
        for number, group in itertools.product(range(12), range(2)):
            of = key(number, group)
            entry, slot = self.entries.get(of), self.table.lookup(of)
            assert slot is (entry.slot if entry is not None else None)
            if entry is not None and slot is not None:
                assert (slot.state, slot.pins, slot.key) == (entry.state, entry.pins, of)

    @invariant()
    def conserves_slots(self) -> None:
        counts = self.table.statistics()
        assert counts.free + counts.reserved + counts.clean + counts.dirty == self.count
        entries = self.entries.values()
        assert counts.pinned == sum(entry.pins > 0 for entry in entries)
        assert counts.dirty == sum(entry.state is DIRTY for entry in entries)

    @invariant()
    def is_consistent(self) -> None:
        check(self.table)


def test_agrees_with_a_model() -> None:
    play(SlotMachine, games=150, steps=60)


@pytest.mark.parametrize("seed", range(8))
def test_no_history_makes_the_slab_smaller(seed: int) -> None:
    """Sizes from one page to half of the slab, dirty ones, pins that come and go: every placement
    that fails has something in its way, none evicts more than it may, and in the end the largest
    entry still fits."""
    draw = random.Random(seed)
    table = Table(Extents(1024))
    filling: list[Entry] = []
    held: list[Entry] = []
    for number in range(600):
        nbytes = int(PAGE_BYTES * 2 ** draw.uniform(0, 9)) + draw.randrange(PAGE_BYTES)
        before = list(table.entries())
        reservation = table.reserve(key(number), nbytes)
        gone = [entry for entry in before if entry.state is FREE]
        # Those of one region, or one that is larger than a region by itself.
        pages = -(-nbytes // PAGE_BYTES)
        assert sum(e.units for e in gone) < 2 * pages or len(gone) == 1, (seed, number)
        if reservation is None:
            assert filling or held, f"seed {seed}: refused with nothing in the way"
        else:
            assert set(reservation.evicted) == {entry.key for entry in gone}
            filling.append(reservation.entry)
        if filling and draw.random() < 0.9:
            done = filling.pop(draw.randrange(len(filling)))
            if draw.random() < 0.1:
                table.abandon(done)
            else:
                table.commit(done, dirty=False, nbytes=done.nbytes - draw.randrange(done.nbytes))
                if draw.random() < 0.3:
                    draw.choice([table.pin, table.mark_dirty])(done)
                    held.append(done)
        if len(held) > 6:
            let_go(table, held.pop(draw.randrange(len(held))))
        if number % 25 == 0:
            check(table)
    for entry in filling:
        table.abandon(entry)
    for entry in held:
        let_go(table, entry)
    check(table)
    assert table.reserve(key(10**6), table.largest_bytes) is not None, f"seed {seed}"
    check(table)


def let_go(table: Table, entry: Entry) -> None:
    if entry.pins:
        table.unpin(entry)
    else:
        table.mark_clean(entry)


def test_it_cannot_be_filled_with_more_than_was_reserved() -> None:
    table = Table(Extents(8))
    entry = table.reserve(key(0), 10).entry
    with pytest.raises(TableError, match="filled with 11 bytes"):
        table.commit(entry, dirty=False, nbytes=11)
    assert entry.state is RESERVED


def test_one_in_the_region_that_must_stay_keeps_its_neighbours() -> None:
    table = Table(Extents(4))
    pinned, other = (resident(table, number, nbytes=PAGE_BYTES) for number in (0, 1))
    table.pin(pinned)
    half = resident(table, 2, nbytes=2 * PAGE_BYTES)
    assert table.reserve(key(3), 4 * PAGE_BYTES) is None, "the pinned one is in every region"
    assert table.reserve(key(3), 2 * PAGE_BYTES) is not None
    assert (half.state, other.state) == (FREE, CLEAN)
    assert table.reserve(key(4), 2 * PAGE_BYTES) is None


def test_an_entry_knows_whether_it_was_used_since_it_came() -> None:
    entry = resident(Table(Extents(4)), 0, nbytes=PAGE_BYTES)
    assert [entry.use(), entry.use()] == ["bucket", "host"]
