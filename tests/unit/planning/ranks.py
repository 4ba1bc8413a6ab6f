"""Ranks that move meanings instead of bytes, and a bucket that is a dict.

What a rank would copy, send and receive is here a tuple that says what it means: of which tokens,
computed with which weights, on which rank. So a slot or a device block that was reused too early
is seen as what it is, the wrong content in the right place, and not only as a rule broken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from s3kv.messages import BucketJob, JobEnd, JobKind, LoadJob, SaveJob, StepPlan, StepReport
from s3kv.planning.group_kinds import Coverage
from s3kv.types import ChunkKey, Outcome
from tests.plans import fetches_of, uploads_of

TokenKV = tuple[int, int]
"""One token's KV: which weights computed it, and the id of the token with its whole prefix."""

Content = tuple[int, tuple[TokenKV | None, ...]]
"""A chunk's bytes: the rank whose shard they are, and the KV of its tokens (None: garbage)."""

Write = tuple[int, int, TokenKV]
"""A forward's: block, offset in it, what is written."""


@dataclass
class Bucket:
    """Objects by rank and key; and what every key was first saved as, which it has to stay."""

    objects: dict[tuple[int, ChunkKey], Content] = field(default_factory=dict)
    meanings: dict[ChunkKey, tuple[TokenKV | None, ...]] = field(default_factory=dict)


Order = BucketJob | SaveJob | LoadJob


class Rank:
    """One rank. What it has been ordered to do is done when the test says so, in any order."""

    def __init__(
        self, number: int, *, slots: int, blocks: int, tables: Sequence[Coverage], bucket: Bucket
    ) -> None:
        self.number = number
        self.slots: list[Content | None] = [None] * slots
        size = max(group.block_tokens for group in tables)
        self.blocks: list[list[TokenKV | None]] = [[None] * size for _ in range(blocks)]
        self._tables = tables
        self._groups = {group.number: group for group in tables}
        self.bucket = bucket
        self.orders: dict[tuple[str, int | str], Order] = {}
        """Not ended yet, by kind and job (or request)."""
        self.cancelled: set[int] = set()
        self.report = StepReport()
        self.loaded: dict[str, bool] = {}
        self.seen: Counter[str] = Counter()

    def run(self, plan: StepPlan, writes: Iterable[Write]) -> None:
        """In the order in which a worker goes about a step."""
        self.report.number = plan.number
        for job_id in plan.fences:
            if ("save", job_id) in self.orders:
                self._copy(job_id, Outcome.OK)
                self.seen["fences that mattered"] += 1
        self.cancelled.update(plan.cancels)
        # Whether a fetch has begun differs between ranks.
        self.cancelled.update(job for job in plan.withdrawals if (job + self.number) % 2)
        for fetch in fetches_of(plan):
            self._claim(fetch.slot)
            self.slots[fetch.slot] = None
            self.orders["fetch", fetch.job_id] = fetch
        for upload in uploads_of(plan):
            self.orders["upload", upload.job_id] = upload
        for load in plan.loads:
            self._check_untouched(block for part in load.parts for block in part.block_ids)
            self.orders["load", load.request_id] = load
        writes = list(writes)
        self._check_untouched(block for block, _, _ in writes)
        for block, offset, token in writes:
            self.blocks[block][offset] = token
        for save in plan.saves:
            self._claim(save.slot)
            self.slots[save.slot] = None
            self.orders["save", save.job_id] = save

    def _claim(self, slot: int) -> None:
        """The slot is about to be written: nobody may read or write it on this rank."""
        users = [order for order in self.orders.values() if slot in slots_of(order)]
        assert not users, f"slot {slot} is written on rank {self.number} while {users} use it"

    def _check_untouched(self, blocks: Iterable[int]) -> None:
        """The blocks are about to be written by this step."""
        written = set(blocks)
        for order in self.orders.values():
            used = written & set(blocks_of(order))
            assert not used, f"blocks {used} are overwritten on rank {self.number} under {order}"

    def end(self, name: tuple[str, int | str], outcome: Outcome) -> None:
        """Carry one order out, as far as `outcome` allows."""
        kind, number = name
        ends: dict[str, Callable[..., None]] = {
            "fetch": self._fetch,
            "save": self._copy,
            "upload": self._upload,
            "load": self._load,
        }
        ends[kind](number, outcome)

    def _fetch(self, job_id: int, outcome: Outcome) -> None:
        order = self.orders.pop(("fetch", job_id))
        assert isinstance(order, BucketJob)
        found = self.bucket.objects.get((self.number, order.key))
        if outcome.is_success:
            outcome = Outcome.MISSING if found is None else Outcome.OK
        self.slots[order.slot] = found if outcome.is_success else None
        self._say(job_id, JobKind.FETCH, outcome)

    def _copy(self, job_id: int, outcome: Outcome) -> None:
        order = self.orders.pop(("save", job_id))
        assert isinstance(order, SaveJob)
        ok = outcome.is_success
        size = self._groups[order.key.group].block_tokens
        tokens = tuple(token for block in order.block_ids for token in self.blocks[block][:size])
        if ok:
            assert all(t is not None and t[1] > 0 for t in tokens), f"{order} copies {tokens}"
            meaning = self.bucket.meanings.setdefault(order.key, tokens)
            assert tokens == meaning, f"{order} copies {tokens} and used to mean {meaning}"
        self.slots[order.slot] = (self.number, tokens) if ok else None
        self._say(job_id, JobKind.SAVE, Outcome.OK if ok else Outcome.FAILED)
        if ok:
            self.orders["upload", job_id] = BucketJob(job_id, JobKind.UPLOAD, order.key, order.slot)
        else:
            self._say(job_id, JobKind.UPLOAD, Outcome.CANCELLED)

    def _upload(self, job_id: int, outcome: Outcome) -> None:
        order = self.orders.pop(("upload", job_id))
        assert isinstance(order, BucketJob)
        content = self.slots[order.slot]
        assert content is not None, f"{order} sends a slot that nothing has filled"
        if outcome.is_success:
            self.bucket.objects.setdefault((self.number, order.key), content)
        self._say(job_id, JobKind.UPLOAD, outcome)

    def _load(self, request_id: str, outcome: Outcome) -> None:
        order = self.orders.pop(("load", request_id))
        assert isinstance(order, LoadJob)
        self.loaded[request_id] = outcome.is_success
        if not outcome.is_success:
            return
        for part in order.parts:
            content = self.slots[part.slot]
            assert content is not None, f"{order} reads a slot that nothing has filled"
            group = self._tables[part.group]
            size = group.block_tokens
            first = group.members.index(part.group) * len(group.held) + part.first_block
            for at, block in enumerate(part.block_ids, first):
                assert at * size < len(content[1]), f"{order} reads what is not in its chunk"
                self.blocks[block][:size] = content[1][at * size : (at + 1) * size]

    def _say(self, job_id: int, kind: JobKind, outcome: Outcome) -> None:
        self.report.add(JobEnd(job_id, kind, outcome, 0, 0.0))
        self.seen[f"{kind.value} {outcome.name}"] += 1

    def take_report(self) -> StepReport:
        report, self.report = self.report, StepReport()
        return report


def slots_of(order: Order) -> tuple[int, ...]:
    if isinstance(order, LoadJob):
        return tuple(part.slot for part in order.parts)
    return (order.slot,)


def blocks_of(order: Order) -> tuple[int, ...]:
    if isinstance(order, LoadJob):
        return tuple(block for part in order.parts for block in part.block_ids)
    return order.block_ids if isinstance(order, SaveJob) else ()
