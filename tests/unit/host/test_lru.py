"""LRU against a plain list, and by hand."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from s3kv.host.lru import LRU
from tests.machines import play


def anything(slot: int) -> bool:
    return True


def drain(lru: LRU) -> list[int]:
    """All slots in the order of eviction."""
    order = []
    while (slot := lru.evict(anything)) is not None:
        order.append(slot)
    return order


def filled(count: int) -> LRU:
    lru = LRU()
    for slot in range(count):
        lru.inserted(slot)
    return lru


class LRUMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(1, 24))
    def start(self, capacity: int) -> None:
        self.capacity = capacity
        self.lru = LRU()
        self.order: list[int] = []
        """The model: slots, the least recently used first."""

    def pick(self, number: int) -> int:
        return sorted(self.order)[number % len(self.order)]

    @rule()
    def insert(self) -> None:
        free = sorted(set(range(self.capacity)) - set(self.order))
        if free:
            self.lru.inserted(free[0])
            self.order.append(free[0])

    @precondition(lambda self: self.order)
    @rule(number=st.integers(0, 23))
    def touch(self, number: int) -> None:
        slot = self.pick(number)
        self.lru.touched(slot)
        self.order.remove(slot)
        self.order.append(slot)

    @precondition(lambda self: self.order)
    @rule(number=st.integers(0, 23))
    def remove(self, number: int) -> None:
        slot = self.pick(number)
        self.lru.removed(slot)
        self.order.remove(slot)

    @rule(busy=st.frozensets(st.integers(0, 23)))
    def evict(self, busy: frozenset[int]) -> None:
        slot = self.lru.evict(lambda slot: slot not in busy)
        assert slot == next((slot for slot in self.order if slot not in busy), None)
        if slot is not None:
            self.order.remove(slot)

    @invariant()
    def holds_the_slots_inserted(self) -> None:
        assert len(self.lru) == len(self.order)
        assert all((slot in self.lru) == (slot in self.order) for slot in range(24))

    def teardown(self) -> None:
        if hasattr(self, "lru"):
            assert drain(self.lru) == self.order


def test_agrees_with_a_list() -> None:
    play(LRUMachine, games=150, steps=60)


def test_nothing_to_evict_from_an_empty_queue() -> None:
    assert LRU().evict(anything) is None


def test_without_uses_the_order_is_that_of_insertion() -> None:
    assert drain(filled(30)) == list(range(30))


def test_gives_up_when_nothing_is_evictable_and_keeps_all() -> None:
    lru = filled(20)
    assert lru.evict(lambda slot: False) is None
    assert drain(lru) == list(range(20))


def test_a_slot_holds_another_chunk_without_inheriting_uses() -> None:
    lru = filled(4)
    for slot in (0, 1, 2):
        lru.touched(slot)
    lru.removed(0)
    lru.inserted(0)
    assert drain(lru) == [3, 1, 2, 0]


def test_a_chain_touched_from_tail_to_head_goes_from_its_tail() -> None:
    lru = filled(6)
    for slot in (5, 4, 3, 2, 1, 0):
        lru.touched(slot)
    assert drain(lru) == [5, 4, 3, 2, 1, 0]


def test_a_slot_passed_over_keeps_its_place() -> None:
    lru = filled(4)
    assert lru.evict(lambda slot: slot >= 2) == 2
    assert drain(lru) == [0, 1, 3]
