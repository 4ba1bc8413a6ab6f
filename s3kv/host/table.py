"""Table of host memory: which entry has which place, and which operations it allows.

Bookkeeping only: no bytes, no I/O, no clock. Chunks of the KV cache, encoder outputs and the
library's blocks follow the same protocol; only the room they lie in differs (`host.room`).
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from typing import Literal, NamedTuple

from s3kv.host.room import Room
from s3kv.types import ChunkKey, Span


class TableError(AssertionError):
    """Violation of the protocol of `Table`.

    Raised for an event that `TRANSITIONS` does not list for the entry's state (an entry that is
    gone is FREE), `unpin` of an unpinned entry, `reserve` of a key that has an entry, and `commit`
    of more bytes than were reserved. The table is unchanged then. The error is a bug of the caller,
    to be fixed and not handled; it is no `S3KVError`, so that no handler catches it by accident.
    """


class EntryState(enum.IntEnum):
    FREE = 0
    """The entry is gone. Its place is free, or has another holder."""
    RESERVED = 1
    """A fetch or a save is filling it. Its bytes must not be read."""
    CLEAN = 2
    """Resident, and may be evicted: the bucket has it, or its upload was given up."""
    DIRTY = 3
    """Resident, and to be uploaded."""


_FREE, _RESERVED, _CLEAN, _DIRTY = EntryState

TRANSITIONS: Mapping[str, Mapping[EntryState, EntryState]] = {
    "reserve": {_FREE: _RESERVED},
    "commit": {_RESERVED: _CLEAN},
    "commit dirty": {_RESERVED: _DIRTY},
    "abandon": {_RESERVED: _FREE},
    "mark_clean": {_DIRTY: _CLEAN},
    "mark_dirty": {_CLEAN: _DIRTY},
    "pin": {_CLEAN: _CLEAN, _DIRTY: _DIRTY},
    "unpin": {_CLEAN: _CLEAN, _DIRTY: _DIRTY},
    "touch": {_CLEAN: _CLEAN, _DIRTY: _DIRTY},
    "evict": {_CLEAN: _FREE},
}
"""Every legal event, and the state it leads to. Anything else raises `TableError`."""


@dataclass(slots=True, eq=False)
class Entry:
    """Possession of a place in the slab, from `reserve` until it is abandoned or evicted. The
    object is the handle: a holder that keeps it longer finds it FREE. For reading only.

    number: that of its place, in units of the room: a slot, or a first page. offset: the same in
    bytes. nbytes: what was reserved, or less if it was committed with less. units: its place's.
    """

    key: ChunkKey
    number: int
    offset: int
    nbytes: int
    units: int
    state: EntryState = _FREE
    pins: int = 0
    is_fresh: bool = True
    """It has not been used since it was filled."""

    @property
    def is_resident(self) -> bool:
        return self.state >= _CLEAN

    @property
    def span(self) -> Span:
        """Its place in the slab, in bytes."""
        return Span(self.offset, self.nbytes)

    def use(self) -> Literal["bucket", "host"]:
        """The tier it is served from: the bucket the first time after it was filled."""
        was_fresh, self.is_fresh = self.is_fresh, False
        return "bucket" if was_fresh else "host"


class Reservation(NamedTuple):
    """An entry to fill, and the keys that were evicted for it."""

    entry: Entry
    evicted: Sequence[ChunkKey]


@dataclass(frozen=True, slots=True)
class TableStatistics:
    """Units of the room (slots or pages) by the state of what they hold: free + reserved + clean +
    dirty is all of them."""

    unit_bytes: int
    free: int
    reserved: int
    clean: int
    dirty: int
    pinned: int
    """Units of the resident entries with at least one pin."""


class Table:
    """Table of entries: the content of the slab, and the operations allowed on it.

    A key has at most one entry. `reserve(…, replace=True)` gives the key of an entry that is still
    being filled to a new one; the replaced entry keeps its place until it is abandoned. Breaking a
    rule raises `TableError` and changes nothing.

    Used from one thread only. `room` must be empty; the table owns it. nbytes: by group, the
    default length in `reserve`; without one it takes one unit.
    """

    __slots__ = ("_at", "_groups", "_lru", "_nbytes", "_pinned", "_room", "_units")

    def __init__(self, room: Room, nbytes: Mapping[int, int] | None = None) -> None:
        self._room = room
        self._nbytes = dict(nbytes or {})
        # Numbers of resident entries, the least recently used first; insertion counts as a use. A
        # linked list with an index, in C: every operation is O(1), and so is iteration after
        # removals at the front, which it is not for a plain dict.
        self._lru: OrderedDict[int, None] = OrderedDict()
        # One dict of block hashes per group, not one of ChunkKeys: bytes cache their hash and
        # tuples do not, and the planner looks up bare hashes without wrapping them.
        self._groups: dict[int, dict[bytes, Entry]] = {}
        self._at: dict[int, Entry] = {}
        self._units = [room.count, 0, 0, 0]
        """Units by state; `_pinned`: those of them that are pinned."""
        self._pinned = [0, 0, 0, 0]

    @property
    def count(self) -> int:
        """Units of the room: slots or pages, free or not."""
        return self._room.count

    @property
    def largest_bytes(self) -> int:
        """The most bytes that one entry can ever have."""
        return self._room.largest * self._room.unit_bytes

    def lookup(self, key: ChunkKey) -> Entry | None:
        """The entry of `key`, resident or being filled (`Entry.state`); None if it has none."""
        group = self._groups.get(key.group)
        return None if group is None else group.get(key.block_hash)

    def entries(self) -> Iterable[Entry]:
        """All entries, in the order of their reservation."""
        return self._at.values()

    def reserve(
        self, key: ChunkKey, nbytes: int | None = None, *, replace: bool = False
    ) -> Reservation | None:
        """Reserve a place of `nbytes` (default: the length for the key's group) to fill with `key`:
        the caller's alone, until it is committed or abandoned. It is free, or made free by evicting
        clean, unpinned entries that were used least recently. Returns None, and changes nothing, if
        there are none, or if the room is too small. replace: the key may have an entry that is
        being filled."""
        held = self._groups.setdefault(key.group, {})
        known = held.get(key.block_hash)
        if known is not None and not (replace and known.state is _RESERVED):
            raise TableError(f"reserve of {key}: it already has {known}")
        room, unit_bytes = self._room, self._room.unit_bytes
        evicted: Sequence[ChunkKey] = ()
        if nbytes is None:
            nbytes = self._nbytes.get(key.group, unit_bytes)
        units = -(-nbytes // unit_bytes) or 1
        number = room.allocate(units)
        if number is None:
            evicted = self._evict(units)
            number = room.allocate(units) if evicted else None
        if number is None:
            return None
        entry = Entry(key, number, number * unit_bytes, nbytes, units)
        self._at[number] = held[key.block_hash] = entry
        self._enter(entry, TRANSITIONS["reserve"][_FREE])
        return Reservation(entry, evicted)

    def commit(self, entry: Entry, *, dirty: bool, nbytes: int | None = None) -> None:
        """Note that `entry` is filled and verified: all may use it. dirty: the bucket lacks it so
        far. nbytes: its length, if less than was reserved."""
        state = self._next(entry, "commit dirty" if dirty else "commit")
        if nbytes is not None and nbytes != entry.nbytes:
            self._shrink(entry, nbytes)
        self._enter(entry, state)
        self._lru[entry.number] = None

    def abandon(self, entry: Entry) -> None:
        """Free `entry`: it was not filled, and nothing will write to its place any more."""
        self._release(entry, self._next(entry, "abandon"))

    def pin(self, entry: Entry) -> None:
        """Keep a resident entry and its bytes, for a reader of them (a load, an upload). Pins nest.
        Pin an entry that you have found before you reserve more, which may evict it."""
        state = self._next(entry, "pin")
        if not entry.pins:
            self._pinned[state] += entry.units
        entry.pins += 1

    def pin_prefix(self, group: int, block_hashes: Sequence[bytes], start: int = 0) -> list[Entry]:
        """Pin and return the entries of `block_hashes[start:]`, up to the first not resident."""
        # One pass over a long prompt, on the engine's thread: hence the local names.
        found: list[Entry] = []
        find = self._groups.get(group, {}).get
        reserved, clean = _RESERVED, _CLEAN
        clean_units = dirty_units = 0
        for block_hash in islice(block_hashes, start, None):
            entry = find(block_hash)
            if entry is None or entry.state is reserved:
                break
            if not entry.pins:
                if entry.state is clean:
                    clean_units += entry.units
                else:
                    dirty_units += entry.units
            entry.pins += 1
            found.append(entry)
        self._pinned[_CLEAN] += clean_units
        self._pinned[_DIRTY] += dirty_units
        return found

    def unpin(self, entry: Entry) -> None:
        state = self._next(entry, "unpin")
        if not entry.pins:
            raise TableError(f"unpin of {entry}: it is not pinned")
        entry.pins -= 1
        if not entry.pins:
            self._pinned[state] -= entry.units

    def mark_clean(self, entry: Entry) -> None:
        """Note that nothing uploads this dirty entry any more; it may be pinned."""
        self._mark(entry, self._next(entry, "mark_clean"))

    def mark_dirty(self, entry: Entry) -> None:
        """Note that this clean entry is about to be uploaded; it may be pinned."""
        self._mark(entry, self._next(entry, "mark_dirty"))

    def _mark(self, entry: Entry, state: EntryState) -> None:
        if entry.pins:
            self._pinned[entry.state] -= entry.units
            self._pinned[state] += entry.units
        self._enter(entry, state)

    def touch_chain(self, entries: Sequence[Entry]) -> None:
        """Note the use of these resident entries of one prompt, given from head to tail. They count
        as used from tail to head, so that a tail is evicted before its head."""
        for entry in entries:
            self._next(entry, "touch")
        touch = self._lru.move_to_end
        for entry in reversed(entries):
            touch(entry.number)

    def statistics(self) -> TableStatistics:
        """Counts of units, in O(1)."""
        free, reserved, clean, dirty = self._units
        pinned = sum(self._pinned)
        return TableStatistics(self._room.unit_bytes, free, reserved, clean, dirty, pinned)

    def _next(self, entry: Entry, event: str) -> EntryState:
        """The state `event` leads to. Raises if it is illegal."""
        state = TRANSITIONS[event].get(entry.state)
        if state is None:
            now = entry.state.name if entry.state else "gone"
            allowed = " or ".join(state.name for state in TRANSITIONS[event])
            raise TableError(f"{event} of {entry}: it is {now}, allowed is {allowed}")
        return state

    def _enter(self, entry: Entry, state: EntryState) -> None:
        self._units[entry.state] -= entry.units
        self._units[state] += entry.units
        entry.state = state

    def _shrink(self, entry: Entry, nbytes: int) -> None:
        if nbytes > entry.nbytes:
            raise TableError(f"commit of {entry}: it was filled with {nbytes} bytes")
        units = max(1, -(-nbytes // self._room.unit_bytes))
        self._room.shrink(entry.number, units)
        self._units[entry.state] -= entry.units - units
        self._units[_FREE] += entry.units - units
        entry.nbytes, entry.units = nbytes, units

    def _release(self, entry: Entry, state: EntryState) -> None:
        key = entry.key
        if self.lookup(key) is entry:
            del self._groups[key.group][key.block_hash]
        del self._at[entry.number]
        self._enter(entry, state)
        self._room.free(entry.number)

    def _evict(self, units: int) -> Sequence[ChunkKey]:
        """Free a place of `units` units; return the keys of its former entries, none if there is no
        such place to free."""
        # Counted rather than searched: with a slab full of dirty entries every save comes here.
        if units > self._room.largest or self._units[_CLEAN] == self._pinned[_CLEAN]:
            return ()
        makes_room = self._may_go if self._room.largest == 1 else partial(self._makes_room, units)
        first = next(filter(makes_room, self._lru), None)
        if first is None:
            return ()
        # Others keep their places. Pinned entries, which may be half of all, are passed over once.
        passed = takewhile(lambda number: number != first, self._lru)
        for number in [number for number in passed if self._at[number].pins]:
            self._lru.move_to_end(number)
        keys = []
        for number in self._room.clearing(first, units):
            victim = self._at[number]
            del self._lru[number]
            self._release(victim, TRANSITIONS["evict"][victim.state])
            keys.append(victim.key)
        return keys

    def _makes_room(self, units: int, number: int) -> bool:
        """Whether evicting the entry at a place, with its region, makes room for `units` units."""
        places = self._room.clearing(number, units)
        return len(places) > 0 and all(map(self._may_go, places))

    def _may_go(self, number: int) -> bool:
        entry = self._at[number]
        return entry.state is _CLEAN and not entry.pins
