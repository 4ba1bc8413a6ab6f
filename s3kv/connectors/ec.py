"""S3ECConnector: vLLM's EC connector interface (0.31 to 0.33), dispatched to the two sides.

This module makes no decision. docs/encoder-outputs.md explains the hooks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm.distributed.ec_transfer.ec_connector.utils import (
    PlaceholderMetadataResolver,
    collect_ec_item_metadata,
)

from s3kv.config import Config
from s3kv.connectors.ec_scheduler import ECSchedulerSide
from s3kv.connectors.ec_translate import ItemPlanMetadata, ItemWorkerReport, check_supported
from s3kv.connectors.ec_worker import ECWorkerSide
from s3kv.connectors.log import join_vllm_log
from s3kv.connectors.metrics import S3ECPromMetrics, S3ECStats

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ECConnectorOutput
    from vllm.v1.request import Request


class S3ECConnector(ECConnectorBase):
    """Serves encoder outputs from a bucket. Its settings are `ec_connector_extra_config`, see
    `s3kv.config`. Raises `ConfigError`, `UnsupportedError` or a `StoreError` at start."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        join_vllm_log()
        transfer = vllm_config.ec_transfer_config
        config = Config.parse(transfer.ec_connector_extra_config, "ec_connector_extra_config")
        check_supported(config, vllm_config)
        self._resolver: Any = None
        directions = {"may_load": self.is_consumer, "may_save": self.is_producer}
        if role is ECConnectorRole.SCHEDULER:
            self._scheduler = ECSchedulerSide(config, vllm_config, **directions)
            if not self.is_consumer:
                self._resolver = PlaceholderMetadataResolver(vllm_config.model_config)
        else:
            self._worker = ECWorkerSide(config, vllm_config, **directions)

    def bind_connector_metadata(self, connector_metadata: ECConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, ItemPlanMetadata), connector_metadata
        self._worker.begin(connector_metadata.plan)

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        self._worker.load(encoder_cache)

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        self._worker.save(encoder_cache, mm_hash)

    def build_connector_worker_meta(self) -> ItemWorkerReport | None:
        return self._worker.report()

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        return self._scheduler.ensure(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        return self._scheduler.has(identifier)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        self._scheduler.allocated(request, index)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        return ItemPlanMetadata(self._scheduler.plan(scheduler_output))

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        self._scheduler.on_output(connector_output)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """End the request. An instance that only encodes returns the metadata with which a consumer
        can skip the image transform."""
        self._scheduler.on_finished(request)
        if self._resolver is None or not request.mm_features:
            return False, None
        return False, collect_ec_item_metadata(request.mm_features, self._resolver) or None

    def get_ec_connector_stats(self) -> S3ECStats | None:
        """The statistics. Only the scheduler's side has them: it receives the workers' reports."""
        return self._scheduler.stats() if self.role is ECConnectorRole.SCHEDULER else None

    def shutdown(self) -> None:
        if self.role is ECConnectorRole.SCHEDULER:
            self._scheduler.shutdown()
        else:
            self._worker.shutdown()

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> S3ECStats | None:
        return S3ECStats(data=dict(data or {}))

    build_prom_metrics = S3ECPromMetrics
