"""Lookup of a request in a group of states: one chunk is enough, the last that has a state.

Engines write a state only where a step ends, so most chunks have none. The lookup goes from the
back: it requests the last chunk, and twice as many at a time with every one that is missing. States
are large, so it requests none before a chunk that is known to have one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from s3kv.host.table import Entry
from s3kv.messages import JobKind
from s3kv.planning.job import Job
from s3kv.planning.ledger import ChunkState, FetchRefusal
from s3kv.planning.lookup import ORDERS_PER_LOOKUP, Lookup, LookupEvent
from s3kv.types import ChunkKey, Outcome

MISSES_PER_LOOKUP = 64
"""Missing chunks after which a lookup requests no more. A repeated prompt has its state in the last
chunk, and the next turn of a conversation as many chunks before it as the turn is long. Full
attention, if the model has it, has already told how far the prefix is known at all."""


@dataclass(slots=True, eq=False)
class StateLookup(Lookup):
    """Lookup in a group of states. `ready` is one after the last resident chunk, which is leased
    alone; without any, it is the number of chunks in the engine's own cache.

    `end` is 0 after `stop`: nothing is requested any more. window: chunks requested at a time."""

    window: int = 1
    gone: set[int] = field(default_factory=set)
    """Positions of chunks that the bucket does not have, or that could not be fetched."""

    @property
    def waits(self) -> bool:
        """Whether a chunk that would make the prefix longer is on its way."""
        return self.end is None and any(self.ready <= p < self.aim for p in self.pending)

    @property
    def unasked(self) -> int:
        """None: the chunks that are not requested are expected to be missing."""
        return 0

    @property
    def limit(self) -> int:
        """Number of chunks that may yet be resumed after."""
        return max(self.aim, self.ready)

    def collect(
        self, local_tokens: int, aim: int | None, now_s: float, orders: int = ORDERS_PER_LOOKUP
    ) -> None:
        """Lease the last resident chunk, and request later ones.

        aim: length to resume at most at, in chunks; None: the chunks before the last token.
        """
        self._step(LookupEvent.COLLECT)
        self.hashes.read()
        last = self.hashes.before_the_last
        self.aim = last if aim is None else min(aim, last)
        own = local_tokens // self.coverage.chunk_tokens
        found = self._find(own)
        before, self.leases = self.leases, []
        self.first = self.ready = own
        if found is not None:
            position, entry = found
            self.ledger.table.pin(entry)
            self.leases.append(entry)
            self.first, self.ready = position, position + 1
        for entry in before:
            self.ledger.table.unpin(entry)
        self._give_back_early()
        pending = len(self.pending)
        self._request(now_s, orders)
        if len(self.pending) > pending:
            self.wait.asked_s = now_s

    def _find(self, own: int) -> tuple[int, Entry] | None:
        """The last resident chunk after the first `own`, and its position."""
        find, known, coverage = self.ledger.table.lookup, self.hashes.known, self.coverage.number
        for position in range(self.aim - 1, own - 1, -1):
            entry = find(ChunkKey(coverage, known[position]))
            if entry is not None and entry.is_resident:
                return position, entry
        return None

    def _request(self, now_s: float, orders: int) -> None:
        """Request chunks after `ready`, from the back, until `window` are on their way."""
        is_present, coverage = self.ledger.index.is_present, self.coverage.number
        awaited = 0
        for position in range(self.aim - 1, self.ready - 1, -1):
            if position in self.gone:
                continue
            full = awaited >= min(self.window, orders) or len(self.gone) >= MISSES_PER_LOOKUP
            if self.end is not None or full or not self._ask(position, now_s):
                return
            awaited += position in self.pending
            if is_present(ChunkKey(coverage, self.hashes.known[position])):
                return

    def _ask(self, position: int, now_s: float) -> bool:
        """Order or join the fetch of a chunk, or find that it is gone. Returns False to stop here
        for now."""
        if position in self.pending:
            return True
        ledger = self.ledger
        key = ChunkKey(self.coverage.number, self.hashes.known[position])
        state = ledger.state(key)
        if state is ChunkState.FETCHING:
            return self._join(position, ledger.fetch_job(key))
        if state is not ChunkState.ABSENT:
            return False
        refusal = ledger.refusal(key, now_s)
        if refusal is FetchRefusal.ABSENT:
            self.gone.add(position)
            return True
        return self._join(position, None if refusal else self._order(position, key))

    def fetch_ended(self, position: int, job: Job, now_s: float) -> None:
        """Take in the end of a fetch that this lookup has ordered or joined."""
        del self.pending[position]
        outcome = job.outcomes[JobKind.FETCH]
        if outcome.is_success and self.is_open and job.entry.is_resident:
            self._lease_early(position, job.entry)
            self.fetched.add(position)
            self.wait.arrived(now_s)
            return
        if not outcome.is_success and outcome is not Outcome.CANCELLED:
            self.gone.add(position)
            self.window *= 2
        self.wait.wake()

    def stop(self) -> None:
        """Stop waiting: `ready` is final."""
        self.end = 0

    def reopen(self) -> None:
        """Start over: the engine asks again for a partly computed request."""
        Lookup.reopen(self)  # a class with slots is not the one that `super()` knows
        self.gone.clear()
