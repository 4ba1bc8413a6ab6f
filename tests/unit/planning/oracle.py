"""What the planner promises, checked by the meaning of the bytes that its plans move."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from s3kv.host.table import TableError
from s3kv.messages import BucketJob, JobKind, LoadJob, SaveJob, StepPlan, StepReport
from s3kv.planning.group_kinds import Coverage
from s3kv.planning.requests import NOTHING, Answer
from s3kv.types import ChunkKey, Outcome
from tests.plans import fetches_of, uploads_of
from tests.unit.planning.blocks import BlockPool
from tests.unit.planning.ranks import TokenKV
from tests.unit.planning.setup import Request, Setup, hash_of, meaning

FINDINGS = (AssertionError, TableError)
"""Verdicts on behaviour: of an oracle or another assertion, or the table's refusal. Any other error
says only that the code, or a mutant of it, cannot run."""


def content_of(
    setup: Setup, coverage: Coverage, chain: Sequence[int], chunk: int, weights: int
) -> tuple[TokenKV, ...]:
    """What the object of a chunk means."""
    size, blocks = coverage.block_tokens, coverage.blocks_of(chunk)
    tokens = chain[blocks.start * size : blocks.stop * size]
    count = len(setup.tables)
    return tuple((weights, meaning(t, table, count)) for table in coverage.members for t in tokens)


def objects_of(
    setup: Setup, chain: Sequence[int]
) -> Iterator[tuple[ChunkKey, tuple[TokenKV, ...]]]:
    """The objects of all chunks in `chain`, computed with the first weights."""
    for chunk in range(len(chain) // setup.chunk_tokens):
        end = (chunk + 1) * setup.chunk_tokens
        for coverage in dict.fromkeys(setup.tables):
            key = ChunkKey(coverage.number, hash_of(chain[end - 1]))
            yield key, content_of(setup, coverage, chain, chunk, 0)


class Told:
    """What a planner has been told: of a chunk that it knows to be in the bucket, or on its way, it
    orders no other job. world_size: ranks that report."""

    def __init__(self, world_size: int) -> None:
        self.in_bucket: set[ChunkKey] = set()
        """What the planner has been told, and not been told otherwise since."""
        self._world_size = world_size
        self._key_of: dict[int, ChunkKey] = {}
        self._replaced: set[int] = set()
        """Fetches whose chunks have been computed and saved beside them."""
        self._ends: dict[tuple[int, JobKind], list[tuple[Outcome, int]]] = {}

    def hear(self, report: StepReport) -> None:
        """Keep, apart from the planner, which chunks it has been told to be in the bucket."""
        for (job_id, kind), end in report.ends.items():
            ends = self._ends.setdefault((job_id, kind), [])
            ends.append((end.outcome, end.ranks))  # others may be added to this end
            if sum(ranks for _, ranks in ends) < self._world_size or kind is JobKind.SAVE:
                continue
            worst, _ = max(self._ends.pop((job_id, kind)))
            if worst.is_success and kind is not JobKind.USE:
                self.in_bucket.add(self._key_of[job_id])
            elif kind is not JobKind.UPLOAD and worst in (Outcome.MISSING, Outcome.CORRUPT):
                self.in_bucket.discard(self._key_of[job_id])

    def check_jobs(self, plan: StepPlan, orders: Iterable[object]) -> None:
        """Check the jobs of a plan. orders: all that the ranks have not ended."""
        fetches = [o for o in orders if isinstance(o, BucketJob) and o.kind is JobKind.FETCH]
        under_way = {order.key for order in fetches if order.job_id not in self._replaced}
        planned, uploads = fetches_of(plan), uploads_of(plan)
        for fetch in planned:
            assert fetch.key not in under_way, f"{fetch} is on its way already"
        saved = {save.key for save in plan.saves}
        beside = [order for order in (*fetches, *planned) if order.key in saved]
        self._replaced.update(order.job_id for order in beside)
        for job in (*plan.saves, *uploads):
            assert job.key not in self.in_bucket, f"{job}: the bucket is known to have it"
        jobs: list[BucketJob | SaveJob] = [*plan.saves, *uploads]
        assert len({job.key for job in jobs}) == len(jobs), "two jobs for one chunk"
        assert len({job.key for job in planned}) == len(planned), "fetched twice"
        self._key_of.update((job.job_id, job.key) for job in (*plan.saves, *plan.jobs))


class Oracle(Told):
    """Sees every plan before the ranks do, and every report before the planner does."""

    def __init__(self, setup: Setup, ranks: Sequence[Any], pool: BlockPool) -> None:
        super().__init__(len(ranks))
        self.weights = 0
        self._setup = setup
        self._ranks = ranks
        self._pool = pool

    def check_answer(self, request: Request, local: int, answer: Answer, now_s: float) -> None:
        if request.load_failed:
            assert answer == NOTHING, f"{request.request_id} is offered again what failed"
        if not answer.wait:
            assert answer.tokens >= 0
            assert local + answer.tokens <= request.known
            request.waits_since_s = None
        elif request.waits_since_s is None:
            request.waits_since_s = now_s
        else:
            waited_s = now_s - request.waits_since_s
            assert waited_s < self._setup.max_wait_s, f"{request.request_id} waits {waited_s} s"

    def check_plan(self, plan: StepPlan, loading: dict[str, Request]) -> None:
        self.check_jobs(plan, [order for rank in self._ranks for order in rank.orders.values()])
        for load in plan.loads:
            self._check_load(loading[load.request_id], load)

    def _check_load(self, request: Request, load: LoadJob) -> None:
        """It fills the end of the request's table, which nobody else has."""
        assert not request.before_reset, "a request from before the reset loads"
        targets = [block for part in load.parts for block in part.block_ids]
        last = request.computed // self._setup.block_tokens
        assert targets == request.table[request.table.index(targets[0]) : last]
        shared = [block for block in targets if self._pool.users(block) != 1]
        assert not shared, "a load into a shared block"

    def check_loaded(self, request: Request) -> None:
        """The request's blocks hold its prefix, on every rank, wherever they came from."""
        size = self._setup.block_tokens
        for at, block in enumerate(request.table):
            known = request.chain[at * size : min((at + 1) * size, request.computed)]
            wanted = [(self.weights, token) for token in known]
            for rank in self._ranks:
                assert list(rank.blocks[block])[: len(wanted)] == wanted, request.request_id
