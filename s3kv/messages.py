"""Messages between the scheduler's process and the workers' processes.

`StepPlan` goes to the workers with every engine step; `StepReport` returns with its output. vLLM's
executors pickle both every step, so they are plain data: no tensors, no vLLM objects, no behaviour
beyond merging the reports of several ranks.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

import msgspec

from s3kv.types import ChunkKey, ItemShape, Outcome


class JobKind(enum.Enum):
    FETCH = "fetch"
    SAVE = "save"
    UPLOAD = "upload"
    USE = "use"
    """A check of an object that is used but not read. Ends as EXISTS, MISSING, or CANCELLED if the
    answer is unknown. Moves no bytes."""


class BucketJob(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A job of the I/O process, as sent in plans and to the process: fill a slot with the object of
    `key`, seal and upload the object in a slot, or check an object that was used but not read. It
    ends once per rank, with a `JobEnd` of its kind, which is never SAVE.

    job_id: unique among the jobs that have not ended. slot: number of its first slot, each of
    `Handshake.slot_bytes`; 0 for a use. item: its shape, if it moves an item instead of a chunk.
    near: a fetch tries only the sources of this host.
    """

    job_id: int
    kind: JobKind
    key: ChunkKey
    slot: int = 0
    item: ItemShape | None = None
    near: bool = False


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Copy `block_ids` (all blocks of the chunk's object, in order: those of its first KV-cache
    group, then as many of the next) to `slot` once this step's forward has written them, then
    upload the slot. Ends twice per rank: as `JobKind.SAVE` when the blocks may be reused, and as
    `JobKind.UPLOAD` when nothing reads the slot any more. A failed save uploads nothing; its second
    end is then CANCELLED."""

    job_id: int
    key: ChunkKey
    slot: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopyPart:
    """Part of a load or save: the copy between the device blocks `block_ids` of one KV-cache group
    and the blocks from `first_block` on of that group's part of the object in `slot`."""

    group: int
    slot: int
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """All loads of one request. They end with vLLM's `finished_recving`, not with a `JobEnd`."""

    request_id: str
    parts: tuple[CopyPart, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step's instructions, the same for every rank.

    jobs: for the I/O process of every rank.
    fences: saves (by job id) whose source blocks this step overwrites; their copies must have
        read the blocks before anything of this step writes.
    cancels: fetches without waiters. They still end, and only their end frees the slot.
    withdrawals: fetches that are too late for the requests that needed them. They are cancelled if
        they have not been sent yet; otherwise the chunk serves the next request that needs it, and
        its time measures the bucket's speed.
    abandons: requests whose load will not happen although the engine waits for it; each ends as
        failed.
    linger_s: longest wait of a worker at the end of this step for one of its loads or fetches to
        end, because the engine is otherwise idle.
    number: the number of a step whose time is measured. The ranks' report repeats it, because vLLM
        forwards the output of a step without computation only if a connector reports something.
    """

    jobs: tuple[BucketJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    loads: tuple[LoadJob, ...] = ()
    fences: tuple[int, ...] = ()
    cancels: tuple[int, ...] = ()
    withdrawals: tuple[int, ...] = ()
    abandons: tuple[str, ...] = ()
    linger_s: float = 0.0
    number: int | None = None


EMPTY_PLAN = StepPlan()


class JobEnd(msgspec.Struct, array_like=True, tag=1):
    """The end of a job: nothing reads or writes its part of the slab for it any more. The I/O
    process and the ranks send it as their report; merged over several ranks, it has the worst
    outcome, the longest time and the sum of the bytes.

    nbytes: bytes moved; of an object, by the last attempt; 0 unless it succeeded. seconds: from the
        first attempt to the end, including retries, excluding the wait for its turn.
    ranks: number of ranks that it covers.
    detail: the cause of a failure, for a person to read; otherwise empty.
    reason: why an object did not verify (`headers.Mismatch`); "quarantined" if the object is known
        to be bad and was not read; otherwise empty.
    fresh_s: after a success, the time until a use of the object has to be reported, because the
        object may then be due for a refresh, or gone; of several ranks, the shortest.
    source: name of the source that decided a fetch ("bucket"), for a miss the last one tried; of
        several ranks, the slowest one's. Empty for other jobs, and for a fetch that was never sent.
    near: whether only sources of this host were tried, so the end implies nothing about the bucket;
        of several ranks, whether this holds for all of them.
    """

    job_id: int
    kind: JobKind
    outcome: Outcome
    nbytes: int = 0
    seconds: float = 0.0
    ranks: int = 1
    detail: str = ""
    reason: str = ""
    fresh_s: float = math.inf
    source: str = ""
    near: bool = False


@dataclass(slots=True)
class StepReport:
    """The report of one or more ranks on a step, and on earlier steps whose reports vLLM held back.
    `ends` is keyed by job id and kind. number: that of the newest plan."""

    ends: dict[tuple[int, JobKind], JobEnd] = field(default_factory=dict)
    number: int | None = None

    def add(self, end: JobEnd) -> None:
        """Record `end`, folded into the ends that other ranks reported for the same job."""
        key = (end.job_id, end.kind)
        known = self.ends.get(key)
        if known is None:
            self.ends[key] = end
            return
        known.outcome = max(known.outcome, end.outcome)
        known.nbytes += end.nbytes
        if end.seconds > known.seconds:
            known.seconds, known.source = end.seconds, end.source
        known.ranks += end.ranks
        known.fresh_s = min(known.fresh_s, end.fresh_s)
        known.near &= end.near

    def merge(self, other: StepReport) -> None:
        self.number = max(self.number or 0, other.number or 0) or None
        for end in other.ends.values():
            self.add(end)


@dataclass(frozen=True, slots=True)
class ItemLoad:
    """Load the item at `offset` of the scheduler's slab, header included, into the engine's encoder
    cache as `identifier`: a tensor [rows, width]."""

    identifier: str
    offset: int
    nbytes: int
    rows: int
    width: int


@dataclass(frozen=True, slots=True)
class ItemSave:
    """Save the output of `identifier` to the bucket under `key`, once this step has encoded it."""

    identifier: str
    key: ChunkKey
    rows: int


@dataclass(frozen=True, slots=True)
class ItemPlan:
    """Items of one engine step: those it loads, and those it encodes and saves."""

    loads: tuple[ItemLoad, ...] = ()
    saves: tuple[ItemSave, ...] = ()


@dataclass(slots=True)
class ItemReport:
    """The report of one or more ranks on items: increments since the last report.

    encoded_rows, encode_seconds: rows the encoder made, and the time it took. uploaded: keys the
    bucket is now known to hold, with their `JobEnd.fresh_s`. seconds: durations, by metric.
    """

    counters: dict[str, int] = field(default_factory=dict)
    uploaded: dict[ChunkKey, float] = field(default_factory=dict)
    encoded_rows: int = 0
    encode_seconds: float = 0.0
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def merge(self, other: ItemReport) -> None:
        for name, value in other.counters.items():
            self.counters[name] = self.counters.get(name, 0) + value
        self.uploaded |= other.uploaded
        self.encoded_rows += other.encoded_rows
        self.encode_seconds += other.encode_seconds
        for name, seconds in other.seconds.items():
            self.seconds[name] = self.seconds.get(name, []) + seconds
