"""Start of a tier: its settings, the engine's configuration, the engines it refuses, and its rows.

A tier sees only keys and rows. So it refuses an engine whose block hashes leave out an input that
changes the KV (adapters (LoRA), and media that clients may name), and one that stores partial rows,
or KV of other keys. The connector of s3kv, which sees requests and blocks, serves most of these.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from s3kv.config import Config
from s3kv.connectors.kv_groups import check_prefixes_suffice, check_states, layers_of
from s3kv.connectors.kv_translate import check_hashes_are_stable, check_steps_end_whole
from s3kv.connectors.log import warn_of_weak_hashes
from s3kv.connectors.media import check_media_names
from s3kv.connectors.request_hashes import cover_inputs
from s3kv.errors import ConfigError, UnsupportedError
from s3kv.types import TensorSpec, item_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import OffloadingSpec

REPLACED = {
    "host_bytes": "set vLLM's cpu_bytes_to_use",
    "chunk_tokens": "set vLLM's block_size",
    "share_ranks": "set vLLM's canonical_layout",
}
"""Settings of the connector that settings of vLLM replace here."""
_OTHER = 'use the connector of s3kv instead ("kv_connector": "S3KVConnector")'
_NUMBERS = {"bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32", "float": "F32"}
"""Number formats of KV caches with more than one byte, by vLLM's names."""


def parse_settings(settings: dict[str, Any]) -> Config:
    """The settings of a tier. Raises `ConfigError`, which names what replaces a setting."""
    for name, advice in REPLACED.items():
        if name in settings:
            raise ConfigError(f"{name} in secondary_tiers has no meaning for a tier: {advice}")
    return Config.parse(settings, "secondary_tiers")


def check_requests_are_known(
    config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None
) -> None:
    """Raise an error if keys may leave out inputs that change the KV of a request, or rows, which
    are memory of one host, the KV of ranks."""
    check_prefixes_suffice(vllm_config, kv_cache_config)
    if any(isinstance(layer, MambaSpec) for layer in layers_of(kv_cache_config)):
        check_states(vllm_config)
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    executor = parallel.distributed_executor_backend
    if parallel.nnodes_within_dp > 1 or executor not in ("mp", "uni", None):
        raise UnsupportedError(
            f"ranks may be on other hosts (nnodes is {parallel.nnodes}, the executor {executor}), "
            f"and vLLM's primary tier has the KV of one host's ranks: {_OTHER}"
        )
    check_steps_end_whole(vllm_config)
    check_hashes_are_stable(vllm_config)
    warn_of_weak_hashes(vllm_config.cache_config.prefix_caching_hash_algo)
    if vllm_config.lora_config is not None:
        raise UnsupportedError(f"vLLM's keys name adapters (LoRA), not their content: {_OTHER}")
    media = model.multimodal_config
    sees = media is not None and not getattr(media, "language_model_only", False)
    if sees and not config.trust_media_names:
        raise ConfigError(
            "trust_media_names is False, and vLLM's keys have the names of images, which a client "
            "may give: set it to True if no client sends names of its own "
            f"(multi_modal_uuids), or {_OTHER}"
        )
    check_media_names(vllm_config, trusted=sees and config.trust_media_names)
    if vllm_config.scheduler_config.policy == "priority":
        raise UnsupportedError(
            f"with priorities vLLM may cache blocks that were never computed (vllm#57580): {_OTHER}"
        )
    if getattr(model, "enable_prompt_embeds", False) or not cover_inputs():
        raise UnsupportedError(f"vLLM's keys may leave out parts of prompt embeddings: {_OTHER}")


def check_rows_are_whole(blocks: int, kv_cache_config: KVCacheConfig | None) -> None:
    """Raise `UnsupportedError` if vLLM may store a row without some of its `blocks`, but load all
    of it: blocks before a window are missing (0.31 to 0.33, `_build_store_jobs`)."""
    layers = layers_of(kv_cache_config)
    if blocks > 1 and not all(isinstance(it, (FullAttentionSpec, MambaSpec)) for it in layers):
        raise UnsupportedError(
            f"this model's attention has windows, and a chunk has {blocks} blocks: vLLM stores it "
            "without the blocks that a window has left behind, and loads all of it. Remove "
            f"block_size and blocks_per_chunk, or {_OTHER}"
        )


def row_tensor(vllm_config: VllmConfig, row_bytes: int) -> TensorSpec:
    """A row of vLLM's memory as a tensor of the KV cache's numbers, or of bytes if the row is not a
    whole number of those. Compression needs the size of a number."""
    cached = vllm_config.cache_config.cache_dtype
    plain = str(vllm_config.model_config.dtype).removeprefix("torch.")
    dtype = _NUMBERS.get(plain if cached == "auto" else cached, "U8")
    if row_bytes % item_bytes(dtype):
        dtype = "U8"
    return TensorSpec("kv", dtype, (row_bytes // item_bytes(dtype),))


def row_eraser(
    spec: OffloadingSpec, kv_cache_config: KVCacheConfig | None, rows: memoryview
) -> Callable[[int, int], None]:
    """A function that zeroes the bytes of a row that vLLM's copy of a group does not write, which
    may be KV of any earlier request.
    A row has pages by worker, layer of the largest group, and block. A copy writes the layers of
    its own group, without the padding of pages; of states the last block alone. Rows of other
    forms, and of ranks with different layers, are left as they are (docs/tier.md)."""
    config, blocks = spec.config, spec.config.cache.blocks_per_chunk
    held = kv_cache_config.kv_cache_groups if kv_cache_config else []
    tensors = kv_cache_config.kv_cache_tensors if kv_cache_config else []
    groups = {it.group_id: held[it.group_id] for it in config.groups if held}
    pages = {group.kv_cache_spec.page_size_bytes for group in groups.values()}
    is_other = config.canonical_layout or config.parallel.pp_size > 1 or len(pages) != 1
    if is_other or len(groups) < 2 or pages != {tensor.block_stride for tensor in tensors}:
        return lambda group, row: None
    (page_bytes,) = pages
    worker_bytes = blocks * config.worker_kv_bytes_per_block

    def erase(group: int, row: int) -> None:
        layer, layers = groups[group].kv_cache_spec, len(groups[group].layer_names)
        whole = torch.frombuffer(rows, dtype=torch.uint8).view(len(rows), -1)[row]
        workers = whole[: len(whole) // worker_bytes * worker_bytes]
        parts = workers.view(-1, worker_bytes // blocks // page_bytes, blocks, page_bytes)
        parts[:, layers:] = 0
        parts[:, :, : (blocks - 1) * isinstance(layer, MambaSpec)] = 0
        parts[..., replace(layer, page_size_padded=None).page_size_bytes :] = 0

    return erase


def engine_config() -> tuple[VllmConfig, KVCacheConfig | None]:
    """The engine's configuration, and its KV cache's. vLLM gives a tier no more than
    `OffloadingConfig`, which leaves out the weights' identity among others, so they are taken from
    the scheduler's constructor that makes the tier. Raises `UnsupportedError` if that is not among
    the callers, or a `MultiConnector` is."""
    from vllm.config import VllmConfig, get_current_vllm_config_or_none

    callers = [frame.f_locals for frame, _ in walk_stack(sys._getframe(1))]
    if any(isinstance(names.get("self"), MultiConnector) for names in callers):
        raise UnsupportedError(
            "in a MultiConnector vLLM up to 0.32 may save KV that another connector loads, under "
            f"the key of an earlier request (vllm#46951): {_OTHER}"
        )
    for names in callers:
        if isinstance(found := names.get("vllm_config"), VllmConfig):
            return found, names.get("kv_cache_config")
    if (current := get_current_vllm_config_or_none()) is not None:
        return current, None
    raise UnsupportedError("this vLLM makes tiers where its configuration is out of reach")
