"""What a run of the small engine is set up with, and its requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

from s3kv.host.room import EqualSlots
from s3kv.host.table import Table
from s3kv.planning.breaker import Breaker
from s3kv.planning.group_kinds import Coverage
from s3kv.planning.index import BucketIndex
from s3kv.planning.kv import KVPlanner, KVPlannerSettings
from s3kv.planning.ledger import Ledger
from s3kv.planning.pace import Pace
from s3kv.planning.residency import ResidencyLog


@dataclass(frozen=True)
class Setup:
    """Everything that stays the same during one run."""

    world_size: int = 1
    slots: int = 6
    blocks: int = 24
    chunk_tokens: int = 4
    block_tokens: int = 2
    hash_tokens: int = 2
    probe_chunks: int = 2
    max_wait_s: float = 5.0
    gate: bool = False
    max_saves_inflight: int = 4
    miss_ttl_s: float = 20.0
    coverages: tuple[Coverage, ...] = ()
    """None: one of full attention."""
    has_disk: bool = False
    may_load: bool = True
    may_save: bool = True
    null_block: int | None = None
    steps_ahead: int = 0
    """Steps planned before the output of one has come back: 0, or 1 for async scheduling."""

    @property
    def _all(self) -> tuple[Coverage, ...]:
        return self.coverages or (Coverage(self.block_tokens, self.chunk_tokens),)

    def coverage(self, number: int) -> Coverage:
        """The coverage with this number."""
        return next(coverage for coverage in self._all if coverage.number == number)

    @property
    def tables(self) -> tuple[Coverage, ...]:
        """The coverage of each of the engine's tables of blocks, by the number of the table."""
        of = {member: coverage for coverage in self._all for member in coverage.members}
        return tuple(of[number] for number in range(len(of)))

    def planner(self) -> KVPlanner:
        ledger = Ledger(
            Table(EqualSlots(self.slots)),
            BucketIndex(capacity=10_000, miss_ttl_s=self.miss_ttl_s),
            Breaker(threshold=3, has_disk=self.has_disk),
            world_size=self.world_size,
            may_save=self.may_save,
            residency=ResidencyLog(),
        )
        settings = KVPlannerSettings(
            coverages=self._all,
            hash_tokens=self.hash_tokens,
            probe_chunks=self.probe_chunks,
            max_wait_s=self.max_wait_s,
            recompute_gate=self.gate,
            max_saves_inflight=self.max_saves_inflight,
            may_load=self.may_load,
            may_save=self.may_save,
            null_block=self.null_block,
        )
        return KVPlanner(ledger, Pace(prefill_tokens_per_s=8.0, fetches_at_once=4), settings)


def meaning(prefix_id: int, table: int, tables: int) -> int:
    """An id for the KV of this token in the layers of one of so many tables."""
    return prefix_id * tables + table


class Prefixes:
    """Ids for "this token after that prefix": equal ids mean equal prefixes."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int], int] = {}

    def extend(self, chain: list[int], token: int) -> None:
        link = (chain[-1] if chain else 0, token)
        chain.append(self._ids.setdefault(link, len(self._ids) + 1))


def hash_of(prefix_id: int) -> bytes:
    return blake2b(prefix_id.to_bytes(8, "little"), digest_size=32).digest()


@dataclass(eq=False)
class Request:
    """`chain` has the prefix ids of its prompt and of all it will ever sample; the first `known`
    have been given or sampled. `outstanding`: samples of steps whose output has not come back."""

    request_id: str
    chain: list[int]
    known: int
    hash_tokens: int
    hashes: list[bytes] = field(default_factory=list)
    computed: int = 0
    outstanding: int = 0
    table: list[int] = field(default_factory=list)
    loading: bool = False
    over: bool = False
    before_reset: bool = False
    load_failed: bool = False
    waits_since_s: float | None = None

    def learn(self, tokens: int) -> None:
        self.known = min(len(self.chain), self.known + tokens)
        size = self.hash_tokens
        for end in range((len(self.hashes) + 1) * size, self.known + 1, size):
            self.hashes.append(hash_of(self.chain[end - 1]))
