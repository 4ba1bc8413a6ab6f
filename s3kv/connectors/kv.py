"""S3KVConnector: vLLM's KV connector interface (0.31 to 0.33), dispatched to the two sides.

This module makes no decision: it passes each hook on to the scheduler's or the worker's side.
docs/architecture.md explains the hooks and their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from s3kv.config import Config
from s3kv.connectors.ec_scheduler import reset_items
from s3kv.connectors.kv_scheduler import SchedulerSide
from s3kv.connectors.kv_translate import PlanMetadata, WorkerHandshake, check_supported, geometry
from s3kv.connectors.kv_worker import WorkerSide
from s3kv.connectors.linger import is_in_lockstep
from s3kv.connectors.log import join_vllm_log, warn_of_weak_hashes
from s3kv.connectors.media import check_media_names
from s3kv.connectors.metrics import S3KVPromMetrics, S3KVStats
from s3kv.messages import EMPTY_PLAN, StepPlan

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class S3KVConnector(KVConnectorBase_V1, SupportsHMA):
    """Serves prefixes from a bucket. Its settings are `kv_connector_extra_config`, see
    `s3kv.config`.

    Raises `ConfigError`, `UnsupportedError` or a `StoreError` at start; nothing afterwards.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        join_vllm_log()
        transfer = self._kv_transfer_config
        config = Config.parse(transfer.kv_connector_extra_config, "kv_connector_extra_config")
        check_supported(vllm_config, kv_cache_config)
        check_media_names(vllm_config, trusted=config.trust_media_names)
        sizes = geometry(config, vllm_config, kv_cache_config)
        events = vllm_config.kv_events_config
        if role is KVConnectorRole.SCHEDULER:
            warn_of_weak_hashes(vllm_config.cache_config.prefix_caching_hash_algo)
            scheduling = vllm_config.scheduler_config
            drafts = vllm_config.speculative_config is not None
            self._scheduler = SchedulerSide(
                config,
                sizes,
                may_load=transfer.is_kv_consumer,
                may_save=transfer.is_kv_producer,
                world_size=vllm_config.parallel_config.world_size,
                in_lockstep=is_in_lockstep(vllm_config),
                publishes_events=events is not None and events.enable_kv_cache_events,
                has_priorities=scheduling.policy == "priority",
                miscounts_sessions=drafts and not scheduling.async_scheduling,
            )
        else:
            self._worker = WorkerSide(config, vllm_config, kv_cache_config, sizes)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        return True

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        self._worker.suspend()

    release_kv_caches = unregister_kv_caches  # the name after 0.33

    def restore_kv_caches(self) -> None:
        # The addresses are the same as before: vLLM maps new memory there.
        self._worker.resume()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker.handshake()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        # vLLM calls this first in every step, before anything is bound or written.
        assert isinstance(kv_connector_metadata, PlanMetadata), kv_connector_metadata
        self._worker.begin(kv_connector_metadata.plan, kv_connector_metadata.step)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._worker.load(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads have ended before the request is scheduled."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Do nothing: whole chunks are saved, after the forward pass."""

    def wait_for_save(self) -> None:
        self._worker.save(self._plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        loaded, failed = self._worker.loaded(self._plan)
        return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.report()

    @property
    def _plan(self) -> StepPlan:
        if not self.has_connector_metadata():
            return EMPTY_PLAN
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PlanMetadata), metadata
        return metadata.plan

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[Any, KVConnectorHandshakeMetadata]
    ) -> None:
        handshakes = [one for one in metadata.values() if isinstance(one, WorkerHandshake)]
        self._scheduler.set_workers(handshakes)

    set_xfer_handshake_metadata_pp_aware = set_xfer_handshake_metadata

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._scheduler.pool = gpu_block_pool

    def on_new_request(self, request: Request) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.lookup(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.admitted(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        # vLLM has this hook and the class since 0.32.
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        bucket = self._scheduler.bucket_tokens(request, num_external_tokens)
        sources = {
            CacheHitSource.HOST: num_external_tokens - bucket,
            # vLLM's name for a remote store.
            CacheHitSource.EXTERNAL_UNSPECIFIED: bucket,
        }
        return {source: tokens for source, tokens in sources.items() if tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        plan = self._scheduler.plan(scheduler_output)
        return PlanMetadata(plan, self._scheduler.adapters.next_step())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.on_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int] | tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.on_finished(request)
        return False, None

    request_finished_all_groups = request_finished

    @property
    def requires_kv_delivery(self) -> bool:
        """False: no request depends on what a cache delivers."""
        return False

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_copies_inflight()

    def reset_cache(self) -> bool | None:
        reset_items()
        return self._scheduler.reset()

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._scheduler.take_events()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self.role is KVConnectorRole.SCHEDULER:
            return self._scheduler.stats()
        return self._worker.stats()

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER:
            self._worker.shutdown()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return S3KVStats(data=dict(data or {}))

    build_prom_metrics = S3KVPromMetrics
