"""vLLM's own scheduler with its `OffloadingConnector`, and our tier in that, over simulated ranks.

    requests ─▶ vLLM's Scheduler ─▶ OffloadingConnectorScheduler ─▶ primary tier ─▶ S3Tier
                    plan of a step │                                          jobs │
                                   ▼                                               ▼
                       ranks: blocks ◀──────────────▶ rows ◀──────────────▶ objects

As in `scheduling`, meanings move instead of bytes, in virtual time, and what is ordered ends in any
order. A row is filled with nothing while a fetch writes it, and given up once its job is reported.
"""

from __future__ import annotations

import os
import random
import uuid
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import OffloadingEvent, TransferResult
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.outputs import KVConnectorOutput

from lab.books import check
from s3kv.connectors.offload_tier import S3Tier
from s3kv.host.room import PAGE_BYTES
from s3kv.io.tier import Tier
from s3kv.messages import BucketJob, JobEnd, JobKind
from s3kv.types import ChunkKey, Outcome, Tally
from tests.contract.scheduling import STEP_S, Engine
from tests.unit.planning.ranks import TokenKV, Write

LATE_S = 5.0
"""What a wait may take beyond its deadline: steps, copies, and the ends of what is cancelled."""
Row = dict[tuple[int, int], list[TokenKV | None]]
"""Blocks, by rank and place in the chunk."""


class Io:
    """In the place of the I/O process and its client. Jobs end late, in any order, or fail."""

    engine: OffloadingEngine

    def __init__(self) -> None:
        self.counters = Tally()
        self.jobs: dict[int, tuple[BucketJob, float]] = {}
        """With the time at which each ends."""
        self._ends: list[JobEnd] = []

    def submit(self, job: BucketJob) -> None:
        if job.kind is not JobKind.USE:
            same = [
                j for j, _ in self.jobs.values() if j.slot == job.slot and j.kind is not job.kind
            ]
            assert all(j.kind is JobKind.USE for j in same), f"{job} and {same} use one row"
        if job.kind is JobKind.FETCH:
            self.engine.rows[job.slot] = {}
        delay_s = self.engine.rng.choice([0.0, STEP_S, STEP_S, 0.4, 0.4, 8.0])
        self.jobs[job.job_id] = job, self.engine.now_s + delay_s

    def cancel(self, job_id: int) -> None:
        if job_id in self.jobs:
            self._end(job_id, Outcome.CANCELLED)

    def flush(self) -> None:
        """Everything has been sent."""

    def poll(self, linger_s: float = 0.0) -> list[JobEnd]:
        due = [number for number, (_, end_s) in self.jobs.items() if end_s <= self.engine.now_s]
        self.engine.rng.shuffle(due)
        for number in due:
            is_lost = self.engine.rng.random() < self.engine._failing
            self._end(number, Outcome.FAILED if is_lost else Outcome.OK)
        ends, self._ends = self._ends, []
        return ends

    def settle(self, timeout_s: float) -> None:
        """Questions go on."""
        self.engine.now_s += timeout_s / 2
        for number in [n for n, (job, _) in self.jobs.items() if job.kind is not JobKind.USE]:
            is_late = self.jobs[number][1] > self.engine.now_s
            self._end(number, Outcome.FAILED if is_late else Outcome.OK)

    def drain(self, timeout_s: float) -> int:
        return len(self.jobs)

    def close(self) -> None:
        self.jobs.clear()

    def _end(self, job_id: int, outcome: Outcome) -> None:
        (job, _), engine = self.jobs.pop(job_id), self.engine
        found = engine.objects.get(job.key)
        if outcome.is_success and job.kind is JobKind.UPLOAD:
            outcome = Outcome.OK if found is None else Outcome.EXISTS
            engine.objects.setdefault(job.key, engine.rows[job.slot].copy())
        elif outcome.is_success:
            outcome = Outcome.MISSING if found is None else Outcome.OK
        if outcome is Outcome.OK and job.kind is JobKind.FETCH and found is not None:
            if engine.rng.random() < engine._failing:
                outcome = Outcome.CORRUPT
            else:
                engine.rows[job.slot] = found.copy()
        engine.seen[f"{job.kind.value} {outcome.name}"] += 1
        self._ends.append(JobEnd(job_id, job.kind, outcome, 0, STEP_S, fresh_s=1.0))


class WatchedTier(S3Tier):
    """vLLM uses a row again as soon as its job has been reported."""

    def _open_tier(self, handshake: Any, view: memoryview) -> None:
        self.io = Io()
        self.given: dict[int, TransferJob] = {}
        """Jobs that have not been reported, whose rows are the tier's."""
        self.failed: set[tuple[str, bytes]] = set()
        self.announced: set[bytes] = set()
        client: Any = self.io
        slab: Any = SimpleNamespace(close=lambda: None)
        self._tier = Tier(handshake, slab, client, True)

    def submit_load(self, job_metadata: TransferJob) -> None:
        again = {(job_metadata.req_context.req_id, key) for key in job_metadata.keys} & self.failed
        assert not again or not job_metadata.is_promotion, f"{again} failed and are fetched again"
        self.given[job_metadata.job_id] = job_metadata
        super().submit_load(job_metadata)

    submit_store = submit_load

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = [*super().get_finished_jobs()]
        for result in results:
            assert result.job_id in self.given, f"job {result.job_id} is reported twice"
            job = self.given.pop(result.job_id)
            if job.is_promotion and not result.success:
                lost = set(job.keys) - set(result.successful_keys or ())
                self.failed |= {(job.req_context.req_id, key) for key in lost}
        in_use = {job.slot for job, _ in self.io.jobs.values() if job.kind is not JobKind.USE}
        given_up = in_use - {row for job in self.given.values() for row in job.chunk_ids.tolist()}
        assert not given_up, f"rows {given_up} are given back and still in use"
        return results

    def take_events(self) -> Iterable[OffloadingEvent]:
        events = [*super().take_events()]
        for event in events:
            known = self.announced
            (known.difference_update if event.removed else known.update)(event.keys)
        return events


class Copier:
    """Copies of one rank between its blocks and the rows, in the place of vLLM's on a GPU."""

    def __init__(self, engine: OffloadingEngine, number: int, config: Any, cache: Any) -> None:
        self.size = max(spec.block_size for spec in engine._specs)
        self.blocks: list[list[TokenKV | None]] = [
            [None] * self.size for _ in range(cache.num_blocks)
        ]
        self.orders: dict[int, tuple[list[tuple[int, int, int]], bool]] = {}
        """Blocks with their rows and places there; and whether it is a load."""
        self.number = number
        self.worker = OffloadingConnectorWorker(
            SimpleNamespace(replicated_layout=False), config, cache
        )
        self.worker.worker = self
        self._engine = engine
        self._ended: list[int] = []

    def submit_store(self, job_id: int, gpu: Any, cpu: Any, is_load: bool = False) -> bool:
        blocks, rows, parts = iter(gpu.block_ids.tolist()), iter(cpu.block_ids.tolist()), []
        chunk_blocks = self._engine.chunk_blocks
        for size, first in zip(gpu.group_sizes, gpu.block_indices, strict=True):
            for place in range(first, first + size):
                if place == first or place % chunk_blocks == 0:
                    row = next(rows)
                parts.append((next(blocks), row, place % chunk_blocks))
        self.orders[job_id] = parts, is_load
        return True

    def submit_load(self, job_id: int, cpu: Any, gpu: Any) -> bool:
        return self.submit_store(job_id, gpu, cpu, is_load=True)

    def wait(self, job_ids: Iterable[int]) -> None:
        for job_id in self.orders.keys() & set(job_ids):
            parts, is_load = self.orders.pop(job_id)
            for block, row, place in parts:
                held = self._engine.rows[row]
                if is_load:
                    self.blocks[block] = held.get((self.number, place), [None] * self.size).copy()
                else:
                    held[self.number, place] = self.blocks[block].copy()
            self._ended.append(job_id)

    def get_finished(self) -> list[TransferResult]:
        self.wait(n for n in sorted(self.orders) if self._engine.rng.random() < 0.5)
        ended, self._ended = self._ended, []
        return [TransferResult(job_id, success=True) for job_id in ended]


class OffloadingEngine(Engine):
    """slots: rows of the primary tier. Its requests may not wait longer than the tier allows.
    chunk_blocks: blocks of a chunk."""

    def __init__(
        self,
        vllm_config: Any,
        rng: random.Random,
        *,
        slots: int,
        chunk_blocks: int,
        **settings: Any,
    ) -> None:
        block_bytes = sum(spec.page_size_bytes for spec in settings["specs"])
        row_bytes = -(-chunk_blocks * settings["ranks"] * block_bytes // PAGE_BYTES) * PAGE_BYTES
        self.max_wait_s, self.rng = settings.pop("max_wait_s"), rng
        self.chunk_blocks = chunk_blocks
        tier = {"type": "WatchedTier", "module_path": __name__, "bucket": "bucket"}
        tier |= {"max_wait_ms": int(1_000 * self.max_wait_s)}  # type: ignore[dict-item]
        extra = {"spec_name": "TieringOffloadingSpec", "blocks_per_chunk": chunk_blocks}
        extra |= {"cpu_bytes_to_use": slots * row_bytes, "secondary_tiers": [tier]}
        settings |= {
            "kv_connector_extra_config": extra,
            "engine_id": uuid.uuid4().hex,
        }
        super().__init__(vllm_config, rng, slots=slots, **settings)

    def _begin(self, before: Any, config: Any, cache: KVCacheConfig, slots: int) -> None:
        self.offloading = self.connector.connector_scheduler
        self.manager = self.offloading.manager
        region = self.manager.primary_tier._mmap_region
        os.unlink(region.mmap_path)  # or an engine that fails leaves it in /dev/shm
        region._creator = False
        (self.tier,) = self.manager.secondary_tiers
        self.tier.io.engine = self
        self.objects: dict[ChunkKey, Row] = {} if before is None else before.objects
        self.rows: list[Row] = [{} for _ in range(slots)]
        ranks = range(config.parallel_config.world_size)
        self.ranks = [Copier(self, number, config, cache) for number in ranks]
        self._asked: dict[str, int] = {}
        self._waited: Counter[str] = Counter()
        self._ask, self.offloading.get_num_new_matched_tokens = (
            self.offloading.get_num_new_matched_tokens,
            self._matched,
        )

    def _matched(self, request: Any, *args: Any, **more: Any) -> Any:
        answer, name = self._ask(request, *args, **more), request.request_id
        if answer[0] is not None or self.offloading._req_status[name].transfer_jobs:
            del self._waited[name]
        elif self._asked.get(name) == self.steps - 1:
            self._waited[name] += 1
            waited_s = self._waited[name] * STEP_S
            assert waited_s < 3 * self.max_wait_s + LATE_S, f"{name} waits for ever"
        self._asked[name] = self.steps
        return answer

    def _run(self, rank: Copier, metadata: Any, writes: list[Write]) -> None:
        metadata.store_jobs = metadata.store_jobs.copy()  # which a flush takes from
        stores = metadata.store_jobs.copy()
        rank.worker.handle_preemptions(metadata)
        for block, offset, token in writes:
            rank.blocks[block][offset] = token
        rank.worker.start_kv_transfers(metadata)
        rank.worker.prepare_store_kv(metadata)
        metadata.store_jobs = stores  # for the next rank

    def _end_orders(self) -> None:
        """They end when a rank is asked."""

    def _reported(self, rank: Copier) -> KVConnectorOutput:
        _, loaded = rank.worker.get_finished(set())
        meta = rank.worker.build_connector_worker_meta()
        self.seen["loads"] += len(loaded)
        return KVConnectorOutput(finished_recving=loaded or None, kv_connector_worker_meta=meta)

    def step(self, *, fails: bool = False) -> int:
        computed = super().step(fails=fails)
        check(self.tier.planner)
        assert self.tier.broken is None, f"the tier has failed in {self.tier.broken}"
        self.tier.take_events()
        index, chunk = self.tier.planner.index, self.tier._chunk
        gone = [name for name in self.tier.announced if not index.is_present(chunk(name))]
        assert not gone, f"{len(gone)} chunks are gone, and no event says so"
        return computed

    def _forget(self) -> None:
        assert all(job.kind is JobKind.USE for job, _ in self.tier.io.jobs.values())
        self.tier.announced.clear()

    def check(self) -> None:
        """Everything has ended: nothing is held for anybody."""
        for _ in range(200):  # nothing that ends takes longer
            self.step()
        planner, primary = self.tier.planner, self.manager.primary_tier
        used = primary._num_allocated_chunks - len(primary._free_list)
        assert used == primary._num_evictable_cache_chunks, "rows are pinned for ever"
        ours = (planner._requests, planner.retries, planner._active, planner._uses, self.tier._open)
        theirs = (self.manager._jobs, self.manager._req_state, self.offloading._req_status)
        left = [held for held in (*ours, *theirs, self.offloading._jobs, self.tier.io.jobs) if held]
        assert not left, f"at rest: {left}"
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == self._blocks, f"{self._blocks - free} blocks are held for nobody"
        self.scheduler.shutdown()
