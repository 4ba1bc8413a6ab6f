"""A bucket that keeps to a budget of bytes, under the requests of a trace.

`SweptBucket` does what `s3kv gc` and the I/O processes do, by the very code that decides there:
`s3kv.objects.ages` chooses what goes, `s3kv.io.server.refreshing.RefreshRule` says which hits
refresh.
What is modelled is time: a refresh happens a while after the hit, and only if nobody has written
the object since; a sweep deletes a while after it has looked, and spares what has been written.
`IdealBucket` is exact LRU by bytes: it knows of every use at once, and is never over its budget.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from s3kv.io.server.refreshing import RefreshRule
from s3kv.objects.ages import Ages


class Bucket(Protocol):
    """What a fleet asks of one. Times are seconds and never go back."""

    peak_objects: int
    counts: Counter[str]

    def get(self, key: bytes, replica: int, now_s: float) -> bool:
        """Whether it is there; a use if so."""
        ...

    def put(self, key: bytes, replica: int, now_s: float) -> None:
        """Write it if it is not there; a use in any case."""
        ...


class IdealBucket:
    """Exact LRU of `capacity` objects."""

    def __init__(self, capacity: int) -> None:
        self.peak_objects = 0
        self.counts: Counter[str] = Counter()
        self._capacity = capacity
        self._objects: OrderedDict[bytes, None] = OrderedDict()

    def get(self, key: bytes, replica: int, now_s: float) -> bool:
        self.counts["gets"] += 1
        if key not in self._objects:
            return False
        self._objects.move_to_end(key)
        self.counts["hits"] += 1
        return True

    def put(self, key: bytes, replica: int, now_s: float) -> None:
        self._objects[key] = None
        self._objects.move_to_end(key)
        while len(self._objects) > self._capacity:
            self._objects.popitem(last=False)
        self.peak_objects = max(self.peak_objects, len(self._objects))


@dataclass(frozen=True, slots=True)
class Upkeep:
    """How a bucket is kept. refresh_after_s: the setting of that name; 0: never.

    sweep_every_s: how often `s3kv gc` runs. sweep_takes_s: from its look at an object to the
    deletion. refresh_takes_s: mean time from a hit to its refresh. conditional: whether the store
    knows the condition of the copy. jitter: off, every hit past the age refreshes.
    """

    refresh_after_s: float
    sweep_every_s: float
    sweep_takes_s: float = 2.0
    refresh_takes_s: float = 0.5
    conditional: bool = True
    jitter: bool = True


@dataclass(slots=True)
class _Always:
    """The rule without chance, to compare with."""

    refresh_after_s: float

    def wants(self, age_s: float) -> bool:
        return age_s > self.refresh_after_s


@dataclass(order=True, slots=True)
class _Event:
    time_s: float
    number: int
    act: Callable[[], None] = field(compare=False)


class SweptBucket:
    """A bucket of objects of one size, with a budget of `capacity` of them."""

    def __init__(self, capacity: int, object_bytes: int, upkeep: Upkeep, seed: int) -> None:
        self.peak_objects = 0
        self.counts: Counter[str] = Counter()
        self._max_bytes = capacity * object_bytes
        self._object_bytes = object_bytes
        self._upkeep = upkeep
        self._rng = random.Random(seed)
        self._rule = self._make_rule()
        self._written_s: dict[bytes, float] = {}
        self._refreshing: set[tuple[int, bytes]] = set()
        self._events: list[_Event] = []
        self._planned = 0
        self._now_s = 0.0
        self._at(upkeep.sweep_every_s, self._sweep)

    def _make_rule(self) -> RefreshRule | _Always | None:
        after_s = self._upkeep.refresh_after_s
        if after_s == 0:
            return None
        return RefreshRule(after_s, self._rng) if self._upkeep.jitter else _Always(after_s)

    def get(self, key: bytes, replica: int, now_s: float) -> bool:
        self._advance(now_s)
        self.counts["gets"] += 1
        if key not in self._written_s:
            return False
        self.counts["hits"] += 1
        self._used(key, replica)
        return True

    def put(self, key: bytes, replica: int, now_s: float) -> None:
        self._advance(now_s)
        if key in self._written_s:
            self.counts["heads"] += self._rule is not None
            self._used(key, replica)
            return
        self.counts["puts"] += 1
        self._written_s[key] = now_s
        self.peak_objects = max(self.peak_objects, len(self._written_s))

    def _used(self, key: bytes, replica: int) -> None:
        written_s = self._written_s[key]
        wanted = self._rule is not None and self._rule.wants(self._now_s - written_s)
        if not wanted or (replica, key) in self._refreshing:
            return
        self._refreshing.add((replica, key))
        takes_s = self._rng.expovariate(1 / self._upkeep.refresh_takes_s)
        self._at(self._now_s + takes_s, lambda: self._refresh(key, replica, written_s))

    def _refresh(self, key: bytes, replica: int, written_s: float) -> None:
        self._refreshing.discard((replica, key))
        now = self._written_s.get(key)
        if now is None or (self._upkeep.conditional and now > written_s):
            self.counts["refused"] += 1
            return
        self.counts["refreshes"] += 1
        self.counts["duplicates"] += now > written_s
        self._written_s[key] = self._now_s

    def _sweep(self) -> None:
        ages = Ages()
        for written_s in self._written_s.values():
            ages.add(written_s, self._object_bytes)
        cut = ages.cut(max_bytes=self._max_bytes)
        victims = {k: s for k, s in self._written_s.items() if cut.takes(s, self._object_bytes)}
        self.counts["sweeps"] += 1
        self._at(self._now_s + self._upkeep.sweep_takes_s, lambda: self._delete(victims))
        self._at(self._now_s + self._upkeep.sweep_every_s, self._sweep)

    def _delete(self, victims: dict[bytes, float]) -> None:
        for key, listed_s in victims.items():
            if self._written_s.get(key) == listed_s:
                del self._written_s[key]
                self.counts["deleted"] += 1
            else:
                self.counts["spared"] += 1

    def _at(self, time_s: float, act: Callable[[], None]) -> None:
        self._planned += 1
        heapq.heappush(self._events, _Event(time_s, self._planned, act))

    def _advance(self, now_s: float) -> None:
        while self._events[0].time_s <= now_s:
            event = heapq.heappop(self._events)
            self._now_s = event.time_s
            event.act()
        self._now_s = now_s
