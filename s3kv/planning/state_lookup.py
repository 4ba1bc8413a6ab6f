"""Lookup from the back: in sparse coverages, where one chunk is enough, the last that there is.

Engines write a state only where a step ends, so most chunks have none. The lookup requests the last
chunk, and twice as many at a time with every one that is missing. States are large, so it requests
none before a chunk that is known to have one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from s3kv.host.table import Entry
from s3kv.messages import JobKind
from s3kv.planning.job import Job
from s3kv.planning.ledger import ChunkState, FetchRefusal
from s3kv.planning.lookup import ORDERS_PER_LOOKUP, Claims
from s3kv.planning.wait import Wait
from s3kv.types import Outcome

MISSES_PER_LOOKUP = 64
"""Missing chunks after which a lookup requests no more. A repeated prompt has its state in the last
chunk, and the next turn of a conversation as many chunks before it as the turn is long. Full
attention, if the model has it, has already told how far the prefix is known at all."""


@dataclass(slots=True, eq=False)
class StateLookup:
    """A `Lookup` from the back. `claims.ready` is one after the last resident chunk, which is
    leased alone; without any, it is the number of chunks in the engine's own cache. aim: chunks
    that may be resumed after, as of the last `collect`. window: chunks requested at a time."""

    claims: Claims
    wait: Wait
    window: int = 1
    aim: int = 0
    is_stopped: bool = False
    gone: set[int] = field(default_factory=set)
    """Positions of chunks that the bucket does not have, or that could not be fetched."""

    looks_ahead = False
    # The chunks that are not requested are expected to be missing.
    unasked = rounds = unproven = 0

    @property
    def waits(self) -> bool:
        ready, pending = self.claims.ready, self.claims.pending
        return not self.is_stopped and any(ready <= p < self.aim for p in pending)

    def awaits(self, position: int) -> bool:
        return self.claims.is_open and not self.is_stopped

    @property
    def secured(self) -> int:
        return self.claims.ready

    @property
    def limit(self) -> int:
        return max(self.aim, self.claims.ready)

    def collect(
        self, local_tokens: int, aim: int | None, now_s: float, orders: int = ORDERS_PER_LOOKUP
    ) -> None:
        """Lease the last resident chunk, and request later ones."""
        claims, table = self.claims, self.claims.ledger.table
        claims.is_open = True
        claims.hashes.read()
        last = claims.hashes.before_the_last
        self.aim = last if aim is None else min(aim, last)
        own = local_tokens // claims.coverage.chunk_tokens
        before, claims.leases = claims.leases, []
        claims.first = claims.ready = own
        if (found := self._find(own)) is not None:
            position, entry = found
            table.pin(entry)
            claims.leases.append(entry)
            claims.first, claims.ready = position, position + 1
        for entry in before:
            table.unpin(entry)
        claims.give_back_early()
        pending = len(claims.pending)
        self._request(now_s, orders)
        if len(claims.pending) > pending:
            self.wait.asked_s = now_s

    def _find(self, own: int) -> tuple[int, Entry] | None:
        """The last resident chunk after the first `own`, and its position."""
        find, key = self.claims.ledger.table.lookup, self.claims.key
        for position in range(self.aim - 1, own - 1, -1):
            entry = find(key(position))
            if entry is not None and entry.is_resident:
                return position, entry
        return None

    def _request(self, now_s: float, orders: int) -> None:
        """Request chunks after the ready one, from the back, until `window` are on their way."""
        claims, awaited = self.claims, 0
        for position in range(self.aim - 1, claims.ready - 1, -1):
            if position in self.gone:
                continue
            full = awaited >= min(self.window, orders) or len(self.gone) >= MISSES_PER_LOOKUP
            if self.is_stopped or full or not self._ask(position, now_s):
                return
            awaited += position in claims.pending
            if claims.ledger.index.is_present(claims.key(position)):
                return

    def _ask(self, position: int, now_s: float) -> bool:
        """Order or join the fetch of a chunk, or find that it is gone. Returns False to stop here
        for now."""
        claims = self.claims
        if position in claims.pending:
            return True
        ledger, key = claims.ledger, claims.key(position)
        state = ledger.state(key)
        if state is ChunkState.FETCHING:
            return claims.join(self, position, ledger.fetch_job(key))
        if state is not ChunkState.ABSENT:
            return False
        refusal = ledger.refusal(key, now_s)
        if refusal is FetchRefusal.ABSENT:
            self.gone.add(position)
            return True
        return claims.join(self, position, None if refusal else claims.order(position, key))

    def fetch_ended(self, position: int, job: Job, now_s: float) -> None:
        claims, outcome = self.claims, job.outcomes[JobKind.FETCH]
        del claims.pending[position]
        if outcome.is_success and claims.is_open and job.entry.is_resident:
            claims.lease_early(position, job.entry)
            claims.fetched.add(position)
            self.wait.arrived(now_s)
            return
        if not outcome.is_success and outcome is not Outcome.CANCELLED:
            self.gone.add(position)
            self.window *= 2
        self.wait.wake()

    def stop(self) -> None:
        self.is_stopped = True

    def reopen(self) -> None:
        self.claims.reopen()
        self.is_stopped = False
        self.gone.clear()
