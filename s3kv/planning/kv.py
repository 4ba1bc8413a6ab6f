"""The planner of the KV cache: engine events in, one `StepPlan` per step out.

Runs in the scheduler's process, on the engine's thread, inside vLLM's scheduling loop: every
call is a few dictionary reads. It owns all state that needs one owner (slots, jobs, requests) and
touches neither bytes nor the network. Times are seconds of one monotonic clock, passed in.

What it promises the engine: tokens are offered only when every rank holds them, verified, in host
memory, and they stay there (leased) until the engine has loaded them or the request is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from s3kv.messages import JobKind, LoadOrder, LoadPart, StepPlan, StepReport
from s3kv.planning.ledger import ChunkLedger, ChunkState, Job
from s3kv.planning.pace import Pace, wait_until_s
from s3kv.planning.prefix import KVPlannerSettings, PrefixCollector
from s3kv.planning.requests import RequestEvent, RequestRecord, RequestState
from s3kv.types import ChunkKey, Outcome


class Answer(NamedTuple):
    """What a lookup says. `wait`: ask again next step; `tokens`: may be loaded now."""

    wait: bool
    tokens: int


WAIT = Answer(True, 0)
NOTHING = Answer(False, 0)


class ScheduledRequest(NamedTuple):
    """One request of an engine step.

    block_ids: its device blocks; those new in this step, or all of them when `replaces`.
    computed_tokens: before this step; scheduled_tokens: in this step, drafts included.
    """

    request_id: str
    block_ids: Sequence[int]
    replaces: bool
    computed_tokens: int
    scheduled_tokens: int


class KVPlanner:
    """See the module. `ledger` and `pace` are the planner's from then on."""

    def __init__(self, ledger: ChunkLedger, pace: Pace, settings: KVPlannerSettings) -> None:
        self.ledger = ledger
        self.pace = pace
        self.counters: Counter[str] = ledger.counters
        self._settings = settings
        self._prefix = PrefixCollector(ledger, settings)
        self._chunk_blocks = settings.chunk_tokens // settings.block_tokens
        self._requests: dict[str, RequestRecord] = {}
        self._orphans: dict[str, RequestRecord] = {}
        self._loads: list[LoadOrder] = []
        self._fences: set[int] = set()
        self._unwanted: dict[int, Job] = {}
        self._overdue: dict[int, Job] = {}
        self._looked_up: dict[str, int] = {}
        """Since the last plan, with how many tokens the engine had itself."""

    # --- requests come and go --------------------------------------------------------------

    def add_request(self, request_id: str, block_hashes: Sequence[bytes]) -> None:
        """A request has arrived. `block_hashes` is the engine's list, and may grow."""
        self._requests[request_id] = RequestRecord(
            request_id, block_hashes, window=self._settings.probe_chunks
        )

    def adopt(self, other: KVPlanner) -> None:
        """The requests that `other`, which neither loads nor saves, knows so far: they will do
        neither here, because nobody has kept where they are.
        """
        for request_id, record in other._requests.items():
            self.add_request(request_id, record.block_hashes)
            self._requests[request_id].barred = True

    def prefetch(self, request_id: str, local_tokens: int, now_s: float) -> None:
        """Start on a queued request's first chunks, unless half of host memory is spoken for."""
        figures = self.ledger.slots.statistics()
        if 2 * (figures.reserved + figures.pinned) >= len(self.ledger.slots):
            return
        record = self._requests[request_id]
        if self._settings.may_load:
            self._prefix.prefetch(record, local_tokens, now_s)

    def finished(self, request_id: str) -> None:
        """The request is over or aborted. Its load, if one runs, keeps its chunks until its end."""
        record = self._requests.pop(request_id, None)
        if record is None:
            return
        if record.state is RequestState.LOADING:
            self._orphans[request_id] = record
            return
        self._prefix.release(record)
        # A request that has been answered leaves its late chunks to the next one that asks.
        aborted = record.wants_chunks
        for position, job in record.pending.items():
            job.waiters.remove((record, position))
            if aborted:
                self._unwanted[job.job_id] = job

    # --- lookups ---------------------------------------------------------------------------

    def lookup(
        self, request_id: str, local_tokens: int, now_s: float, *, reads: bool = True
    ) -> Answer:
        """How many tokens after the `local_tokens` the engine has itself can be loaded now. Without
        `reads` none: the request has to be computed.

        May be asked any number of times; asks the bucket for what is missing, and waits for it
        only while that is expected to pay (see `pace`).
        """
        record = self._requests[request_id]
        if record.state is RequestState.WAITING and not record.news and now_s < record.wait_until_s:
            return WAIT
        self._looked_up[request_id] = local_tokens
        if not self._settings.may_load or record.barred or not reads:
            return NOTHING
        if record.state is RequestState.COMPUTING:
            record.start_over()
        record.step(RequestEvent.LOOKUP)
        record.news = False
        self._prefix.collect(record, local_tokens, now_s)
        if record.waits:
            record.wait_until_s = self._wait_until_s(record, now_s)
            if now_s < record.wait_until_s:
                record.step(RequestEvent.WAIT)
                return WAIT
            self.counters["deadline_cuts"] += 1
            if record.arrival_s < now_s:
                ahead = self.ledger.fetches_ahead_of(record.pending.values())
                self.pace.gave_up(now_s - record.arrival_s, ahead)
        record.end = record.ready
        self._overdue.update((job.job_id, job) for job in record.pending.values())
        return self._offer(record)

    def _offer(self, record: RequestRecord) -> Answer:
        tokens = record.ready * self._settings.chunk_tokens - record.local_tokens
        if tokens <= 0:
            self._prefix.release(record)
            record.step(RequestEvent.NOTHING)
            return NOTHING
        self._prefix.release_early(record)
        record.step(RequestEvent.OFFER)
        return Answer(False, tokens)

    def _wait_until_s(self, record: RequestRecord, now_s: float) -> float:
        if record.started_s is None:
            record.started_s = record.arrival_s = now_s
            record.wanted_chunks = len(record.hashes) - record.ready
        end = len(record.hashes) if record.end is None else record.end
        unasked = max(0, end - record.asked)
        # Others' chunks, too, come before the last of these.
        missing = self.ledger.fetches_ahead_of(record.pending.values()) + unasked
        size, pace = self._settings.chunk_tokens, self.pace
        return wait_until_s(
            now_s=now_s,
            started_s=record.started_s,
            asked_s=record.asked_s,
            arrival_s=record.arrival_s,
            expected_s=pace.fetch_s(missing, rounds=(unasked // record.window).bit_length()),
            patience_s=pace.patience_s(missing),
            missing_compute_s=pace.compute_s((end - record.ready) * size),
            wanted_compute_s=pace.compute_s(record.wanted_chunks * size),
            max_wait_s=self._settings.max_wait_s,
            gate=self._settings.recompute_gate,
        )

    # --- admission and loads ---------------------------------------------------------------

    def admitted(self, request_id: str, block_ids: Sequence[int], external_tokens: int) -> None:
        """The engine placed the request in `block_ids` and takes `external_tokens` of the offer."""
        record = self._requests[request_id]
        if external_tokens == 0:
            if record.state is not RequestState.LOADING:
                self._prefix.release(record)
                record.step(RequestEvent.ADMIT)
                self._fence_others(request_id, block_ids)
            return
        record.step(RequestEvent.LOAD)
        parts = self._load_parts(record, block_ids, external_tokens)
        blocks = [block for part in parts for block in part.block_ids]
        self._fences |= self.ledger.fences(blocks)
        self._loads.append(LoadOrder(request_id, parts))
        self.ledger.slots.touch_chain(record.prefix)
        bucket_tokens = self.bucket_tokens(request_id, external_tokens)
        self.counters["hit_tokens_bucket"] += bucket_tokens
        self.counters["hit_tokens_host"] += external_tokens - bucket_tokens

    def _fence_others(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Another connector may write to these blocks before the request is scheduled."""
        local_tokens = self._looked_up.get(request_id)
        if local_tokens is not None:
            first = local_tokens // self._settings.block_tokens
            self._fences |= self.ledger.fences(block_ids[first:])

    def bucket_tokens(self, request_id: str, external_tokens: int) -> int:
        """How many of the tokens loaded came from the bucket just now; the rest was resident."""
        record = self._requests[request_id]
        size = self._settings.chunk_tokens
        end = record.local_tokens + external_tokens
        return sum(
            max(0, min(end, (p + 1) * size) - max(record.local_tokens, p * size))
            for p in record.fetched
        )

    def _load_parts(
        self, record: RequestRecord, block_ids: Sequence[int], external_tokens: int
    ) -> tuple[LoadPart, ...]:
        block_tokens, per_chunk = self._settings.block_tokens, self._chunk_blocks
        start = record.local_tokens // block_tokens
        end = (record.local_tokens + external_tokens) // block_tokens
        parts = []
        for position in range(start // per_chunk, -(-end // per_chunk)):
            low, high = position * per_chunk, (position + 1) * per_chunk
            blocks = tuple(block_ids[max(low, start) : min(high, end)])
            slot = record.prefix[position - record.first]
            parts.append(LoadPart(self._settings.group, slot.number, max(low, start) - low, blocks))
        return tuple(parts)

    def loaded(self, request_ids: Iterable[str], failed: Iterable[str] = ()) -> None:
        """All ranks have ended these requests' loads. `failed`: those of them that went wrong."""
        bad = set(failed)
        for request_id in request_ids:
            record = self._orphans.pop(request_id, None) or self._requests.get(request_id)
            if record is None or record.state is not RequestState.LOADING:
                continue
            record.step(RequestEvent.LOADED)
            self._prefix.release(record)
            if request_id in bad:
                # The engine asks again in the same pass: the answer has to be a miss by then.
                record.barred = True
                self.counters["loads_failed"] += 1

    # --- the step --------------------------------------------------------------------------

    def plan(self, scheduled: Iterable[ScheduledRequest], now_s: float) -> StepPlan:
        """This step's instructions. Called once per engine step, after all lookups."""
        fences, self._fences = self._fences, set()
        looked_up, self._looked_up = self._looked_up, {}
        tokens = 0
        for step in scheduled:
            tokens += step.scheduled_tokens
            record = self._requests.get(step.request_id)
            if record is None:
                continue
            fences |= self.ledger.fences(self._place(record, step))
            own_tokens = looked_up.get(step.request_id) if step.replaces else None
            if own_tokens is not None and step.computed_tokens > own_tokens:
                # Another connector loads while the step runs. Whether that went well is known only
                # after this step's saves are on their way to the bucket.
                record.barred = True
            if self._settings.may_save and not record.barred:
                self._save(record, step.computed_tokens + step.scheduled_tokens)
        self.pace.step_started(now_s, tokens)
        self._prefix.go_on(now_s)
        loads, self._loads = tuple(self._loads), []
        # Whoever joined such a fetch since keeps it going.
        cancels = tuple(job_id for job_id, job in self._unwanted.items() if not job.waiters)
        self._unwanted.clear()
        withdrawals = tuple(job_id for job_id, job in self._overdue.items() if not _awaited(job))
        self._overdue.clear()
        return StepPlan(
            fetches=self.ledger.take_fetches(),
            saves=self.ledger.take_saves(),
            uploads=self.ledger.take_uploads(now_s),
            loads=loads,
            fences=tuple(sorted(fences)),
            cancels=cancels,
            withdrawals=withdrawals,
        )

    def _place(self, record: RequestRecord, step: ScheduledRequest) -> list[int]:
        """Remember where the request lives; the blocks this step may write for the first time."""
        if not step.replaces:
            record.block_ids.extend(step.block_ids)
            return list(step.block_ids)
        record.block_ids = list(step.block_ids)
        return record.block_ids[step.computed_tokens // self._settings.block_tokens :]

    def _save(self, record: RequestRecord, computed_tokens: int) -> None:
        """Save the chunks that are complete after this step and of which every token is known.

        Only known tokens have hashes, so drafts that may yet be rejected are never saved.
        """
        complete = computed_tokens // self._settings.chunk_tokens
        if complete <= record.saved and not record.undecided:
            return
        hashes = self._prefix.hashes(record)
        complete = min(complete, len(hashes))
        # After a preemption the undecided ones may have to be computed again first.
        due = [position for position in record.undecided if position < complete]
        record.undecided = [p for p in record.undecided if p >= complete]
        for position in (*due, *range(record.saved, complete)):
            self._save_chunk(record, position, ChunkKey(self._settings.group, hashes[position]))
        record.saved = max(record.saved, complete)

    def _save_chunk(self, record: RequestRecord, position: int, key: ChunkKey) -> None:
        state = self.ledger.state(key)
        if state is ChunkState.FETCHING:
            record.undecided.append(position)
        if state is not ChunkState.ABSENT or self.ledger.index.is_present(key):
            return
        low = position * self._chunk_blocks
        blocks = tuple(record.block_ids[low : low + self._chunk_blocks])
        full = self.ledger.saves_inflight >= self._settings.max_saves_inflight
        if full or not self.ledger.plan_save(key, blocks):
            self.counters["saves_dropped"] += 1
        elif self.ledger.residency is not None:
            self.ledger.residency.origin(key, JobKind.SAVE, record.request_id, position)

    # --- reports ---------------------------------------------------------------------------

    def step_ended(self, now_s: float) -> None:
        """The oldest planned step has been carried out."""
        self.pace.step_ended(now_s)

    def on_report(self, report: StepReport, now_s: float) -> None:
        """Take in what the ranks reported."""
        for end in report.ends.values():
            job = self.ledger.on_end(end, now_s)
            if job is not None and end.kind is JobKind.FETCH:
                self._fetch_ended(job, now_s)

    def _fetch_ended(self, job: Job, now_s: float) -> None:
        outcome = job.outcomes[JobKind.FETCH]
        arrived = outcome.is_success
        if arrived:
            ended_with = self.ledger.fetches_inflight + 1
            self.pace.fetched(job.seconds, began_with=job.began_with, ended_with=ended_with)
        for record, position in job.waiters:
            del record.pending[position]
            record.news = True
            if outcome is Outcome.CANCELLED:
                # Of somebody else who gave up, in the moment this request joined: ask again.
                record.asked = min(record.asked, position)
            elif not arrived:
                record.end = position if record.end is None else min(record.end, position)
            elif record.wants_chunks:
                self._prefix.lease_early(record, position, job.slot)
                record.arrival_s = now_s
                record.fetched.add(position)
                record.window *= 2

    @property
    def has_arrivals_inflight(self) -> bool:
        """Something that a request waits for, or may wait for, is on its way to it."""
        loading = RequestState.LOADING
        return self.ledger.fetches_inflight > 0 or any(
            record.state is loading for record in self._requests.values()
        )

    @property
    def has_copies_inflight(self) -> bool:
        """An idle engine has to keep stepping until its last saves are on their way."""
        return self.ledger.has_copies_inflight

    def reset(self, salt: bytes) -> None:
        """Make everything cached so far unreachable, here and in the bucket.

        From now on chunk hashes are derived with `salt`, which nobody else has. Requests that are
        in the engine now may hold KV of before: they neither load nor save any more.
        """
        self._prefix.reset(salt)
        self.ledger.index.forget()
        for record in self._requests.values():
            record.barred = record.news = True
            record.hashes.clear()
            if record.state is not RequestState.LOADING:
                self._prefix.release(record)

    def check(self) -> None:
        """Raise AssertionError where the books do not balance. For tests."""
        self.ledger.check()
        leased = Counter(
            slot
            for record in (*self._requests.values(), *self._orphans.values())
            for slot in (*record.prefix, *record.early.values())
        )
        for slot, pins in leased.items():
            assert self.ledger.slots.pins(slot) == pins, (slot, pins)
        assert self.ledger.slots.statistics().pinned == len(leased)


def _awaited(job: Job) -> bool:
    """Somebody still waits for this fetch, or would take it."""
    return any(record.awaits(position) for record, position in job.waiters)
