"""KV-cache groups of an engine: which of them s3kv serves, and which need the same positions.

vLLM divides a model's layers into groups. Every request has a table of blocks per group, and all
groups take their blocks from one pool. Groups that need the same positions to resume share their
objects (`Coverage`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import lcm, prod
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from s3kv.errors import ConfigError, UnsupportedError
from s3kv.planning.group_kinds import (
    KINDS,
    STATE_SPACING,
    Coverage,
    FullAttention,
    GroupKind,
    LocalAttention,
    SlidingWindow,
    States,
)
from s3kv.types import default_chunk_tokens

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NULL_BLOCK = 0
"""vLLM's number for "no block". No layer's KV is ever in it."""

_KIND: dict[type[KVCacheSpec], Callable[[Any], GroupKind]] = {
    FullAttentionSpec: lambda _: FullAttention(),
    MLAAttentionSpec: lambda _: FullAttention(),
    SlidingWindowSpec: lambda layer: SlidingWindow(layer.sliding_window),
    ChunkedLocalAttentionSpec: lambda layer: LocalAttention(layer.attention_chunk_size),
    MambaSpec: lambda _: States(),
}
"""The kind of each class of layers that is served. A subclass is refused, because it may keep state
that is not in the pages. MLA with a window is not among them: in DeepSeek-V4 such layers have other
pages."""
_STATES = {"SHORT_CONV", "GDN_ATTN", "MAMBA2"}
"""Kinds of states that s3kv has been run with on an engine."""


def check_groups_are_served(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise `UnsupportedError` for groups that s3kv cannot serve correctly."""
    groups = kv_cache_config.kv_cache_groups
    layers = layers_of(kv_cache_config)
    if not layers:
        raise UnsupportedError("this model has no KV cache. Run it without s3kv")
    if refused := sorted({_name(layer) for layer in layers if not _is_served(layer)}):
        raise UnsupportedError(
            f"this model has layers of kind {', '.join(refused)}; s3kv serves full attention (with "
            "MLA), sliding windows, chunked local attention, and states of Mamba2, Gated DeltaNet "
            "and short convolutions. Run it without s3kv"
        )
    mixed = [group for group in groups if len(set(map(_kind, _layers(group.kv_cache_spec)))) > 1]
    if mixed:
        raise UnsupportedError(
            f"layers that need different positions are in one KV-cache group ({mixed[0]}); s3kv "
            "needs each kind in groups of its own. Run it without s3kv"
        )
    if len(groups) > 1 or not _kind(layers[0]).is_cumulative:
        _check_tables_with_gaps(vllm_config, kv_cache_config)
    if any(_kind(layer).is_sparse for layer in layers):
        check_states(vllm_config)


def check_prefixes_suffice(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None) -> None:
    """Raise `UnsupportedError` if a request cannot resume after the KV of a prefix. vLLM turns its
    own cache off for such a model, but still queries connectors. None: unknown layers."""
    if any(getattr(layer, "non_causal", False) for layer in layers_of(kv_cache_config)):
        raise UnsupportedError(
            "the model's tokens attend to later ones, so no prefix has own KV. Run it without s3kv"
        )
    pooler = vllm_config.model_config.pooler_config
    if pooler is not None and pooler.seq_pooling_type in ("MEAN", "CLS"):
        raise UnsupportedError(
            f"this model pools from the first token of a prompt on ({pooler.seq_pooling_type}), "
            "and vLLM does not compute tokens whose KV is loaded. Run it without s3kv"
        )
    if vllm_config.aux_output_config.enable_return_routed_experts:
        raise UnsupportedError(
            "with --enable-return-routed-experts vLLM needs the experts of every token: up to 0.32 "
            "it fails if it has not computed one, and 0.33 takes no KV from the bucket. Run it "
            "without s3kv"
        )


def check_states(vllm_config: VllmConfig) -> None:
    """Raise `UnsupportedError` if a block of a state group may differ from the state after its last
    token, once a step has ended there."""
    cache = vllm_config.cache_config
    if cache.mamba_cache_mode != "align":
        raise UnsupportedError(
            f"this model keeps states, and mamba_cache_mode is {cache.mamba_cache_mode!r}: s3kv "
            'serves "align", which vLLM takes by itself with --enable-prefix-caching'
        )
    if vllm_config.speculative_config is not None:
        raise UnsupportedError(
            "this model keeps states, and with speculative decoding they may contain tokens that "
            "are rejected later. Run it without speculative decoding, or without s3kv"
        )
    if cache.use_replayssm:
        raise UnsupportedError(
            "with --use-replayssm the last tokens are not in the states yet. Run this model "
            "without it, or without s3kv"
        )


def _check_tables_with_gaps(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise `UnsupportedError` if s3kv cannot follow tables that lose blocks before the end."""
    speculative = vllm_config.speculative_config
    if any(group.is_eagle_group for group in kv_cache_config.kv_cache_groups) or (
        speculative is not None and speculative.use_eagle()
    ):
        raise UnsupportedError(
            "with EAGLE or MTP vLLM leaves the last block out of every hit, which s3kv does not do "
            "beside windows. If the model has full attention and windows of one size, start it "
            "with --disable-hybrid-kv-cache-manager, which takes more memory per token and gives "
            "the same answers. Otherwise run it without s3kv"
        )
    for layer in layers_of(kv_cache_config):
        if (
            not layer.prefix_cacheable
            or layer.prefix_replay_tokens > 0
            or getattr(layer, "extra_retained_tokens", 0) > 0
        ):
            raise UnsupportedError(
                f"vLLM does not cache the prefix of these layers block by block ({layer}). Run "
                "this model without s3kv"
            )


def coverages(kv_cache_config: KVCacheConfig, chunk_tokens: int) -> tuple[Coverage, ...]:
    """The engine's groups, joined where they need the same positions: full attention first, then
    ordered by reach. Every rank and every engine with this model numbers them alike.
    Raises `ConfigError` if no chunk of this length fits them."""
    interval = _interval_tokens(kv_cache_config)
    members: dict[tuple[GroupKind, int], list[int]] = {}
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        kind = _kind(next(_layers(group.kv_cache_spec)))
        if isinstance(kind, States):
            kind = States(interval_tokens=interval)
        members.setdefault((kind, group.kv_cache_spec.block_size), []).append(number)
    needs = sorted(
        members, key=lambda need: (KINDS.index(type(need[0])), need[0].reach_tokens, need[1])
    )
    try:
        return tuple(
            Coverage(need[1], chunk_tokens, need[0], number, tuple(members[need]))
            for number, need in enumerate(needs)
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _interval_tokens(kv_cache_config: KVCacheConfig) -> int:
    """Tokens whose KV in full attention takes `STATE_SPACING` times the bytes of a state; 1 without
    full attention, the yardstick for a state's size."""
    state_bytes = token_bytes = 0
    for group in kv_cache_config.kv_cache_groups:
        layers = list(_layers(group.kv_cache_spec))
        alike = len(group.layer_names) // len(layers)
        for layer in layers:
            if isinstance(layer, MambaSpec):
                numbers = zip(map(prod, layer.shapes), layer.dtypes, strict=True)
                # Without the padding of its page.
                state_bytes += alike * sum(count * dtype.itemsize for count, dtype in numbers)
            elif _kind(layer).is_cumulative:
                token_bytes += alike * (layer.page_size_bytes // layer.block_size)
    return max(1, STATE_SPACING * state_bytes // token_bytes) if token_bytes else 1


def states_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, coverage: Coverage
) -> dict[str, Any]:
    """Meaning of the pages of states, whose layout shows only bytes; empty for other kinds."""
    if not coverage.kind.is_sparse:
        return {}
    groups = kv_cache_config.kv_cache_groups
    members = [
        [
            {
                "kind": layer.mamba_type.name,
                "shapes": [list(shape) for shape in layer.shapes],
                "dtypes": [str(dtype) for dtype in layer.dtypes],
            }
            for layer in _layers(groups[member].kv_cache_spec)
        ]
        for member in coverage.members
    ]
    return {
        "states": {
            "members": members,
            "conv_layout": envs.VLLM_SSM_CONV_STATE_LAYOUT,
            "rounded_at_random": vllm_config.mamba_config.enable_stochastic_rounding,
        }
    }


def block_tokens(kv_cache_config: KVCacheConfig) -> int:
    """The least number of tokens that is a whole number of blocks in every group."""
    return lcm(*(g.kv_cache_spec.block_size for g in kv_cache_config.kv_cache_groups))


def chunk_tokens_for(kv_cache_config: KVCacheConfig) -> int:
    """Tokens per chunk without a setting."""
    chunk = default_chunk_tokens(block := block_tokens(kv_cache_config))
    for layer in layers_of(kv_cache_config):
        chunk = _kind(layer).chunk_tokens(block, chunk)
    return chunk


def layers_of(kv_cache_config: KVCacheConfig | None) -> list[KVCacheSpec]:
    """The specs of all layers; of an unknown cache none. Equal layers of a group may share one."""
    groups = [] if kv_cache_config is None else kv_cache_config.kv_cache_groups
    return [layer for group in groups for layer in _layers(group.kv_cache_spec)]


def _layers(spec: KVCacheSpec) -> Iterator[Any]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        yield from spec.kv_cache_specs.values()
    else:
        yield spec


def _is_served(layer: KVCacheSpec) -> bool:
    is_known_state = not isinstance(layer, MambaSpec) or layer.mamba_type.name in _STATES
    return type(layer) in _KIND and is_known_state


def _name(layer: KVCacheSpec) -> str:
    kind = type(layer).__name__
    return f"{kind} ({layer.mamba_type.name})" if isinstance(layer, MambaSpec) else kind


def _kind(layer: KVCacheSpec) -> GroupKind:
    return _KIND[type(layer)](layer)
