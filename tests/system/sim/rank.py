"""One rank with real bytes: the real `RankWorker` over device memory that is a bytearray.

Copies take a while (`Copies`), real time or virtual. The simulation's rank has the real `IoClient`,
but a `Process` for its child.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from s3kv.config import Config
from s3kv.device.copies import SavedEnd
from s3kv.io.client import IoClient
from s3kv.io.wire import Handshake
from s3kv.messages import BucketJob, CopyPart, JobEnd, JobKind, StepPlan, StepReport
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.rearranging import Pages
from s3kv.worker.rank import RankWorker
from tests.plans import fetches_of
from tests.system.sim.meaning import Shard, format_of
from tests.system.sim.process import Machine, Process
from tests.unit.planning.ranks import TokenKV, Write
from tests.unit.planning.setup import Setup


class Slab:
    """As `s3kv.host.slab.Slab`, of bytes that nothing has been written to yet."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.view = memoryview(bytearray(b"\xa5" * nbytes))
        self.fd: Machine

    def close(self) -> None:
        pass


class Blocks(Sequence["tuple[TokenKV | None, ...]"]):
    """The paged device memory of one rank: a bytearray, read as what it says."""

    def __init__(self, shard: Shard, setup: Setup) -> None:
        self._shard = shard
        self._size = shard.block_bytes(setup.block_tokens)
        self._count = setup.blocks
        self._data = memoryview(bytearray(setup.blocks * self._size))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, block: int) -> tuple[TokenKV | None, ...]:  # type: ignore[override]
        return self._shard.read(self._block(block))

    def _block(self, number: int) -> memoryview:
        return self._data[number * self._size :][: self._size]

    def write(self, writes: Iterable[Write]) -> None:
        for block, offset, token in writes:
            self._shard.write(self._block(block), offset, token)

    def copy_out(self, block_ids: Sequence[int], payload: memoryview) -> None:
        for number, block in enumerate(block_ids):
            payload[number * self._size :][: self._size] = self._block(block)

    def copy_in(self, part: CopyPart, payload: memoryview) -> None:
        for number, block in enumerate(part.block_ids, part.first_block):
            self._block(block)[:] = payload[number * self._size :][: self._size]


class Copies:
    """As `s3kv.device.copies.BlockCopies`: a copy reads and writes as late as it may."""

    copier = SimpleNamespace(refused=0)

    def __init__(self, rank: ByteRank, rng: random.Random, failing: float) -> None:
        self._rank = rank
        self._rng = rng
        self._failing = failing
        self._saves: dict[int, tuple[float, int, Sequence[int]]] = {}
        self._loads: dict[str, tuple[float, Sequence[CopyPart]]] = {}
        self._saved: list[SavedEnd] = []

    def _due_s(self) -> float:
        return self._rank.clock() + self._rng.choice([0.0, 0.01, 0.2, 0.8])

    def mark(self) -> None:
        return

    def save(
        self, job_id: int, group: int, slot: int, block_ids: Sequence[int], mark: None
    ) -> None:
        self._saves[job_id] = (self._due_s(), slot, block_ids)

    def load(self, load_id: str, parts: Sequence[CopyPart], mark: None) -> None:
        self._loads[load_id] = (self._due_s(), parts)

    def fence(self, job_ids: Iterable[int]) -> None:
        for job_id in job_ids:
            if job_id in self._saves:
                self._rank.seen["fences that mattered"] += 1
                self._save(job_id)

    def poll(self) -> Copies:
        now_s = self._rank.clock()
        for job_id in [job_id for job_id, save in self._saves.items() if save[0] <= now_s]:
            self._save(job_id)
        self.saved, self._saved = self._saved, []
        due = [load_id for load_id, load in self._loads.items() if load[0] <= now_s]
        self.loaded = [(load_id, self._load(load_id)) for load_id in due]
        return self

    def _save(self, job_id: int) -> None:
        _, slot, block_ids = self._saves.pop(job_id)
        ok = self._rng.random() >= self._failing
        if ok:
            self._rank.blocks.copy_out(block_ids, self._rank.payload(slot))
        self._saved.append(SavedEnd(job_id, ok, 0.0))

    def _load(self, load_id: str) -> bool:
        _, parts = self._loads.pop(load_id)
        if self._rng.random() < self._failing:
            return False
        for part in parts:
            self._rank.blocks.copy_in(part, self._rank.payload(part.slot))
        return True

    def wait_all(self, timeout_s: float) -> bool:
        for job_id in [*self._saves]:
            self._save(job_id)
        return True

    def close(self) -> None:
        self._saves.clear()
        self._loads.clear()


def handshake_for(shard: Shard, setup: Setup, config: Config, padding_bytes: int = 0) -> Handshake:
    space, formats = shard.namespace, formats_of(shard, setup, padding_bytes)
    return Handshake(
        config,
        space.prefix,
        space.digest,
        shard.name,
        {group: layout.tensors for group, layout in formats.items()},
        slot_bytes=slot_bytes_of(formats),
        integrity=shard.integrity,
        pages=Pages(shard.order, "layer.{}") if config.share_ranks else None,
    )


def formats_of(shard: Shard, setup: Setup, padding_bytes: int = 0) -> dict[int, ChunkFormat]:
    """Of the chunks of all coverages, by number."""
    groups = {coverage.number for coverage in setup.tables}
    return {group: format_of(shard, setup, padding_bytes, group) for group in sorted(groups)}


def slot_bytes_of(formats: Mapping[int, ChunkFormat]) -> int:
    """No multiple of anything, so that a wrong offset is noticed."""
    return max(layout.object_bytes for layout in formats.values()) + 64


class ByteRank:
    """In the place of `tests.unit.planning.ranks.Rank`, under the same engine and oracle.

    make_slab: of so many bytes. make_client: over that slab. clock: seconds.
    """

    def __init__(
        self,
        shard: Shard,
        setup: Setup,
        *,
        make_slab: Callable[[int], Any],
        make_client: Callable[[Any], IoClient],
        rng: random.Random,
        clock: Callable[[], float],
        padding_bytes: int = 0,
    ) -> None:
        self.number = shard.rank
        self.shard = shard
        self.blocks = Blocks(shard, setup)
        self.orders: dict[int, BucketJob] = {}
        self.report = StepReport()
        self.loaded: dict[str, bool] = {}
        self.seen: Counter[str] = Counter()
        self.clock = clock
        layout = format_of(shard, setup, padding_bytes)
        self._header_bytes = layout.header_bytes
        self._block_bytes = shard.block_bytes(setup.block_tokens)
        self._tokens_bytes = layout.payload_bytes - padding_bytes
        self._slot_bytes = slot_bytes_of(formats_of(shard, setup, padding_bytes))
        self._slab = make_slab(setup.slots * self._slot_bytes)
        self.client = make_client(self._slab)
        copies = Copies(self, rng, rng.choice([0.0, 0.0, 0.03]))
        self.worker = RankWorker(
            copies=copies,  # type: ignore[arg-type]
            client=self.client,
            block_bytes={0: 1},
            clock=clock,
        )

    def payload(self, slot: int) -> memoryview:
        """Where the tokens of this slot's chunk are."""
        at = slot * self._slot_bytes + self._header_bytes
        return self._slab.view[at : at + self._tokens_bytes]

    def run(self, plan: StepPlan, writes: Iterable[Write]) -> None:
        """In the order in which vLLM goes about a step."""
        self.orders.update((fetch.job_id, fetch) for fetch in fetches_of(plan))
        self.worker.begin(plan)
        self.worker.load(plan.loads)
        self.blocks.write(writes)
        self.worker.save(plan.saves)
        self._poll()

    def _poll(self) -> None:
        self.worker.poll()
        report = self.worker.take_report()
        if report is not None:
            for end in report.ends.values():
                self.heard(end)
                if end.kind is JobKind.FETCH:
                    del self.orders[end.job_id]
            self.report.merge(report)
        loaded, failed = self.worker.take_loaded()
        self.loaded.update((request_id, request_id not in failed) for request_id in sorted(loaded))

    def heard(self, end: JobEnd) -> None:
        self.seen[f"{end.kind.value} {end.outcome.name}"] += 1

    def take_report(self) -> StepReport:
        report, self.report = self.report, StepReport()
        return report


class Rank(ByteRank):
    def __init__(self, machine: Machine, shard: Shard, setup: Setup, config: Config) -> None:
        self._machine = machine
        handshake = handshake_for(shard, setup, config)

        def make_slab(nbytes: int) -> Slab:
            machine.slab = Slab(nbytes)
            machine.slab.fd = machine
            return machine.slab

        super().__init__(
            shard,
            setup,
            make_slab=make_slab,
            make_client=lambda slab: IoClient(handshake, slab, clock=machine.loop.time),
            rng=machine.rng,
            clock=machine.loop.time,
        )

    @property
    def processes(self) -> list[Process]:
        return self._machine.processes

    def heard(self, end: JobEnd) -> None:
        super().heard(end)
        for process in self.processes:
            still = end.kind is not JobKind.SAVE and end.job_id in process.orders
            if still and not process.is_dead():
                self._machine.oracle.accuse(f"{end}, while process {process.pid} may still do it")
