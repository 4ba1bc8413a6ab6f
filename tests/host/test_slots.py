"""The slot table against its transition table, a plain-dict model, and by example."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from s3kv.host.policy import make_policy
from s3kv.host.slots import TRANSITIONS, Slot, SlotError, SlotState, SlotTable
from s3kv.types import ChunkKey
from tests.machines import play

FREE, RESERVED, CLEAN, DIRTY = SlotState


def key(number: int, group: int = 0) -> ChunkKey:
    return ChunkKey(group, number.to_bytes(4, "big"))


def make_table(count: int, policy: str = "lru") -> SlotTable:
    return SlotTable(count, make_policy(policy, count))


def reserve(table: SlotTable, of: ChunkKey) -> Slot:
    reservation = table.reserve(of)
    assert reservation is not None
    return reservation.slot


def resident(table: SlotTable, of: ChunkKey, *, dirty: bool = False) -> Slot:
    slot = reserve(table, of)
    table.commit(slot, dirty=dirty)
    return slot


def prefix(
    table: SlotTable, hashes: Sequence[bytes], *, group: int = 0, start: int = 0
) -> list[Slot]:
    slots = table.pin_prefix(group, hashes, start)
    for slot in slots:
        table.unpin(slot)
    return slots


# ---- every state and every event


def pin_and_unpin(table: SlotTable, slot: Slot) -> None:
    table.pin(slot)
    table.unpin(slot)


EVENTS: dict[str, Callable[[SlotTable, Slot], None]] = {
    "commit": lambda table, slot: table.commit(slot, dirty=False),
    "commit dirty": lambda table, slot: table.commit(slot, dirty=True),
    "abandon": lambda table, slot: table.abandon(slot),
    "mark_clean": lambda table, slot: table.mark_clean(slot),
    "pin": lambda table, slot: table.pin(slot),
    "unpin": pin_and_unpin,
    "touch": lambda table, slot: table.touch_chain([slot]),
    "discard": lambda table, slot: table.discard(slot),
}


def in_state(state: SlotState) -> tuple[SlotTable, Slot]:
    table = make_table(2)
    slot = reserve(table, key(1))
    if state is FREE:
        table.abandon(slot)
    elif state is not RESERVED:
        table.commit(slot, dirty=state is DIRTY)
    return table, slot


def test_every_event_is_tried() -> None:
    assert set(TRANSITIONS) == set(EVENTS) | {"reserve", "evict"}, "those two name no slot"


@pytest.mark.parametrize(("state", "event"), list(itertools.product(SlotState, EVENTS)))
def test_an_event_leads_where_the_table_says_or_is_refused(state: SlotState, event: str) -> None:
    table, slot = in_state(state)
    after = TRANSITIONS[event].get(state)
    before = table.statistics()
    if after is None:
        with pytest.raises(SlotError):
            EVENTS[event](table, slot)
        assert table.statistics() == before
    else:
        EVENTS[event](table, slot)
        if after is FREE:
            assert table.lookup(key(1)) is None
        else:
            assert table.state(slot) is after
    table.check()


@pytest.mark.parametrize("event", EVENTS)
def test_a_stale_handle_is_refused_when_the_slot_has_another_holder(event: str) -> None:
    for dirty in (None, False, True):
        table = make_table(1)
        stale = resident(table, key(1))
        current = reserve(table, key(2))
        assert current.number == stale.number
        if dirty is not None:
            table.commit(current, dirty=dirty)
        before = table.statistics()
        with pytest.raises(SlotError, match="stale"):
            EVENTS[event](table, stale)
        assert table.statistics() == before
        table.check()


@pytest.mark.parametrize("question", [SlotTable.state, SlotTable.key_of, SlotTable.pins])
def test_questions_refuse_a_stale_handle_too(
    question: Callable[[SlotTable, Slot], object],
) -> None:
    table, slot = in_state(FREE)
    with pytest.raises(SlotError, match="stale"):
        question(table, slot)


# ---- by example


def test_free_slots_are_used_before_anything_is_evicted() -> None:
    table = make_table(2)
    resident(table, key(1))
    reservation = table.reserve(key(2))
    assert reservation is not None
    assert reservation.evicted is None


def test_a_full_table_names_the_chunk_it_evicted() -> None:
    table = make_table(2)
    first = resident(table, key(1))
    resident(table, key(2))
    reservation = table.reserve(key(3))
    assert reservation is not None
    assert reservation.evicted == key(1)
    assert reservation.slot.number == first.number
    assert reservation.slot.generation > first.generation
    assert table.lookup(key(1)) is None
    assert table.lookup(key(3)) == reservation.slot


def test_reserved_dirty_and_pinned_slots_are_never_evicted() -> None:
    table = make_table(3)
    reserve(table, key(1))
    dirty = resident(table, key(2), dirty=True)
    pinned = resident(table, key(3))
    table.pin(pinned)
    assert table.reserve(key(4)) is None
    assert table.statistics().refusals == 1
    table.unpin(pinned)
    table.mark_clean(dirty)
    evicted = {table.reserve(key(number)).evicted for number in (4, 5)}  # type: ignore[union-attr]
    assert evicted == {key(2), key(3)}
    assert table.reserve(key(6)) is None


def test_a_key_has_one_slot() -> None:
    table = make_table(2)
    slot = reserve(table, key(1))
    for _ in range(2):
        with pytest.raises(SlotError, match="already"):
            table.reserve(key(1))
        if table.state(slot) is RESERVED:
            table.commit(slot, dirty=False)
    assert table.statistics().free == 1


def test_groups_do_not_share_keys() -> None:
    table = make_table(2)
    first, second = resident(table, key(1, group=0)), resident(table, key(1, group=1))
    assert table.lookup(key(1, group=0)) == first
    assert table.lookup(key(1, group=1)) == second
    assert prefix(table, [key(1).block_hash], group=1) == [second]
    assert prefix(table, [key(1).block_hash], group=2) == []


def test_pins_nest() -> None:
    table = make_table(1)
    slot = resident(table, key(1))
    table.pin(slot)
    table.pin(slot)
    table.unpin(slot)
    assert table.pins(slot) == 1
    with pytest.raises(SlotError, match="pins"):
        table.discard(slot)
    table.unpin(slot)
    with pytest.raises(SlotError, match="not pinned"):
        table.unpin(slot)
    table.discard(slot)
    assert table.statistics().free == 1


def test_a_prefix_ends_at_the_first_chunk_that_is_not_resident() -> None:
    table = make_table(8)
    hashes = [key(number).block_hash for number in range(6)]
    slots = [resident(table, key(number), dirty=number == 1) for number in (0, 1)]
    reserve(table, key(2))
    slots += [resident(table, key(number)) for number in (3, 4)]
    assert prefix(table, hashes) == slots[:2], "chunk 2 is only reserved"
    assert prefix(table, hashes, start=1) == slots[1:2]
    assert prefix(table, hashes, start=3) == slots[2:], "chunk 5 is unknown"
    assert prefix(table, hashes, start=6) == []


def test_a_prefix_is_pinned_as_far_as_it_is_resident() -> None:
    table = make_table(4)
    slots = [resident(table, key(n), dirty=n == 2) for n in (1, 2, 3)]
    table.pin(slots[1])
    missing = reserve(table, key(4))
    hashes = [key(n).block_hash for n in (1, 2, 3, 4)]
    assert table.pin_prefix(0, hashes, start=1) == slots[1:]
    assert [table.pins(slot) for slot in slots] == [0, 2, 1]
    table.check()
    table.abandon(missing)
    for slot in (*slots[1:], slots[1]):
        table.unpin(slot)
    assert table.statistics().pinned == 0
    table.check()


def test_a_chain_leaves_from_its_tail() -> None:
    table = make_table(4)
    chain = [resident(table, key(number)) for number in range(4)]
    table.touch_chain(chain)
    evicted = []
    for number in range(4, 8):
        reservation = table.reserve(key(number))
        assert reservation is not None
        evicted.append(reservation.evicted)
    assert evicted == [key(3), key(2), key(1), key(0)]


def test_a_chain_with_a_stale_handle_touches_nothing() -> None:
    table = make_table(3)
    chain = [resident(table, key(number)) for number in range(3)]
    table.discard(chain[0])
    resident(table, key(9))
    with pytest.raises(SlotError, match="stale"):
        table.touch_chain(chain)
    reservation = table.reserve(key(10))
    assert reservation is not None
    assert reservation.evicted == key(1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda table: table._free.append(0),
        lambda table: table._free.clear(),
        lambda table: table._groups[0].clear(),
        lambda table: table._pins.__setitem__(0, 1),
        lambda table: table._states.__setitem__(0, CLEAN),
        lambda table: table._handles.__setitem__(0, Slot(0, 99)),
        lambda table: table._keys.__setitem__(0, key(7)),
        lambda table: table._policy.removed(1),
        lambda table: table._policy.inserted(0, key(1)),
        lambda table: table._slots_per_state.__setitem__(0, 5),
        lambda table: table._pinned_per_state.__setitem__(2, 1),
    ],
)
def test_check_finds_damage(damage: Callable[[SlotTable], object]) -> None:
    table = make_table(3)
    reserve(table, key(1))
    resident(table, key(2))
    table.check()
    damage(table)
    with pytest.raises(SlotError, match="inconsistent"):
        table.check()


# ---- against a model


@dataclass
class Entry:
    slot: Slot
    state: SlotState
    pins: int = 0

    @property
    def is_evictable(self) -> bool:
        return self.state is CLEAN and not self.pins


def machine_for(policy: str) -> type[RuleBasedStateMachine]:
    class SlotMachine(RuleBasedStateMachine):
        """The model is a dict of what each key holds. Handles are never forgotten, so that every
        event is also tried with stale ones; whatever the transition table forbids must be refused.
        """

        @initialize(count=st.integers(1, 8))
        def start(self, count: int) -> None:
            self.count = count
            self.table = make_table(count, policy)
            self.entries: dict[ChunkKey, Entry] = {}
            self.handles: list[tuple[ChunkKey, Slot]] = []

        def find(self, number: int) -> tuple[ChunkKey, Slot, Entry | None]:
            of, slot = self.handles[number % len(self.handles)]
            entry = self.entries.get(of)
            return of, slot, entry if entry is not None and entry.slot == slot else None

        @rule(number=st.integers(0, 11), group=st.integers(0, 1))
        def reserve(self, number: int, group: int) -> None:
            of = key(number, group)
            if of in self.entries:
                with pytest.raises(SlotError):
                    self.table.reserve(of)
                return
            has_room = len(self.entries) < self.count
            reservation = self.table.reserve(of)
            if reservation is None:
                assert not has_room
                assert not any(entry.is_evictable for entry in self.entries.values())
                return
            slot, evicted = reservation
            assert (evicted is None) == has_room
            if evicted is not None:
                entry = self.entries.pop(evicted)
                assert entry.is_evictable
                assert entry.slot.number == slot.number
            assert all(slot.generation > other.generation for _, other in self.handles)
            self.entries[of] = Entry(slot, RESERVED)
            self.handles.append((of, slot))

        @rule(event=st.sampled_from(sorted(EVENTS)), number=st.integers(0, 200))
        def event(self, event: str, number: int) -> None:
            if not self.handles:
                return
            of, slot, entry = self.find(number)
            after = TRANSITIONS[event].get(entry.state) if entry is not None else None
            if entry is None or after is None or (event == "discard" and entry.pins):
                with pytest.raises(SlotError):
                    EVENTS[event](self.table, slot)
                return
            EVENTS[event](self.table, slot)
            entry.state = after
            entry.pins += event == "pin"
            if after is FREE:
                del self.entries[of]

        @rule(number=st.integers(0, 200))
        def unpin(self, number: int) -> None:
            if not self.handles:
                return
            _, slot, entry = self.find(number)
            if entry is None or not entry.pins:
                with pytest.raises(SlotError):
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
            hashes = [key(number).block_hash for number in numbers]
            assert prefix(self.table, hashes, group=group) == expected

        @invariant()
        def agrees_with_the_model(self) -> None:
            for number, group in itertools.product(range(12), range(2)):
                of = key(number, group)
                entry, slot = self.entries.get(of), self.table.lookup(of)
                assert slot == (entry.slot if entry is not None else None)
                if entry is not None and slot is not None:
                    assert self.table.state(slot) is entry.state
                    assert self.table.pins(slot) == entry.pins
                    assert self.table.key_of(slot) == of

        @invariant()
        def conserves_slots(self) -> None:
            counts = self.table.statistics()
            assert counts.free + counts.reserved + counts.resident == self.count
            entries = self.entries.values()
            assert counts.evictable == sum(entry.is_evictable for entry in entries)
            assert counts.pinned == sum(entry.pins > 0 for entry in entries)
            assert counts.dirty == sum(entry.state is DIRTY for entry in entries)
            assert counts.reservations == len(self.handles)

        @invariant()
        def is_consistent(self) -> None:
            self.table.check()

    return SlotMachine


@pytest.mark.parametrize("policy", ["lru", "sieve", "s3fifo"])
def test_agrees_with_a_model(policy: str) -> None:
    play(machine_for(policy), games=150, steps=60)
