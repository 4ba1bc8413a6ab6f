"""What crosses the edge between the scheduler's process and the workers' processes.

`StepPlan` goes down with every engine step, `StepReport` comes back with its output. Both are
pickled by vLLM's executors every step: plain data, no tensors, no vLLM objects, no behaviour
beyond merging the reports of several ranks.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from s3kv.types import ChunkKey, Outcome


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """Fill `slot` with the object of `key`. Ends once per rank, as `JobKind.FETCH`."""

    job_id: int
    key: ChunkKey
    slot: int


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Copy `block_ids` (all blocks of the chunk, in order) to `slot` once this step's forward has
    written them, then upload the slot. Ends twice per rank: `JobKind.SAVE` when the blocks may be
    reused, `JobKind.UPLOAD` when nothing reads the slot any more. A failed save uploads nothing;
    its second end is then CANCELLED.
    """

    job_id: int
    key: ChunkKey
    slot: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UploadOrder:
    """Send a slot that holds a chunk already saved, again. Ends once, as `JobKind.UPLOAD`."""

    job_id: int
    key: ChunkKey
    slot: int


@dataclass(frozen=True, slots=True)
class LoadPart:
    """Blocks `first_block …` of the chunk in `slot` go to the device blocks `block_ids`."""

    group: int
    slot: int
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Everything one request loads. Its end is vLLM's `finished_recving`, not a `JobEnd`."""

    request_id: str
    parts: tuple[LoadPart, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step's instructions, the same for every rank.

    fences: saves (by job id) whose source blocks this step overwrites; their copies must have
        read the blocks before anything of this step writes.
    cancels: fetches nobody waits for any more. They still end, and only their end frees the slot.
    withdrawals: fetches that come too late for those who asked. They are cancelled if they have not
        been sent yet; otherwise what arrives serves the next who asks, and tells how fast the
        bucket is.
    abandons: requests the engine holds for a load that will not come; they end as failed loads.
    linger_s: how long a worker may wait at the end of this step for one of its loads or fetches to
        end, because the engine has nothing else to do than to ask again.
    """

    fetches: tuple[FetchOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    uploads: tuple[UploadOrder, ...] = ()
    loads: tuple[LoadOrder, ...] = ()
    fences: tuple[int, ...] = ()
    cancels: tuple[int, ...] = ()
    withdrawals: tuple[int, ...] = ()
    abandons: tuple[str, ...] = ()
    linger_s: float = 0.0


EMPTY_PLAN = StepPlan()


class JobKind(enum.Enum):
    FETCH = "fetch"
    SAVE = "save"
    UPLOAD = "upload"


@dataclass(slots=True)
class JobEnd:
    """The end of one job on `ranks` ranks: the worst outcome, the longest time, all bytes."""

    job_id: int
    kind: JobKind
    outcome: Outcome
    nbytes: int
    seconds: float
    ranks: int = 1


@dataclass(slots=True)
class StepReport:
    """What one or more ranks have to tell after a step. `ends` is keyed by job id and kind."""

    ends: dict[tuple[int, JobKind], JobEnd] = field(default_factory=dict)

    def add(self, end: JobEnd) -> None:
        """Record `end`, folding it into what other ranks said of the same job."""
        key = (end.job_id, end.kind)
        known = self.ends.get(key)
        if known is None:
            self.ends[key] = end
            return
        known.outcome = max(known.outcome, end.outcome)
        known.nbytes += end.nbytes
        known.seconds = max(known.seconds, end.seconds)
        known.ranks += end.ranks

    def merge(self, other: StepReport) -> None:
        for end in other.ends.values():
            self.add(end)


@dataclass(frozen=True, slots=True)
class ItemLoad:
    """The item at `offset` of the scheduler's slab, header and all, goes into the engine's encoder
    cache as `identifier`: a tensor [rows, width]."""

    identifier: str
    offset: int
    nbytes: int
    rows: int
    width: int


@dataclass(frozen=True, slots=True)
class ItemSave:
    """Once this step has encoded `identifier`, its output goes to the bucket under `key`."""

    identifier: str
    key: ChunkKey
    rows: int


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """What one engine step loads instead of encoding, and what it encodes and saves."""

    loads: tuple[ItemLoad, ...] = ()
    saves: tuple[ItemSave, ...] = ()


@dataclass(slots=True)
class ItemReport:
    """What one or more ranks have to tell of items: increments since the last report.

    encoded_rows, encode_seconds: what the encoder made, and how long that took.
    uploaded: keys the bucket is now known to hold. seconds: how long things took, by metric.
    """

    counters: dict[str, int] = field(default_factory=dict)
    uploaded: list[ChunkKey] = field(default_factory=list)
    encoded_rows: int = 0
    encode_seconds: float = 0.0
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def merge(self, other: ItemReport) -> None:
        for name, value in other.counters.items():
            self.counters[name] = self.counters.get(name, 0) + value
        self.uploaded += other.uploaded
        self.encoded_rows += other.encoded_rows
        self.encode_seconds += other.encode_seconds
        for name, seconds in other.seconds.items():
            self.seconds[name] = self.seconds.get(name, []) + seconds
