"""A planner on a desk: the test plays engine and ranks by hand, one event at a time."""

from __future__ import annotations

from collections.abc import Iterable

from lab.books import check
from s3kv.messages import BucketJob, JobEnd, JobKind, LoadJob, SaveJob, StepPlan, StepReport
from s3kv.planning.requests import NO_LIMITS, WAIT, Answer, RequestLimits, ScheduledRequest
from s3kv.types import ChunkKey, Outcome
from tests.plans import fetches_of, uploads_of, uses_of
from tests.unit.planning.setup import Prefixes, Setup, hash_of

OK, MISSING, FAILED = Outcome.OK, Outcome.MISSING, Outcome.FAILED
CHUNK = 4
"""Tokens of a chunk, unless a test says otherwise; two blocks of two."""

Order = BucketJob | SaveJob


class Desk:
    """Prompts are texts, and every letter is a token: "aaaabbbb" has two chunks."""

    def __init__(self, **setup: object) -> None:
        self.setup = Setup(**{"slots": 16, "max_saves_inflight": 16, **setup})  # type: ignore[arg-type]
        self.planner = self.setup.planner()
        self.now_s = 0.0
        self.hashes: dict[str, list[bytes]] = {}
        self._prefixes = Prefixes()

    def add(self, request_id: str, prompt: str, limits: RequestLimits = NO_LIMITS) -> None:
        self.hashes[request_id] = self._hashes(prompt)
        self.planner.add_request(request_id, self.hashes[request_id], limits)

    def ask(self, request_id: str, prompt: str, local_tokens: int = 0) -> Answer:
        """The first answer to a new request."""
        self.add(request_id, prompt)
        return self.lookup(request_id, local_tokens)

    def compute(
        self, request_id: str, prompt: str, blocks: Iterable[int], computed: int, tokens: int
    ) -> StepPlan:
        """The first step of a new request, which the engine admits without an answer."""
        self.add(request_id, prompt)
        self.admit(request_id)
        return self.run(request_id, blocks, computed, tokens, new=True)

    def grow(self, request_id: str, text: str) -> None:
        """The request's tokens are these by now."""
        known = self.hashes[request_id]
        known.extend(self._hashes(text)[len(known) :])

    def lookup(self, request_id: str, local_tokens: int = 0) -> Answer:
        answer = self.planner.lookup(request_id, local_tokens, self.now_s)
        check(self.planner)
        return answer

    def admit(self, request_id: str, blocks: Iterable[int] = (), tokens: int = 0) -> None:
        self.planner.admitted(request_id, (list(blocks),), tokens)

    def plan(self, *scheduled: ScheduledRequest) -> StepPlan:
        plan = self.planner.plan(scheduled, self.now_s)
        check(self.planner)
        return plan

    def fetches(self) -> tuple[BucketJob, ...]:
        """Of a step without requests."""
        return fetches_of(self.plan())

    def fetches_for(self, request_id: str, prompt: str) -> tuple[BucketJob, ...]:
        """Those that the first lookup of a new request orders, which has to wait for them."""
        assert self.ask(request_id, prompt) == WAIT
        return self.fetches()

    def uploads(self) -> tuple[BucketJob, ...]:
        return uploads_of(self.plan())

    def uses(self) -> tuple[BucketJob, ...]:
        return uses_of(self.plan())

    def run(
        self, request_id: str, blocks: Iterable[int], computed: int, tokens: int, *, new: bool
    ) -> StepPlan:
        """A step with this one request. new: `blocks` are all it has, not those it gets."""
        return self.plan(ScheduledRequest(request_id, (list(blocks),), new, computed, tokens))

    def end(
        self,
        orders: Iterable[Order] | Order,
        outcome: Outcome = OK,
        *,
        kind: JobKind | None = None,
        ranks: int | None = None,
        seconds: float = 0.0,
        source: str = "",
        near: bool = False,
    ) -> None:
        """Orders end, on all ranks: a fetch or an upload, or (by `kind`) one half of a save."""
        report = StepReport()
        for order in [orders] if isinstance(orders, Order) else orders:
            what = kind or (order.kind if isinstance(order, BucketJob) else JobKind.UPLOAD)
            count = self.setup.world_size if ranks is None else ranks
            end = JobEnd(order.job_id, what, outcome, 0, seconds, count, source=source, near=near)
            end.fresh_s = 0.0 if near else end.fresh_s
            report.add(end)
        self.planner.on_report(report, self.now_s)
        check(self.planner)

    def copied(self, orders: Iterable[SaveJob] | SaveJob) -> None:
        self.end(orders, kind=JobKind.SAVE)

    def uploaded(self, orders: Iterable[Order] | Order, outcome: Outcome = OK) -> None:
        self.end(orders, outcome, kind=JobKind.UPLOAD)

    def key(self, prompt: str) -> ChunkKey:
        """Of the last chunk of this prompt."""
        return ChunkKey(0, self._hashes(prompt)[-1])

    def keys(self, orders: Iterable[Order]) -> list[ChunkKey]:
        return [order.key for order in orders]

    def pinned(self) -> int:
        return self.planner.ledger.table.statistics().pinned

    def make_resident(self, *prompts: str) -> None:
        """All chunks of the prompts are fetched in turn, for requests that are gone again."""
        for prompt in prompts:
            request_id = f"for {prompt}"
            self.add(request_id, prompt)
            while self.lookup(request_id).wait:
                self.end(self.fetches())
            self.planner.finished(request_id)

    def _hashes(self, text: str) -> list[bytes]:
        chain: list[int] = []
        for letter in text:
            self._prefixes.extend(chain, ord(letter))
        size = self.setup.hash_tokens
        return [hash_of(chain[end - 1]) for end in range(size, len(chain) + 1, size)]


def saving(**setup: object) -> tuple[Desk, SaveJob]:
    """Blocks 0 and 1 are being copied for the request "r"."""
    desk = Desk(**{"may_load": False, **setup})
    (save,) = desk.compute("r", "aaaa", [0, 1], 0, 4).saves
    return desk, save


def load_slots(load: LoadJob) -> list[int]:
    return [part.slot for part in load.parts]
