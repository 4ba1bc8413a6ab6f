"""The worker's side of the KV connector: the slab, I/O process and device copies of one rank.

It runs in each worker process, on the thread that runs the model.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from s3kv.config import Config
from s3kv.connectors.adapter_loads import AdapterLoads, AdapterStep
from s3kv.connectors.guard import Guarded, guarded, wait_for_bucket
from s3kv.connectors.identity import fingerprint
from s3kv.connectors.kv_groups import states_of
from s3kv.connectors.kv_shards import equal_ranks, kinds_of_layers, shard_names, shared_pages
from s3kv.connectors.kv_translate import (
    KVGeometry,
    WorkerHandshake,
    WorkerReport,
    writes_around_fences,
)
from s3kv.connectors.log import leave_to_first_rank, warn_of_uploads_left
from s3kv.connectors.metrics import S3KVStats
from s3kv.connectors.telemetry import Meter
from s3kv.connectors.worker_memory import open_worker_tier
from s3kv.device.copies import BlockCopies
from s3kv.device.layout import PageLayout
from s3kv.errors import IoProcessError, StoreError
from s3kv.host.placement import beside_the_model
from s3kv.io.tier import Slots, Tier, introduce
from s3kv.io.wire import Handshake
from s3kv.messages import StepPlan, StepReport
from s3kv.metrics import KV_METRICS
from s3kv.objects.rearranging import Pages
from s3kv.worker.rank import RankWorker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("s3kv")

ANNOUNCES_SLEEP = bool({"unregister_kv_caches", "release_kv_caches"} & {*dir(KVConnectorBase_V1)})
"""Whether vLLM calls `suspend` before it unmaps the KV cache's memory, as 0.33 and later do."""
_LAUNCH_S = 5.0
"""Longest wait for copies to be launched. Launching the copies of one step takes far less."""
_SUSPEND_S = 60.0
"""Longest wait for copies before the engine sleeps. Copies take far less, even from memory that is
not pinned. A copy that runs on after the wait fails the engine."""


class WorkerSide(Guarded):
    """The worker's side of one rank, made before the KV caches. It serves from `register` on."""

    def __init__(
        self,
        config: Config,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        sizes: KVGeometry,
    ) -> None:
        self._config, self._sizes = config, sizes
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._meter = Meter(KV_METRICS)
        self._rank: RankWorker | None = None
        self._tier: Tier | None = None
        self._handshake: WorkerHandshake | None = None
        self._has_passed_handshake = False
        """Whether vLLM has requested the handshake. Under `MultiConnector` it requests only the
        first connector's."""
        self._stranded: set[str] = set()
        self._unstarted: set[str] = set()
        """Requests whose load is in the current plan and has not been started."""
        self._error: BaseException | None = None
        """The error that was being handled when the step began, by a caller of the engine."""
        lora = vllm_config.lora_config
        # Made here, because vLLM loads no adapter before the KV caches exist.
        self._adapters = AdapterLoads(lora, config.weights_digest) if lora is not None else None
        self._fences_at_once, self._loads_after_writes = writes_around_fences(
            vllm_config, kv_cache_config, sizes
        )
        # Only memory of this allocator is unmapped for a sleep. vLLM waits for the device first,
        # but not for a copy that has not been launched yet.
        self._launches_at_once = (
            not ANNOUNCES_SLEEP
            and vllm_config.model_config.enable_cumem_allocator
            and vllm_config.device_config.device_type != "cpu"
        )

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Make the slab for these caches and start the I/O process, which tries the bucket while
        the engine warms up. Raises `ConfigError` or `UnsupportedError`."""
        layouts = self._layouts(kv_caches)
        coverages = self._sizes.coverages
        shards, rank = self._shards()
        leave_to_first_rank(rank)
        handshake = self._introduce(layouts, shards, rank)
        slots = Slots.of(handshake, " for this model (a smaller chunk_tokens makes it smaller)")
        device = next(iter(layouts.values())).device
        self._tier = tier = open_worker_tier(
            self._vllm_config, slots.nbytes, handshake, device, wait=None
        )
        copies = BlockCopies.open(
            layouts, tier.slab.view, slots.slot_bytes, self._parts(slots, layouts)
        )
        self._rank = RankWorker(
            copies=copies,
            client=tier.client,
            block_bytes={group: layout.block_bytes for group, layout in layouts.items()},
            uploads=shards.index(shards[rank]) == rank,
            clock=time.monotonic,
            members={c.number: c.members for c in coverages},
        )
        pinned = copies.copier.pinned
        if not pinned:  # pinning maps the pages; without it, the first copies would map them
            tier.slab.prefault(processors=beside_the_model())
        object_bytes = tuple(slots.formats[c.number].object_bytes for c in coverages)
        self._handshake = WorkerHandshake(
            handshake.namespace_digest,
            slots.count,
            slots.slot_bytes,
            object_bytes if len(coverages) > 1 else (),
            None if device.type == "cpu" else pinned,
        )

    def _layouts(self, kv_caches: dict[str, torch.Tensor]) -> dict[int, PageLayout]:
        """The layout of the objects' parts, by vLLM's number of the KV-cache group."""
        config = self._kv_cache_config
        return {
            member: PageLayout.of(
                kv_caches,
                config.num_blocks,
                config.kv_cache_groups[member].layer_names,
                len(coverage.held),
            )
            for coverage in self._sizes.coverages
            for member in coverage.members
        }

    def _parts(self, slots: Slots, layouts: dict[int, PageLayout]) -> dict[int, int]:
        """Offset of the part of each of vLLM's groups in its objects."""
        begins: dict[int, int] = {}
        for coverage in self._sizes.coverages:
            at = slots.formats[coverage.number].header_bytes
            for member in coverage.members:
                begins[member] = at
                at += layouts[member].payload_bytes
        return begins

    def handshake(self) -> WorkerHandshake:
        """Wait until the bucket has been tried. Raises a `StoreError` if the bucket cannot be used
        and `on_unavailable` is "fail".

        Later calls do not wait: vLLM 0.33 calls this again when the engine wakes up, and by then an
        unusable bucket is no reason to stop.
        """
        assert self._tier is not None, "register comes first"
        assert self._handshake is not None
        if not self._has_passed_handshake:
            self._has_passed_handshake = True
            known = wait_for_bucket(self._tier.client, self._config)
            self._handshake = dataclasses.replace(self._handshake, known=known)
        return self._handshake

    def shutdown(self) -> None:
        """Finish uploads within `drain_timeout_s`, then release everything. Idempotent."""
        rank, self._rank = self._rank, None
        if rank is not None:
            timeout_s = self._config.drain_timeout_s
            warn_of_uploads_left(rank.shutdown(timeout_s), "chunk", timeout_s)
        if self._tier is not None:
            self._tier.close()

    def _identity(
        self, layouts: dict[int, PageLayout], pages: Pages | None, shard: str
    ) -> dict[str, Any]:
        coverages = self._sizes.coverages
        layers = {n: kinds_of_layers(layout, pages, shard) for n, layout in layouts.items()}
        page: dict[str, Any] = {
            "chunk_blocks": self._sizes.chunk_tokens // self._sizes.block_tokens,
            "layers": layers[coverages[0].members[0]],
        }
        if not self._sizes.is_plain:
            page = {
                "groups": [
                    {
                        "kind": coverage.kind.name,
                        "reach_tokens": coverage.kind.reach_tokens,
                        "block_tokens": coverage.block_tokens,
                        "members": {str(member): layers[member] for member in coverage.members},
                    }
                    | states_of(self._vllm_config, self._kv_cache_config, coverage)
                    for coverage in coverages
                ]
            }
        return fingerprint(
            self._config, self._vllm_config, self._kv_cache_config, self._sizes, page, pages
        )

    def _introduce(self, layouts: dict[int, PageLayout], shards: list[str], rank: int) -> Handshake:
        """The handshake of this rank, whose shard is one of all the ranks'."""
        coverages, pages = self._sizes.coverages, None
        if self._config.share_ranks:
            pages = shared_pages(self._vllm_config, self._kv_cache_config, layouts, shards[rank])
        return introduce(
            self._config,
            self._identity(layouts, pages, shards[rank]),
            shards[rank],
            {c.number: tuple(layouts[m].part(f"g{m}") for m in c.members) for c in coverages},
            writes_manifest=rank == 0,  # all ranks have the same manifest
            shapes=tuple(dict.fromkeys(shards)),
            first_blocks={c.number: c.held.start for c in coverages},
            pages=pages,
        )

    def _shards(self) -> tuple[list[str], int]:
        """The shards of all ranks, and which of them is this rank's."""
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        tp, pp = get_tp_group(), get_pp_group()
        equal = equal_ranks(self._vllm_config, self._kv_cache_config, tp.world_size)
        shards = shard_names(self._vllm_config.model_config, tp.world_size, pp.world_size, equal)
        return shards, pp.rank_in_group * tp.world_size + tp.rank_in_group

    def on_broken(self) -> None:
        """End the loads in flight as failed, because the engine waits for them."""
        if self._rank is not None:
            self._rank.counters["internal_errors"] += 1
            self._stranded |= self._rank.give_up_loads() | self._unstarted
            self._unstarted = set()

    def begin(self, plan: StepPlan, step: AdapterStep | None = None) -> None:
        """Begin a step. Loads that the previous step should have started but did not, because it or
        s3kv failed, end as failed, because the engine waits for them."""
        self._error = sys.exc_info()[1]
        self._stranded |= self._unstarted
        self._unstarted = {order.request_id for order in plan.loads} | set(plan.abandons)
        self._begin(plan, step)

    @guarded(default=lambda: None)
    def _begin(self, plan: StepPlan, step: AdapterStep | None) -> None:
        if self._adapters is not None and step is not None:
            self._adapters.begin(step)
        if self._rank is not None:
            self._rank.begin(plan)

    @property
    def _fails(self) -> bool:
        """Whether the step has failed, so that its KV is incomplete. The first-generation runner
        still calls the hooks then, but discards their answers."""
        return sys.exc_info()[1] is not self._error

    @guarded(default=lambda: None)
    def load(self, plan: StepPlan) -> None:
        """Start the plan's loads."""
        if plan.loads:
            assert self._rank is not None
            self._rank.load(plan.loads, from_now=self._loads_after_writes)
            self._unstarted = set(plan.abandons)
            self._let_launch(self._rank)

    @guarded(default=lambda: None)
    def save(self, plan: StepPlan) -> None:
        """Start the plan's saves."""
        if self._rank is None or not plan.saves or self._fails:
            return
        if self._adapters is not None and not self._adapters.may_save:
            self._rank.refuse(plan.saves)
            return
        self._rank.save(plan.saves, read_first=self._fences_at_once)
        self._let_launch(self._rank)

    def _let_launch(self, rank: RankWorker) -> None:
        if self._launches_at_once and not rank.wait_launched(_LAUNCH_S):
            self._launches_at_once = False
            logger.error(
                "s3kv: copies were not launched within %g s. s3kv no longer waits for "
                "launches. This engine may fail if it is put to sleep while a copy waits",
                _LAUNCH_S,
            )

    @guarded(default=lambda: None)
    def suspend(self) -> None:
        """Wait for all copies, because the engine is about to sleep and to unmap the KV cache. No
        copy starts until `resume`. Both are idempotent."""
        if self._rank is not None and not self._rank.suspend(_SUSPEND_S):
            logger.error(
                "s3kv: copies did not end within %g s, and vLLM unmaps the KV cache's memory now. "
                "This engine may fail",
                _SUSPEND_S,
            )

    @guarded(default=lambda: None)
    def resume(self) -> None:
        if self._rank is not None:
            self._rank.resume()

    def loaded(self, plan: StepPlan) -> tuple[set[str], set[str]]:
        """Requests whose load has ended since the last call, and those whose load failed."""
        if self._fails:
            return set(), set()
        loaded, failed = self._poll(plan.linger_s)
        # Taken after the poll, because a poll that fails strands the loads in flight.
        if self._stranded:
            stranded, self._stranded = self._stranded, set()
            loaded, failed = loaded | stranded, failed | stranded
        return loaded, failed

    @guarded(default=lambda: (set(), set()))
    def _poll(self, linger_s: float) -> tuple[set[str], set[str]]:
        rank = self._rank
        assert rank is not None
        if rank.is_quiet:
            return set(), set()
        rank.poll(linger_s)
        return rank.take_loaded()

    @guarded(default=lambda: WorkerReport(StepReport(), broken=True))
    def report(self) -> WorkerReport | None:
        if self._fails:
            return None
        report = self._rank.take_report() if self._rank is not None else None
        adapters = self._adapters.report() if self._adapters is not None else None
        handshakes: tuple[WorkerHandshake, ...] = ()
        if self._handshake is not None and not self._has_passed_handshake:
            try:
                # This hardly waits, because the bucket was tried while the engine warmed up.
                handshakes = (self.handshake(),)
            except (IoProcessError, StoreError):
                logger.error("s3kv: this engine has already started and runs without its cache")
        if report is None and adapters is None and not handshakes:
            return None
        return WorkerReport(report or StepReport(), handshakes, adapters)

    def stats(self) -> S3KVStats | None:
        if self._rank is None or self._tier is None or self._fails:
            return None
        values = self._meter.grown(self._rank.counters, self._tier.client.counters)
        values |= self._rank.take_seconds()
        return S3KVStats(data=values) if values else None
