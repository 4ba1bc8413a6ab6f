"""Lookup from the front, for coverages that need all chunks before a length, or the last ones.

Chunks are requested in order from the first that a resume needs: hundreds ahead where the bucket
index has them as present, otherwise `probe_chunks` ahead, a window that doubles with every arrival.
The first missing chunk ends the lookup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from s3kv.messages import JobKind
from s3kv.planning.job import Job
from s3kv.planning.ledger import ChunkState
from s3kv.planning.lookup import Lookup
from s3kv.types import Outcome

KNOWN_WINDOW_CHUNKS = 256
"""Window for chunks known to be in the bucket: more than any network keeps in flight."""


@dataclass(slots=True, eq=False)
class PrefixLookup(Lookup):
    """A `Lookup` from the front. Chunks from `end` on are not requested; None: no chunk is missing.
    own: chunks in the engine's own cache, as of the last `collect`. The window begins after the
    ready chunks."""

    end: int | None = None
    own: int = 0

    @property
    def waits(self) -> bool:
        return self.ready in self.pending and self.ready < self.limit

    def awaits(self, position: int) -> bool:
        return self.is_open and (self.end is None or position < self.end)

    @property
    def secured(self) -> int:
        """Only the engine's own chunks if a resume also needs the rest of a window."""
        return self.ready if self.coverage.kind.is_cumulative else self.own

    @property
    def unproven(self) -> int:
        """Number of chunks before `end` that follow the last one known to be in the bucket."""
        if self.end is None:
            return 0
        is_present = self.ledger.index.is_present
        for position in range(self.end - 1, self.ready - 1, -1):
            if position in self.early or is_present(self.key(position)):
                return self.end - 1 - position
        return self.end - self.ready

    @property
    def unasked(self) -> int:
        return max(0, self.limit - self.asked)

    @property
    def limit(self) -> int:
        return self.aim if self.end is None else min(self.end, self.aim)

    @property
    def looks_ahead(self) -> bool:
        return self.end is None

    def collect(self, local_tokens: int, aim: int | None, now_s: float, orders: int) -> None:
        """Lease resident chunks from the first missing one to `aim`; request more, before `end`."""
        self.is_open = True
        coverage = self.coverage
        first = self.own = local_tokens // coverage.chunk_tokens
        hashes = self.hashes.loadable()
        end = len(hashes)
        if not coverage.kind.is_cumulative:
            last = self.hashes.before_the_last
            end = last if aim is None else min(aim, last)
            first = max(first, coverage.chunks_for(end * coverage.chunk_tokens).start)
            hashes = hashes[:end]
        elif aim is not None:
            # Chunks beyond the length that all coverages can reach make room for needed ones.
            hashes = hashes[:aim]
            self.shorten(aim)
        self.aim = end
        if first != self.first:
            self.give_back()
            self.first = self.ready = self.asked = first
        self._lease(hashes)
        self._request(now_s, orders)

    def _request(self, now_s: float, orders: int) -> None:
        end, counters = self.limit, self.ledger.counters
        full = counters["fetches"] + orders
        self.has_more = False
        while self.asked < end and self._ask(self.asked, now_s):
            self.asked += 1
            if counters["fetches"] == full:
                self.has_more = True
                break

    def _lease(self, hashes: Sequence[bytes]) -> None:
        table = self.ledger.table
        entries = table.pin_prefix(self.coverage.number, hashes, self.ready)
        self.leases += entries
        self.ready += len(entries)
        self.asked = max(self.asked, self.ready)
        for position in [p for p in self.early if p < self.ready]:
            table.unpin(self.early.pop(position))

    def _ask(self, position: int, now_s: float) -> bool:
        """Order, join or lease the chunk at `position`. Returns False to stop here for now."""
        if position in self.pending or position in self.early:
            return True
        ledger, key = self.ledger, self.key(position)
        state = ledger.state(key)
        if state is ChunkState.RESIDENT:
            entry = ledger.table.lookup(key)
            assert entry is not None
            self.lease_early(position, entry)
            return True
        in_window = position < self.ready + self.window
        job: Job | None = None
        if state is ChunkState.FETCHING and in_window:
            job = ledger.fetch_job(key)
        elif state is ChunkState.ABSENT and (
            in_window
            or (position < self.ready + KNOWN_WINDOW_CHUNKS and ledger.index.is_present(key))
        ):
            refusal = ledger.refusal(key, now_s, known=not in_window)
            if refusal == "absent":
                self.end = position
            job = None if refusal else self.order(position, key, now_s)
            if self.probe is None and job is not None and not ledger.index.is_present(key):
                self.probe = position
        return self.join(position, job, now_s)

    def fetch_ended(self, position: int, job: Job, now_s: float) -> None:
        del self.pending[position]
        outcome, entry = job.outcomes[JobKind.FETCH], self.ledger.table.lookup(job.key)
        if entry is not None and entry.is_resident and self.is_open:
            self.lease_early(position, entry)
            if entry is job.entry:  # else another request has computed it meanwhile
                self.fetched.add(position)
            self.window *= 2
            self.wait.arrived(now_s)
            return
        if outcome is Outcome.CANCELLED or entry is not None:
            # Request it again: another request has cancelled the fetch, or computes the chunk.
            self.asked = min(self.asked, position)
        elif not outcome.is_success:
            self.end = position if self.end is None else min(self.end, position)
        self.wait.wake()

    def stop(self) -> None:
        # A window is not requested for a shorter prefix.
        self.end = self.ready if self.coverage.kind.is_cumulative else 0

    def reopen(self) -> None:
        Lookup.reopen(self)  # `super()` fails: `dataclass` with slots re-creates the class
        self.end = None
