"""Planner of the tier below vLLM's primary tier: decides on lookups, fetches and uploads of rows.

vLLM owns the primary tier, and allocates a row for every key whose lookup returns HIT. The fetch
itself then finds out whether the bucket has the chunk:

    lookup ──HIT──▶ row allocated ──load──▶ FETCHING ──arrived──▶ the key succeeds
       │                                       └──absent, bad, failed, given up──▶ the key fails
       ├──RETRY──▶ asked again in the next pass, until the request's deadline
       └──MISS: the rest of the prompt is computed, unless a RETRY came before in the same scan

Once a request has no fetch under way, keys that failed, and every key after its deadline, are a
MISS for good: vLLM stores no computed chunk whose row awaits a fetch. So no request waits forever.

- Chunks that the bucket may not have (probes) take few rows: a window per request, which doubles
  with every arrival, and a fraction of all rows. Groups are probed in turn: hits prove the rest.
- Requests hold the rows promised to them until they are scheduled. A request that finds no row left
  waits for other requests; one that needs too many by itself gets a MISS for the rest. No key is
  promised twice, because vLLM may reuse the row of a chunk that has arrived.
- Uploads also pin rows: they are dropped beyond a fraction of the rows, and while the store fails.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from s3kv.messages import BucketJob, JobEnd, JobKind
from s3kv.planning.breaker import Breaker
from s3kv.planning.deadline import Forecast, Wait, WaitFacts, keep_waiting
from s3kv.planning.index import BucketIndex
from s3kv.planning.pace import MIN_PREFILL_SAMPLE_TOKENS, Pace
from s3kv.planning.requests import NO_LIMITS, RequestLimits
from s3kv.planning.row_transfers import RowJob, RowKey, RowKeys, RowTransfers
from s3kv.types import ChunkKey, Outcome, Tally

_FIRST_WINDOW, _LARGEST_WINDOW = 64, 256  # per request; the first as in the connector (decision 8)
_PROBE_SHARE = 8  # all probes take at most 1/8 of the rows, a first window half of that
_SPARE_SHARE = 8  # 1/8 of the rows is never promised: vLLM needs some for computed chunks
_TRIAL_S = 60.0  # after that without an arrival, a wait ignores what fetches took before
_UPLOAD_SHARE = 4  # uploads pin at most 1/4 of the rows, because vLLM cannot evict pinned rows


class OffloadAnswer(enum.Enum):
    """Answer to a lookup, as vLLM's `LookupResult`."""

    HIT = "hit"
    RETRY = "retry"
    MISS = "miss"


@dataclass(slots=True)
class _OffloadRequest:
    """A request. promised: keys answered HIT since it was last scheduled; new: those of this pass
    without a job. fetching: its fetches, by key. probes: unknown keys in new and fetching. found:
    hashes for which some group's chunk arrived. lost: keys that failed. behind: keys not promised
    at its last whole scan. stop: group and end token of the RETRY that ends its scan. is_closed: it
    waits no more. is_barred: it saves no more. first: smallest end token of its lookups or chunks
    to compute. computed: keys from there, with the times at which they were stored in this pass."""

    number: int  # in the order of arrival
    limits: RequestLimits = NO_LIMITS
    wait: Wait = field(default_factory=Wait)
    promised: set[ChunkKey] = field(default_factory=set)
    new: dict[ChunkKey, bool] = field(default_factory=dict)
    fetching: dict[ChunkKey, int] = field(default_factory=dict)
    probes: int = 0
    window: int = 0
    probed_group: int = 0
    found: set[bytes] = field(default_factory=set)
    lost: set[ChunkKey] = field(default_factory=set)
    behind: int = 0
    stop: tuple[int, int] | None = None
    is_closed: bool = False
    is_barred: bool = False
    first: float = math.inf
    computed: dict[RowKey, float] = field(default_factory=dict)
    computing_s: float = 0.0
    computing_step: int = 0  # since then, what it computes has not been measured


class OffloadPlanner:
    """The planner of one engine's tier, for one caller at a time; times are seconds of one clock.
    rows: of the primary tier. chunk_tokens: tokens of a key in full attention. groups: of the KV
    cache. is_observed: whether `changes` is filled. recompute_gate: `WaitFacts.gate`."""

    def __init__(
        self,
        index: BucketIndex,
        breaker: Breaker,
        pace: Pace,
        *,
        rows: int,
        chunk_tokens: int,
        groups: int = 1,
        max_wait_s: float,
        is_observed: bool = False,
        recompute_gate: bool = True,
    ) -> None:
        self.index, self.breaker, self.pace = index, breaker, pace
        self.counters, self.transfers, self._step, self._begun = Tally(), RowTransfers(), 0, 0
        self.changes: list[tuple[bytes, bool]] = []
        """Names of keys, and whether the bucket turned out to have them; its reader clears it."""
        self._is_observed, self._recompute_gate = is_observed, recompute_gate
        self._chunk_tokens, self._groups, self._max_wait_s = chunk_tokens, groups, max_wait_s
        self._most_probes = max(1, min(4 * _FIRST_WINDOW, rows // _PROBE_SHARE))
        self._first_window = max(1, min(_FIRST_WINDOW, self._most_probes // 2))
        self._most_promised = max(1, rows - rows // _SPARE_SHARE)
        self._most_uploads = max(1, rows // _UPLOAD_SHARE)
        self._requests: dict[str, _OffloadRequest] = {}
        self.retries: dict[str, int] = {}
        """RETRY counts of this pass by request, whose later answers are RETRY; callers add them."""
        self._active: dict[str, _OffloadRequest] = {}  # with a lookup in this pass, or a fetch
        self._promised = self._probes = 0  # sums over all requests
        self.is_idle = False  # whether all requests only waited at the end of the last pass
        self._names: dict[ChunkKey, bytes] = {}  # of those that are due
        self._uses: dict[int, RowKey] = {}
        self._slow: dict[ChunkKey, float] = {}  # given up; no request starts to wait until then
        self._tried_s, self._arrived_s = 0.0, -math.inf  # last trial or arrival; last arrival
        self._compute_s = 1e6  # per chunk; so long that only patience counts until it is measured

    def begin(self, request_id: str, limits: RequestLimits = NO_LIMITS) -> None:
        """Add a new request. limits: vLLM enforces a limit on loads, unless it is 0."""
        self._begun += 1
        self._requests[request_id] = _OffloadRequest(self._begun, limits, window=self._first_window)

    def finish(self, request_id: str) -> None:
        """Forget a request. Its fetches continue, because others may wait for the same rows."""
        self._active.pop(request_id, None)
        self.retries.pop(request_id, None)
        if (request := self._requests.pop(request_id, None)) is not None:
            self._measure(request)
            self._release(request)
            self._probes -= request.probes

    def reset(self) -> None:
        """Forget all verdicts. Live requests no longer load or save: they may have old KV."""
        self.index.forget()
        self._names, self._uses = {}, {}
        self.transfers.cancel_loads(math.inf)
        for request in self._requests.values():
            request.is_closed = request.is_barred = True

    def lookup(
        self, request_id: str, key: ChunkKey, end_token: int | None, now_s: float
    ) -> OffloadAnswer:
        """Answer a lookup of a key that the primary tier lacks. end_token: as in `RowKey`."""
        if (request := self._requests.get(request_id)) is None:
            return OffloadAnswer.MISS
        request.first = min(request.first, end_token or math.inf)
        is_over = request.is_closed or key in request.lost or request.limits.load_tokens == 0
        if request.stop or request_id in self.retries or (is_over and request.fetching):
            return self._retry(request_id, request, key, end_token)
        if is_over:
            return OffloadAnswer.MISS
        if key in request.new or key in request.fetching:
            return OffloadAnswer.HIT
        if self._slow.get(key, 0.0) > now_s:
            return self._refuse("deadline_cuts")
        if key in request.promised:  # its row was reused meanwhile
            return self._refuse("fetches_without_room")
        self._active[request_id] = request
        is_probe = not (self.index.is_present(key) or key.block_hash in request.found)
        if is_probe and self.index.is_absent(key, now_s):
            return self._refuse("fetches_spared")
        if is_probe and not self._may_probe(request, key.group):
            return self._retry(request_id, request, key, end_token)
        if self._promised + self.transfers.uploads >= self._most_promised:
            if len(request.promised) < self._promised:
                return self._retry(request_id, request, key, end_token)
            return self._refuse("fetches_without_room")
        if not (self.breaker.has_disk or self.breaker.allows(now_s)):
            return self._refuse("fetches_refused_by_breaker")
        request.promised.add(key)
        request.new[key] = is_probe
        request.probes += is_probe
        self._promised, self._probes = self._promised + 1, self._probes + is_probe
        request.behind -= request.behind > 0
        return OffloadAnswer.HIT

    def _may_probe(self, request: _OffloadRequest, group: int) -> bool:
        request.probed_group = request.probed_group if request.probes else group
        is_free = request.probes < request.window and self._probes < self._most_probes
        return is_free and not (request.lost and request.fetching) and request.probed_group == group

    def _refuse(self, counter: str) -> OffloadAnswer:
        self.counters[counter] += 1
        return OffloadAnswer.MISS

    def _retry(
        self, request_id: str, request: _OffloadRequest, key: ChunkKey, end_token: int | None
    ) -> OffloadAnswer:
        """Answer RETRY; or MISS, to end a scan, if an earlier key waits and `behind` is known."""
        if request.behind and end_token is not None and request_id not in self.retries:
            request.stop = stop = request.stop or (key.group, end_token)
            if stop[0] == key.group and stop[1] <= end_token:
                return OffloadAnswer.RETRY if stop[1] == end_token else OffloadAnswer.MISS
        self.retries[request_id] = self.retries.get(request_id, 0) + 1
        return OffloadAnswer.RETRY

    def end_pass(self, scheduled: Iterable[str], now_s: float) -> None:
        """End a pass, after its loads. scheduled: requests begun, whose rows vLLM has pinned."""
        waiting = 0
        self.pace.step_started(now_s, 0, sum(self.pace.queue(now_s, 1)))  # all queued has begun
        for request_id, request in sorted(self._active.items(), key=lambda item: item[1].number):
            self._measure(request)
            if request.new:  # vLLM had no rows for these, and treats them as MISS
                self._give_up_new(request)
            retries = self.retries.pop(request_id, 0)
            if request.stop:
                retries, request.stop = max(retries, request.behind), None
            if (retries or request.fetching) and not request.is_closed:
                request.behind = retries or request.behind
                self._decide(request, retries, now_s)
            waiting += bool(retries or request.fetching)
            if not request.fetching:
                del self._active[request_id]
                if request.computing_step and not retries:  # it resumes, which vLLM may not report
                    self._release(request)
        self._step, self.is_idle = self._step + 1, 0 < waiting == len(self._requests)
        while self._slow and next(iter(self._slow.values())) <= now_s:
            del self._slow[next(iter(self._slow))]
        for begun in filter(None, map(self._requests.get, scheduled)):
            self._release(begun)
            begun.computing_s, begun.computing_step, begun.behind = now_s, self._step, 0
        # Loads of ended requests: others may wait for their rows, which only an end frees.
        self.transfers.cancel_loads(now_s - self._max_wait_s, but_of=self._requests)

    def _give_up_new(self, request: _OffloadRequest) -> None:
        probes = sum(request.new.values())
        self.counters["fetches_without_room"] += len(request.new)
        request.promised -= request.new.keys()
        request.probes -= probes
        self._promised, self._probes = self._promised - len(request.new), self._probes - probes
        request.new.clear()

    def _release(self, request: _OffloadRequest) -> None:
        self._promised -= len(request.promised)
        request.promised.clear()
        request.wait.start_over()

    def _decide(self, request: _OffloadRequest, retries: int, now_s: float) -> None:
        """Close a request whose wait has ended, and cancel its fetches."""
        wait, missing = request.wait, len(request.fetching) + retries
        queue = self.pace.queue(now_s, self.pace.compute_s(1) / self._compute_s)
        if not wait.is_begun:
            wait.begin(now_s, 0, sum(queue))
            wait.asked_s = now_s
        if now_s < wait.until_s:
            return
        wait.wanted = max(1, len(request.promised) + retries)
        near = {self.transfers.jobs[job_id].near for job_id in request.fetching.values()} == {True}
        forecast = self.pace.forecast(missing, (retries // request.window).bit_length(), near=near)
        if now_s >= self._tried_s + _TRIAL_S:  # the fetches of refused waits measure nothing
            self._tried_s, forecast = now_s, Forecast(None, None)
        facts = WaitFacts(
            now_s=now_s,
            wait=wait,
            missing=missing,
            unproven=request.probes,
            progress_s=self._arrived_s if self.transfers.is_behind(request.fetching) else -math.inf,
            queue=queue,
            compute_s=self._compute_s,
            forecast=forecast,
            max_wait_s=self._max_wait_s,
            gate=self._recompute_gate,
        )
        if keep_waiting(facts, self.counters, lambda s: self.pace.gave_up(s, missing, near=near)):
            return
        request.is_closed = True
        self.pace.new_tokens += missing * self._chunk_tokens / self._groups
        self.transfers.cancels += request.fetching.values()
        self._slow.update(dict.fromkeys(request.fetching, now_s + self._max_wait_s))

    def load(
        self, transfer_id: int, request_id: str, keys: RowKeys, now_s: float
    ) -> list[BucketJob]:
        """Begin vLLM's load of keys, each into its row. Returns the fetches."""
        load = self.transfers.begin(transfer_id, request_id, now_s, is_load=True)
        jobs = [self.transfers.add(load, *row, near=self.breaker.is_near(now_s)) for row in keys]
        if (request := self._requests.get(request_id)) is not None:
            for job in jobs:
                self.transfers.jobs[job.job_id].is_probe = request.new.pop(job.key, False)
                request.fetching[job.key] = job.job_id
            request.wait.asked_s = now_s
            request.wait.wake()
        self.counters["fetches"] += len(jobs)
        self.transfers.end_if_done(load, now_s)
        return jobs

    def store(
        self, transfer_id: int, request_id: str, keys: RowKeys, now_s: float
    ) -> list[BucketJob]:
        """Begin vLLM's store of keys, each from its row. Returns the uploads that it needs."""
        transfer = self.transfers.begin(transfer_id, request_id, now_s, is_load=False)
        request = self._requests.get(request_id)
        if request is not None and request.is_barred:
            self.counters.update({"saves_dropped": len(keys), "saves_after_reset": len(keys)})
            transfer.is_whole, keys = False, ()
        elif request is not None:
            self._active[request_id] = request
            computed = (key for key, _ in keys if (key.end_token or 0) >= request.first)
            request.computed |= dict.fromkeys(computed, now_s)
            if (most := request.limits.save_tokens) is not None:
                keys = [row for row in keys if (row[0].end_token or most + 1) <= most]
        jobs = []
        for key, row in keys:
            if self.index.is_present(key.chunk):
                self.use(key, now_s)
            elif self.transfers.uploads >= self._most_uploads or not self.breaker.allows(now_s):
                self.counters["saves_dropped"] += 1
                self.counters["saves_refused_by_breaker"] += self.breaker.is_open(now_s)
                transfer.is_whole = False
            else:
                jobs.append(self.transfers.add(transfer, key, row))
        self.counters["saves"] += len(jobs)
        self.transfers.end_if_done(transfer, now_s)
        return jobs

    def use(self, key: RowKey, now_s: float) -> None:
        """Note that a chunk is used in the primary tier."""
        self.index.use(key.chunk, now_s)
        if key.chunk in self.index.due:
            self._names[key.chunk] = key.name

    def uses(self) -> list[BucketJob]:
        """The checks of used chunks that the bucket may have deleted."""
        due, self.index.due = self.index.due, []
        jobs = [BucketJob(self.transfers.new_id(), JobKind.USE, key) for key in due]
        self._uses.update((job.job_id, RowKey(self._names.pop(job.key), job.key)) for job in jobs)
        return jobs

    def _measure(self, request: _OffloadRequest) -> None:
        """Measure prefill speed by the chunks stored since the last time, or since scheduling."""
        if not (computed := request.computed):
            return
        now_s = max(computed.values())
        tokens = self._chunk_tokens * max(Counter(key.chunk.group for key in computed).values())
        steps, seconds = self._step - request.computing_step, now_s - request.computing_s
        # With a gap in the arrivals, the engine also computes chunks that are not stored again.
        is_whole = not (request.is_closed or (request.lost and request.found))
        is_prefill = tokens >= steps * MIN_PREFILL_SAMPLE_TOKENS
        if request.computing_step and seconds > 0 and is_whole and is_prefill:
            self.pace.prefilled(tokens, seconds)
            self._compute_s = self.pace.compute_s(self._chunk_tokens)
        # A resumed request also stores chunks that the primary tier lost: it does not compute them.
        request.first = 1 + max(key.end_token or 0 for key in computed)
        computed.clear()
        request.computing_s, request.computing_step = now_s, self._step

    def on_end(self, end: JobEnd, now_s: float) -> None:
        """Process the end of a job. Nothing reads or writes its row on its behalf any more."""
        if end.kind is JobKind.USE:
            if (used := self._uses.pop(end.job_id, None)) is not None:  # else before a reset
                self._learn(used, end, now_s)
            return
        job, outcome = self.transfers.job_ended(end), end.outcome
        self.counters[f"{end.kind.value}_{outcome.name.lower()}"] += 1
        if end.reason:
            self.counters[f"fetch_corrupt_{end.reason}"] += 1
        if not job.near and (outcome is not Outcome.DENIED or job.transfer.is_load):
            self.breaker.saw(outcome, now_s, near=end.near)
        if job.transfer.is_load:
            self._fetched(job, end, now_s)
        if outcome.is_success:
            self.counters[f"{end.kind.value}_bytes"] += end.nbytes
        self._learn(job.key, end, now_s)
        self.transfers.end_if_done(job.transfer, now_s)

    def _fetched(self, job: RowJob, end: JobEnd, now_s: float) -> None:
        key, request = job.key.chunk, self._requests.get(job.transfer.request_id)
        began, ended, source = job.began_with, self.transfers.fetches + 1, end.source
        self.pace.fetched(end.outcome, end.seconds, began, ended, source, near=end.near)
        if request is None:
            return
        request.fetching.pop(key, None)
        request.probes -= job.is_probe
        self._probes -= job.is_probe
        if end.outcome.is_success:
            request.found.add(key.block_hash)
            request.window = min(2 * request.window, _LARGEST_WINDOW)
            request.wait.arrived(now_s)
            self._tried_s = self._arrived_s = now_s
            return
        request.lost.add(key)
        request.wait.wake()
        self._promised -= key in request.promised
        request.promised.discard(key)

    def _learn(self, key: RowKey, end: JobEnd, now_s: float) -> None:
        """Record the bucket's answer, if there is one, in the index and in `changes`."""
        was_there = self.index.is_present(key.chunk)
        if end.outcome.is_success and not (end.near and was_there):
            self.index.note_present(key.chunk, now_s + end.fresh_s)
        elif not end.near and end.outcome in (Outcome.MISSING, Outcome.CORRUPT):
            self.index.note_absent(key.chunk, now_s)
        if self._is_observed and was_there is not self.index.is_present(key.chunk):
            self.changes.append((key.name, not was_there))
