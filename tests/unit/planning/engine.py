"""A small engine over simulated ranks: drives a planner the way vLLM's scheduler does.

It keeps what of vLLM matters to a KV connector (v1/core/sched/scheduler.py of vLLM 0.32): waiting
requests are asked about in every pass until they are placed, blocks of a load are held until its
end, everything else is freed at once and reused in order, full blocks are found again by their
prefix, the last running request is preempted when blocks run out, and outputs may come one step
late (async scheduling) or bring several tokens (drafts).

All along it asserts what the planner promises, by the meaning of the bytes (see `ranks`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from s3kv.messages import StepPlan, StepReport
from s3kv.planning.ledger import ChunkState
from s3kv.planning.requests import Answer, ScheduledRequest
from s3kv.types import ChunkKey
from tests.unit.planning.blocks import BlockPool
from tests.unit.planning.oracle import Oracle
from tests.unit.planning.ranks import Write
from tests.unit.planning.setup import Prefixes, Request, Setup, hash_of


@dataclass
class _Step:
    """A step, and what it samples: per request, the tokens sampled and the drafts rejected."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    sampled: list[tuple[Request, int, int]] = field(default_factory=list)


class Engine:
    """prefixes: shared by engines that share a bucket, and so are numbers, of which every weight
    update takes a new one."""

    def __init__(
        self, setup: Setup, *, ranks: Sequence[Any], prefixes: Prefixes, numbers: Iterator[int]
    ) -> None:
        self.setup = setup
        self.planner = setup.planner()
        self.ranks = ranks
        self.now_s = 0.0
        self.prefixes = prefixes
        self._numbers = numbers
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.loading: dict[str, Request] = {}
        self.seen: Counter[str] = Counter()
        self.pool = BlockPool(setup.blocks, setup.block_tokens)
        self.oracle = Oracle(setup, self.ranks, self.pool)
        self._decided: dict[str, int] = {}
        """By request: the number of its chunks that have been complete before."""
        self._outputs: deque[_Step] = deque()
        self._load_ends: dict[str, list[bool]] = {}

    # --- requests --------------------------------------------------------------------------

    def arrive(self, request_id: str, tokens: list[int], max_new_tokens: int) -> None:
        chain: list[int] = []
        for token in [*tokens, *[7] * max_new_tokens]:
            self.prefixes.extend(chain, token)
        request = Request(request_id, chain, 0, self.setup.hash_tokens)
        request.learn(len(tokens))
        self.waiting.append(request)
        self.planner.add_request(request_id, request.hashes)
        local_tokens, _ = self.pool.hit(request)
        self.planner.prefetch(request_id, local_tokens, self.now_s, tokens=request.known)

    def abort(self, request: Request) -> None:
        state = "loading" if request.loading else "running" if request.table else "waiting"
        self.seen[f"aborted while {state}"] += 1
        self._leave(request)

    def _leave(self, request: Request) -> None:
        """The request is over. Blocks that a load writes to are given back at its end."""
        request.over = True
        self.planner.finished(request.request_id)
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        if not request.loading:
            self.pool.give_back(request)

    def preempt(self, request: Request) -> None:
        self.seen["preempted"] += 1
        self.running.remove(request)
        self.pool.give_back(request)
        request.computed = 0
        self.waiting.insert(0, request)

    def reset(self) -> None:
        """New weights: nothing of before may be used any more. While a load runs the engine
        refuses, and keeps its weights, but the connector has been told to reset all the same."""
        while self._outputs:
            self.finish_step()
        for request in [*reversed(self.running)]:
            self.preempt(request)
        for request in [*self.waiting, *self.loading.values()]:
            request.before_reset = True
        holding = bool(self.loading) or any(request.table for request in self.waiting)
        if not holding:
            self.pool.forget()
            self.oracle.weights = next(self._numbers)
        self.seen["resets refused" if holding else "resets"] += 1
        self.oracle.in_bucket.clear()
        self.planner.reset(b"salt %d" % next(self._numbers))

    # --- a step ----------------------------------------------------------------------------

    def step(self, budget: int = 1_000, drafts: str = "") -> StepPlan:
        """Schedule `budget` tokens, have the ranks run them, and take in what is back by then.

        drafts: guesses added to each decode, "y" for one that turns out right, "n" for wrong.
        """
        step = _Step()
        placed = self._schedule_running(budget, drafts, step)
        if placed is not None:
            self._schedule_waiting(placed, step)
        dropped, completed = self.planner.counters["saves_dropped"], self._completed(step.scheduled)
        plan = self.planner.plan(step.scheduled, self.now_s)
        self.oracle.check_plan(plan, self.loading)
        lost = self._lacking(completed)
        dropped = self.planner.counters["saves_dropped"] - dropped
        assert len(lost) <= dropped, f"computed, not saved, and not counted: {lost}"
        for rank in self.ranks:
            rank.run(plan, step.writes)
        self._outputs.append(step)
        while len(self._outputs) > self.setup.steps_ahead:
            self.finish_step()
        return plan

    def _lacking(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Those that are neither kept here nor believed to be in the bucket."""
        ledger, kept = self.planner.ledger, (ChunkState.RESIDENT, ChunkState.COPYING)
        return {k for k in keys if ledger.state(k) not in kept and not ledger.index.is_present(k)}

    def _completed(self, scheduled: Iterable[ScheduledRequest]) -> set[ChunkKey]:
        """The chunks to save that this step completes and that nobody has so far."""
        completed: set[ChunkKey] = set()
        if self.seen["resets"] or self.seen["resets refused"]:
            return completed
        running = {request.request_id: request for request in self.running}
        size = self.setup.chunk_tokens
        for step in scheduled:
            request = running.get(step.request_id)
            if request is None or self.planner._requests[step.request_id].saving.is_barred:
                continue
            known = len(request.hashes) * self.setup.hash_tokens
            end = min(step.computed_tokens + step.scheduled_tokens, known)
            first = max(step.computed_tokens // size, self._decided.get(step.request_id, 0))
            self._decided[step.request_id] = max(first, end // size)
            for place in range(first, end // size):
                completed.add(ChunkKey(0, hash_of(request.chain[(place + 1) * size - 1])))
        return self._lacking(completed)

    def _schedule_running(self, budget: int, drafts: str, step: _Step) -> int | None:
        """Returns the budget left; None when somebody was preempted."""
        preempted = False
        for request in list(self.running):
            if request not in self.running:
                continue
            left = request.known + request.outstanding - request.computed
            guesses = drafts if left == 1 and not self.setup.steps_ahead else ""
            guesses = guesses[: len(request.chain) - request.known]
            count = min(budget, left + len(guesses))
            if count <= 0 or request.computed + left > len(request.chain):
                continue
            end = request.computed + count
            new = self.pool.allocate(request, end, [])
            while new is None:
                victim = self.running[-1]
                self.preempt(victim)
                preempted = True
                if victim is request:
                    break
                new = self.pool.allocate(request, end, [])
            if new is None:
                break
            budget -= count
            step.scheduled.append(self._scheduled(request, new, count, False))
            self._run(request, count, guesses, step)
        return None if preempted else budget

    def _schedule_waiting(self, budget: int, step: _Step) -> None:
        # Who holds blocks already goes first, or it would keep them from the others for ever.
        for request in sorted(self.waiting, key=lambda request: not request.table):
            if budget <= 0:
                break
            hit: list[int] = []
            if request.computed == 0:
                local, hit = self.pool.hit(request)
                answer = self._ask(request, local)
                if answer.wait:
                    continue
                request.computed = local
                if answer.tokens:
                    if not self._place_load(request, hit, answer.tokens):
                        request.computed = 0
                        break
                    continue
            count = min(budget, request.known - request.computed)
            end = request.computed + count
            if self.pool.allocate(request, end, hit) is None:
                self.seen["unplaced"] += 1
                if not request.table:
                    request.computed = 0
                break
            self.planner.admitted(request.request_id, [request.table], 0)
            budget -= count
            self.waiting.remove(request)
            self.running.append(request)
            step.scheduled.append(self._scheduled(request, [*request.table], count, True))
            self._run(request, count, "", step)

    def _scheduled(
        self, request: Request, blocks: Sequence[int], count: int, replaces: bool
    ) -> ScheduledRequest:
        tables = [blocks] if blocks else ()
        return ScheduledRequest(request.request_id, tables, replaces, request.computed, count)

    def _ask(self, request: Request, local_tokens: int) -> Answer:
        answer = self.planner.lookup(
            request.request_id, local_tokens, self.now_s, tokens=request.known
        )
        self.seen["waits" if answer.wait else "offers" if answer.tokens else "nothings"] += 1
        self.oracle.check_answer(request, local_tokens, answer, self.now_s)
        return answer

    def _place_load(self, request: Request, hit: list[int], tokens: int) -> bool:
        # Requests that hold blocks and compute nothing must be able to go on some time.
        holding = [*self.loading.values(), *(r for r in self.waiting if r.table)]
        promised = sum(self.pool.missing(r, r.known, []) for r in holding)
        end = request.computed + tokens
        if (
            promised + self.pool.missing(request, request.known, hit) > self.pool.free
            or self.pool.allocate(request, end, hit) is None
        ):
            self.seen["unplaced offers"] += 1
            return False
        self.planner.admitted(request.request_id, [[*request.table]], tokens)
        request.computed += tokens
        request.loading = True
        self.waiting.remove(request)
        self.loading[request.request_id] = request
        return True

    def _run(self, request: Request, count: int, guesses: str, step: _Step) -> None:
        """What the forward writes, and what will come of it."""
        start, end = request.computed, request.computed + count
        first_guess = request.known if guesses else end
        right, accepted = True, 0
        for position in range(start, end):
            if position >= first_guess:
                right = right and guesses[position - first_guess] == "y"
                accepted += right
            prefix = request.chain[position] if right else -1 - position
            at, offset = divmod(position, self.setup.block_tokens)
            step.writes.append((request.table[at], offset, (self.oracle.weights, prefix)))
        request.computed = end
        self.pool.remember(request, end)
        rejected = max(0, end - first_guess) - accepted
        if end >= request.known + request.outstanding and request.known < len(request.chain):
            request.outstanding += 1
            step.sampled.append((request, 1 + accepted, rejected))
        elif end >= len(request.chain):
            step.sampled.append((request, 0, 0))

    # --- what comes back -------------------------------------------------------------------

    def finish_step(self) -> None:
        """The oldest step's output arrives, and with it what the ranks have to tell."""
        if not self._outputs:
            return
        output = self._outputs.popleft()
        report = StepReport()
        for rank in self.ranks:
            self.oracle.hear(rank.report)
            report.merge(rank.take_report())
            for request_id, ok in rank.loaded.items():
                self._load_ends.setdefault(request_id, []).append(ok)
            rank.loaded.clear()
        self.planner.pace.step_ended(self.now_s, report.number)
        self.planner.on_report(report, self.now_s)
        self._loads_ended()
        for request, sampled, rejected in output.sampled:
            if not request.over:
                self._sampled(request, sampled, rejected)

    def _sampled(self, request: Request, sampled: int, rejected: int) -> None:
        request.learn(sampled)
        if sampled:
            request.outstanding -= 1
        if request in self.running:
            request.computed -= rejected
        if request.known >= len(request.chain):
            self.seen["finished"] += 1
            self._leave(request)

    def _loads_ended(self) -> None:
        ended = {r: all(e) for r, e in self._load_ends.items() if len(e) == len(self.ranks)}
        self.planner.loaded(ended, [r for r, ok in ended.items() if not ok])
        for request_id, ok in ended.items():
            del self._load_ends[request_id]
            self._load_ended(self.loading.pop(request_id), ok)

    def _load_ended(self, request: Request, ok: bool) -> None:
        self.seen["loads" if ok else "loads failed"] += 1
        request.loading = False
        request.load_failed = not ok
        if request.over or not ok:
            self.pool.give_back(request)
            request.computed = 0
        if request.over:
            return
        self.waiting.insert(0, request)
        if ok:
            self.oracle.check_loaded(request)
            self.pool.remember(request, request.computed)
            request.computed = min(request.computed, request.known - 1)

    def what_happened(self) -> Counter[str]:
        return self.seen + self.planner.counters + sum((r.seen for r in self.ranks), Counter())
