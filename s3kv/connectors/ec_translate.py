"""vLLM's multi-modal requests in s3kv's words: what can be served, and its items."""

from __future__ import annotations

import hashlib
from json.encoder import encode_basestring_ascii as _quoted
from typing import TYPE_CHECKING

import torch

from s3kv.config import Config
from s3kv.connectors.requests import Adapters, names_are_hashes
from s3kv.device.tensors import dtype_name
from s3kv.errors import ConfigError, UnsupportedError
from s3kv.io.handover import rendezvous
from s3kv.objects.items import GROUP
from s3kv.planning.items import Wanted
from s3kv.types import ChunkKey

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

_PASSED_THROUGH = "prompt_embeds"
"""Not encoded at all: the client sends what an encoder would make."""


def check_supported(config: Config, vllm_config: VllmConfig) -> None:
    """Raise `UnsupportedError` for what s3kv cannot serve rightly, `ConfigError` for settings."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model.is_encoder_decoder:
        raise UnsupportedError(
            "this model is an encoder-decoder; vLLM does not cache its encoder outputs. Run it "
            "without an EC connector"
        )
    if model.multimodal_config is None:
        raise UnsupportedError("this model has no encoder; run it without an EC connector")
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise UnsupportedError("prefill_context_parallel_size > 1 cannot be served yet")
    if config.eviction == "s3fifo":
        raise ConfigError(
            "eviction is 's3fifo': allowed is 'lru' or 'sieve' for encoder outputs, because it "
            "counts what it holds and they differ in size"
        )
    if config.trust_client_uuid and not _hashes_content(vllm_config):
        raise ConfigError(
            "trust_client_uuid is True, and vLLM numbers what clients do not name when both its "
            "prefix cache and its processor cache are off: every process would mean another image "
            "by the same number. Turn one of them on (--enable-prefix-caching, or "
            "--mm-processor-cache-gb above 0), or set trust_client_uuid to False"
        )


def _hashes_content(vllm_config: VllmConfig) -> bool:
    multimodal, cache = vllm_config.model_config.multimodal_config, vllm_config.cache_config
    return bool(multimodal.mm_processor_cache_gb > 0 or cache.enable_prefix_caching)


def item_dtype(vllm_config: VllmConfig) -> str:
    """The dtype of all items, as safetensors names it. Raises `UnsupportedError`."""
    dtype: torch.dtype = vllm_config.model_config.dtype
    try:
        return dtype_name(dtype)
    except ValueError as error:
        raise UnsupportedError(f"the model's dtype cannot be stored: {error}") from error


def worker_rendezvous(vllm_config: VllmConfig, tp_rank: int) -> str:
    """Where a worker that loads waits for the slab."""
    engine_id = vllm_config.ec_transfer_config.engine_id
    return rendezvous(engine_id, vllm_config.parallel_config.data_parallel_rank, tp_rank)


def is_cacheable(feature: MultiModalFeatureSpec, *, trust_client_uuid: bool) -> bool:
    """Whether the identifier stands for the content, or is trusted to."""
    if feature.modality == _PASSED_THROUGH:
        return False
    return trust_client_uuid or names_are_hashes([feature.identifier])


def wanted(
    request: Request, feature: MultiModalFeatureSpec, adapters: Adapters | None
) -> Wanted | None:
    """The item behind a feature. adapters: where they change what the encoder makes. None when the
    request's cannot be told by its content.
    """
    rows = feature.mm_position.get_num_embeds()
    adapter = getattr(request, "lora_request", None) if adapters is not None else None
    digest = adapters.key(adapter) if adapters is not None and adapter is not None else b""
    if digest is None:
        return None
    # What json.dumps gives for these four with sorted keys, without its dozen calls.
    name, modality = _quoted(feature.identifier), _quoted(feature.modality)
    identity = (
        f'{{"adapter":"{digest.hex()}","identifier":{name},"modality":{modality},"rows":{rows}}}'
    )
    key = ChunkKey(GROUP, hashlib.sha256(identity.encode()).digest())
    return Wanted(feature.identifier, key, rows, feature.modality)


def has_tower_lora(vllm_config: VllmConfig) -> bool:
    lora = vllm_config.lora_config
    return lora is not None and bool(getattr(lora, "enable_tower_connector_lora", False))


def embedding_width(vllm_config: VllmConfig) -> int:
    """Of the model's own embeddings; an encoder's output may be a multiple of it."""
    model = vllm_config.model_config
    measure = getattr(model, "get_inputs_embeds_size", None) or model.get_hidden_size
    return int(measure())


def steps_inflight(vllm_config: VllmConfig) -> int:
    """Engine steps that may be under way at once, and one to spare."""
    pipeline = vllm_config.parallel_config.pipeline_parallel_size
    most = getattr(vllm_config, "max_concurrent_batches", None)
    return 1 + int(most if most is not None else max(2, pipeline + 1))
