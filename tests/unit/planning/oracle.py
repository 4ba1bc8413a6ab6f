"""What the planner promises, checked by the meaning of the bytes that its plans move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from s3kv.host.table import TableError
from s3kv.messages import BucketJob, JobKind, LoadJob, SaveJob, StepPlan, StepReport
from s3kv.planning.group_kinds import Coverage
from s3kv.planning.requests import NOTHING, Answer
from s3kv.types import ChunkKey, Outcome
from tests.plans import fetches_of, uploads_of
from tests.unit.planning.blocks import BlockPool
from tests.unit.planning.ranks import Rank, TokenKV
from tests.unit.planning.setup import Request, Setup, hash_of, meaning

FINDINGS = (AssertionError, TableError)
"""Verdicts on behaviour: of an oracle or another assertion, or the table's refusal. Any other error
says only that the code, or a mutant of it, cannot run."""


def content_of(
    setup: Setup, coverage: Coverage, chain: Sequence[int], chunk: int, weights: int
) -> tuple[TokenKV, ...]:
    """What the object of a chunk means. A state is one of the chunk's last token alone."""
    size, blocks = coverage.block_tokens, coverage.blocks_of(chunk)
    tokens = chain[blocks.start * size : blocks.stop * size]
    if coverage.kind.is_sparse:
        tokens = [tokens[-1]] * len(tokens)
    count = len(setup.tables)
    return tuple((weights, meaning(t, table, count)) for table in coverage.members for t in tokens)


def objects_of(
    setup: Setup, chain: Sequence[int]
) -> Iterator[tuple[ChunkKey, tuple[TokenKV, ...]]]:
    """The objects of all chunks in `chain`, computed with the first weights."""
    for chunk in range(len(chain) // setup.chunk_tokens):
        end = (chunk + 1) * setup.chunk_tokens
        for coverage in dict.fromkeys(setup.tables):
            if coverage.blocks_for(end):
                key = ChunkKey(coverage.number, hash_of(chain[end - 1]))
                yield key, content_of(setup, coverage, chain, chunk, 0)


class Oracle:
    """Sees every plan before the ranks do, and every report before the planner does."""

    def __init__(self, setup: Setup, ranks: Sequence[Rank], pool: BlockPool) -> None:
        self.weights = 0
        self.in_bucket: set[ChunkKey] = set()
        """What the planner has been told, and not been told otherwise since."""
        self.invalid: set[ChunkKey] = set()
        """What it has been told that no bucket takes."""
        self._setup = setup
        self._ranks = ranks
        self._pool = pool
        self._key_of: dict[int, ChunkKey] = {}
        self._replaced: set[int] = set()
        """Fetches whose chunks have been computed and saved beside them."""
        self._told: dict[tuple[int, JobKind], list[Outcome]] = {}

    def hear(self, report: StepReport) -> None:
        """Keep, apart from the planner, which chunks it has been told to be in the bucket."""
        for (job_id, kind), end in report.ends.items():
            outcomes = self._told.setdefault((job_id, kind), [])
            outcomes.append(end.outcome)
            if len(outcomes) < len(self._ranks) or kind is JobKind.SAVE:
                continue
            worst = max(self._told.pop((job_id, kind)))
            if worst.is_success and kind is not JobKind.USE:
                self.in_bucket.add(self._key_of[job_id])
            elif worst is Outcome.INVALID:
                self.invalid.add(self._key_of[job_id])
            elif kind is not JobKind.UPLOAD and worst in (Outcome.MISSING, Outcome.CORRUPT):
                self.in_bucket.discard(self._key_of[job_id])

    def check_answer(self, request: Request, local: int, answer: Answer, now_s: float) -> None:
        if request.load_failed:
            assert answer == NOTHING, f"{request.request_id} is offered again what failed"
        most = request.limits.load_tokens
        assert most is None or answer.tokens <= most, "more is loaded than the request allows"
        if not answer.wait:
            assert answer.tokens >= 0
            assert local + answer.tokens <= request.known
            if answer.tokens and self._setup.null_block is not None:
                assert local + answer.tokens < request.known, "the last one is computed"
            request.waits_since_s = None
        elif request.waits_since_s is None:
            request.waits_since_s = now_s
        else:
            waited_s = now_s - request.waits_since_s
            assert waited_s < self._setup.max_wait_s, f"{request.request_id} waits {waited_s} s"

    def check_plan(self, plan: StepPlan, loading: dict[str, Request]) -> None:
        orders = [order for rank in self._ranks for order in rank.orders.values()]
        fetches = [o for o in orders if isinstance(o, BucketJob) and o.kind is JobKind.FETCH]
        under_way = {order.key for order in fetches if order.job_id not in self._replaced}
        planned, uploads = fetches_of(plan), uploads_of(plan)
        for fetch in planned:
            assert fetch.key not in under_way, f"{fetch} is on its way already"
        saved = {save.key for save in plan.saves}
        beside = [order for order in (*fetches, *planned) if order.key in saved]
        self._replaced.update(order.job_id for order in beside)
        for load in plan.loads:
            self._check_load(loading[load.request_id], load)
        for save in plan.saves:
            assert save.key not in self.in_bucket, f"{save}: the bucket is known to have it"
        for upload in uploads:
            assert upload.key not in self.in_bucket, f"{upload}: the bucket is known to have it"
        jobs: list[BucketJob | SaveJob] = [*plan.saves, *uploads]
        assert len({job.key for job in jobs}) == len(jobs), "two jobs for one chunk"
        assert len({job.key for job in planned}) == len(planned), "fetched twice"
        self._key_of.update((job.job_id, job.key) for job in (*plan.saves, *plan.jobs))

    def check_limits(self, plan: StepPlan, running: Sequence[Request]) -> None:
        """A chunk that is saved is of a request that allows that. Hashes: before any reset."""
        size = self._setup.chunk_tokens
        allowed = {
            hash_of(prefix)
            for request in running
            for prefix in request.chain[: request.limits.save_tokens][size - 1 :: size]
        }
        for save in plan.saves:
            assert save.key.block_hash in allowed, f"{save}: no request lets it be saved"

    def _check_load(self, request: Request, load: LoadJob) -> None:
        """Every part is the right chunk, complete on every rank, and goes where it should."""
        assert not request.before_reset, "a request from before the reset loads"
        targets: dict[int, list[int]] = {}
        for part in load.parts:
            coverage, table = self._setup.tables[part.group], request.tables[part.group]
            chunk, first_block = divmod(
                table.index(part.block_ids[0]), coverage.chunk_tokens // coverage.block_tokens
            )
            assert part.first_block == first_block - coverage.held.start
            assert part.first_block + len(part.block_ids) <= len(coverage.held)
            content = content_of(self._setup, coverage, request.chain, chunk, self.weights)
            for rank in self._ranks:
                wanted, found = (rank.number, content), rank.slots[part.slot]
                assert found == wanted, f"{part} on rank {rank.number}: {found}, not {wanted}"
            targets.setdefault(part.group, []).extend(part.block_ids)
        for number, blocks in targets.items():
            table = request.tables[number]
            last = request.computed // self._setup.tables[number].block_tokens
            assert blocks == table[table.index(blocks[0]) : last]
            shared = [block for block in blocks if self._pool.users(block) != 1]
            assert not shared, "a load into a shared block"

    def check_loaded(self, request: Request) -> None:
        """The request's blocks hold its prefix, on every rank, wherever they came from."""
        tables = self._setup.tables
        for number, coverage in enumerate(tables):
            for at, block in enumerate(request.tables[number]):
                if block == self._setup.null_block:
                    continue
                begin = at * coverage.block_tokens
                known = request.chain[begin : min(begin + coverage.block_tokens, request.computed)]
                if coverage.kind.is_sparse:
                    known = [known[-1]] * len(known)
                wanted = [(self.weights, meaning(t, number, len(tables))) for t in known]
                for rank in self._ranks:
                    held = list(rank.blocks[block])[: len(wanted)]
                    assert held == wanted, request.request_id
