"""vLLM's loop as far as a KV connector sees it, around a real planner (vLLM 0.32, scheduler.py).

One step: prompts under way get their share of the batch; then everyone who waits is asked about,
in order, until the batch or memory is full; then the planner's plan is carried out, time passes,
and the step's end brings the reports. Reports reach the planner at the end of a step only. With
nothing to compute a step takes 1 ms, and an engine whose steps change nothing sleeps until
something happens to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise

from benchmarks.simulation.gpu import PagePool
from benchmarks.simulation.wire import IoProcess, Timeline
from benchmarks.simulation.workload import CHUNK_TOKENS, Arrival
from s3kv.messages import BucketJob, JobEnd, JobKind, LoadJob, StepPlan, StepReport
from s3kv.planning.kv import KVPlanner
from s3kv.planning.requests import ScheduledRequest
from s3kv.types import Outcome

BLOCK_TOKENS = 16
"""vLLM's default. Requests hold whole pages; the planner sees their blocks."""

_PAGE_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
_EMPTY_STEP_S = 0.001
_DEADLINE_POLL_S = 0.02
"""How late an otherwise idle engine may notice that a deadline is over. About a decode step."""


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    prefill_tokens_per_s: float
    batch_tokens: int
    """Prompt tokens computed in one step, at most."""
    decode_s: float
    """Per token of an answer. It holds memory, and costs the prompts of others nothing."""
    load_bytes_per_s: float
    """From host memory to the device."""


@dataclass(slots=True, eq=False)
class Request:
    request_id: str
    arrival: Arrival
    computed: int = 0
    filled: int = 0
    """Full pages that others can find."""
    local_tokens: int = 0
    pages: list[int] = field(default_factory=list)
    loading: bool = False
    waits_since_s: float | None = None
    waited_s: float = 0.0

    @property
    def block_ids(self) -> list[int]:
        starts = (page * _PAGE_BLOCKS for page in self.pages)
        return list(chain.from_iterable(range(s, s + _PAGE_BLOCKS) for s in starts))


@dataclass(slots=True)
class Seen:
    """What came of an engine's requests. One entry per request, in order of admission."""

    ttft_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    gpu_tokens: int = 0
    disk_tokens: int = 0
    computed_tokens: int = 0


class Engine:
    """`io` is set right after construction: the two know each other."""

    io: IoProcess

    def __init__(
        self,
        timeline: Timeline,
        planner: KVPlanner,
        pool: PagePool,
        speed: EngineSpeed,
        chunk_bytes: int,
    ) -> None:
        self.planner = planner
        self.seen = Seen()
        self._timeline = timeline
        self._pool = pool
        self._speed = speed
        self._chunk_bytes = chunk_bytes
        self._waiting: list[Request] = []
        self._prefilling: list[Request] = []
        self._loading: dict[str, Request] = {}
        self._decoding: dict[str, Request] = {}
        self._report = StepReport()
        self._loaded: list[str] = []
        self._over: list[Request] = []
        self._loads_end_s = 0.0
        self._stepping = False
        self._has_news = False
        self._will_poll = False

    def arrive(self, arrival: Arrival) -> None:
        now_s, request_id = self._timeline.now_s, str(arrival.number)
        local_tokens = len(self._local_hit(arrival)) * CHUNK_TOKENS
        self._waiting.append(Request(request_id, arrival))
        self.planner.add_request(request_id, arrival.hashes)
        self.planner.prefetch(request_id, local_tokens, now_s)
        self._wake()

    def job_ended(self, end: JobEnd) -> None:
        self._report.add(end)
        # An engine without requests does not step; it learns of this in its next step.
        if self._waiting or self._decoding:
            self._wake()

    def _load_ended(self, request_id: str) -> None:
        self._loaded.append(request_id)
        self._wake()

    def _answered(self, request: Request) -> None:
        del self._decoding[request.request_id]
        self._over.append(request)
        if not self._stepping:
            self._retire()
        if self._waiting:
            self._wake()

    def _retire(self) -> None:
        for request in self._over:
            self.planner.finished(request.request_id)
            self._pool.give_back(request.pages)
        self._over.clear()

    def _wake(self) -> None:
        self._has_news = True
        if not self._stepping:
            self._step()

    def _poll(self) -> None:
        self._will_poll = False
        self._wake()

    def _step(self) -> None:
        now_s = self._timeline.now_s
        self._has_news = False
        self._retire()
        scheduled: list[ScheduledRequest] = []
        self._schedule(scheduled)
        tokens = sum(step.scheduled_tokens for step in scheduled)
        # In decode steps the planner decides about chunks whose fetch came to nothing meanwhile.
        scheduled += [
            ScheduledRequest(request_id, (), False, request.arrival.prompt_tokens, 1)
            for request_id, request in self._decoding.items()
        ]
        plan = self.planner.plan(scheduled, now_s)
        assert not plan.fences, "no block is used again before the copy of its step is done"
        # Some jobs end at once, and what ends in a step is heard at its end.
        self._stepping = True
        for job_id in plan.cancels:
            self.io.cancel(job_id)
        for job in plan.jobs:
            self.io.submit(job)
        for job_id in plan.withdrawals:
            self.io.withdraw(job_id)
        for load in plan.loads:
            self._load(load)
        length_s = tokens / self._speed.prefill_tokens_per_s if tokens else _EMPTY_STEP_S
        self._timeline.at(now_s + length_s, partial(self._step_ended, plan, tokens))

    def _schedule(self, scheduled: list[ScheduledRequest]) -> None:
        left = self._speed.batch_tokens
        for request in self._prefilling:
            left -= self._compute(request, left, scheduled, is_new=False)
        # Those that hold memory go first, or they and a large request wait for each other.
        for request in sorted(self._waiting, key=lambda request: not request.pages):
            if left <= 0:
                return
            if request.loading:
                continue
            if not request.pages:
                external_tokens = self._ask(request)
                if external_tokens is None:
                    continue
                if not self._place(request, external_tokens):
                    return
                if external_tokens:
                    continue
            self.planner.admitted(request.request_id, (request.block_ids,), 0)
            self._waiting.remove(request)
            self._prefilling.append(request)
            left -= self._compute(request, left, scheduled, is_new=True)

    def _compute(
        self, request: Request, left: int, scheduled: list[ScheduledRequest], *, is_new: bool
    ) -> int:
        tokens = min(left, request.arrival.prompt_tokens - request.computed)
        if tokens > 0:
            first = 0 if is_new else -(-request.computed // BLOCK_TOKENS)
            blocks = (request.block_ids[first : -(-(request.computed + tokens) // BLOCK_TOKENS)],)
            step = ScheduledRequest(request.request_id, blocks, is_new, request.computed, tokens)
            scheduled.append(step)
            request.computed += tokens
            self.seen.computed_tokens += tokens
        return tokens

    def _ask(self, request: Request) -> int | None:
        """None: ask again in the next step. Otherwise the tokens that can be loaded."""
        now_s = self._timeline.now_s
        request.local_tokens = len(self._local_hit(request.arrival)) * CHUNK_TOKENS
        answer = self.planner.lookup(request.request_id, request.local_tokens, now_s)
        if answer.wait:
            if request.waits_since_s is None:
                request.waits_since_s = now_s
            return None
        if request.waits_since_s is not None:
            request.waited_s += now_s - request.waits_since_s
            request.waits_since_s = None
        return answer.tokens

    def _place(self, request: Request, external_tokens: int) -> bool:
        """Memory for the prompt and the answer at once, so that nobody is ever preempted."""
        arrival = request.arrival
        count = -(-(arrival.prompt_tokens + arrival.output_tokens) // CHUNK_TOKENS)
        pages = self._pool.take(self._local_hit(arrival), count)
        if pages is None:
            return False
        request.pages = pages
        request.filled = request.local_tokens // CHUNK_TOKENS
        request.computed = request.local_tokens + external_tokens
        self.seen.waited_s.append(request.waited_s)
        self.seen.gpu_tokens += request.local_tokens
        if external_tokens:
            request.loading = True
            self._loading[request.request_id] = request
            self.seen.disk_tokens += self._disk_tokens(request, external_tokens)
            self.planner.admitted(request.request_id, (request.block_ids,), external_tokens)
        return True

    def _disk_tokens(self, request: Request, external_tokens: int) -> int:
        """Of the tokens that were fetched for the request, those from the disk."""
        hashes, first = request.arrival.hashes, request.local_tokens // CHUNK_TOKENS
        ends = range(0, external_tokens + CHUNK_TOKENS, CHUNK_TOKENS)
        fetched = [self.planner.bucket_tokens(request.request_id, end) for end in ends]
        return sum(
            after - before
            for block_hash, (before, after) in zip(hashes[first:], pairwise(fetched), strict=False)
            if block_hash in self.io.near
        )

    def _local_hit(self, arrival: Arrival) -> list[int]:
        return self._pool.hit(arrival.hashes, arrival.prompt_tokens, CHUNK_TOKENS)

    def _load(self, order: LoadJob) -> None:
        blocks = sum(len(part.block_ids) for part in order.parts)
        length_s = blocks / _PAGE_BLOCKS * self._chunk_bytes / self._speed.load_bytes_per_s
        self._loads_end_s = max(self._loads_end_s, self._timeline.now_s) + length_s
        self._timeline.at(self._loads_end_s, partial(self._load_ended, order.request_id))

    def _step_ended(self, plan: StepPlan, tokens: int) -> None:
        now_s = self._timeline.now_s
        for order in plan.saves:
            # The copy is done by the end of the step, and the upload starts.
            self._report.add(JobEnd(order.job_id, JobKind.SAVE, Outcome.OK, 0, 0.0))
            self.io.submit(BucketJob(order.job_id, JobKind.UPLOAD, order.key, order.slot))
        report, self._report = self._report, StepReport()
        loaded, self._loaded = self._loaded, []
        self.planner.pace.step_ended(now_s, plan.number)
        self.planner.on_report(report, now_s)
        self.planner.loaded(loaded)
        for request_id in loaded:
            self._start_computing(self._loading.pop(request_id))
        for request in self._prefilling:
            self._fill(request)
        self._first_tokens()
        self._stepping = False
        self._go_on_stepping(bool(tokens or loaded or report.ends or self._has_news))

    def _go_on_stepping(self, changed: bool) -> None:
        if self._prefilling or (changed and (self._waiting or self._decoding)):
            self._step()
        elif not self._will_poll and any(r.waits_since_s is not None for r in self._waiting):
            self._will_poll = True
            self._timeline.at(self._timeline.now_s + _DEADLINE_POLL_S, self._poll)

    def _start_computing(self, request: Request) -> None:
        """Its load has ended. The last token has to be computed in any case, for its logits."""
        request.loading = False
        request.computed = min(request.computed, request.arrival.prompt_tokens - 1)
        self._fill(request)

    def _first_tokens(self) -> None:
        now_s = self._timeline.now_s
        done = [r for r in self._prefilling if r.computed == r.arrival.prompt_tokens]
        self._prefilling = [r for r in self._prefilling if r not in done]
        for request in done:
            self.seen.ttft_s.append(now_s - request.arrival.time_s)
            self._decoding[request.request_id] = request
            answered_s = now_s + request.arrival.output_tokens * self._speed.decode_s
            self._timeline.at(answered_s, partial(self._answered, request))

    def _fill(self, request: Request) -> None:
        """What of the request is on the device by now can be found by others."""
        full = request.computed // CHUNK_TOKENS
        for place in range(request.filled, full):
            self._pool.fill(request.pages[place], request.arrival.hashes[place])
        request.filled = full
