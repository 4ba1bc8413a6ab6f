"""Translation between vLLM and s3kv for encoder outputs: which models are served, the items of
requests, and the messages that vLLM carries between scheduler and workers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as _quoted
from typing import TYPE_CHECKING

from vllm.distributed.ec_transfer.ec_connector import base

from s3kv.config import Config
from s3kv.connectors.media import MediaDigests, check_media_names
from s3kv.device.tensors import dtype_name
from s3kv.errors import UnsupportedError
from s3kv.io.slab_handover import rendezvous
from s3kv.messages import ItemPlan, ItemReport
from s3kv.objects.item_format import GROUP
from s3kv.planning.items import Wanted
from s3kv.planning.lookup import salted
from s3kv.types import ChunkKey

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

_PASSED_THROUGH = "prompt_embeds"
"""The modality that is not encoded, because the client sends the embeddings."""


def check_supported(config: Config, vllm_config: VllmConfig) -> None:
    """Raise `UnsupportedError` for a model or engine that s3kv cannot serve correctly, and
    `ConfigError` for settings that it cannot use."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model.is_encoder_decoder:
        raise UnsupportedError(
            "this model is an encoder-decoder; vLLM does not cache its encoder outputs. Run it "
            "without an EC connector"
        )
    if model.multimodal_config is None:
        raise UnsupportedError("this model has no encoder; run it without an EC connector")
    if parallel.prefill_context_parallel_size > 1:
        raise UnsupportedError("prefill_context_parallel_size > 1 cannot be served yet")
    check_media_names(vllm_config, trusted=config.trust_media_names)


def item_dtype(vllm_config: VllmConfig) -> str:
    """The dtype of all items, as safetensors names it. Raises `UnsupportedError`."""
    try:
        return dtype_name(vllm_config.model_config.dtype)
    except ValueError as error:
        raise UnsupportedError(f"the model's dtype cannot be stored: {error}") from error


def worker_rendezvous(vllm_config: VllmConfig, tp_rank: int) -> str:
    """The name of the rendezvous at which a worker that loads waits for the slab."""
    engine_id = vllm_config.ec_transfer_config.engine_id
    return rendezvous(engine_id, vllm_config.parallel_config.data_parallel_index, tp_rank)


def wanted(
    request: Request, index: int, digests: MediaDigests, salt: bytes, *, trust_media_names: bool
) -> Wanted | None:
    """The `salted` item of a feature that no adapter changes; None if its content is unknown. The
    item's identity covers the request's `cache_salt`, so tenants with salts share none."""
    feature = request.mm_features[index]
    if feature.modality == _PASSED_THROUGH:
        return None
    content = None if trust_media_names else digests.of(feature)
    if content is None and not trust_media_names:
        return None
    rows = feature.mm_position.get_num_embeds()
    name = f"name:{feature.identifier}" if content is None else f"content:{content.hex()}"
    # The text that json.dumps gives for these with sorted keys, without its dozen calls.
    item, modality = _quoted(name), _quoted(feature.modality)
    tenant = f'"cache_salt":{_quoted(request.cache_salt)},' if request.cache_salt else ""
    identity = f'{{"adapter":"",{tenant}"item":{item},"modality":{modality},"rows":{rows}}}'
    key = ChunkKey(GROUP, salted(hashlib.sha256(identity.encode()).digest(), salt))
    return Wanted(feature.identifier, key, rows, feature.modality)


@dataclass(frozen=True, slots=True)
class ItemPlanMetadata(base.ECConnectorMetadata):
    """The plan of a step, from the scheduler to every worker."""

    plan: ItemPlan


@dataclass(slots=True)
class ItemWorkerReport(base.ECConnectorWorkerMetadata):
    """The workers' report to the scheduler. vLLM merges the reports of all ranks into one."""

    report: ItemReport

    def aggregate(self, other: ItemWorkerReport) -> ItemWorkerReport:
        self.report.merge(other.report)
        return self
