"""The planner's record of a request: its state, its lookup in every group, its wait, its saves.

NEW ──WAIT──▶ WAITING ──OFFER──▶ OFFERED ──LOAD──▶ LOADING ──LOADED──▶ COMPUTING
 └─────NOTHING / ADMIT──▶ COMPUTING ──LOOKUP (preempted, or its load failed)──▶ NEW
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from s3kv.planning.deadline import Wait
from s3kv.planning.group_kinds import Coverage
from s3kv.planning.job import Job
from s3kv.planning.ledger import Ledger
from s3kv.planning.lookup import ChunkHashes, Lookup
from s3kv.planning.prefix_lookup import PrefixLookup
from s3kv.planning.state_lookup import StateLookup
from s3kv.states import IdentityEnum, Transitions
from s3kv.types import ChunkKey

PROBE_CHUNKS = 64
"""Chunks that a lookup requests at first while the bucket's content is unknown (decision 8)."""
OFFER_S = 1.0
"""Time that an idle engine has to place an offered load. After that, one lookup returns `NOTHING`:
vLLM keeps more blocks free for a load than for computing, perhaps more than exist."""


class ScheduledRequest(NamedTuple):
    """One request of an engine step.

    block_ids: device blocks per KV-cache group: those new in this step, or all of them if
    `replaces`; empty if no group has new ones.
    computed_tokens: tokens before this step. scheduled_tokens: tokens in this step, with drafts.
    tables: returns all device blocks per KV-cache group in this step; None: they are the sum of all
    `block_ids`, because the engine frees none of them before the request ends.
    states: numbers of tokens within the step after which the engine also writes a state.
    """

    request_id: str
    block_ids: Sequence[Sequence[int]]
    replaces: bool
    computed_tokens: int
    scheduled_tokens: int
    tables: Callable[[], Sequence[Sequence[int]]] | None = None
    states: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits that a request sets on its own caching. None: no limit."""

    save_tokens: int | None = None
    """Tokens from the start of the request that may be saved. 0: the request is private."""
    load_tokens: int | None = None
    """Tokens that may be loaded after those in the engine's own cache."""


NO_LIMITS = RequestLimits()


class Answer(NamedTuple):
    """Answer to a lookup. wait: repeat it next step. tokens: number that may be loaded now."""

    wait: bool
    tokens: int


WAIT, NOTHING = Answer(True, 0), Answer(False, 0)


class RequestState(IdentityEnum):
    NEW = "new"
    """No lookup is open. Fetches of its chunks may already be under way."""
    WAITING = "waiting"
    """The last lookup returned `WAIT`; the engine repeats it later."""
    OFFERED = "offered"
    """Chunks in host memory were offered; they are leased until the engine decides."""
    LOADING = "loading"
    """Its chunks are being copied to device blocks."""
    COMPUTING = "computing"
    """The engine computes it; nothing is leased."""


class RequestEvent(IdentityEnum):
    LOOKUP = "lookup"
    WAIT = "wait"
    OFFER = "offer"
    NOTHING = "nothing"
    ADMIT = "admit"
    LOAD = "load"
    LOADED = "loaded"


_NEW, _WAITING, _OFFERED, _LOADING, _COMPUTING = RequestState

REQUEST_TRANSITIONS: Transitions[RequestState, RequestEvent] = Transitions(
    {
        (_NEW, RequestEvent.LOOKUP): _NEW,
        (_NEW, RequestEvent.WAIT): _WAITING,
        (_NEW, RequestEvent.OFFER): _OFFERED,
        (_NEW, RequestEvent.NOTHING): _NEW,
        (_NEW, RequestEvent.ADMIT): _COMPUTING,
        (_WAITING, RequestEvent.LOOKUP): _WAITING,
        (_WAITING, RequestEvent.WAIT): _WAITING,
        (_WAITING, RequestEvent.OFFER): _OFFERED,
        (_WAITING, RequestEvent.NOTHING): _NEW,
        # The engine skips lookups for this request, and admits it without an answer.
        (_WAITING, RequestEvent.ADMIT): _COMPUTING,
        # The engine could not place the request after the offer, and looks it up again.
        (_OFFERED, RequestEvent.LOOKUP): _NEW,
        (_OFFERED, RequestEvent.ADMIT): _COMPUTING,
        (_OFFERED, RequestEvent.LOAD): _LOADING,
        (_LOADING, RequestEvent.LOADED): _COMPUTING,
        (_COMPUTING, RequestEvent.ADMIT): _COMPUTING,
        (_COMPUTING, RequestEvent.LOOKUP): _NEW,
    }
)


@dataclass(slots=True, eq=False)
class Saving:
    """Device blocks of a request, per KV-cache group, and the progress of its saves."""

    limit: int | None = None
    """Number of chunks from the start that may be saved; None: all."""
    block_ids: list[list[int]] = field(default_factory=list)
    is_barred: bool = False
    """Whether it no longer saves or loads: a load of it failed, the cache was reset, or its KV may
    be wrong or in an unknown place for another reason. This is permanent."""
    saved: int = 0
    """Position up to which all chunks have been decided on (saved or not)."""

    def allowed(self, chunks: int) -> int:
        """The number of these chunks that may be saved."""
        return chunks if self.limit is None else min(chunks, self.limit)

    def place(self, step: ScheduledRequest) -> None:
        """Record the request's blocks in this step, unless the step has `tables`."""
        if step.tables is not None:
            return
        if step.replaces or not self.block_ids:
            self.block_ids = [list(ids) for ids in step.block_ids]
        elif step.block_ids:
            for known, new in zip(self.block_ids, step.block_ids, strict=True):
                known.extend(new)

    def take(self, complete: int) -> range:
        """Take the positions before `complete` whose chunks are now due for a decision."""
        due = range(self.saved, complete)
        self.saved = max(self.saved, complete)
        return due


@dataclass(slots=True, eq=False)
class PlannedRequest:
    """Record of a request: its state, its lookup in every group, its wait and its saves."""

    request_id: str
    hashes: ChunkHashes
    lookups: tuple[Lookup, ...]
    wait: Wait
    saving: Saving
    limits: RequestLimits = NO_LIMITS
    state: RequestState = RequestState.NEW
    offered_s: float = 0.0
    """Time of the first lookup that made the present offer."""
    local_tokens: int = 0
    """Tokens in the engine's own cache at the last lookup."""
    ready: int = 0
    """Chunks after which all groups can resume, as of the last `collect` that returned None."""

    @classmethod
    def of(
        cls,
        request_id: str,
        hashes: ChunkHashes,
        coverages: Sequence[Coverage],
        ledger: Ledger,
        planned: list[Job],
        probe_chunks: int,
        limits: RequestLimits = NO_LIMITS,
    ) -> PlannedRequest:
        """The record of a request that has arrived, with its lookups. planned: as in `Lookup`."""
        wait = Wait()
        lookups = tuple(
            StateLookup(request_id, ledger, coverage, hashes, wait, planned, 1)
            if coverage.kind.is_sparse
            else PrefixLookup(request_id, ledger, coverage, hashes, wait, planned, probe_chunks)
            for coverage in coverages
        )
        saved = limits.save_tokens
        saving = Saving(None if saved is None else saved // coverages[0].chunk_tokens)
        return cls(request_id, hashes, lookups, wait, saving, limits)

    def step(self, event: RequestEvent) -> None:
        self.state = REQUEST_TRANSITIONS.after(self.state, event)

    def arrange(self, local_tokens: int, tokens: int | None) -> None:
        """Record the tokens in the engine's own cache, and the request's total (None: not given),
        for the next `collect`."""
        size, most = self.lookups[0].coverage.chunk_tokens, self.limits.load_tokens
        self.local_tokens = local_tokens
        self.hashes.resumable = None if tokens is None else max(0, tokens - 1) // size
        self.hashes.limit = None if most is None else (local_tokens + most) // size

    def is_unplaced(self, now_s: float, idle_since_s: float) -> bool:
        """Whether the engine, idle since `idle_since_s`, has not placed the offered load for longer
        than `OFFER_S`. If so, the time starts again."""
        is_late = now_s - max(self.offered_s, idle_since_s) > OFFER_S
        if is_late or self.state is not RequestState.OFFERED:
            self.offered_s = now_s
        return is_late and self.state is RequestState.OFFERED

    def use(self, tokens: int, now_s: float) -> None:
        """Record the use of the chunks, from any tier, from which the engine resumes at `tokens`.
        Nothing is sent about a request that may neither save nor load."""
        known = () if self.limits == RequestLimits(0, 0) else self.hashes.read()
        for lookup in self.lookups:
            coverage, index = lookup.coverage, lookup.ledger.index
            needed = coverage.chunks_for(tokens - tokens % coverage.chunk_tokens)
            for position in range(needed.start, min(needed.stop, len(known))):
                index.use(ChunkKey(coverage.number, known[position]), now_s)

    def start_over(self) -> None:
        """Forget the wait. The engine has preempted the request and looks up its prefix again."""
        for lookup in self.lookups:
            lookup.reopen()
        self.wait.start_over()

    def close(self) -> None:
        """Give back all leases and end the wait's sleep."""
        for lookup in self.lookups:
            lookup.close()
        self.wait.wake()

    def collect(self, now_s: float, orders: int) -> Lookup | None:
        """Collect in every group, for the longest prefix that may become resident in all groups.
        Returns the first lookup that still waits for a chunk; None if no lookup waits.

        Windows are requested together with the prefix that another lookup waits for, on the
        assumption that all of it exists. Otherwise they would arrive one fetch time later.
        """
        is_cumulative = self.lookups[0].coverage.kind.is_cumulative
        chunks = None if is_cumulative else self.hashes.before_the_last
        settled = False
        while not settled:
            settled = True
            for lookup in self.lookups:
                lookup.collect(self.local_tokens, chunks, now_s, orders)
                if lookup.waits:
                    self._prefetch_windows(lookup, now_s, orders)
                    return lookup
                if chunks is None:
                    chunks = lookup.ready
                elif lookup.ready < chunks:
                    chunks, settled = lookup.ready, False
            # An engine that has lost tokens since the last lookup may load fewer.
            self.ready = min(chunks or 0, self.hashes.count)
        return None

    def _prefetch_windows(self, awaited: Lookup, now_s: float, orders: int) -> None:
        """Request the chunks that the lookups after `awaited` need at its `limit`. Lookups that
        have found a chunk missing, and those of states, are left until the prefix is known."""
        if awaited.unasked or awaited.has_more:
            return
        for lookup in self.lookups[self.lookups.index(awaited) + 1 :]:
            if lookup.looks_ahead:
                lookup.collect(self.local_tokens, awaited.limit, now_s, orders)

    def offer(self) -> int:
        """Hold the chunks that all groups have ready. Returns the tokens to offer, or 0."""
        tokens = self.ready * self.lookups[0].coverage.chunk_tokens - self.local_tokens
        for lookup in self.lookups:
            lookup.stop()
            if tokens > 0:
                lookup.hold(self.ready)
            else:
                lookup.give_back()
        self.step(RequestEvent.OFFER if tokens > 0 else RequestEvent.NOTHING)
        return max(0, tokens)

    def bucket_tokens(self, external_tokens: int) -> int:
        """Number of `external_tokens` that were fetched for this request, by the first group. A
        group without full attention has few chunks: any fetched one counts for all tokens."""
        lookup = self.lookups[0]
        if not lookup.coverage.kind.is_cumulative:
            return external_tokens if lookup.fetched else 0
        size = lookup.coverage.chunk_tokens
        begin, end = self.local_tokens, self.local_tokens + external_tokens
        return sum(max(0, min(end, (p + 1) * size) - max(begin, p * size)) for p in lookup.fetched)

    @property
    def has_more(self) -> bool:
        """Whether an open lookup has chunks left to request."""
        for lookup in self.lookups:  # noqa: SIM110 - any() takes three times as long, per lookup
            if lookup.has_more and lookup.is_open:
                return True
        return False
