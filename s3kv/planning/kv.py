"""KV-cache planner: takes engine events and returns one `StepPlan` per step.

It runs in the scheduler's process, on the engine's thread, inside vLLM's scheduling loop. Every
call costs a few dictionary reads. It owns all slots, jobs and requests, and touches neither bytes
nor the network. Times are seconds of one monotonic clock, passed in.

It offers tokens to the engine only if every rank holds the chunks that each KV-cache group needs
for them, verified and in host memory. It keeps these leased until the load or the request ends.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from s3kv.messages import CopyPart, JobKind, LoadJob, StepPlan, StepReport
from s3kv.planning.deadline import WaitFacts, keep_waiting
from s3kv.planning.group_kinds import Coverage, blocks_after, check_coverages
from s3kv.planning.job import Job
from s3kv.planning.ledger import Ledger
from s3kv.planning.lookup import ORDERS_PER_LOOKUP, ChunkHashes, Lookup
from s3kv.planning.pace import Pace
from s3kv.planning.prefix_lookup import KNOWN_WINDOW_CHUNKS
from s3kv.planning.requests import (
    NO_LIMITS,
    NOTHING,
    PROBE_CHUNKS,
    WAIT,
    Answer,
    PlannedRequest,
    RequestEvent,
    RequestLimits,
    RequestState,
    ScheduledRequest,
)
from s3kv.planning.saves import ChunkSaves
from s3kv.types import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPlannerSettings:
    """Settings. hash_tokens: tokens per hash; divides a chunk. recompute_gate: `WaitFacts.gate`."""

    coverages: tuple[Coverage, ...]
    """Cumulative ones first. Together they have every KV-cache group of the engine as a member,
    because a block of one group may be reused for another."""
    hash_tokens: int
    max_wait_s: float
    probe_chunks: int = PROBE_CHUNKS
    recompute_gate: bool = True
    max_saves_inflight: int = 256
    may_load: bool = True
    may_save: bool = True
    null_block: int | None = None
    """The engine's number for "no block" in its tables; None if they have no gaps."""


class KVPlanner:
    """The planner. It takes ownership of `ledger` and `pace`."""

    def __init__(self, ledger: Ledger, pace: Pace, settings: KVPlannerSettings) -> None:
        check_coverages(settings.coverages)
        self.ledger = ledger
        self.pace = pace
        self.counters = ledger.counters
        self._settings = settings
        self.may_save = settings.may_save
        self._coverages = settings.coverages
        self._chunk_tokens = settings.coverages[0].chunk_tokens
        self._saves = ChunkSaves(
            ledger,
            self._coverages,
            max_saves_inflight=settings.max_saves_inflight,
            null_block=settings.null_block,
        )
        self._salt = b""
        self._requests: dict[str, PlannedRequest] = {}
        self._orphans: dict[str, PlannedRequest] = {}
        self._unfinished: dict[str, PlannedRequest] = {}
        """Requests whose lookups stopped at the limit on orders per step."""
        self._fetches: list[Job] = []
        self._loads: list[LoadJob] = []
        self._fences: set[int] = set()
        self._unwanted: dict[int, Job] = {}
        self._overdue: dict[int, Job] = {}
        self._looked_up: dict[str, int] = {}
        """Tokens in the engine's own cache, for each request looked up since the last plan."""
        self._idle_since_s, self._arrived_s = math.inf, -math.inf

    def add_request(
        self, request_id: str, block_hashes: Sequence[bytes], limits: RequestLimits = NO_LIMITS
    ) -> None:
        """Add a request that has arrived. `block_hashes` is the engine's list, and may grow."""
        settings = self._settings
        self._requests[request_id] = PlannedRequest.of(
            request_id,
            ChunkHashes(block_hashes, self._chunk_tokens // settings.hash_tokens, self._salt),
            settings.coverages,
            self.ledger,
            self._fetches,
            settings.probe_chunks,
            limits,
        )

    def request(self, request_id: str) -> PlannedRequest:
        """The record of a live request; for reading only."""
        return self._requests[request_id]

    def restrict(self, request_id: str, limits: RequestLimits) -> None:
        """Replace a request's limits. A limit on saves is never raised: it covers later tokens."""
        request = self._requests[request_id]
        saved = [x for x in (request.limits.save_tokens, limits.save_tokens) if x is not None]
        request.limits = RequestLimits(min(saved, default=None), limits.load_tokens)
        request.saving.limit = min(saved) // self._chunk_tokens if saved else None

    def adopt(self, other: KVPlanner) -> None:
        """Take over and bar the requests of `other`, a planner that neither loads nor saves."""
        for request_id, request in other._requests.items():
            self.add_request(request_id, request.hashes.block_hashes, request.limits)
        self.bar(other._requests)

    def bar(self, request_ids: Iterable[str]) -> None:
        """Stop loads and saves of these requests for good. A load under way runs to its end."""
        for request_id in request_ids:
            request = self._requests[request_id]
            request.saving.is_barred = True
            if request.state is not RequestState.LOADING:
                request.close()

    def prefetch(
        self, request_id: str, local_tokens: int, now_s: float, *, tokens: int | None = None
    ) -> None:
        """Order a queued request's first chunks, until half the slots are reserved or pinned.
        tokens: as for `lookup`."""
        figures, request = self.ledger.table.statistics(), self._requests[request_id]
        room = -(-self.ledger.table.count // 2) - figures.reserved - figures.pinned
        if room > 0 and self._settings.may_load and not request.saving.is_barred:
            request.arrange(local_tokens, tokens)
            self._collect(request, now_s, min(room, KNOWN_WINDOW_CHUNKS))
            # The request's first lookup orders the rest.
            self._unfinished.pop(request_id, None)

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended or was aborted. A running load keeps its chunks."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if request.state is RequestState.LOADING:
            self._orphans[request_id] = request
            return
        for lookup in request.lookups:
            # If the request has its answer, its late chunks still arrive, for the next request.
            aborted, jobs = lookup.is_open, lookup.forget_fetches()
            self._unwanted |= {job.job_id: job for job in jobs if aborted}
        request.close()

    def lookup(
        self,
        request_id: str,
        local_tokens: int,
        now_s: float,
        *,
        tokens: int | None = None,
        reads: bool = True,
    ) -> Answer:
        """Look up the tokens to load after the `local_tokens` in the engine's own cache. Without
        `reads` the answer is `NOTHING`: the request must be computed. tokens: the request's total;
        with a window, the answer stays below it, because the engine recomputes the last token.

        May be called any number of times. Missing chunks are requested from the bucket; the request
        waits for them only while the wait is expected to pay (see `deadline`).
        """
        request = self._requests[request_id]
        if now_s < request.wait.until_s:
            return WAIT
        self._looked_up[request_id] = local_tokens
        request.arrange(local_tokens, tokens)
        if not self._settings.may_load or request.saving.is_barred or not reads:
            return NOTHING
        if request.is_unplaced(now_s, self._idle_since_s):
            return NOTHING
        if request.state is RequestState.COMPUTING:
            request.start_over()
        request.step(RequestEvent.LOOKUP)
        while (lookup := self._collect(request, now_s)) is not None:
            if self._waits(request, lookup, now_s):
                return WAIT
            lookup.stop()
        return self._offer(request)

    def _collect(
        self, request: PlannedRequest, now_s: float, orders: int = ORDERS_PER_LOOKUP
    ) -> Lookup | None:
        awaited = request.collect(now_s, orders)
        if request.has_more:
            self._unfinished[request.request_id] = request
        return awaited

    def _go_on(self, now_s: float) -> None:
        """Collect for the first of `_unfinished`, which the engine may not look up in this step."""
        while self._unfinished:
            request_id, request = next(iter(self._unfinished.items()))
            if request.has_more:
                self._collect(request, now_s)
                request.wait.wake()
                return
            del self._unfinished[request_id]

    def _waits(self, request: PlannedRequest, lookup: Lookup, now_s: float) -> bool:
        """Whether the request waits for the missing chunks of `lookup`."""
        wait, pace = request.wait, self.pace
        queue = pace.queue(now_s, 1 / self._chunk_tokens)
        wait.begin(now_s, request.hashes.count - lookup.secured, sum(queue))
        # Chunks of other requests also arrive before the last of these.
        awaited = lookup.awaited()
        ahead, near = self.ledger.fetches_ahead_of(awaited), all(job.near for job in awaited)
        facts = WaitFacts(
            now_s=now_s,
            wait=wait,
            missing=lookup.limit - lookup.secured,
            unproven=lookup.unproven,
            progress_s=self._arrived_s if ahead > len(awaited) else -math.inf,
            queue=queue,
            compute_s=pace.compute_s(self._chunk_tokens),
            forecast=pace.forecast(ahead + lookup.unasked, lookup.rounds, near=near),
            max_wait_s=self._settings.max_wait_s,
            gate=self._settings.recompute_gate,
        )
        if not keep_waiting(facts, self.counters, lambda s: pace.gave_up(s, ahead, near=near)):
            return False
        request.step(RequestEvent.WAIT)
        if lookup.has_more:
            wait.wake()
        return True

    def _offer(self, request: PlannedRequest) -> Answer:
        self._overdue |= {j.job_id: j for one in request.lookups for j in one.pending.values()}
        tokens = request.offer()
        return Answer(False, tokens) if tokens else NOTHING

    def _left(self, request: PlannedRequest, tokens: int) -> int:
        """Number of the request's tokens after the first `tokens`, as of its last lookup."""
        return max(0, len(request.hashes.known) * self._chunk_tokens - tokens)

    def admitted(
        self, request_id: str, block_ids: Sequence[Sequence[int]], external_tokens: int
    ) -> None:
        """Record that the engine has placed the request in `block_ids` (per KV-cache group of the
        engine) and accepts `external_tokens` of the offer."""
        request = self._requests[request_id]
        if external_tokens == 0:
            if request.state is not RequestState.LOADING:
                request.close()
                request.step(RequestEvent.ADMIT)
                # Another connector may write to the blocks before the request is scheduled.
                if (own_tokens := self._looked_up.get(request_id)) is not None:
                    self._fences |= self._fences_behind(own_tokens, block_ids)
                    self.pace.new_tokens += self._left(request, own_tokens)
            return
        request.step(RequestEvent.LOAD)
        end = request.local_tokens + external_tokens
        self.pace.new_tokens += self._left(request, end)
        parts: list[CopyPart] = []
        for lookup in request.lookups:
            parts += lookup.load_parts(block_ids, request.local_tokens, end)
            self.ledger.table.touch_chain(lookup.leases)
        filled = [block for part in parts for block in part.block_ids]
        null = self._settings.null_block
        assert null is None or null not in filled, "the engine gave no block for what it loads"
        self._fences |= self.ledger.fences(filled)
        self._saves.written(filled)
        self._loads.append(LoadJob(request_id, tuple(parts)))
        bucket_tokens = request.bucket_tokens(external_tokens)
        self.counters["hit_tokens_bucket"] += bucket_tokens
        self.counters["hit_tokens_host"] += external_tokens - bucket_tokens

    def _fences_behind(self, tokens: int, block_ids: Sequence[Sequence[int]]) -> set[int]:
        """Saves that still read any of these blocks after the first `tokens`."""
        return self.ledger.fences(blocks_after(self._coverages, tokens, block_ids))

    def bucket_tokens(self, request_id: str, external_tokens: int) -> int:
        """Number of loaded tokens that were fetched for this request; the rest were resident."""
        return self._requests[request_id].bucket_tokens(external_tokens)

    def loaded(self, request_ids: Iterable[str], failed: Collection[str] = ()) -> None:
        """Process the end of these requests' loads on all ranks. failed: those that failed."""
        for request_id in request_ids:
            request = self._orphans.pop(request_id, None) or self._requests.get(request_id)
            if request is None or request.state is not RequestState.LOADING:
                continue
            request.step(RequestEvent.LOADED)
            request.close()
            if request_id in failed:
                # The engine repeats the lookup in the same pass, and must get a miss.
                request.saving.is_barred = True
                self.counters["loads_failed"] += 1

    def plan(
        self,
        scheduled: Iterable[ScheduledRequest],
        now_s: float,
        written: Collection[int] = (),
        copied: frozenset[int] = frozenset(),
    ) -> StepPlan:
        """The instructions for this step. Called once per step, after all lookups. written: further
        blocks that the engine writes to, beyond `scheduled`. copied: blocks that it copies to."""
        fences = self._fences | self.ledger.fences(written) if written else self._fences
        self._fences = set()
        if self._looked_up:
            scheduled = list(scheduled)
            self._doubt_loads(scheduled, copied)
        tokens, left, requests, may_save = 0, 0, self._requests, self.may_save
        saves: list[Job] = []
        for step in scheduled:
            tokens += step.scheduled_tokens
            request = requests.get(step.request_id)
            if request is None:
                continue
            if step.block_ids:
                left += self._left(request, step.computed_tokens + step.scheduled_tokens)
                request.saving.place(step)
                if first_written := step.computed_tokens if step.replaces else 0:
                    request.use(first_written, now_s)
                fences |= self._fences_behind(first_written, step.block_ids)
                self._saves.written(blocks_after(self._coverages, first_written, step.block_ids))
            if may_save and (jobs := self._saves.plan(request, step, now_s)):
                saves += jobs
        self._go_on(now_s)
        self._idle_since_s = math.inf if tokens else min(self._idle_since_s, now_s)
        most = self._settings.max_saves_inflight
        planned = self._fetches + self.ledger.plan_due(now_s, max_saves_inflight=most)
        self._fetches.clear()
        loads, self._loads = tuple(self._loads), []
        return StepPlan(
            jobs=tuple(job.for_bucket() for job in planned) if planned else (),
            saves=tuple(job.for_copies() for job in saves) if saves else (),
            loads=loads,
            fences=tuple(sorted(fences)) if fences else (),
            cancels=self._take_cancels() if self._unwanted else (),
            withdrawals=self._take_withdrawals() if self._overdue else (),
            number=self.pace.step_started(now_s, tokens, left),
        )

    def _doubt_loads(self, scheduled: Iterable[ScheduledRequest], copied: frozenset[int]) -> None:
        """Bar saves of everything that another connector loads during the step, for all requests. A
        hit that ends within a block is a copy and no load: doubtful only if other blocks are."""
        looked_up, self._looked_up = self._looked_up, {}
        beyond, doubts = [], False
        for step in scheduled:
            own_tokens = looked_up.get(step.request_id) if step.replaces else None
            if own_tokens is not None and step.computed_tokens > own_tokens:
                beyond.append(self._requests[step.request_id])
                blocks = set(blocks_after(self._coverages, own_tokens, step.block_ids))
                doubts = self._saves.doubt(blocks if copied.isdisjoint(blocks) else ())
        for request in beyond if doubts else ():
            request.saving.is_barred = True

    def _take_cancels(self) -> tuple[int, ...]:
        """Fetches that no request wants any more, and that none has joined since."""
        unwanted, self._unwanted = self._unwanted, {}
        return tuple(job_id for job_id, job in unwanted.items() if not job.waiters)

    def _take_withdrawals(self) -> tuple[int, ...]:
        """Fetches that no request awaits any more."""
        overdue, self._overdue = self._overdue, {}
        awaited = {i for i, job in overdue.items() for lookup, n in job.waiters if lookup.awaits(n)}
        return tuple(job_id for job_id in overdue if job_id not in awaited)

    def on_report(self, report: StepReport, now_s: float) -> None:
        """Process a report of the ranks, uses first: a fetch in it may have the newer answer."""
        for end in sorted(report.ends.values(), key=lambda end: end.kind is not JobKind.USE):
            job = self.ledger.on_end(end, now_s)
            if job is not None and end.kind is JobKind.FETCH:
                self._fetch_ended(job, now_s)

    def _fetch_ended(self, job: Job, now_s: float) -> None:
        outcome, ended_with = job.outcomes[JobKind.FETCH], self.ledger.fetches_inflight + 1
        near = not job.asked_bucket
        self._arrived_s = now_s if outcome.is_success else self._arrived_s
        self.pace.fetched(outcome, job.seconds, job.began_with, ended_with, job.source, near=near)
        for lookup, position in job.waiters:
            if position == lookup.probe and (outcome.is_success or outcome is Outcome.MISSING):
                self.pace.of(near=job.near).probed(found=outcome.is_success)
            lookup.fetch_ended(position, job, now_s)

    @property
    def has_arrivals_inflight(self) -> bool:
        """Whether a request waits or may wait for a fetch or load. Slow if there are many."""
        return self.ledger.fetches_inflight > 0 or any(
            request.state is RequestState.LOADING for request in self._requests.values()
        )

    def reset(self, salt: bytes) -> None:
        """Make everything cached so far unreachable, here and in the bucket: from now on chunk
        hashes are derived with `salt`, which must be unique. Requests in the engine may hold KV
        from before the reset, so they no longer load or save."""
        self._salt = salt
        self.ledger.index.forget()
        self.bar(self._requests)
