"""The local disk of a host, shared by its engines: its time, its room and its wear.

Objects are read and written at one speed, shared equally by whatever flies. Writes come from a
buffer, and are dropped while it is full. Past `HIGH` of the room the objects that were used longest
ago are deleted, down to `LOW`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.simulation.wire import Link, Timeline
from s3kv.messages import JobKind

READ_S = 0.0001
"""Time to the first byte."""
HIGH, LOW = 0.95, 0.85
BUFFER_BYTES = 256 * 2**20
"""Most bytes that wait to be written, per engine."""
ADMISSIONS = ("all", "fetched")
"""Values of `disk_writes`."""


@dataclass(eq=False)
class Disk:
    """Objects of one size, by block hash. Counts `reads`, `writes`, `dropped` writes, and `evicted`
    objects."""

    timeline: Timeline
    object_bytes: int
    max_bytes: float
    bytes_per_s: float
    admission: str
    engines: int = 1

    def __post_init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._link = Link(
            self.timeline, bytes_per_s=self.bytes_per_s, connection_bytes_per_s=self.bytes_per_s
        )
        self._most_writing = max(1, self.engines * BUFFER_BYTES // self.object_bytes)
        self._writing: set[bytes] = set()
        self._held: OrderedDict[bytes, None] = OrderedDict()
        """The object that was used longest ago is first."""

    def read(self, block_hash: bytes, on_end: Callable[[], None]) -> bool:
        """Read the object if it is there, and return whether it is. A use."""
        if block_hash not in self._held:
            return False
        self.counts["reads"] += 1
        self._held.move_to_end(block_hash)
        body = partial(self._link.carry, self.object_bytes, on_end)
        self.timeline.at(self.timeline.now_s + READ_S, body)
        return True

    def offer(self, block_hash: bytes, kind: JobKind) -> None:
        """Write an object that was uploaded or fetched, if it is admitted and not there."""
        admits = self.admission == "all" or kind is JobKind.FETCH
        if not admits or block_hash in self._held or block_hash in self._writing:
            return
        if len(self._writing) >= self._most_writing:
            self.counts["dropped"] += 1
            return
        self._writing.add(block_hash)
        self._link.carry(self.object_bytes, partial(self._written, block_hash))

    def _written(self, block_hash: bytes) -> None:
        self.counts["writes"] += 1
        self._writing.remove(block_hash)
        self._held[block_hash] = None
        room = self.max_bytes / self.object_bytes
        if len(self._held) > HIGH * room:
            while len(self._held) > LOW * room:
                self._held.popitem(last=False)
                self.counts["evicted"] += 1
