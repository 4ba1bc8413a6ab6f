"""A fleet of engines with vLLM's offloading, from a seed: s3kv is the tier below, and no connector.

vLLM's own manager of the primary tier, `S3Tier` and the I/O process's service are the real ones.
`TierEngine` stands for vLLM's scheduler and its copies between GPU and rows. What must hold, beside
all that holds of every fleet:

1. A row that is loaded has the KV of its key, computed with the engine's weights.
2. Every transfer is reported once, and nothing reads or writes its rows afterwards.
3. A request waits for its own fetches, and for rows that two others fetch, and no longer.
4. Whoever follows the events knows what the tier takes the bucket to have.
5. At rest no row is pinned, and nothing is promised to anybody.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from lab.books import check
from s3kv.config import Config
from s3kv.connectors import offload_tier
from s3kv.errors import S3KVError
from s3kv.io import wire
from s3kv.io.client import IoClient
from s3kv.io.tier import Tier
from s3kv.messages import JobKind
from s3kv.planning.group_kinds import Coverage
from tests.system.sim.cleaners import KeptFleet
from tests.system.sim.fleet import Fleet, Happening
from tests.system.sim.meaning import Shard
from tests.system.sim.node import Node
from tests.system.sim.process import Machine
from tests.system.sim.rank import Slab, formats_of, handshake_for
from tests.system.sim.tier_engine import TierEngine

_LATE_S = 1.5
"""What a wait may take beyond its deadline: steps, copies, and the ends of what is cancelled."""


class WatchedTier(offload_tier.S3Tier):  # type: ignore[misc]
    """vLLM uses a row again as soon as its transfer has been reported."""

    def __init__(self, machine: Machine, *args: Any) -> None:
        self.rows: dict[int, set[int]] = {}
        """Of the transfers that have not been reported."""
        self._machine = machine
        super().__init__(*args)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self.rows[job_metadata.job_id] = {*job_metadata.chunk_ids.tolist()}
        super().submit_load(job_metadata)

    def submit_store(self, job_metadata: TransferJob) -> None:
        self.rows[job_metadata.job_id] = {*job_metadata.chunk_ids.tolist()}
        super().submit_store(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = [*super().get_finished_jobs()]
        for result in results:
            assert result.job_id in self.rows, f"transfer {result.job_id} is reported twice"
            del self.rows[result.job_id]
        given_up = self._in_use() - {row for rows in self.rows.values() for row in rows}
        assert not given_up, f"rows {given_up} are given back and still in use"
        return results

    def _in_use(self) -> set[int]:
        """The rows that a process may still read or write."""
        return {
            order.offset // self.block_size_bytes
            for process in self._machine.processes
            for order in process.orders.values()
            if order.kind is not JobKind.USE and not process.is_dead()
        }


class TierNode(Node):
    """An engine whose rows hold the KV of all ranks."""

    engine: Any

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rng, self.dictionary = self._rng, self._around.dictionary
        self._max_wait_s = max(0.5, self.setup.max_wait_s)  # without a wait it fetches nothing
        self.longest_wait_s = 3 * self._max_wait_s + _LATE_S
        self._rows = self.rng.choice([4, 12, 40, 200])

    def shards(self) -> list[Shard]:
        return [Shard.of(self.model, 1, 0)]

    @property
    def is_served(self) -> bool:
        """Whether no I/O process is stopped: its rows are in use until it is killed."""
        processes = self.ranks[0].processes
        return not any(process.frozen and not process.is_dead() for process in processes)

    def start(self) -> bool:
        around, (shard,) = self._around, self.shards()
        config = dataclasses.replace(
            around.config, max_wait_ms=int(1_000 * self._max_wait_s), drain_timeout_s=2.0
        )
        machine = self.machine()
        formats = formats_of(shard, self.setup).values()
        row_bytes = max(layout.payload_bytes for layout in formats) + 64
        machine.slab = slab = Slab(self._rows * row_bytes)
        slab.fd = machine
        region = SimpleNamespace(
            create_kv_memoryview=lambda: slab.view.cast("B", (self._rows, row_bytes)),
            cleanup=lambda: None,
        )
        primary = CPUPrimaryTierOffloadingManager(self._rows, region)
        handshake = msgspec.structs.replace(
            handshake_for(shard, self.setup, config), slot_bytes=row_bytes, is_borrowed=True
        )
        tier = self._make_tier(config, machine, handshake, primary.get_kv_memoryview())
        self.engine = TierEngine(self, TieringOffloadingManager(primary, [tier]), slab)
        self.ranks = [machine]  # type: ignore[list-item]
        if self.rng.random() < 0.3:
            try:
                tier._tier.client.wait_ready(wire.START_TIMEOUT_S + 1.0)
            except S3KVError as error:
                around.oracle.accuse(f"engine {self.number} does not start: {error!r}")
                return False
        self.is_up = True
        return True

    def _make_tier(
        self, config: Config, machine: Machine, handshake: wire.Handshake, view: memoryview
    ) -> WatchedTier:
        """The tier, with the simulation's configuration in place of vLLM's, and its clock."""

        def open_tier(slab: Any, handshake: wire.Handshake, wait: Any) -> Tier:
            client = IoClient(handshake, slab, clock=machine.loop.time)
            client.start()
            return Tier(handshake, slab, client, None)

        group = SimpleNamespace(tokens_per_block=self.setup.chunk_tokens)
        offloading = SimpleNamespace(
            cache=SimpleNamespace(blocks_per_chunk=1), groups=[group] * len(self.setup.tables)
        )
        spec = SimpleNamespace(
            config=offloading, kv_events_config=SimpleNamespace(enable_kv_cache_events=True)
        )
        role = SimpleNamespace(is_kv_consumer=True, is_kv_producer=True)
        alone = SimpleNamespace(data_parallel_size=1)
        engine = SimpleNamespace(kv_transfer_config=role, parallel_config=alone)
        with mock.patch.multiple(
            offload_tier,
            join_vllm_log=lambda: None,
            parse_settings=lambda settings: config,
            engine_config=lambda: (engine, None),
            row_eraser=lambda *of: lambda group, row: None,
            check_requests_are_known=lambda *of: None,
            row_tensor=lambda *of: None,
            offload_fingerprint=lambda *of: {},
            introduce=lambda *of, **more: handshake,
            open_tier=open_tier,
            Slab=SimpleNamespace(behind=lambda view: machine.slab),
        ):
            return WatchedTier(machine, spec, view, "s3kv")

    def shut_down(self) -> None:
        self._end_life()
        self.engine.manager.shutdown()
        if not all(process.is_dead() for process in self.ranks[0].processes):
            self._around.oracle.accuse("an I/O process outlives the shutdown")

    @property
    def has_work(self) -> bool:
        engine = self.engine
        queues = (engine.waiting, engine.running, engine.loading, engine.copies, engine.finished)
        return any(queues) or engine.manager.has_pending_work() or bool(engine.tier.rows)

    def step(self) -> None:
        self.engine.now_s = self._around.loop.time()
        self.engine.step(self.rng.choice([3, 8, 100, 100]))

    def reset(self) -> None:
        self.engine.now_s = self._around.loop.time()
        with mock.patch.object(offload_tier.secrets, "token_bytes", self.rng.randbytes):
            self.engine.reset(next(self._around.numbers))

    @property
    def is_at_rest(self) -> bool:
        return not self.has_work and not self.engine.tier._tier.client._jobs

    def check_books(self) -> None:
        planner, primary = self.engine.planner, self.engine.manager.primary_tier
        check(planner)
        assert not planner._requests, f"requests that have ended: {[*planner._requests]}"
        used = primary._num_allocated_chunks - len(primary._free_list)
        pinned = used - primary._num_evictable_cache_chunks
        assert not pinned, f"{pinned} rows are pinned for ever"
        living = [process for process in self.ranks[0].processes if not process.is_dead()]
        assert len(living) <= 1, f"two I/O processes of one engine: {living}"


class TierFleet(Fleet):
    node_type = TierNode
    lengths = (5, 12, 20, 60, 120)

    def draw_sizes(self) -> dict[str, Any]:
        sizes = super().draw_sizes()
        chunk, block = sizes["chunk_tokens"], sizes["block_tokens"]
        groups = range(self.rng.choice([1, 1, 2]))
        return sizes | {"coverages": tuple(Coverage(block, chunk, number=n) for n in groups)}

    def draw_config(self) -> Config:
        self.constants["miss_ttl_s"] = self.rng.choice([0.1, 1.0, 20.0])
        self.constants["recompute_gate"] = self.rng.random() < 0.3
        return super().draw_config()

    def draw_ranks(self) -> tuple[int, int]:
        return 1, 1

    def happenings(self) -> list[Happening]:
        """The engine has no cache of its own to lose."""
        return [pair for pair in super().happenings() if pair[0] is not Fleet.squeeze]

    def _use_again(self) -> None:
        if not self.constants["recompute_gate"]:  # to compute is faster here
            super()._use_again()

    def use(self, node: Node) -> list[str]:
        """As far as the uploads were not shed."""
        return [key for key in super().use(node) if self.bucket.has(key)]

    def _use_above(self) -> None:
        """vLLM orders no second upload of what the bucket has lost."""


class KeptTierFleet(TierFleet, KeptFleet):
    pass


_KEPT_EVERY = 25


def tier_fleet(seed: int, log: Callable[[str], None] | None = None) -> Fleet:
    """Every so many fleets keep their bucket to a budget, and take as long as all the others."""
    return (TierFleet if seed % _KEPT_EVERY else KeptTierFleet)(seed, log)
