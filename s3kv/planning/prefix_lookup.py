"""Lookup from the front: in coverages that need all chunks before a length, or the last ones.

Chunks are requested in order from the first that a resume needs: hundreds ahead where the bucket
index says "present", otherwise `probe_chunks` ahead, a window that doubles with every arrival. The
first missing chunk ends the lookup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from s3kv.messages import JobKind
from s3kv.planning.job import Job
from s3kv.planning.ledger import ChunkState, FetchRefusal
from s3kv.planning.lookup import ORDERS_PER_LOOKUP, Claims
from s3kv.planning.wait import Wait
from s3kv.types import Outcome

KNOWN_WINDOW_CHUNKS = 256
"""Window for chunks known to be in the bucket: more than any network keeps in flight."""


@dataclass(slots=True, eq=False)
class PrefixLookup:
    """A `Lookup` from the front. Chunks from `end` on are not requested; None: no chunk is missing.
    As of the last `collect` the engine's own cache has `own` chunks, and `aim` may be resumed
    after. window: chunks after the ready ones that may be requested without being known."""

    claims: Claims
    wait: Wait
    window: int
    end: int | None = None
    own: int = 0
    aim: int = 0

    @property
    def waits(self) -> bool:
        ready = self.claims.ready
        return ready in self.claims.pending and ready < self.limit

    def awaits(self, position: int) -> bool:
        return self.claims.is_open and (self.end is None or position < self.end)

    @property
    def secured(self) -> int:
        """The engine's own chunks, if a resume needs the rest of a window, too."""
        return self.claims.ready if self.claims.coverage.kind.is_cumulative else self.own

    @property
    def unproven(self) -> int:
        """The chunks after the last one before `end` that is known to be in the bucket."""
        if self.end is None:
            return 0
        claims, is_present = self.claims, self.claims.ledger.index.is_present
        for position in range(self.end - 1, claims.ready - 1, -1):
            if position in claims.early or is_present(claims.key(position)):
                return self.end - 1 - position
        return self.end - claims.ready

    @property
    def unasked(self) -> int:
        return max(0, self.limit - self.claims.asked)

    @property
    def rounds(self) -> int:
        return (self.unasked // self.window).bit_length()

    @property
    def limit(self) -> int:
        return self.aim if self.end is None else min(self.end, self.aim)

    @property
    def looks_ahead(self) -> bool:
        return self.end is None

    def collect(
        self, local_tokens: int, aim: int | None, now_s: float, orders: int = ORDERS_PER_LOOKUP
    ) -> None:
        """Lease resident chunks from the first missing one on, and request more, all before `end`.
        Where every chunk makes the hit longer, chunks between `end` and `aim` are leased, too."""
        claims = self.claims
        claims.is_open = True
        coverage = claims.coverage
        first = self.own = local_tokens // coverage.chunk_tokens
        hashes = claims.hashes.loadable()
        end = len(hashes)
        if not coverage.kind.is_cumulative:
            last = claims.hashes.before_the_last
            end = last if aim is None else min(aim, last)
            first = max(first, coverage.chunks_for(end * coverage.chunk_tokens).start)
            hashes = hashes[:end]
        elif aim is not None:
            # Chunks after those that all coverages can have make room for those that they need.
            hashes = hashes[:aim]
            claims.shorten(aim)
        self.aim = end
        if first != claims.first:
            claims.give_back()
            claims.first = claims.ready = claims.asked = first
        self._lease(hashes)
        self._request(now_s, orders)

    def _request(self, now_s: float, orders: int) -> None:
        claims, end = self.claims, self.limit
        counters = claims.ledger.counters
        full = counters["fetches"] + orders
        pending = len(claims.pending)
        claims.has_more = False
        while claims.asked < end and self._ask(claims.asked, now_s):
            claims.asked += 1
            if counters["fetches"] == full:
                claims.has_more = True
                break
        if len(claims.pending) > pending:
            self.wait.asked_s = now_s

    def _lease(self, hashes: Sequence[bytes]) -> None:
        claims, table = self.claims, self.claims.ledger.table
        entries = table.pin_prefix(claims.coverage.number, hashes, claims.ready)
        claims.leases += entries
        claims.ready += len(entries)
        claims.asked = max(claims.asked, claims.ready)
        for position in [p for p in claims.early if p < claims.ready]:
            table.unpin(claims.early.pop(position))

    def _ask(self, position: int, now_s: float) -> bool:
        """Order, join or lease the chunk at `position`. Returns False to stop here for now."""
        claims = self.claims
        if position in claims.pending or position in claims.early:
            return True
        ledger, key = claims.ledger, claims.key(position)
        state = ledger.state(key)
        if state is ChunkState.RESIDENT:
            entry = ledger.table.lookup(key)
            assert entry is not None
            claims.lease_early(position, entry)
            return True
        in_window = position < claims.ready + self.window
        job: Job | None = None
        if state is ChunkState.FETCHING and in_window:
            job = ledger.fetch_job(key)
        elif state is ChunkState.ABSENT and (
            in_window
            or (position < claims.ready + KNOWN_WINDOW_CHUNKS and ledger.index.is_present(key))
        ):
            refusal = ledger.refusal(key, now_s, known=not in_window)
            if refusal is FetchRefusal.ABSENT:
                self.end = position
            job = None if refusal else claims.order(position, key)
        return claims.join(self, position, job)

    def fetch_ended(self, position: int, job: Job, now_s: float) -> None:
        claims = self.claims
        del claims.pending[position]
        outcome, entry = job.outcomes[JobKind.FETCH], claims.ledger.table.lookup(job.key)
        if entry is not None and entry.is_resident and claims.is_open:
            claims.lease_early(position, entry)
            if entry is job.entry:  # else another request has computed it meanwhile
                claims.fetched.add(position)
            self.window *= 2
            self.wait.arrived(now_s)
            return
        if outcome is Outcome.CANCELLED or entry is not None:
            # Request it again: another request has cancelled the fetch, or computes the chunk.
            claims.asked = min(claims.asked, position)
        elif not outcome.is_success:
            self.end = position if self.end is None else min(self.end, position)
        self.wait.wake()

    def stop(self) -> None:
        # A window is not requested for a shorter prefix.
        self.end = self.claims.ready if self.claims.coverage.kind.is_cumulative else 0

    def reopen(self) -> None:
        self.claims.reopen()
        self.end = None
