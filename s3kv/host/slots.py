"""Who holds which slot of the slab. Bookkeeping only: no bytes, no I/O, no clock."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, NoReturn

from s3kv.host.policy import EvictionPolicy
from s3kv.types import ChunkKey


class SlotError(AssertionError):
    """The caller broke the protocol of `SlotTable`, or `check` found the table inconsistent.

    Raised for

    - a stale handle: its slot was abandoned, discarded or evicted since;
    - an event the slot's state does not allow, as listed in `TRANSITIONS`;
    - `discard` of a pinned slot, `unpin` of one that is not pinned;
    - `reserve` of a key that already has a slot.

    The table is unchanged then. It is a bug of the caller, to be fixed and not handled; it is no
    `S3KVError`, so that nobody handles it by accident.
    """


class SlotState(enum.IntEnum):
    FREE = 0
    RESERVED = 1
    """Being filled by a fetch or a save. Its bytes must not be read."""
    CLEAN = 2
    """Resident, and the bucket has it."""
    DIRTY = 3
    """Resident, and the bucket does not have it yet."""

    @property
    def is_resident(self) -> bool:
        return self >= SlotState.CLEAN


_FREE, _RESERVED, _CLEAN, _DIRTY = SlotState

TRANSITIONS: Mapping[str, Mapping[SlotState, SlotState]] = {
    "reserve": {_FREE: _RESERVED},
    "commit": {_RESERVED: _CLEAN},
    "commit dirty": {_RESERVED: _DIRTY},
    "abandon": {_RESERVED: _FREE},
    "mark_clean": {_DIRTY: _CLEAN},
    "pin": {_CLEAN: _CLEAN, _DIRTY: _DIRTY},
    "unpin": {_CLEAN: _CLEAN, _DIRTY: _DIRTY},
    "touch": {_CLEAN: _CLEAN, _DIRTY: _DIRTY},
    "discard": {_CLEAN: _FREE, _DIRTY: _FREE},
    "evict": {_CLEAN: _FREE},
}
"""Every legal event, and the state it leads to. Anything else raises `SlotError`."""


class Slot(NamedTuple):
    """Possession of one slot, from `reserve` until it is abandoned, discarded or evicted.

    `generation` is larger for every later reservation of the table, so a handle that outlived its
    possession is told from the current one.
    """

    number: int
    generation: int


class Reservation(NamedTuple):
    """A slot to fill, and whose chunk had to leave host memory for it (None: the slot was free)."""

    slot: Slot
    evicted: ChunkKey | None


@dataclass(frozen=True, slots=True)
class SlotStatistics:
    """Slots by state (free + reserved + clean + dirty is all of them), and what has happened."""

    free: int
    reserved: int
    clean: int
    dirty: int
    pinned: int
    """Resident slots with at least one pin."""
    evictable: int
    """Clean slots without a pin. `reserve` succeeds while free + evictable is not 0."""
    reservations: int
    """Reservations made since the start."""
    evictions: int
    """Reservations that evicted a chunk, since the start."""
    refusals: int
    """Times `reserve` returned None, since the start."""

    @property
    def resident(self) -> int:
        return self.clean + self.dirty


class SlotTable:
    """Which chunk is in which slot, and what may be done with it.

    The protocol:

    1. `reserve(key)` hands out a free slot, or one taken from the chunk the policy gives up first.
       It is the caller's alone, to be filled.
    2. `commit(slot, dirty=…)` says it is filled and verified: the chunk is resident and may be
       used by all. Or `abandon(slot)` says that filling it failed *and that nothing writes to it
       any more*; the slot is free.
    3. `pin(slot)` … `unpin(slot)` around whatever reads a resident slot's bytes (a load, an
       upload). Pins nest. A pinned slot stays as it is. Pin what you have found before you
       reserve more, or the reservation may evict it.
    4. `mark_clean(slot)` when the bucket has a dirty chunk. Only clean, unpinned slots are evicted.
    5. Possession ends when the table evicts the chunk for a `reserve`, which names it, or with
       `discard(slot)`, for a chunk that should not be in memory any more.

                    ┌─ abandon ◀─┐
        FREE ─ reserve ▶ RESERVED ┴ commit ▶ DIRTY ─ mark_clean ▶ CLEAN ─ evict ▶ FREE

    A key has at most one slot. Every broken rule raises `SlotError` and changes nothing.

    Lives in the scheduler's process and is used from one thread only. `policy` must be empty, made
    for `count` slots, and is the table's from then on.
    """

    __slots__ = (
        "_evictions",
        "_free",
        "_groups",
        "_handles",
        "_keys",
        "_pinned_per_state",
        "_pins",
        "_policy",
        "_refusals",
        "_reservations",
        "_slots_per_state",
        "_states",
    )

    def __init__(self, count: int, policy: EvictionPolicy) -> None:
        self._policy = policy
        # One dict of block hashes per group, not one of ChunkKeys: bytes remember their hash and
        # tuples do not, and the planner holds bare hashes, which need no wrapping to be looked up.
        self._groups: dict[int, dict[bytes, Slot]] = {}
        self._keys: list[ChunkKey | None] = [None] * count
        self._handles: list[Slot | None] = [None] * count
        self._states = [_FREE] * count
        self._pins = [0] * count
        self._free = list(range(count - 1, -1, -1))
        self._slots_per_state = [count, 0, 0, 0]
        self._pinned_per_state = [0, 0, 0, 0]
        self._reservations = 0
        self._evictions = 0
        self._refusals = 0

    def __len__(self) -> int:
        return len(self._states)

    # ---- questions

    def lookup(self, key: ChunkKey) -> Slot | None:
        """The slot that holds `key` or is being filled with it (see `state`)."""
        group = self._groups.get(key.group)
        return None if group is None else group.get(key.block_hash)

    def state(self, slot: Slot) -> SlotState:
        """RESERVED, CLEAN or DIRTY (never FREE: a handle to a free slot is stale)."""
        self._check_live(slot, "state")
        return self._states[slot.number]

    def pins(self, slot: Slot) -> int:
        self._check_live(slot, "pins")
        return self._pins[slot.number]

    def key_of(self, slot: Slot) -> ChunkKey:
        self._check_live(slot, "key_of")
        key = self._keys[slot.number]
        assert key is not None
        return key

    # ---- events

    def reserve(self, key: ChunkKey) -> Reservation | None:
        """A slot to fill with `key`. None when every slot is reserved, dirty or pinned; nothing
        has changed then.
        """
        if self.lookup(key) is not None:
            raise SlotError(f"reserve of {key}: it already has {self.lookup(key)}")
        evicted = None
        if not self._free:
            evicted = self._evict()
            if evicted is None:
                self._refusals += 1
                return None
        index = self._free.pop()
        self._reservations += 1
        slot = Slot(index, self._reservations)
        self._handles[index] = slot
        self._keys[index] = key
        self._groups.setdefault(key.group, {})[key.block_hash] = slot
        self._enter(index, TRANSITIONS["reserve"][self._states[index]])
        return Reservation(slot, evicted)

    def commit(self, slot: Slot, *, dirty: bool) -> None:
        """`slot` is filled and verified. `dirty`: the bucket does not have the chunk yet."""
        state = self._next(slot, "commit dirty" if dirty else "commit")
        self._enter(slot.number, state)
        self._policy.inserted(slot.number, self.key_of(slot))

    def abandon(self, slot: Slot) -> None:
        """`slot` was not filled, and nothing will write to it any more."""
        self._next(slot, "abandon")
        self._release(slot.number)

    def pin(self, slot: Slot) -> None:
        state = self._next(slot, "pin")
        if not self._pins[slot.number]:
            self._pinned_per_state[state] += 1
        self._pins[slot.number] += 1

    def pin_prefix(self, group: int, block_hashes: Sequence[bytes], start: int = 0) -> list[Slot]:
        """Find the slots of `block_hashes[start:]`, up to the first that is not resident; pin each.

        One pass over a long prompt, on the engine's thread: hence the local names.
        """
        found: list[Slot] = []
        find = self._groups.get(group, {}).get
        states, pins, reserved = self._states, self._pins, _RESERVED
        fresh = []
        for block_hash in islice(block_hashes, start, None):
            slot = find(block_hash)
            if slot is None:
                break
            index = slot[0]
            state = states[index]
            if state is reserved:
                break
            if not pins[index]:
                fresh.append(state)
            pins[index] += 1
            found.append(slot)
        for state in (_CLEAN, _DIRTY):
            self._pinned_per_state[state] += fresh.count(state)
        return found

    def unpin(self, slot: Slot) -> None:
        state = self._next(slot, "unpin")
        if not self._pins[slot.number]:
            raise SlotError(f"unpin of {slot}: it is not pinned")
        self._pins[slot.number] -= 1
        if not self._pins[slot.number]:
            self._pinned_per_state[state] -= 1

    def mark_clean(self, slot: Slot) -> None:
        """The bucket has the chunk of this dirty slot now. Pins do not matter."""
        state = self._next(slot, "mark_clean")
        if self._pins[slot.number]:
            self._pinned_per_state[_DIRTY] -= 1
            self._pinned_per_state[_CLEAN] += 1
        self._enter(slot.number, state)

    def touch_chain(self, slots: Sequence[Slot]) -> None:
        """These resident chunks of one prompt, from head to tail, were used.

        They reach the policy from tail to head, so that a tail goes before its head.
        """
        for slot in slots:
            self._next(slot, "touch")
        touched = self._policy.touched
        for slot in reversed(slots):
            touched(slot[0])

    def discard(self, slot: Slot) -> None:
        """Drop an unpinned resident chunk, clean or dirty, from host memory."""
        self._next(slot, "discard")
        if self._pins[slot.number]:
            raise SlotError(f"discard of {slot}: it has {self._pins[slot.number]} pins")
        self._policy.removed(slot.number)
        self._release(slot.number)

    # ---- accounts

    def statistics(self) -> SlotStatistics:
        """O(1)."""
        free, reserved, clean, dirty = self._slots_per_state
        return SlotStatistics(
            free=free,
            reserved=reserved,
            clean=clean,
            dirty=dirty,
            pinned=sum(self._pinned_per_state),
            evictable=clean - self._pinned_per_state[_CLEAN],
            reservations=self._reservations,
            evictions=self._evictions,
            refusals=self._refusals,
        )

    def check(self) -> None:
        """Derive every index and count anew, in O(slots); raise `SlotError` where they differ.
        For tests, after every event or at their end.
        """
        taken = [i for i, state in enumerate(self._states) if state is not _FREE]
        resident = [i for i in taken if self._states[i].is_resident]
        pinned = [i for i, pins in enumerate(self._pins) if pins]
        index = {
            (group, block_hash): slot
            for group, slots in self._groups.items()
            for block_hash, slot in slots.items()
        }
        free = [i for i, state in enumerate(self._states) if state is _FREE]
        _require(sorted(self._free) == free, "the free list is not the slots that are FREE")
        _require(self._slots_per_state == _per_state(self._states), "slots per state: miscounted")
        _require(
            self._pinned_per_state == _per_state(self._states[i] for i in pinned),
            "the pinned slots per state are miscounted",
        )
        _require(set(pinned) <= set(resident), "a slot that is not resident is pinned")
        _require(
            index == {self._keys[i]: self._handles[i] for i in taken} and len(index) == len(taken),
            "the index by key is not the keys of the slots",
        )
        for i, (key, handle) in enumerate(zip(self._keys, self._handles, strict=True)):
            if handle is not None:
                fits = handle.number == i and 0 < handle.generation <= self._reservations
                _require(fits, f"the handle of slot {i} is {handle}")
            holders = (key is not None, handle is not None, self._states[i] is not _FREE)
            _require(len(set(holders)) == 1, f"slot {i} has only some of key, handle and state")
        _require(
            len(self._policy) == len(resident) and all(i in self._policy for i in resident),
            "the policy does not hold exactly the resident slots",
        )

    # ---- inside

    def _check_live(self, slot: Slot, event: str) -> None:
        if self._handles[slot[0]] != slot:
            raise SlotError(
                f"{event} of {slot}: stale, the slot is now {self._handles[slot.number] or 'free'}"
            )

    def _next(self, slot: Slot, event: str) -> SlotState:
        """The state `event` leads to. Raises when the handle is stale or the event illegal."""
        index = slot[0]
        if self._handles[index] == slot:
            state = TRANSITIONS[event].get(self._states[index])
            if state is not None:
                return state
        self._refuse(slot, event)

    def _refuse(self, slot: Slot, event: str) -> NoReturn:
        self._check_live(slot, event)
        allowed = " or ".join(state.name for state in TRANSITIONS[event])
        raise SlotError(
            f"{event} of {slot}: it is {self._states[slot.number].name}, allowed is {allowed}"
        )

    def _enter(self, index: int, state: SlotState) -> None:
        self._slots_per_state[self._states[index]] -= 1
        self._slots_per_state[state] += 1
        self._states[index] = state

    def _release(self, index: int) -> None:
        key = self._keys[index]
        assert key is not None
        del self._groups[key.group][key.block_hash]
        self._keys[index] = self._handles[index] = None
        self._enter(index, _FREE)
        self._free.append(index)

    def _evict(self) -> ChunkKey | None:
        """Free the slot that goes first and name its key. None when no slot is evictable."""
        # Counted rather than searched: with a slab full of dirty chunks every save comes here.
        if self._slots_per_state[_CLEAN] == self._pinned_per_state[_CLEAN]:
            return None
        states, pins = self._states, self._pins
        index = self._policy.evict(lambda i: states[i] is _CLEAN and not pins[i])
        assert index is not None
        key = self._keys[index]
        self._release(index)
        self._evictions += 1
        return key


def _per_state(states: Iterable[SlotState]) -> list[int]:
    counts = [0] * len(SlotState)
    for state in states:
        counts[state] += 1
    return counts


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise SlotError(f"inconsistent: {what}")
