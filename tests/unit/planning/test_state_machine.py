"""The planner under an engine that keeps states, as a state machine.

The engine is like vLLM's with `mamba_cache_mode` "align", but ends its steps anywhere: a block
holds the state after the last token of the step that wrote it, and the next step begins from it.
Groups give blocks up while their requests run, and all take them from one pool. Copies are as late
as fences let them be. Every block has a meaning, and whoever reads it checks that.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lab.books import check
from s3kv.messages import BucketJob, JobEnd, JobKind, LoadJob, SaveJob, StepReport
from s3kv.planning.group_kinds import Coverage, GroupKind, States
from s3kv.planning.ledger import Ledger
from s3kv.planning.requests import ScheduledRequest
from s3kv.types import ChunkKey, Outcome
from tests.plans import fetches_of, uploads_of
from tests.unit.planning import machine
from tests.unit.planning.setup import Prefixes, Setup, hash_of

BLOCK = 4
STATES, FULL = (0, 1), (2,)
"""The engine's groups: two with states, one with full attention."""
Meaning = tuple[str, int, int]
"""What a block holds: kind, group, and the prefix after its last token."""
NOTHING: Meaning = ("zeros", 0, 0)


@dataclass(eq=False)
class Request:
    """chain: the prefixes after each token that it will ever have; `known` are given or sampled."""

    name: str
    chain: list[int]
    known: int
    hashes: list[bytes]
    computed: int = 0
    tables: list[list[int]] = field(default_factory=lambda: [[], [], []])
    is_loading: bool = False
    is_placed: bool = False
    """The planner has seen its tables in a step."""

    def learn(self, tokens: int) -> None:
        self.known = min(len(self.chain), self.known + tokens)
        for end in range((len(self.hashes) + 1) * BLOCK, self.known + 1, BLOCK):
            self.hashes.append(hash_of(self.chain[end - 1]))


class StateMachine(RuleBasedStateMachine):
    seen: ClassVar[Counter[str]] = Counter()

    @initialize(
        chunk=st.sampled_from([4, 8]),
        blocks=st.sampled_from([16, 24, 40]),
        slots=st.sampled_from([6, 12, 30]),
        late=st.booleans(),
    )
    def start(self, chunk: int, blocks: int, slots: int, late: bool) -> None:
        self.chunk, self.late = chunk, late
        self.groups = (
            Coverage(BLOCK, chunk, members=FULL),
            Coverage(BLOCK, chunk, States(), number=1, members=STATES),
        )
        setup = Setup(
            coverages=self.groups,
            slots=slots,
            hash_tokens=BLOCK,
            max_wait_s=50.0,
            max_saves_inflight=8,
            null_block=0,
        )
        self.planner = setup.planner()
        self.now_s = 0.0
        self.prefixes = Prefixes()
        self.memory: dict[int, Meaning] = dict.fromkeys(range(1, blocks), NOTHING)
        self.free = list(self.memory)
        self.fresh: list[int] = []
        self.requests: list[Request] = []
        self.count = 0
        self.slots: dict[int, tuple[Meaning, ...]] = {}
        self.bucket: dict[ChunkKey, tuple[Meaning, ...]] = {}
        self.content: dict[ChunkKey, tuple[Meaning, ...]] = {}
        """What the object of a key has to hold."""
        self.copies: dict[int, SaveJob] = {}
        self.fetches: list[BucketJob] = []
        self.uploads: list[SaveJob | BucketJob] = []
        self.loads: list[LoadJob] = []

    # --- requests --------------------------------------------------------------------------

    @precondition(lambda self: len(self.requests) < 4)
    @rule(
        letter=st.sampled_from("ab"),
        fork=st.sampled_from([8, 12, 24]),
        tokens=st.sampled_from([7, 8, 13, 17, 24]),
        answer=st.integers(1, 6),
        cached=st.sampled_from([0, 0, 1, 3]),
        rounds=st.sampled_from([0, 1, 6, 12]),
    )
    def arrive(
        self, letter: str, fork: int, tokens: int, answer: int, cached: int, rounds: int
    ) -> None:
        """cached: another engine has put the prompt into the bucket, with the states of every
        so-manieth chunk."""
        chain: list[int] = []
        for token in ([ord(letter)] * fork + [ord("z")] * 24)[:tokens] + [7] * answer:
            self.prefixes.extend(chain, token)
        self.count += 1
        request = Request(f"r{self.count}", chain, 0, [])
        request.learn(tokens)
        self.note_contents(chain)
        for number, end in enumerate(range(self.chunk, tokens + 1, self.chunk), 1):
            for group in range((number % cached == 0) + 1 if cached else 0):
                key = ChunkKey(group, hash_of(chain[end - 1]))
                self.bucket[key] = self.content[key]
        self.requests.append(request)
        self.planner.add_request(request.name, request.hashes)
        for _ in range(rounds):
            for kind in ("fetch", "load", "upload"):
                self.something_ends(kind, 0, 20, fails=False)
            self.step([8] * 4)

    def note_contents(self, chain: list[int]) -> None:
        for end in range(self.chunk, len(chain) + 1, self.chunk):
            ends = range(end - self.chunk + BLOCK, end + 1, BLOCK)
            kv = tuple(("kv", FULL[0], chain[e - 1]) for e in ends)
            states = tuple(("state", member, chain[end - 1]) for member in STATES)
            block_hash = hash_of(chain[end - 1])
            self.content |= {ChunkKey(0, block_hash): kv, ChunkKey(1, block_hash): states}

    @rule(which=st.integers(0, 9), leaves=st.booleans())
    def leave_or_be_preempted(self, which: int, leaves: bool) -> None:
        running = [r for r in self.requests if not r.is_loading and (leaves or any(r.tables))]
        if running:
            request = running[which % len(running)]
            self.give_back(request)
            if leaves:
                self.over(request)

    def over(self, request: Request) -> None:
        self.requests.remove(request)
        self.planner.finished(request.name)

    def give_back(self, request: Request) -> None:
        self.free += [block for table in request.tables for block in table if block]
        request.tables = [[], [], []]
        request.computed, request.is_placed = 0, False

    # --- a step ----------------------------------------------------------------------------

    @rule(budgets=st.lists(st.sampled_from([1, 3, 4, 8, 30]), min_size=4, max_size=4))
    def step(self, budgets: list[int]) -> None:
        self.now_s += 0.01
        scheduled, ends = [], []
        for request, budget in zip(list(self.requests), budgets, strict=False):
            if request.is_loading:
                continue
            is_new = not any(request.tables)
            if is_new and not self.ask(request):
                continue
            end = min(request.computed + budget, request.known)
            new = self.allocate(request, end) if end > request.computed else None
            if new is None:
                continue
            if is_new:
                self.planner.admitted(request.name, request.tables, 0)
            replaces = not request.is_placed
            tables = [list(table) for table in request.tables]
            scheduled.append(
                ScheduledRequest(
                    request.name,
                    tables if replaces else new,
                    replaces,
                    request.computed,
                    end - request.computed,
                    lambda tables=tables: tables,  # type: ignore[misc]
                )
            )
            request.is_placed = True
            ends.append((request, end))
        self.carry_out(scheduled, ends)

    def ask(self, request: Request) -> bool:
        """Whether the request may be computed in this step."""
        answer = self.planner.lookup(request.name, 0, self.now_s, tokens=request.known)
        if answer.wait or not answer.tokens:
            return not answer.wait
        assert answer.tokens < request.known
        tables = request.tables
        if not self.fits(answer.tokens // BLOCK + len(STATES)):
            return False
        for member in STATES:
            tables[member] = [0] * (answer.tokens // BLOCK - 1) + [self.take()]
        tables[2] = [self.take() for _ in range(answer.tokens // BLOCK)]
        self.planner.admitted(request.name, tables, answer.tokens)
        request.is_loading = True
        request.computed = answer.tokens
        self.seen["hits"] += 1
        return False

    def fits(self, blocks: int) -> bool:
        return len(self.free) >= blocks

    def take(self) -> int:
        self.fresh.append(block := self.free.pop(0))
        return block

    def allocate(self, request: Request, end: int) -> list[list[int]] | None:
        """New blocks for the tokens up to `end`, per group; None if there are too few. States that
        no step reads any more are given up first."""
        needed = -(-end // BLOCK)
        for member in STATES:
            table = request.tables[member]
            for position in range(max(0, (request.computed - 1) // BLOCK)):
                if position < len(table) and table[position]:
                    self.free.append(table[position])
                    table[position] = 0
        if not self.fits(needed - len(request.tables[2]) + len(STATES)):
            return None
        new: list[list[int]] = [[], [], []]
        for member in STATES:
            if needed > len(request.tables[member]):
                gaps = needed - len(request.tables[member]) - 1
                new[member] = [0] * gaps + [self.take()]
        new[2] = [self.take() for _ in range(needed - len(request.tables[2]))]
        for table, blocks in zip(request.tables, new, strict=True):
            table += blocks
        return new

    def carry_out(self, scheduled: list[ScheduledRequest], ends: list[tuple[Request, int]]) -> None:
        fresh, self.fresh = self.fresh, []
        plan = self.planner.plan(scheduled, self.now_s, fresh)
        for job_id in plan.fences:
            if job_id in self.copies:
                self.seen["fences"] += 1
                self.copy(self.copies[job_id])
        for block in fresh:
            self.memory[block] = NOTHING
        for request, end in ends:
            self.compute(request, end)
        self.loads += plan.loads
        self.fetches += fetches_of(plan)
        self.uploads += uploads_of(plan)
        for save in plan.saves:
            self.seen["states saved"] += save.key.group
            self.copies[save.job_id] = save
        for request, _ in ends:
            if request.computed == len(request.chain):
                self.give_back(request)
                self.over(request)

    def compute(self, request: Request, end: int) -> None:
        chain, begin = request.chain, request.computed
        for position in range(begin // BLOCK):
            meaning = self.memory[request.tables[2][position]]
            assert meaning == ("kv", 2, chain[(position + 1) * BLOCK - 1])
        for member in STATES:
            table = request.tables[member]
            if begin:
                meaning = self.memory[table[(begin - 1) // BLOCK]]
                assert meaning == ("state", member, chain[begin - 1])
            self.memory[table[(end - 1) // BLOCK]] = ("state", member, chain[end - 1])
        for position in range(begin // BLOCK, -(-end // BLOCK)):
            last = min(end, (position + 1) * BLOCK)
            self.memory[request.tables[2][position]] = ("kv", 2, chain[last - 1])
        request.computed = end
        if end == request.known and not self.late:
            request.learn(1)

    @rule()
    def hear_of_samples(self) -> None:
        """Of steps whose output comes late."""
        for request in self.requests:
            if self.late and request.computed == request.known and request.computed:
                request.learn(1)

    # --- ends ------------------------------------------------------------------------------

    @rule(
        kind=st.sampled_from(["copy", "upload", "fetch", "load", "load", "fetch"]),
        which=st.integers(0, 9),
        count=st.sampled_from([1, 1, 20]),
        fails=st.sampled_from([False, False, False, True]),
    )
    def something_ends(self, kind: str, which: int, count: int, fails: bool) -> None:
        orders: Any = {
            "copy": list(self.copies.values()),
            "upload": self.uploads,
            "fetch": self.fetches,
            "load": self.loads,
        }[kind]
        for _ in range(min(count, len(orders))):
            order = orders.pop(which % len(orders))
            if kind == "copy":
                self.copy(order)
            elif kind == "load":
                self.load(order)
            elif kind == "fetch":
                self.fetched(order, fails)
            else:
                self.uploaded(order, fails)

    def copy(self, order: SaveJob) -> None:
        del self.copies[order.job_id]
        content = tuple(self.memory[block] for block in order.block_ids)
        assert content == self.content[order.key], f"{order} saves something else"
        self.slots[order.slot] = content
        self.uploads.append(order)
        self.report(order.job_id, JobKind.SAVE, Outcome.OK)

    def uploaded(self, order: SaveJob | BucketJob, fails: bool) -> None:
        if not fails:
            self.bucket[order.key] = self.slots[order.slot]
        self.report(order.job_id, JobKind.UPLOAD, Outcome.FAILED if fails else Outcome.OK)

    def fetched(self, order: BucketJob, fails: bool) -> None:
        there = self.bucket.get(order.key)
        if there is not None and not fails:
            self.slots[order.slot] = there
            self.seen["states fetched"] += order.key.group
        missing = Outcome.FAILED if fails else Outcome.MISSING
        outcome = missing if there is None or fails else Outcome.OK
        self.report(order.job_id, JobKind.FETCH, outcome)

    def load(self, order: LoadJob) -> None:
        for part in order.parts:
            group = next(g for g in self.groups if part.group in g.members)
            at = len(group.held) * group.members.index(part.group) + part.first_block
            for block, meaning in zip(part.block_ids, self.slots[part.slot][at:], strict=False):
                self.memory[block] = meaning
        (request,) = (r for r in self.requests if r.name == order.request_id)
        request.is_loading = False
        self.planner.loaded([order.request_id])

    def report(self, job_id: int, kind: JobKind, outcome: Outcome) -> None:
        report = StepReport()
        report.add(JobEnd(job_id, kind, outcome))
        self.planner.on_report(report, self.now_s)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "planner"):
            check(self.planner)


run = partial(machine.run, steps=60, machine=StateMachine)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("examples", [60, pytest.param(1_500, marks=pytest.mark.nightly)])
def test_no_request_goes_on_from_another_state_than_its_own(examples: int) -> None:
    seen = run(examples)
    for event in ("hits", "states saved", "states fetched", "fences"):
        assert seen[event] > examples // 20, seen


def test_states_that_no_step_has_written_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a full block is taken for the state after its last token."""
    monkeypatch.setattr(States, "is_saved", GroupKind.is_saved)
    with pytest.raises(AssertionError, match="saves something else"):
        run(150)


def test_blocks_that_are_given_away_too_early_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: no fences."""
    monkeypatch.setattr(Ledger, "fences", lambda ledger, block_ids: set())
    with pytest.raises(AssertionError, match="saves something else"):
        run(150)
