"""One worker's life without an engine: the planner, the rank worker and a real I/O process.

The test plays the engine. Prompts are numbers of chunks; a chunk is one block, and its KV is
`rig.payload(number)`, so a load that brings anything else is seen at once.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from lab.books import check
from s3kv.config import Config
from s3kv.device.copies import CopyEnds, LoadedEnd, SavedEnd
from s3kv.device.copy_jobs import CopyMark
from s3kv.host.room import EqualSlots
from s3kv.host.slab import Slab
from s3kv.host.table import Table
from s3kv.io.client import IoClient
from s3kv.io.process_life import State
from s3kv.messages import CopyPart, StepReport
from s3kv.planning.breaker import Breaker
from s3kv.planning.group_kinds import Coverage
from s3kv.planning.index import BucketIndex
from s3kv.planning.kv import KVPlanner, KVPlannerSettings
from s3kv.planning.ledger import Ledger
from s3kv.planning.pace import Pace
from s3kv.planning.requests import ScheduledRequest
from s3kv.worker.rank import RankWorker
from tests.unit.io import rig

CHUNK_TOKENS = 4
SLOTS = 24
CONSTANTS: dict[str, Any] = {
    "max_attempts": 2,
    "min_bytes_per_s": 2**18,
    "network_threads": 2,  # as on a host with many cores
    # A chunk whose probe is under way when its request ends is not saved.
    "probe_chunks": 1,
    "recompute_gate": False,
    "start_timeout_s": 60.0,
}
"""Constants of `lab.constants` for lives."""
HANG_S = 120.0
"""Nothing here may take this long; it is no measure, only the end of a test that hangs."""


class SlabCopies:
    """Stands in for `BlockCopies`: what a block holds follows from its number."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self._saved: list[SavedEnd] = []
        self._loaded: list[LoadedEnd] = []
        self.copier = SimpleNamespace(refused=0)

    def mark(self) -> CopyMark:
        return CopyMark(None, True)

    def fence(self, job_ids: Iterable[int]) -> None:
        """Copies are done as soon as they are ordered."""

    def save(
        self, job_id: int, group: int, slot: int, block_ids: Sequence[int], mark: CopyMark
    ) -> None:
        rig.fill(self._slab, slot, block_ids[0])
        self._saved.append(SavedEnd(job_id, True, 0.0))

    def load(self, load_id: str, parts: Sequence[CopyPart], mark: CopyMark) -> None:
        for part in parts:
            found = bytes(rig.slot(self._slab, part.slot)[rig.FORMAT.header_bytes :])
            assert found == rig.payload(part.block_ids[0]), f"{load_id} was given wrong bytes"
        self._loaded.append(LoadedEnd(load_id, True))

    def poll(self) -> CopyEnds:
        ends = CopyEnds(self._saved, self._loaded)
        self._saved, self._loaded = [], []
        return ends

    def wait_all(self, timeout_s: float) -> None:
        """Nothing is ever under way."""

    wait_load = wait_all

    def close(self) -> None:
        """Nothing to give back."""


class Life:
    """Planner, workers and I/O processes from `start` to `stop`: one rank per URL.

    settings: over the fast ones. All ranks share the bucket and its keys. first_uploads: as ranks
    do that hold the same; otherwise every rank uploads.
    """

    def __init__(
        self,
        url: str,
        bucket: str,
        module: str = "s3kv.io",
        *more_urls: str,
        first_uploads: bool = False,
        **settings: Any,
    ) -> None:
        fast = {"request_timeout_ms": 1_000, "max_wait_ms": 3_000, "on_unavailable": "serve"}
        self.config = Config(**{"bucket": bucket, "endpoint_url": url, **fast, **settings})
        self._urls = (url, *more_urls)
        self._module = module
        self._first_uploads = first_uploads
        self.is_started = False
        self._ahead_s = 0.0
        self._requests = 0
        self._steps = 0

    def start(self) -> str | None:
        """Returns what trouble the bucket made."""
        self.slabs = [Slab.create(SLOTS * rig.SLOT_BYTES) for _ in self._urls]
        configs = [dataclasses.replace(self.config, endpoint_url=url) for url in self._urls]
        self.clients = [
            IoClient(rig.handshake(config), slab, module=self._module)
            for config, slab in zip(configs, self.slabs, strict=True)
        ]
        for client in self.clients:
            client.start()
        self.ranks = [
            RankWorker(
                copies=SlabCopies(slab),  # type: ignore[arg-type]
                client=client,
                block_bytes={0: 1},
                uploads=client is self.client or not self._first_uploads,
                clock=time.monotonic,
            )
            for client, slab in zip(self.clients, self.slabs, strict=True)
        ]
        self.planner = self._make_planner()
        self.is_started = True
        troubles = [client.wait_ready(HANG_S).trouble for client in self.clients]
        return next((trouble for trouble in troubles if trouble), None)

    @property
    def client(self) -> IoClient:
        """Of the first rank."""
        return self.clients[0]

    def _make_planner(self) -> KVPlanner:
        ledger = Ledger(
            Table(EqualSlots(SLOTS)),
            BucketIndex(capacity=1000),
            Breaker(threshold=5),
            world_size=len(self._urls),
        )
        settings = KVPlannerSettings(
            coverages=(Coverage(CHUNK_TOKENS, CHUNK_TOKENS),),
            hash_tokens=CHUNK_TOKENS,
            max_wait_s=self.config.max_wait_ms / 1000,
        )
        return KVPlanner(ledger, Pace(fetches_at_once=8), settings)

    def later(self) -> None:
        """For the planner a minute passes: breakers half-open, verdicts expire, retries are due."""
        self._ahead_s += 61.0

    @property
    def _now_s(self) -> float:
        return time.monotonic() + self._ahead_s

    def step(self, *scheduled: ScheduledRequest) -> None:
        plan = self.planner.plan(scheduled, self._now_s)
        folded = StepReport()
        for rank in self.ranks:
            rank.begin(plan)
            rank.load(plan.loads)
            rank.save(plan.saves)
            rank.poll(0.002)
            folded.merge(rank.take_report() or StepReport())
            loaded = rank.take_loaded()  # of this step's loads, so the same on every rank
        self.planner.on_report(folded, self._now_s)
        self.planner.loaded(*loaded)
        self.planner.pace.step_ended(self._now_s, folded.number)
        check(self.planner)

    def serve(self, *chunks: int) -> int:
        """A request for these chunks, from its arrival to its last token. Returns how many of them
        were not computed. Fails when it is not answered."""
        self._requests += 1
        name = f"request-{self._requests}"
        # One more chunk, because the last token is always computed.
        self.planner.add_request(name, [rig.chunk(n).block_hash for n in chunks])
        until_s = time.monotonic() + HANG_S
        while (answer := self.planner.lookup(name, 0, self._now_s)).wait:
            assert time.monotonic() < until_s, f"{name} waits for ever"
            self.step()
        self.planner.admitted(name, (chunks,), answer.tokens)
        hits = answer.tokens // CHUNK_TOKENS
        if answer.tokens:
            self.step()
        computed = (len(chunks) - hits) * CHUNK_TOKENS
        self.step(ScheduledRequest(name, (chunks,), True, answer.tokens, computed))
        self.planner.finished(name)
        return hits

    def compute(self, *chunks: int) -> None:
        """A request that may read no cache, so that all its chunks are saved."""
        self._requests += 1
        name = f"request-{self._requests}"
        self.planner.add_request(name, [rig.chunk(n).block_hash for n in chunks])
        self.planner.admitted(name, (chunks,), 0)
        self.step(ScheduledRequest(name, (chunks,), True, 0, len(chunks) * CHUNK_TOKENS))
        self.planner.finished(name)

    @property
    def busy(self) -> int:
        return sum(rank.busy for rank in self.ranks)

    def settle(self) -> None:
        """Until nothing is under way any more, whatever became of it."""
        until_s = time.monotonic() + HANG_S
        ledger = self.planner.ledger
        while ledger.fetches_inflight or ledger.saves_inflight or self.busy:
            assert time.monotonic() < until_s, f"still under way: {self.counters()}"
            self.step()
            if not self.busy:
                self.later()  # only uploads to be tried again are left
        figures = ledger.table.statistics()
        assert (figures.reserved, figures.pinned, figures.dirty) == (0, 0, 0)

    def settle_jobs(self) -> None:
        """Until every job has ended that has been sent; uploads may be due again later."""
        until_s = time.monotonic() + HANG_S
        while self.busy:
            assert time.monotonic() < until_s, f"still under way: {self.counters()}"
            self.step()

    def stop(self) -> int:
        """Returns the uploads that were not finished. Nothing is left of the process afterwards."""
        left = 0
        for rank, slab in zip(self.ranks, self.slabs, strict=True):
            left += rank.shutdown(self.config.drain_timeout_s)
            slab.close()
        return left

    @property
    def is_over(self) -> bool:
        return self.client.life.state is State.CLOSED

    def counters(self) -> Counter[str]:
        """Of all ranks, and what their I/O processes say of themselves."""
        return sum(
            (
                rank.counters + client.counters
                for rank, client in zip(self.ranks, self.clients, strict=True)
            ),
            Counter(),
        )
