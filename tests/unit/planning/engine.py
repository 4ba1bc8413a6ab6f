"""A small engine over simulated ranks: drives a planner the way vLLM's scheduler does.

It keeps what of vLLM matters to a KV connector (v1/core/sched/scheduler.py of vLLM 0.32): waiting
requests are asked about in every pass until they are placed, blocks of a load are held until its
end, everything else is freed at once and reused in order, full blocks are found again by their
prefix, the last running request is preempted when blocks run out, and outputs may come one step
late (async scheduling) or bring several tokens (drafts).

All along it asserts what the planner promises, by the meaning of the bytes (see `ranks`).
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lab.books import check
from s3kv.messages import StepPlan, StepReport
from s3kv.planning.ledger import ChunkState
from s3kv.planning.requests import NO_LIMITS, Answer, RequestLimits, ScheduledRequest
from s3kv.types import ChunkKey, Outcome
from tests.unit.planning.blocks import BlockPool, Tables, copied
from tests.unit.planning.oracle import Oracle, objects_of
from tests.unit.planning.ranks import Bucket, Rank, Write
from tests.unit.planning.setup import Prefixes, Request, Setup, hash_of, meaning


@dataclass
class _Output:
    """A step on its way back: per sampled request, tokens sampled and drafts rejected."""

    sampled: list[tuple[Request, int, int]]


class Engine:
    """ranks: other ones than those that move meanings. prefixes: shared by engines that share a
    bucket, and so are numbers, of which every weight update takes a new one."""

    def __init__(
        self,
        setup: Setup,
        *,
        ranks: Sequence[Any] | None = None,
        prefixes: Prefixes | None = None,
        numbers: Iterator[int] | None = None,
    ) -> None:
        self.setup = setup
        self.planner = setup.planner()
        self.bucket = Bucket()
        self.ranks: Sequence[Any] = ranks or [
            Rank(
                number,
                slots=setup.slots,
                blocks=setup.blocks,
                tables=setup.tables,
                bucket=self.bucket,
            )
            for number in range(setup.world_size)
        ]
        self.now_s = 0.0
        self.prefixes = Prefixes() if prefixes is None else prefixes
        self._numbers = itertools.count(1) if numbers is None else numbers
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.loading: dict[str, Request] = {}
        self.seen: Counter[str] = Counter()
        self.sound = True
        """No step has broken off with a failure."""
        self.pool = BlockPool(setup.blocks, setup.tables, setup.null_block)
        self.oracle = Oracle(setup, self.ranks, self.pool)
        self._decided: dict[str, int] = {}
        """By request: the number of its chunks that have been complete before."""
        self._outputs: deque[_Output] = deque()
        self._load_ends: dict[str, list[bool]] = {}

    # --- requests --------------------------------------------------------------------------

    def arrive(
        self,
        request_id: str,
        tokens: list[int],
        max_new_tokens: int,
        limits: RequestLimits = NO_LIMITS,
    ) -> Request:
        chain: list[int] = []
        for token in [*tokens, *[7] * max_new_tokens]:
            self.prefixes.extend(chain, token)
        request = Request(request_id, chain, 0, self.setup.hash_tokens, limits)
        request.learn(len(tokens))
        self.waiting.append(request)
        self.planner.add_request(request_id, request.hashes, limits)
        local_tokens, _ = self.pool.hit(request)
        self.planner.prefetch(request_id, local_tokens, self.now_s, tokens=request.known)
        return request

    def abort(self, request: Request) -> None:
        state = "loading" if request.loading else "running" if request.tables else "waiting"
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
        holding = bool(self.loading) or any(request.tables for request in self.waiting)
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
        self.sound = False
        scheduled: list[ScheduledRequest] = []
        writes: list[Write] = []
        output = _Output([])
        placed = self._schedule_running(budget, drafts, scheduled, writes, output)
        if placed is not None:
            self._schedule_waiting(placed, scheduled, writes, output)
        dropped, completed = self.planner.counters["saves_dropped"], self._completed(scheduled)
        plan = self.planner.plan(scheduled, self.now_s)
        self.oracle.check_plan(plan, self.loading)
        lost = self._lacking(completed)
        dropped = self.planner.counters["saves_dropped"] - dropped
        assert len(lost) <= dropped, f"computed, not saved, and not counted: {lost}"
        if not (self.seen["resets"] or self.seen["resets refused"]):
            self.oracle.check_limits(plan, self.running)
        for rank in self.ranks:
            rank.run(plan, writes)
        self._outputs.append(output)
        while len(self._outputs) > self.setup.steps_ahead:
            self.finish_step()
        self.sound = True
        return plan

    def _lacking(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Those that are neither kept here nor believed to be in the bucket."""
        ledger, kept = self.planner.ledger, (ChunkState.RESIDENT, ChunkState.COPYING)
        return {k for k in keys if ledger.state(k) not in kept and not ledger.index.is_present(k)}

    def _completed(self, scheduled: Iterable[ScheduledRequest]) -> set[ChunkKey]:
        """The chunks to save that this step completes and that nobody has so far."""
        completed: set[ChunkKey] = set()
        if self.seen["resets"] or self.seen["resets refused"] or not self.setup.may_save:
            return completed
        running = {request.request_id: request for request in self.running}
        size = self.setup.chunk_tokens
        for step in scheduled:
            request = running.get(step.request_id)
            if request is None or self.planner._requests[step.request_id].saving.is_barred:
                continue
            known = len(request.hashes) * self.setup.hash_tokens
            most = request.limits.save_tokens
            end = min(step.computed_tokens + step.scheduled_tokens, known)
            end = end if most is None else min(end, most)
            first = max(step.computed_tokens // size, self._decided.get(step.request_id, 0))
            self._decided[step.request_id] = max(first, end // size)
            for place in range(first, end // size):
                block_hash = hash_of(request.chain[(place + 1) * size - 1])
                for coverage in dict.fromkeys(self.setup.tables):
                    if coverage.blocks_for((place + 1) * size) and not coverage.kind.is_sparse:
                        completed.add(ChunkKey(coverage.number, block_hash))
        return self._lacking(completed)

    def _schedule_running(
        self,
        budget: int,
        drafts: str,
        scheduled: list[ScheduledRequest],
        writes: list[Write],
        output: _Output,
    ) -> int | None:
        """Returns the budget left; None when somebody was preempted."""
        preempted = False
        for request in list(self.running):
            if request not in self.running:
                continue
            left = request.known + request.outstanding - request.computed
            may_guess = left == 1 and not (self.setup.steps_ahead or self.setup.has_states)
            guesses = drafts if may_guess else ""
            guesses = guesses[: len(request.chain) - request.known]
            count = min(budget, left + len(guesses))
            if count <= 0 or request.computed + left > len(request.chain):
                continue
            end = request.computed + count
            new = self.pool.allocate(request, request.computed, end, [])
            while new is None:
                victim = self.running[-1]
                self.preempt(victim)
                preempted = True
                if victim is request:
                    break
                new = self.pool.allocate(request, request.computed, end, [])
            if new is None:
                break
            budget -= count
            scheduled.append(self._scheduled(request, new if any(new) else (), count, False))
            self._run(request, count, guesses, writes, output)
        return None if preempted else budget

    def _schedule_waiting(
        self, budget: int, scheduled: list[ScheduledRequest], writes: list[Write], output: _Output
    ) -> None:
        # Who holds blocks already goes first, or it would keep them from the others for ever.
        for request in sorted(self.waiting, key=lambda request: not request.tables):
            if budget <= 0:
                break
            hit: Tables = []
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
            if self.pool.allocate(request, request.computed, end, hit) is None:
                self.seen["unplaced"] += 1
                if not request.tables:
                    request.computed = 0
                break
            self.planner.admitted(request.request_id, request.tables, 0)
            budget -= count
            self.waiting.remove(request)
            self.running.append(request)
            scheduled.append(self._scheduled(request, copied(request.tables), count, True))
            self._run(request, count, "", writes, output)

    def _scheduled(
        self, request: Request, blocks: Sequence[Sequence[int]], count: int, replaces: bool
    ) -> ScheduledRequest:
        has_gaps = self.setup.null_block is not None
        tables = partial(copied, copied(request.tables)) if has_gaps else None
        return ScheduledRequest(
            request.request_id, blocks, replaces, request.computed, count, tables
        )

    def _ask(self, request: Request, local_tokens: int) -> Answer:
        answer = self.planner.lookup(
            request.request_id, local_tokens, self.now_s, tokens=request.known
        )
        self.seen["waits" if answer.wait else "offers" if answer.tokens else "nothings"] += 1
        self.oracle.check_answer(request, local_tokens, answer, self.now_s)
        return answer

    def _place_load(self, request: Request, hit: Tables, tokens: int) -> bool:
        # Requests that hold blocks and compute nothing must be able to go on some time.
        holding = [*self.loading.values(), *(r for r in self.waiting if r.tables)]
        promised = sum(self.pool.missing(r, r.computed, r.known, []) for r in holding)
        end = request.computed + tokens
        if (
            promised + self.pool.missing(request, end, request.known, hit) > self.pool.free
            or self.pool.allocate(request, end, end, hit) is None
        ):
            self.seen["unplaced offers"] += 1
            return False
        self.planner.admitted(request.request_id, copied(request.tables), tokens)
        request.computed += tokens
        request.loading = True
        self.waiting.remove(request)
        self.loading[request.request_id] = request
        return True

    def _run(
        self, request: Request, count: int, guesses: str, writes: list[Write], output: _Output
    ) -> None:
        """What the forward writes, and what will come of it."""
        start, end = request.computed, request.computed + count
        first_guess = request.known if guesses else end
        right, accepted = True, 0
        for position in range(start, end):
            if position >= first_guess:
                right = right and guesses[position - first_guess] == "y"
                accepted += right
            prefix = request.chain[position] if right else -1 - position
            for number, (table, spec) in enumerate(
                zip(request.tables, self.setup.tables, strict=True)
            ):
                at, offset = divmod(position, spec.block_tokens)
                token = self.oracle.weights, meaning(prefix, number, len(request.tables))
                if not spec.kind.is_sparse:
                    writes.append((table[at], offset, token))
                elif position == end - 1:
                    writes += [(table[at], offset, token) for offset in range(spec.block_tokens)]
        request.computed = end
        self.pool.remember(request, end)
        rejected = max(0, end - first_guess) - accepted
        if end >= request.known + request.outstanding and request.known < len(request.chain):
            request.outstanding += 1
            output.sampled.append((request, 1 + accepted, rejected))
        elif end >= len(request.chain):
            output.sampled.append((request, 0, 0))

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

    # --- what goes on outside ----------------------------------------------------------------

    def end(self, rank: Rank, name: tuple[str, int | str], fate: Outcome = Outcome.OK) -> None:
        cancelled = name[0] == "fetch" and name[1] in rank.cancelled
        rank.end(name, Outcome.CANCELLED if cancelled else fate)

    def end_all(self, *kinds: str, fate: Outcome = Outcome.OK) -> None:
        for rank in self.ranks:
            for name in [name for name in rank.orders if name[0] in kinds]:
                self.end(rank, name, fate)

    def outage(self) -> None:
        """No upload works until the last of them has been given up."""
        for _ in range(20):
            self.end_all("save")
            self.end_all("upload", fate=Outcome.FAILED)
            self.step()
            self.now_s += 60.0
            if not self.planner.ledger.saves_inflight:
                break

    def publish(self, tokens: list[int]) -> None:
        """Another replica has saved this prompt's chunks, computed with the first weights."""
        chain: list[int] = []
        for token in tokens:
            self.prefixes.extend(chain, token)
        for key, content in objects_of(self.setup, chain):
            for rank in self.ranks:
                self.bucket.objects.setdefault((rank.number, key), (rank.number, content))

    def drain(self) -> None:
        """Everything ends well from now on. Then nothing may be left of anything."""
        for _ in range(1_000):
            self.step()
            self.now_s += 1.0
            self.end_all("fetch", "save", "upload", "load")
            if self._idle:
                break
        assert self._idle, f"for ever: {self.waiting}, {self.running}, {self.loading}"
        while self._outputs:
            self.finish_step()
        check(self.planner)
        figures = self.planner.ledger.table.statistics()
        assert (figures.reserved, figures.pinned, figures.dirty) == (0, 0, 0)
        assert self.planner.ledger.saves_inflight == 0
        assert not self.planner.ledger.has_copies_inflight

    @property
    def _idle(self) -> bool:
        return not (
            self.waiting
            or self.running
            or self.loading
            or any(rank.orders or rank.report.ends or rank.loaded for rank in self.ranks)
            or self.planner.ledger.saves_inflight
        )

    def what_happened(self) -> Counter[str]:
        return self.seen + self.planner.counters + sum((r.seen for r in self.ranks), Counter())
