"""vLLM's objects in s3kv's words: what can be served, its geometry, its steps."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
)

from s3kv.config import Config
from s3kv.errors import ConfigError, UnsupportedError
from s3kv.planning.kv import ScheduledRequest
from s3kv.types import default_chunk_tokens

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

GROUP = 0
"""The KV-cache group that is served: models with one group only, so far."""

_FULL = {"FullAttentionSpec", "MLAAttentionSpec"}
_WINDOWED = {"SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec"}
"""What vLLM makes full attention of, where there is some, when its hybrid manager is off."""


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Sizes in tokens, equal on every rank."""

    block_tokens: int
    hash_tokens: int
    chunk_tokens: int

    @property
    def chunk_blocks(self) -> int:
        return self.chunk_tokens // self.block_tokens


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise `UnsupportedError` for what s3kv cannot serve rightly.

    Layers that look at a window of tokens are served where vLLM keeps the KV of all their tokens
    as for full attention: in one group, in pages that it frees with the request alone.
    """
    _check_layers([group.kv_cache_spec for group in kv_cache_config.kv_cache_groups])
    parallel = vllm_config.parallel_config
    for setting in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, setting, 1) > 1:
            raise UnsupportedError(f"{setting} > 1 cannot be served yet")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise UnsupportedError(
            "calculate_kv_scales: every engine would scale its quantised KV differently, by the "
            "first prompts it saw. Use a checkpoint with scales, or run it without s3kv"
        )
    _check_hashes_are_stable(vllm_config)


def _check_layers(groups: Sequence[KVCacheSpec]) -> None:
    layers = [
        layer
        for spec in groups
        for layer in (
            spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
        )
    ]
    kinds = {type(layer).__name__ for layer in layers}
    if len(groups) != 1:
        remedy = "Run it without s3kv"
        if kinds <= _FULL | _WINDOWED and kinds & _FULL and kinds & _WINDOWED:
            remedy = (
                "Start it with --disable-hybrid-kv-cache-manager: vLLM then keeps the KV of every "
                "token in every layer, which takes more memory per token and gives the same "
                "answers. Or run it without s3kv"
            )
        raise UnsupportedError(
            f"this model has {len(groups)} KV-cache groups ({', '.join(sorted(kinds))}); s3kv "
            f"serves models whose layers are all in one. {remedy}"
        )
    for layer in layers:
        # Subclasses are not taken on trust: some keep state that is not in the pages.
        name = type(layer).__name__
        if name not in _FULL or not isinstance(layer, FullAttentionSpec):
            raise UnsupportedError(
                f"this model has layers of kind {name}; s3kv serves full attention (with MLA), and "
                "beside it layers with a window. Run it without s3kv"
            )


def writes_before_fences(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, sizes: KVGeometry
) -> bool:
    """Whether a step may write to blocks before it calls `handle_preemptions`, where fences are.

    The second-generation model runner does: it zeroes new blocks, where vLLM wants that (layers of
    several precisions), and copies the block that a partial hit ends in (hashes finer than blocks)
    while it takes in the step's requests.
    """
    if not vllm_config.use_v2_model_runner:
        return False
    return kv_cache_config.needs_kv_cache_zeroing or sizes.hash_tokens < sizes.block_tokens


def _check_hashes_are_stable(vllm_config: VllmConfig) -> None:
    """vLLM's own function says what seeds the hashes: twice the same unless it is random."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if hasattr(kv_cache_utils, "resolve_none_hash_seed"):
        function = get_hash_fn_by_name(algorithm)
        seeds = {kv_cache_utils.resolve_none_hash_seed(function) for _ in range(2)}
        random = len(seeds) > 1
    else:
        random = algorithm.startswith("xxhash") and os.environ.get("PYTHONHASHSEED") is None
    if random:
        raise ConfigError(
            f"prefix_caching_hash_algo is {algorithm!r}, which vLLM seeds at random in every "
            "process, so that nothing in the bucket would ever be found again. Set PYTHONHASHSEED "
            "to the same number on all instances, or use sha256_cbor"
        )


def geometry(config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> KVGeometry:
    """Raises `ConfigError` when chunk_tokens does not fit the block size."""
    block = kv_cache_config.kv_cache_groups[GROUP].kv_cache_spec.block_size
    hashed = getattr(kv_cache_config, "hash_block_size", None)
    if hashed is None:
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

        hashed = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1]
    chunk = config.chunk_tokens or default_chunk_tokens(block)
    if chunk % block or chunk % hashed:
        below = chunk // block * block
        near = f"{below} or {below + block}" if below else f"{block}"
        raise ConfigError(
            f"chunk_tokens is {chunk}: allowed is a multiple of the KV block size, which is "
            f"{block} tokens here (for example {near})"
        )
    return KVGeometry(block, hashed, chunk)


def shard_name(*, tp_rank: int, tp_size: int, pp_rank: int, pp_size: int) -> str:
    """This rank's part of every chunk, as it stands in object keys."""
    return f"t{tp_rank}of{tp_size}-p{pp_rank}of{pp_size}"


def scheduled_requests(output: SchedulerOutput) -> Iterator[ScheduledRequest]:
    """The requests of one engine step. A request that was preempted comes back as a new one on
    the second-generation model runner, as a resumed one on the first: both replace its blocks.
    """
    tokens = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield ScheduledRequest(
            new.req_id,
            new.block_ids[GROUP],
            True,
            new.num_computed_tokens,
            tokens[new.req_id],
        )
    cached = output.scheduled_cached_reqs
    for request_id, blocks, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        yield ScheduledRequest(
            request_id,
            blocks[GROUP] if blocks else (),
            request_id in cached.resumed_req_ids,
            computed,
            tokens[request_id],
        )
