"""Every eviction policy against one suite, a model that transcribes its paper, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

import pytest
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

from s3kv.config import Config
from s3kv.host.policy import EvictionPolicy, make_policy
from s3kv.types import ChunkKey

Evictable = Callable[[int], bool]


def key(name: int | str) -> ChunkKey:
    return ChunkKey(0, str(name).encode())


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
    def inserted(self, slot: int, key: ChunkKey) -> None: ...
    def touched(self, slot: int) -> None: ...
    def removed(self, slot: int) -> None: ...
    def evict(self, evictable: Evictable) -> int | None: ...


class LRUModel:
    def __init__(self, capacity: int) -> None:
        self.order: list[int] = []

    def inserted(self, slot: int, key: ChunkKey) -> None:
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

    def inserted(self, slot: int, key: ChunkKey) -> None:
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


class S3FIFOModel:
    def __init__(self, capacity: int) -> None:
        self.small_count = max(1, capacity // 10)
        self.ghost_count = max(1, capacity - self.small_count)
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[ChunkKey | None] = []
        self.keys: dict[int, ChunkKey] = {}
        self.uses: dict[int, int] = {}

    def inserted(self, slot: int, key: ChunkKey) -> None:
        self.keys[slot] = key
        self.uses[slot] = 0
        if key in self.ghosts:
            self.ghosts = [None if g == key else g for g in self.ghosts]
            self.main.append(slot)
        else:
            self.small.append(slot)

    def touched(self, slot: int) -> None:
        self.uses[slot] = min(self.uses[slot] + 1, 3)

    def removed(self, slot: int) -> None:
        (self.small if slot in self.small else self.main).remove(slot)

    def evict(self, evictable: Evictable) -> int | None:
        queues = [self.evict_small, self.evict_main]
        if len(self.small) < self.small_count:
            queues.insert(0, self.evict_main)
        for evict in queues:
            slot = evict(evictable)
            if slot is not None:
                return slot
        return None

    def evict_small(self, evictable: Evictable) -> int | None:
        for slot in list(self.small):
            self.small.remove(slot)
            if self.uses[slot] > 1:
                self.uses[slot] = 0
                self.main.append(slot)
            elif not evictable(slot):
                self.small.append(slot)
            else:
                self.ghosts = [*self.ghosts, self.keys[slot]][-self.ghost_count :]
                return slot
        return None

    def evict_main(self, evictable: Evictable) -> int | None:
        while any(map(evictable, self.main)):
            slot = self.main.pop(0)
            if not evictable(slot):
                self.main.append(slot)
            elif self.uses[slot]:
                self.uses[slot] -= 1
                self.main.append(slot)
            else:
                return slot
        return None


def machine_for(name: str, model_of: Callable[[int], Model]) -> type[RuleBasedStateMachine]:
    class PolicyMachine(RuleBasedStateMachine):
        """Twice as many keys as slots, so that keys come back after they left."""

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
            self.policy.inserted(free[0], key(number))
            self.model.inserted(free[0], key(number))

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
            policy.inserted(slot, key(slot))
        return policy

    def test_agrees_with_its_model(self) -> None:
        run_state_machine_as_test(
            machine_for(self.name, self.model),
            settings=settings(
                max_examples=150, stateful_step_count=60, deadline=None, print_blob=True
            ),
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
        policy.inserted(0, key("new"))
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
        policy.inserted(2, key("H"))
        policy.touched(0)
        policy.touched(3)
        assert policy.evict(anything) == 4, "I: the hand went on to D, used, and takes E"
        policy.inserted(4, key("I"))
        policy.touched(1)
        assert policy.evict(anything) == 5, "J: the hand was at F"
        policy.inserted(5, key("J"))
        # G is cleared, then H, I and J go, and only then does the hand start over: A and B are
        # used, D and G are not.
        assert drain(policy) == [2, 4, 5, 3, 6, 0, 1]

    def test_after_the_newest_comes_the_oldest_even_if_something_newer_arrived(self) -> None:
        policy = self.filled(3)
        for slot in (0, 1):
            policy.touched(slot)
        assert policy.evict(anything) == 2
        policy.inserted(2, key("new"))
        assert policy.evict(anything) == 0


class TestS3FIFO(PolicySuite):
    """Twenty slots: the small queue has two, the main queue and the ghosts eighteen."""

    name = "s3fifo"

    def model(self, capacity: int) -> Model:
        return S3FIFOModel(capacity)

    def with_main(self) -> EvictionPolicy:
        """Slots 0 … 17 in the main queue, unused there; 18 and 19 in the small queue."""
        policy = self.filled(20)
        for slot in [*range(18), *range(18)]:
            policy.touched(slot)
        assert policy.evict(anything) == 18
        policy.inserted(18, key("a"))
        return policy

    def test_one_hit_wonders_leave_through_the_small_queue(self) -> None:
        policy = self.with_main()
        for number in range(100):
            slot = policy.evict(anything)
            assert slot in (18, 19), "a scan pushed something out of the main queue"
            policy.inserted(slot, key(f"wonder {number}"))

    def test_one_use_is_not_enough_for_the_main_queue(self) -> None:
        policy = self.with_main()
        policy.touched(19)
        assert policy.evict(anything) == 19

    def test_two_uses_are(self) -> None:
        policy = self.with_main()
        policy.touched(19)
        policy.touched(19)
        assert policy.evict(anything) == 18
        assert policy.evict(anything) == 0, "with the small queue empty the main queue has to give"
        assert drain(policy) == [*range(1, 18), 19], "19 is the newest there, and its uses are gone"

    def test_a_key_that_comes_back_goes_to_the_main_queue(self) -> None:
        policy = self.with_main()
        assert policy.evict(anything) == 19
        policy.inserted(19, key(18))
        assert policy.evict(anything) == 0, "key 18 left the small queue and was remembered"

    def test_a_ghost_counts_once(self) -> None:
        policy = self.with_main()
        policy.removed(19)
        policy.inserted(19, key(18))
        policy.removed(19)
        policy.inserted(19, key(18))
        assert policy.evict(anything) == 18
        assert policy.evict(anything) == 0
        assert policy.evict(anything) == 1

    @pytest.mark.parametrize(("others", "is_remembered"), [(17, True), (18, False)])
    def test_ghosts_are_as_many_as_the_main_queue_has_slots(
        self, others: int, is_remembered: bool
    ) -> None:
        policy = self.with_main()
        for number in range(others):
            slot = policy.evict(anything)
            assert slot is not None
            policy.inserted(slot, key(f"wonder {number}"))
        policy.removed(19)
        policy.inserted(19, key(18))
        assert policy.evict(anything) == (0 if is_remembered else 18)

    def test_the_main_queue_gives_what_the_small_queue_has_just_moved_there(self) -> None:
        policy = self.make(20)
        policy.inserted(0, key(0))
        policy.touched(0)
        policy.touched(0)
        assert policy.evict(anything) == 0

    def test_the_main_queue_gives_a_round_per_use_and_at_most_three(self) -> None:
        policy = self.filled(3)
        for slot in (0, 0, 1, 1, 2, 2):
            policy.touched(slot)
        assert policy.evict(lambda slot: False) is None, "all three are in the main queue now"
        for slot in [0] * 9 + [1] * 3:
            policy.touched(slot)
        assert drain(policy) == [2, 0, 1]

    def test_what_is_removed_is_not_remembered(self) -> None:
        policy = self.with_main()
        policy.removed(19)
        policy.inserted(19, key(19))
        assert [policy.evict(anything), policy.evict(anything)] == [18, 0]


def test_every_policy_of_the_settings_exists() -> None:
    field = Config.__dataclass_fields__["eviction"]
    for name in field.metadata["choices"]:
        assert len(make_policy(name, 8)) == 0
