"""Lookup from the back, for sparse coverages: the last chunk that exists is enough.

Engines write a state only where a step ends, so most chunks have none. The lookup requests the last
chunk first, and twice as many at a time after every missing one. States are large, so it requests
none before a chunk that is known to have one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from s3kv.host.table import Entry
from s3kv.messages import JobKind
from s3kv.planning.job import Job
from s3kv.planning.ledger import ChunkState
from s3kv.planning.lookup import Lookup
from s3kv.types import Outcome

MISSES_PER_LOOKUP = 64
"""Missing chunks after which a lookup requests no more. A repeated prompt has its state in the last
chunk, and the next turn of a conversation has it one turn's length earlier. Full attention, if the
model has it, has already determined how much of the prefix exists."""


@dataclass(slots=True, eq=False)
class StateLookup(Lookup):
    """A `Lookup` from the back. `ready` is the position after the last resident chunk, the only one
    leased; without any, it is the number of chunks in the engine's own cache. Chunks that are not
    requested are expected to be missing."""

    is_stopped: bool = False
    gone: set[int] = field(default_factory=set)
    """Positions of chunks that the bucket does not have, or that could not be fetched."""

    @property
    def waits(self) -> bool:
        return not self.is_stopped and any(self.ready <= p < self.aim for p in self.pending)

    @property
    def looks_ahead(self) -> bool:
        return False

    def awaits(self, position: int) -> bool:
        return self.is_open and not self.is_stopped

    @property
    def secured(self) -> int:
        return self.ready

    @property
    def limit(self) -> int:
        return max(self.aim, self.ready)

    def collect(self, local_tokens: int, aim: int | None, now_s: float, orders: int) -> None:
        """Lease the last resident chunk, and request later ones."""
        table = self.ledger.table
        self.is_open = True
        self.hashes.read()
        last = self.hashes.before_the_last
        self.aim = last if aim is None else min(aim, last)
        own = local_tokens // self.coverage.chunk_tokens
        before, self.leases = self.leases, []
        self.first = self.ready = own
        if (found := self._find(own)) is not None:
            position, entry = found
            table.pin(entry)
            self.leases.append(entry)
            self.first, self.ready = position, position + 1
        for entry in before:
            table.unpin(entry)
        self.give_back_early()
        self._request(now_s, orders)

    def _find(self, own: int) -> tuple[int, Entry] | None:
        """The last resident chunk after the first `own`, and its position."""
        find, key = self.ledger.table.lookup, self.key
        for position in range(self.aim - 1, own - 1, -1):
            entry = find(key(position))
            if entry is not None and entry.is_resident:
                return position, entry
        return None

    def _request(self, now_s: float, orders: int) -> None:
        """Request chunks after the ready one, from the back, until `window` are in flight."""
        awaited = 0
        for position in range(self.aim - 1, self.ready - 1, -1):
            if position in self.gone:
                continue
            full = awaited >= min(self.window, orders) or len(self.gone) >= MISSES_PER_LOOKUP
            if self.is_stopped or full or not self._ask(position, now_s):
                return
            awaited += position in self.pending
            if self.ledger.index.is_present(self.key(position)):
                return

    def _ask(self, position: int, now_s: float) -> bool:
        """Order or join the fetch of a chunk, or record that it is gone. False: stop for now."""
        if position in self.pending:
            return True
        ledger, key = self.ledger, self.key(position)
        state = ledger.state(key)
        if state is ChunkState.FETCHING:
            return self.join(position, ledger.fetch_job(key), now_s)
        if state is not ChunkState.ABSENT:
            return False
        refusal = ledger.refusal(key, now_s)
        if refusal == "absent":
            self.gone.add(position)
            return True
        return self.join(position, None if refusal else self.order(position, key, now_s), now_s)

    def fetch_ended(self, position: int, job: Job, now_s: float) -> None:
        outcome = job.outcomes[JobKind.FETCH]
        del self.pending[position]
        if outcome.is_success and self.is_open and job.entry.is_resident:
            self.lease_early(position, job.entry)
            self.fetched.add(position)
            self.wait.arrived(now_s)
            return
        if not outcome.is_success and outcome is not Outcome.CANCELLED:
            self.gone.add(position)
            self.window *= 2
        self.wait.wake()

    def stop(self) -> None:
        self.is_stopped = True

    def reopen(self) -> None:
        Lookup.reopen(self)
        self.is_stopped = False
        self.gone.clear()
