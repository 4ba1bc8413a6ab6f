"""Lookup of a request in one coverage: leases resident chunks and requests the others.

The GET is the probe. Chunks are requested in order from the first that a resume needs:
hundreds ahead where the bucket index says "present", otherwise `probe_chunks` ahead, a window that
doubles with every arrival. The first missing chunk ends the lookup. A fetch under way for another
request is joined; no chunk is requested twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from s3kv.host.table import Entry
from s3kv.messages import CopyPart, JobKind
from s3kv.planning.group_kinds import Coverage
from s3kv.planning.job import Job
from s3kv.planning.ledger import ChunkState, FetchRefusal, Ledger
from s3kv.planning.residency import Origin
from s3kv.planning.wait import Wait
from s3kv.states import IdentityEnum, Transitions
from s3kv.types import ChunkKey, Outcome

KNOWN_WINDOW_CHUNKS = 256
"""Window for chunks known to be in the bucket: more than any network keeps in flight."""
ORDERS_PER_LOOKUP = 32
"""Most fetches ordered in one lookup; the rest follow in the next steps. An order takes 3 to 5 µs
of the engine's scheduling thread. On arrival a request's whole window is ordered: otherwise the
network would idle for engine steps, which may take hundreds of ms."""


class LookupState(IdentityEnum):
    OPEN = "open"
    """It leases chunks that arrive."""
    HELD = "held"
    """Its leases are offered or being loaded. Later arrivals serve other requests."""
    CLOSED = "closed"
    """It has no leases and takes none until it is reopened."""


class LookupEvent(IdentityEnum):
    COLLECT = "collect"
    RELEASE = "release"
    HOLD = "hold"
    CLOSE = "close"
    REOPEN = "reopen"


_OPEN, _HELD, _CLOSED = LookupState

LOOKUP_TRANSITIONS: Transitions[LookupState, LookupEvent] = Transitions(
    {
        (_OPEN, LookupEvent.COLLECT): _OPEN,
        # The answer was "nothing". The engine may ask again before it admits the request.
        (_OPEN, LookupEvent.RELEASE): _OPEN,
        (_OPEN, LookupEvent.HOLD): _HELD,
        (_OPEN, LookupEvent.CLOSE): _CLOSED,
        # The engine could not place the request after the offer, and asks again.
        (_HELD, LookupEvent.COLLECT): _OPEN,
        (_HELD, LookupEvent.CLOSE): _CLOSED,
        (_CLOSED, LookupEvent.CLOSE): _CLOSED,
        (_CLOSED, LookupEvent.REOPEN): _OPEN,
    }
)


@dataclass(slots=True, eq=False)
class ChunkHashes:
    """Chunk hashes of a request, taken from the engine's growing list of block hashes.

    stride: hash blocks per chunk. salt: key from which the hashes are derived, if not empty."""

    block_hashes: Sequence[bytes]
    stride: int
    salt: bytes
    known: list[bytes] = field(default_factory=list)
    """Hashes as of the last `read`."""
    resumable: int | None = None
    """Number of chunks that end before the request's last token; None if the caller does not tell
    how many tokens it has."""
    limit: int | None = None
    """Number of chunks from the start that may be loaded; None: all."""

    def read(self) -> list[bytes]:
        """Update and return `known`: the hashes of all chunks whose tokens are known by now."""
        known, stride = self.known, self.stride
        fresh = self.block_hashes[(len(known) + 1) * stride - 1 :: stride]
        if fresh:
            known += [self._salted(h) for h in fresh] if self.salt else fresh
        return known

    def loadable(self) -> list[bytes]:
        """Update `known`, and return the hashes of the chunks that may be loaded."""
        known = self.read()
        return known if self.limit is None else known[: self.limit]

    @property
    def count(self) -> int:
        """Number of chunks that may be loaded, as of the last `read`."""
        return self._limited(len(self.known))

    @property
    def before_the_last(self) -> int:
        """Number of chunks that may be loaded and end before the last known token."""
        if self.resumable is None:
            return self._limited((len(self.block_hashes) - 1) // self.stride)
        return self._limited(min(self.resumable, len(self.block_hashes) // self.stride))

    def _limited(self, chunks: int) -> int:
        return chunks if self.limit is None else min(chunks, self.limit)

    def _salted(self, block_hash: bytes) -> bytes:
        return blake2b(block_hash, key=self.salt, digest_size=32).digest()


@dataclass(slots=True, eq=False)
class Lookup:
    """Lookup in one coverage. Same process, thread and clock as the planner.

    Chunk positions count from the start of the prompt. Chunks `first … ready` are resident, and
    leased until the engine decides; `ready … asked` have been requested; chunks from `end` on are
    not requested. As of the last `collect` the engine's own cache has `own` chunks, and `aim` may
    be resumed after. window: chunks after `ready` that may be requested without being known."""

    request_id: str
    ledger: Ledger
    coverage: Coverage
    hashes: ChunkHashes
    wait: Wait
    window: int
    planned: list[Job] = field(default_factory=list)
    """The fetches for this step's plan: one list for all lookups."""
    state: LookupState = _OPEN
    first: int = 0
    ready: int = 0
    asked: int = 0
    end: int | None = None
    own: int = 0
    aim: int = 0
    leases: list[Entry] = field(default_factory=list)
    """Leases of the chunks `first … ready`, or none."""
    early: dict[int, Entry] = field(default_factory=dict)
    """Leases of chunks after `ready`: they arrived before a chunk that is still missing."""
    pending: dict[int, Job] = field(default_factory=dict)
    fetched: set[int] = field(default_factory=set)
    """Positions of chunks fetched from the bucket for this request, for the hit statistics."""
    has_more: bool = False
    """Whether the last `collect` stopped at its limit on orders."""

    # --- questions -------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether it leases chunks that arrive."""
        return self.state is _OPEN

    @property
    def waits(self) -> bool:
        """Whether its next chunk is on its way and still counts (is before `limit`)."""
        return self.ready in self.pending and self.ready < self.limit

    def awaits(self, position: int) -> bool:
        """Whether the lookup still needs the chunk at `position`."""
        return self.state is _OPEN and (self.end is None or position < self.end)

    @property
    def secured(self) -> int:
        """Number of chunks from the start that need not be computed, whatever comes of those on
        their way. Without the rest of a window none can be resumed after but the engine's own."""
        return self.ready if self.coverage.kind.is_cumulative else self.own

    @property
    def missing(self) -> int:
        """Number of chunks that the engine computes unless the lookup gets what it lacks."""
        return self.limit - self.secured

    @property
    def unproven(self) -> int:
        """Number of the missing chunks that the bucket may not have either, because it does not
        have the chunk at `end`: those after the last one that is known to be there."""
        if self.end is None:
            return 0
        is_present, known = self.ledger.index.is_present, self.hashes.known
        for position in range(self.end - 1, self.ready - 1, -1):
            if position in self.early or is_present(
                ChunkKey(self.coverage.number, known[position])
            ):
                return self.end - 1 - position
        return self.end - self.ready

    @property
    def awaited(self) -> Iterable[Job]:
        """The fetches under way that still count."""
        limit = self.limit
        return [job for position, job in self.pending.items() if position < limit]

    @property
    def unasked(self) -> int:
        """Number of chunks that it has yet to request."""
        return max(0, self.limit - self.asked)

    @property
    def rounds(self) -> int:
        """Rounds of arrivals until it can request its last chunk."""
        return (self.unasked // self.window).bit_length()

    @property
    def limit(self) -> int:
        """Number of chunks that may yet be resumed after."""
        return self.aim if self.end is None else min(self.end, self.aim)

    # --- collecting ------------------------------------------------------------------------

    def collect(
        self, local_tokens: int, aim: int | None, now_s: float, orders: int = ORDERS_PER_LOOKUP
    ) -> None:
        """Lease resident chunks from the first missing one on, and request more.

        aim: length to resume at, in chunks; None: all that may be loaded. Orders at most `orders`
        fetches, all before `end`. Where every chunk makes the hit longer, it leases resident chunks
        between `end` and `aim`, too.
        """
        self._step(LookupEvent.COLLECT)
        first = self.own = local_tokens // self.coverage.chunk_tokens
        hashes = self.hashes.loadable()
        end = len(hashes)
        if not self.coverage.kind.is_cumulative:
            end = self.hashes.before_the_last if aim is None else aim
            end = min(end, self.hashes.before_the_last)
            first = max(first, self.coverage.chunks_for(end * self.coverage.chunk_tokens).start)
            hashes = hashes[:end]
        elif aim is not None:
            # Chunks after those that all coverages can have make room for those that they need.
            hashes = hashes[:aim]
            self._shorten(aim)
        self.aim = end
        if first != self.first:
            self._give_back()
            self.first = self.ready = self.asked = first
        self._lease(hashes)
        end = self.limit
        counters = self.ledger.counters
        full = counters["fetches"] + orders
        pending = len(self.pending)
        self.has_more = False
        while self.asked < end and self._ask(self.asked, now_s):
            self.asked += 1
            if counters["fetches"] == full:
                self.has_more = True
                break
        if len(self.pending) > pending:
            self.wait.asked_s = now_s

    def _lease(self, hashes: Sequence[bytes]) -> None:
        entries = self.ledger.table.pin_prefix(self.coverage.number, hashes, self.ready)
        self.leases += entries
        self.ready += len(entries)
        self.asked = max(self.asked, self.ready)
        for position in [p for p in self.early if p < self.ready]:
            self.ledger.table.unpin(self.early.pop(position))

    def _lease_early(self, position: int, entry: Entry) -> None:
        """Keep a resident chunk until the ready ones reach it."""
        if position >= self.ready and position not in self.early:
            self.ledger.table.pin(entry)
            self.early[position] = entry

    def _ask(self, position: int, now_s: float) -> bool:
        """Order, join or lease the chunk at `position`. Returns False to stop here for now."""
        if position in self.pending or position in self.early:
            return True
        ledger = self.ledger
        key = ChunkKey(self.coverage.number, self.hashes.known[position])
        state = ledger.state(key)
        if state is ChunkState.RESIDENT:
            entry = ledger.table.lookup(key)
            assert entry is not None
            self._lease_early(position, entry)
            return True
        in_window = position < self.ready + self.window
        job: Job | None = None
        if state is ChunkState.FETCHING and in_window:
            job = ledger.fetch_job(key)
        elif state is ChunkState.ABSENT and (in_window or self._is_known(position, key)):
            refusal = ledger.refusal(key, now_s, known=not in_window)
            if refusal is FetchRefusal.ABSENT:
                self.end = position
            job = None if refusal else self._order(position, key)
        return self._join(position, job)

    def _order(self, position: int, key: ChunkKey) -> Job | None:
        """Order the fetch of a chunk. None: there is no room, and the next lookup tries again."""
        if (job := self.ledger.plan_fetch(key)) is not None:
            self.planned.append(job)
            if (residency := self.ledger.residency) is not None:
                residency.append(Origin(key, JobKind.FETCH, self.request_id, position))
        return job

    def _join(self, position: int, job: Job | None) -> bool:
        """Wait for the chunk at `position`. Returns False, and does nothing, without a job."""
        if job is not None:
            job.waiters.append((self, position))
            self.pending[position] = job
        return job is not None

    def _is_known(self, position: int, key: ChunkKey) -> bool:
        return position < self.ready + KNOWN_WINDOW_CHUNKS and self.ledger.index.is_present(key)

    def fetch_ended(self, position: int, job: Job, now_s: float) -> None:
        """Take in the end of a fetch that this lookup has ordered or joined."""
        del self.pending[position]
        outcome, entry = job.outcomes[JobKind.FETCH], self.ledger.table.lookup(job.key)
        if entry is not None and entry.is_resident and self.state is _OPEN:
            self._lease_early(position, entry)
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

    # --- answers ---------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop waiting: `ready` is final, and a window is not requested for a shorter prefix."""
        self.end = self.ready if self.coverage.kind.is_cumulative else 0

    def hold(self, chunks: int) -> None:
        """Keep only the leases of the ready chunks before `chunks`, for an offer."""
        self._step(LookupEvent.HOLD)
        self._give_back_early()
        self._shorten(chunks)

    def _shorten(self, chunks: int) -> None:
        """Give back the leases of the ready chunks from `chunks` on."""
        while self.leases and self.ready > chunks:
            self.ledger.table.unpin(self.leases.pop())
            self.ready -= 1

    def load_parts(
        self, tables: Sequence[Sequence[int]], begin_tokens: int, end_tokens: int
    ) -> Iterator[CopyPart]:
        """The parts of a load that fill the blocks from `begin_tokens` to `end_tokens`. tables: the
        request's blocks in every KV-cache group of the engine."""
        coverage, fits = self.coverage, end_tokens == self.ready * self.coverage.chunk_tokens
        assert fits or coverage.kind.is_cumulative, "what is ready fits one length"
        per_chunk, held = coverage.blocks_per_chunk, coverage.held.start
        needed = coverage.blocks_for(end_tokens)
        start, end = max(needed.start, begin_tokens // coverage.block_tokens), needed.stop
        for position in range(start // per_chunk, -(-end // per_chunk)):
            low, high = position * per_chunk, (position + 1) * per_chunk
            entry = self.leases[position - self.first]
            for member in coverage.members:
                blocks = tuple(tables[member][max(low, start) : min(high, end)])
                yield CopyPart(member, entry.number, max(low, start) - low - held, blocks)

    def release(self) -> None:
        """Give back all leases. Only `collect` takes new ones."""
        self._step(LookupEvent.RELEASE)
        self._give_back()

    def close(self) -> None:
        """Give back all leases, and lease nothing more."""
        self._step(LookupEvent.CLOSE)
        self._give_back()

    def reopen(self) -> None:
        """Start over: the engine asks again for a partly computed request."""
        self._step(LookupEvent.REOPEN)
        self.end = None
        self.fetched.clear()

    def forget_fetches(self) -> list[Job]:
        """Stop waiting for all fetches under way. Returns their jobs."""
        dropped, self.pending = self.pending, {}
        for position, job in dropped.items():
            job.waiters.remove((self, position))
        return list(dropped.values())

    def _give_back(self) -> None:
        for entry in self.leases:
            self.ledger.table.unpin(entry)
        self.leases.clear()
        self.ready = self.asked = self.first
        self.has_more = False
        self._give_back_early()

    def _give_back_early(self) -> None:
        for entry in self.early.values():
            self.ledger.table.unpin(entry)
        self.early.clear()

    def _step(self, event: LookupEvent) -> None:
        self.state = LOOKUP_TRANSITIONS.after(self.state, event)
