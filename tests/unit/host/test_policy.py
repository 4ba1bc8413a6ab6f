"""Every eviction policy against one suite, a model that transcribes its paper, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol, get_args

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from s3kv.config import Eviction
from s3kv.host.policy import EvictionPolicy, make_policy

Evictable = Callable[[int], bool]


def anything(slot: int) -> bool:
    return True


def drain(policy: EvictionPolicy) -> list[int]:
    """All slots in the order of eviction."""
    order = []
    while (slot := policy.evict(anything)) is not None:
        order.append(slot)
    return order


# ---- models: the papers' pseudo-code on plain lists, slow and obvious; oldest first


class Model(Protocol):
    def inserted(self, slot: int) -> None: ...
    def touched(self, slot: int) -> None: ...
    def removed(self, slot: int) -> None: ...
    def evict(self, evictable: Evictable) -> int | None: ...


class LRUModel:
    def __init__(self, capacity: int) -> None:
        self.order: list[int] = []

    def inserted(self, slot: int) -> None:
        self.order.append(slot)

    def touched(self, slot: int) -> None:
        self.order.remove(slot)
        self.order.append(slot)

    def removed(self, slot: int) -> None:
        self.order.remove(slot)

    def evict(self, evictable: Evictable) -> int | None:
        for slot in self.order:
            if evictable(slot):
                self.order.remove(slot)
                return slot
        return None


class SIEVEModel:
    def __init__(self, capacity: int) -> None:
        self.order: list[int] = []
        self.visited: dict[int, bool] = {}
        self.hand: int | None = None

    def newer(self, slot: int) -> int | None:
        after = self.order.index(slot) + 1
        return self.order[after] if after < len(self.order) else None

    def inserted(self, slot: int) -> None:
        self.order.append(slot)
        self.visited[slot] = False

    def touched(self, slot: int) -> None:
        self.visited[slot] = True

    def removed(self, slot: int) -> None:
        if slot == self.hand:
            self.hand = self.newer(slot)
        self.order.remove(slot)

    def evict(self, evictable: Evictable) -> int | None:
        if not any(map(evictable, self.order)):
            return None
        slot = self.order[0] if self.hand is None else self.hand
        while self.visited[slot] or not evictable(slot):
            if evictable(slot):
                self.visited[slot] = False
            newer = self.newer(slot)
            slot = self.order[0] if newer is None else newer
        self.hand = self.newer(slot)
        self.order.remove(slot)
        return slot


def machine_for(name: str, model_of: Callable[[int], Model]) -> type[RuleBasedStateMachine]:
    class PolicyMachine(RuleBasedStateMachine):
        @initialize(capacity=st.integers(1, 24))
        def start(self, capacity: int) -> None:
            self.capacity = capacity
            self.policy = make_policy(name, capacity)
            self.model = model_of(capacity)
            self.held: dict[int, int] = {}

        def pick(self, number: int) -> int:
            return sorted(self.held)[number % len(self.held)]

        @rule(number=st.integers(0, 47))
        def insert(self, number: int) -> None:
            number %= 2 * self.capacity
            free = sorted(set(range(self.capacity)) - set(self.held))
            if not free or number in self.held.values():
                return
            self.held[free[0]] = number
            self.policy.inserted(free[0])
            self.model.inserted(free[0])

        @precondition(lambda self: self.held)
        @rule(number=st.integers(0, 23))
        def touch(self, number: int) -> None:
            self.policy.touched(self.pick(number))
            self.model.touched(self.pick(number))

        @precondition(lambda self: self.held)
        @rule(number=st.integers(0, 23))
        def remove(self, number: int) -> None:
            slot = self.pick(number)
            del self.held[slot]
            self.policy.removed(slot)
            self.model.removed(slot)

        @rule(busy=st.frozensets(st.integers(0, 23)))
        def evict(self, busy: frozenset[int]) -> None:
            slot = self.policy.evict(lambda s: s not in busy)
            assert slot == self.model.evict(lambda s: s not in busy)
            if slot is None:
                assert busy >= set(self.held), "refused although something was evictable"
            else:
                assert slot not in busy
                del self.held[slot]

        @invariant()
        def holds_what_was_inserted(self) -> None:
            assert len(self.policy) == len(self.held)
            assert all((slot in self.policy) == (slot in self.held) for slot in range(24))

        def teardown(self) -> None:
            if hasattr(self, "policy"):
                assert sorted(drain(self.policy)) == sorted(self.held)

    return PolicyMachine


# ---- the suite


class PolicySuite:
    """What holds for every policy. A subclass names the policy and a model of it."""

    name: ClassVar[str]

    def model(self, capacity: int) -> Model:
        raise NotImplementedError

    def make(self, capacity: int) -> EvictionPolicy:
        return make_policy(self.name, capacity)

    def filled(self, count: int) -> EvictionPolicy:
        policy = self.make(count)
        for slot in range(count):
            policy.inserted(slot)
        return policy

    def test_agrees_with_its_model(self) -> None:
        run_state_machine_as_test(
            machine_for(self.name, self.model),
            settings=settings(max_examples=150, stateful_step_count=60, print_blob=True),
        )

    def test_nothing_to_evict_from_an_empty_policy(self) -> None:
        policy = self.make(4)
        assert policy.evict(anything) is None
        assert len(policy) == 0

    def test_evicts_everything_once(self) -> None:
        policy = self.filled(50)
        assert sorted(drain(policy)) == list(range(50))
        assert len(policy) == 0

    def test_without_uses_the_order_is_that_of_insertion(self) -> None:
        assert drain(self.filled(30)) == list(range(30))

    def test_gives_up_when_nothing_is_evictable_and_keeps_all(self) -> None:
        policy = self.filled(20)
        for slot in range(0, 20, 3):
            policy.touched(slot)
        assert policy.evict(lambda slot: False) is None
        assert sorted(drain(policy)) == list(range(20))

    def test_finds_the_only_evictable_slot_however_much_it_was_used(self) -> None:
        for only in range(20):
            policy = self.filled(20)
            for slot in list(range(20)) * 5:
                policy.touched(slot)
            assert policy.evict(only.__eq__) == only
            assert only not in policy

    def test_a_slot_holds_another_chunk_after_eviction_without_inheriting_uses(self) -> None:
        policy = self.filled(4)
        for slot in [0] * 5:
            policy.touched(slot)
        policy.removed(0)
        policy.inserted(0)
        assert drain(policy) == [1, 2, 3, 0]

    def test_a_used_slot_outlives_an_unused_one(self) -> None:
        policy = self.filled(10)
        policy.touched(0)
        policy.touched(0)
        assert policy.evict(anything) == 1

    def test_the_same_calls_give_the_same_order(self) -> None:
        orders = []
        for _ in range(2):
            policy = self.filled(40)
            for number in range(200):
                policy.touched(number * number % 37)
            orders.append(drain(policy))
        assert orders[0] == orders[1]

    def test_a_head_that_is_used_outlives_tails_that_are_not(self) -> None:
        policy = self.filled(10)
        for slot in (1, 0, 1, 0):
            policy.touched(slot)
        assert drain(policy)[:8] == [2, 3, 4, 5, 6, 7, 8, 9]


class TestLRU(PolicySuite):
    name = "lru"

    def model(self, capacity: int) -> Model:
        return LRUModel(capacity)

    def test_a_chain_touched_from_tail_to_head_goes_from_its_tail(self) -> None:
        policy = self.filled(6)
        for slot in (5, 4, 3, 2, 1, 0):
            policy.touched(slot)
        assert drain(policy) == [5, 4, 3, 2, 1, 0]

    def test_a_slot_passed_over_keeps_its_place(self) -> None:
        policy = self.filled(4)
        assert policy.evict(lambda slot: slot >= 2) == 2
        assert drain(policy) == [0, 1, 3]


class TestSIEVE(PolicySuite):
    name = "sieve"

    def model(self, capacity: int) -> Model:
        return SIEVEModel(capacity)

    def test_the_hand_worked_through(self) -> None:
        """Slots 0 … 6 are A … G, oldest first; A, B and G were used. H A D I B J are asked for."""
        policy = self.filled(7)
        for slot in (0, 1, 6):
            policy.touched(slot)
        assert policy.evict(anything) == 2, "H: past A and B, which are cleared, to C"
        policy.inserted(2)
        policy.touched(0)
        policy.touched(3)
        assert policy.evict(anything) == 4, "I: the hand went on to D, used, and takes E"
        policy.inserted(4)
        policy.touched(1)
        assert policy.evict(anything) == 5, "J: the hand was at F"
        policy.inserted(5)
        # G is cleared, then H, I and J go, and only then does the hand start over: A and B are
        # used, D and G are not.
        assert drain(policy) == [2, 4, 5, 3, 6, 0, 1]

    def test_after_the_newest_comes_the_oldest_even_if_something_newer_arrived(self) -> None:
        policy = self.filled(3)
        for slot in (0, 1):
            policy.touched(slot)
        assert policy.evict(anything) == 2
        policy.inserted(2)
        assert policy.evict(anything) == 0


def test_every_policy_of_the_settings_exists() -> None:
    for name in get_args(Eviction):
        assert len(make_policy(name, 8)) == 0
