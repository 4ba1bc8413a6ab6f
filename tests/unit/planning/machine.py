"""The planner under a random engine, random ranks and a random network, as a state machine.

A failure prints the steps that led to it, made few and small by Hypothesis.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lab.books import check
from s3kv.planning.group_kinds import (
    Coverage,
    FullAttention,
    GroupKind,
    LocalAttention,
    SlidingWindow,
    States,
)
from s3kv.planning.ledger import ChunkState
from s3kv.planning.requests import NO_LIMITS, RequestLimits
from s3kv.types import ChunkKey, Outcome
from tests.unit.planning.engine import Engine
from tests.unit.planning.oracle import objects_of
from tests.unit.planning.setup import Request, Setup, hash_of

GEOMETRIES = [(4, 2, 2), (4, 4, 4), (4, 4, 2), (8, 2, 2)]
"""Tokens per chunk, block and hash."""

setups = st.builds(
    lambda geometry, **rest: Setup(
        chunk_tokens=geometry[0], block_tokens=geometry[1], hash_tokens=geometry[2], **rest
    ),
    geometry=st.sampled_from(GEOMETRIES),
    world_size=st.integers(1, 2),
    slots=st.sampled_from([2, 6, 8, 12]),
    blocks=st.sampled_from([12, 16, 24, 40]),
    probe_chunks=st.integers(1, 4),
    max_wait_s=st.sampled_from([0.0, 2.0, 5.0, 50.0]),
    gate=st.booleans(),
    max_saves_inflight=st.integers(1, 6),
    steps_ahead=st.integers(0, 1),
)

prompts = st.builds(
    lambda letter, fork, tokens: ([ord(letter)] * fork + [ord("z")] * 20)[:tokens],
    letter=st.sampled_from("ab"),
    fork=st.sampled_from([6, 8, 20]),
    tokens=st.sampled_from([5, 8, 12, 17, 20]),
)

limits = st.sampled_from(
    [NO_LIMITS] * 16
    + [
        RequestLimits(save_tokens=0),
        RequestLimits(load_tokens=0),
        RequestLimits(save_tokens=9, load_tokens=7),
        RequestLimits(load_tokens=4),
    ]
)

fates = st.sampled_from(
    [Outcome.OK] * 6
    + [Outcome.MISSING, Outcome.CORRUPT, Outcome.FAILED, Outcome.DENIED, Outcome.INVALID]
)


class PlannerMachine(RuleBasedStateMachine):
    seen: ClassVar[Counter[str]] = Counter()
    """What happened in all runs of this class."""

    def __init_subclass__(cls) -> None:
        cls.seen = Counter()

    def begin(self, setup: Setup) -> None:
        self.engine = Engine(setup)
        self.arrived = 0
        self.prompts: list[list[int]] = []

    start = initialize(setup=setups)(begin)

    @property
    def loading(self) -> list[Request]:
        """Rare and short, so half of the aborts choose among these."""
        return [request for request in self.engine.loading.values() if not request.over]

    @property
    def alive(self) -> list[Request]:
        queues = (self.engine.waiting, self.engine.running)
        return self.loading + [request for queue in queues for request in queue if not request.over]

    # Few rules that branch by themselves: Hypothesis leaves whole rules out of most examples, and
    # the interesting states need all of them.

    @precondition(lambda self: len(self.alive) < 6)
    @rule(
        prompt=prompts,
        new_tokens=st.integers(1, 4),
        limits=limits,
        cached=st.booleans(),
        rounds=st.sampled_from([0, 0, 1, 6]),
    )
    def arrive(
        self, prompt: list[int], new_tokens: int, limits: RequestLimits, cached: bool, rounds: int
    ) -> None:
        engine = self.engine
        if cached and engine.oracle.weights == 0:
            engine.publish(prompt)
        self.arrived += 1
        self.prompts.append(prompt)
        request = engine.arrive(f"r{self.arrived}", prompt, new_tokens, limits)
        engine.bucket.meanings |= objects_of(engine.setup, request.chain)
        for _ in range(rounds):
            engine.end_all("fetch", "upload", "load")
            engine.step()

    @rule(
        event=st.sampled_from(
            ["step"] * 6 + ["preempt"] + ["squeeze"] * 3 + ["abort"] * 2 + ["reset", "outage"]
        ),
        budget=st.sampled_from([1, 3, 8, 100]),
        drafts=st.sampled_from(["", "", "y", "n", "yyn"]),
        which=st.integers(0, 20),
    )
    def schedule(self, event: str, budget: int, drafts: str, which: int) -> None:
        engine = self.engine
        if event == "step":
            engine.step(budget, drafts)
        elif event in ("preempt", "squeeze") and engine.running:
            engine.preempt(engine.running[which % len(engine.running)])
            if event == "squeeze":
                engine.pool.forget()
        elif event == "abort" and self.alive:
            among = (which % 2 and self.loading) or self.alive
            engine.abort(among[which // 2 % len(among)])
        elif event == "outage":
            engine.outage()
        elif event == "reset" and which < 7:
            engine.reset()

    @rule(
        kind=st.sampled_from(["", "", "fetch", "load", "save", "upload"]),
        which=st.integers(0, 20),
        fate=fates,
        seconds=st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0, 30.0]),
    )
    def something_ends(self, kind: str, which: int, fate: Outcome, seconds: float) -> None:
        """One order, or all of a kind, on any rank and in any order; and time passes."""
        engine = self.engine
        engine.now_s += seconds
        orders = [(rank, name) for rank in engine.ranks for name in rank.orders]
        if kind:
            engine.end_all(kind, fate=fate)
        elif orders:
            engine.end(*orders[which % len(orders)], fate)

    @precondition(lambda self: self.engine.bucket.objects)
    @rule(which=st.integers(0, 99))
    def lose_an_object(self, which: int) -> None:
        objects = sorted(self.engine.bucket.objects)
        del self.engine.bucket.objects[objects[which % len(objects)]]

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "engine"):
            check(self.engine.planner)

    def teardown(self) -> None:
        if hasattr(self, "engine") and self.engine.sound:
            self.engine.drain()
            self.ask_again()
            self.seen.update(self.engine.what_happened())

    def ask_again(self) -> None:
        """What is in host memory alone, and asked for again while the bucket is well, is uploaded.

        After a reset the hashes are not known here.
        """
        engine = self.engine
        is_full = engine.setup.tables[0].kind.is_cumulative
        if engine.seen["resets"] or engine.seen["resets refused"] or not is_full:
            return
        for number, prompt in enumerate(self.prompts[-3:]):
            request = engine.arrive(f"again {number}", prompt, 1)
            for _ in range(4):
                engine.now_s += 1_000.0
                engine.drain()
            size = engine.setup.chunk_tokens
            keys = {ChunkKey(0, hash_of(p)) for p in request.chain[size - 1 : len(prompt) : size]}
            resident = {k for k in keys if engine.planner.ledger.state(k) is ChunkState.RESIDENT}
            left = resident - engine.oracle.in_bucket - engine.oracle.invalid
            assert not left, f"in host memory alone, and nobody uploads them: {left}"


@st.composite
def groups_of_several(draw: st.DrawFn) -> Setup:
    """Full attention or none, then windows and local attention, with blocks of any sizes."""
    hash_tokens = draw(st.sampled_from([1, 2]))
    sizes = st.sampled_from([hash_tokens, 2 * hash_tokens])
    chunk_tokens = draw(st.sampled_from([2, 4])) * hash_tokens
    windows = st.builds(SlidingWindow, st.integers(2, 13))
    local = st.builds(LocalAttention, st.integers(2, 4).map(lambda n: n * chunk_tokens))
    kinds: list[GroupKind] = draw(st.lists(windows | local, min_size=1, max_size=2))
    if draw(st.sampled_from([True, True, True, False])):
        kinds = [FullAttention(), *kinds]
    members = [draw(st.integers(1, 2)) for _ in kinds]
    tables = sum(members)
    numbers = draw(st.permutations(range(tables)))
    coverages = []
    for number, kind in enumerate(kinds):
        mine = tuple(numbers.pop() for _ in range(members[number]))
        coverages.append(Coverage(draw(sizes), chunk_tokens, kind, number, mine))
    return Setup(
        chunk_tokens=chunk_tokens,
        hash_tokens=hash_tokens,
        coverages=tuple(coverages),
        null_block=0,
        world_size=draw(st.integers(1, 2)),
        slots=draw(st.sampled_from([6, 12, 24])),
        # Enough for the longest request.
        blocks=1 + 24 // hash_tokens * tables + draw(st.sampled_from([0, 10, 40, 100])),
        probe_chunks=draw(st.integers(1, 4)),
        max_wait_s=draw(st.sampled_from([0.0, 2.0, 5.0, 50.0])),
        gate=draw(st.booleans()),
        max_saves_inflight=draw(st.sampled_from([2, 6, 12])),
        steps_ahead=draw(st.integers(0, 1)),
    )


class GroupsMachine(PlannerMachine):
    """The same with several KV-cache groups, whose tables have gaps."""

    start = initialize(setup=groups_of_several())(PlannerMachine.begin)


@st.composite
def groups_with_states(draw: st.DrawFn) -> Setup:
    """Two tables with states and one of full attention. Steps end anywhere."""
    size, chunk_tokens = 4, draw(st.sampled_from([4, 8]))
    return Setup(
        chunk_tokens=chunk_tokens,
        hash_tokens=size,
        coverages=(
            Coverage(size, chunk_tokens, members=(2,)),
            Coverage(size, chunk_tokens, States(), number=1, members=(0, 1)),
        ),
        null_block=0,
        world_size=draw(st.integers(1, 2)),
        slots=draw(st.sampled_from([6, 12, 30])),
        blocks=draw(st.sampled_from([16, 24, 40])),
        max_wait_s=draw(st.sampled_from([5.0, 50.0])),
        max_saves_inflight=8,
        steps_ahead=draw(st.integers(0, 1)),
    )


class StatesMachine(PlannerMachine):
    """The same with an engine that keeps states, as vLLM's does with `mamba_cache_mode` "align"."""

    start = initialize(setup=groups_with_states())(PlannerMachine.begin)


def run(examples: int, *, steps: int = 50, machine: Any = PlannerMachine) -> Counter[str]:
    """The same examples every time. Returns how often what happened."""
    seen: Counter[str] = machine.seen
    seen.clear()
    run_state_machine_as_test(
        seed(20240601)(machine),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            phases=[Phase.generate],
            database=None,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        ),
    )
    return seen
