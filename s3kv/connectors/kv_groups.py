"""KV-cache groups of an engine: which of them s3kv serves, and which need the same positions.

vLLM divides a model's layers into groups. Every request has a table of blocks per group, and all
groups take their blocks from one pool. Groups that need the same positions to resume share their
objects (`GroupSpec.members`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from math import gcd, lcm, prod
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)

from s3kv.errors import ConfigError, UnsupportedError
from s3kv.planning.cover import STATE_SPACING, GroupKind, GroupSpec, held_blocks
from s3kv.types import default_chunk_tokens

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NULL_BLOCK = 0
"""vLLM's number for "no block". No layer's KV is ever in it."""

_FULL = {"FullAttentionSpec", "MLAAttentionSpec"}
_REACH = {
    "SlidingWindowSpec": (GroupKind.WINDOW, "sliding_window"),
    "ChunkedLocalAttentionSpec": (GroupKind.LOCAL, "attention_chunk_size"),
}
"""Layers with a window, and the attribute that says how far it reaches. A subclass is refused,
because it may keep state that is not in the pages. MLA with a window is not among them: in
DeepSeek-V4 such layers have other pages."""
_STATES = {"SHORT_CONV", "GDN_ATTN", "MAMBA2"}
"""Kinds of states that s3kv has been run with on an engine."""


def check_groups_are_served(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise `UnsupportedError` for groups that s3kv cannot serve correctly."""
    groups = kv_cache_config.kv_cache_groups
    layers = layers_of(kv_cache_config)
    refused = sorted({_name(layer) for layer in layers if not _is_served(layer)})
    if refused:
        raise UnsupportedError(
            f"this model has layers of kind {', '.join(refused)}; s3kv serves full attention (with "
            "MLA), sliding windows, chunked local attention, and states of Mamba2, Gated DeltaNet "
            "and short convolutions. Run it without s3kv"
        )
    mixed = [group for group in groups if len(set(map(_need, _layers(group.kv_cache_spec)))) > 1]
    if mixed:
        raise UnsupportedError(
            f"layers that need different positions are in one KV-cache group ({mixed[0]}); s3kv "
            "needs each kind in groups of its own. Run it without s3kv"
        )
    if len(groups) > 1 or _need(layers[0])[0] is not GroupKind.FULL:
        _check_tables_with_gaps(vllm_config, kv_cache_config)
    if any(isinstance(layer, MambaSpec) for layer in layers):
        _check_states(vllm_config)


def _check_states(vllm_config: VllmConfig) -> None:
    """Raise `UnsupportedError` if a block of a state group may be something else than the state
    after its last token, once a step has ended there."""
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
    """Raise `UnsupportedError` if s3kv cannot follow tables whose blocks are given up before the
    request ends."""
    groups = kv_cache_config.kv_cache_groups
    speculative = vllm_config.speculative_config
    if any(group.is_eagle_group for group in groups) or (
        speculative is not None and speculative.use_eagle()
    ):
        raise UnsupportedError(
            "with EAGLE or MTP vLLM leaves the last block out of every hit, because the draft's KV "
            "there depends on the tokens that follow. s3kv does not do so yet, and has not been "
            f"run so beside windows{_one_group_advice(kv_cache_config)}"
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


def coverages(kv_cache_config: KVCacheConfig, chunk_tokens: int) -> tuple[GroupSpec, ...]:
    """The engine's groups, joined where they need the same positions: those with full attention,
    then by how far they reach. Every rank and every engine with this model numbers them alike.

    Raises `ConfigError` if no chunk of this length fits them.
    """
    members: dict[tuple[GroupKind, int, int], list[int]] = {}
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        kind, reach = _need(next(_layers(group.kv_cache_spec)))
        members.setdefault((kind, reach, group.kv_cache_spec.block_size), []).append(number)
    order = list(GroupKind)
    needs = sorted(members, key=lambda need: (order.index(need[0]), *need[1:]))
    interval = _interval_tokens(kv_cache_config)
    found = tuple(
        GroupSpec(
            block,
            chunk_tokens,
            kind,
            reach,
            number,
            tuple(members[kind, reach, block]),
            interval if kind is GroupKind.STATE else 1,
        )
        for number, (kind, reach, block) in enumerate(needs)
    )
    for group in found:
        if group.kind is GroupKind.LOCAL and group.reach_tokens % chunk_tokens:
            raise ConfigError(
                f"chunk_tokens is {chunk_tokens}: allowed is a divisor of {group.reach_tokens}, "
                "because this model's local attention begins anew after so many tokens"
            )
        if not held_blocks(group):
            raise ConfigError(f"a window of {group.reach_tokens} tokens needs no cache")
    return found


def _interval_tokens(kv_cache_config: KVCacheConfig) -> int:
    """Tokens whose KV in full attention takes `STATE_SPACING` times the bytes of a state; 1 without
    full attention, beside which a state is large or small."""
    state_bytes = token_bytes = 0
    for group in kv_cache_config.kv_cache_groups:
        for layer in _every_layer(group):
            need, _ = _need(layer)
            if need is GroupKind.STATE:
                state_bytes += _state_bytes(layer)
            elif need is GroupKind.FULL:
                token_bytes += layer.page_size_bytes // layer.block_size
    return max(1, STATE_SPACING * state_bytes // token_bytes) if token_bytes else 1


def _state_bytes(layer: Any) -> int:
    """Bytes of one state of a layer, without the padding of its page."""
    return sum(
        prod(shape) * dtype.itemsize
        for shape, dtype in zip(layer.shapes, layer.dtypes, strict=True)
    )


def states_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, group: GroupSpec
) -> dict[str, Any]:
    """Meaning of the pages of a state group, for the fingerprint; empty for other groups. The
    layout shows their bytes alone."""
    if group.kind is not GroupKind.STATE:
        return {}
    specs = (kv_cache_config.kv_cache_groups[member].kv_cache_spec for member in group.members)
    return {
        "states": {
            "members": [[_state(layer) for layer in _layers(spec)] for spec in specs],
            "conv_layout": envs.VLLM_SSM_CONV_STATE_LAYOUT,
            "rounded_at_random": vllm_config.mamba_config.enable_stochastic_rounding,
        }
    }


def _state(layer: Any) -> dict[str, Any]:
    return {
        "kind": layer.mamba_type.name,
        "shapes": [list(shape) for shape in layer.shapes],
        "dtypes": [str(dtype) for dtype in layer.dtypes],
    }


def block_tokens(kv_cache_config: KVCacheConfig) -> int:
    """The least number of tokens that is a whole number of blocks in every group."""
    return lcm(*(g.kv_cache_spec.block_size for g in kv_cache_config.kv_cache_groups))


def chunk_tokens_for(kv_cache_config: KVCacheConfig) -> int:
    """Tokens per chunk if no setting says so. With states it is as short as the blocks allow: the
    engine keeps the state of a prompt after its last whole block, and of no other for sure."""
    block = block_tokens(kv_cache_config)
    if any(isinstance(layer, MambaSpec) for layer in layers_of(kv_cache_config)):
        return block
    chunk = default_chunk_tokens(block)
    for group in kv_cache_config.kv_cache_groups:
        kind, reach = _need(next(_layers(group.kv_cache_spec)))
        if kind is GroupKind.LOCAL:
            chunk = gcd(chunk, reach)
    return chunk


def grouping_module() -> Any:
    """The module of vLLM that divides layers into groups. It has another name from 0.33 on."""
    try:
        return importlib.import_module("vllm.v1.core.kv_cache_planning")
    except ModuleNotFoundError:
        return importlib.import_module("vllm.v1.core.kv_cache_utils")


def layers_of(kv_cache_config: KVCacheConfig) -> list[KVCacheSpec]:
    """The specs of all layers; of layers that are alike, there may be one for a whole group."""
    groups = kv_cache_config.kv_cache_groups
    return [layer for group in groups for layer in _layers(group.kv_cache_spec)]


def _layers(spec: KVCacheSpec) -> Iterator[KVCacheSpec]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        yield from spec.kv_cache_specs.values()
    else:
        yield spec


def _every_layer(group: Any) -> Sequence[KVCacheSpec]:
    """The specs of a group's layers, one for each."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec] * len(group.layer_names)


def _is_served(layer: KVCacheSpec) -> bool:
    if isinstance(layer, MambaSpec):
        return type(layer) is MambaSpec and layer.mamba_type.name in _STATES
    name = type(layer).__name__
    return name in _REACH or (name in _FULL and isinstance(layer, FullAttentionSpec))


def _name(layer: KVCacheSpec) -> str:
    kind = type(layer).__name__
    return f"{kind} ({layer.mamba_type.name})" if isinstance(layer, MambaSpec) else kind


def _need(layer: KVCacheSpec) -> tuple[GroupKind, int]:
    """The kind of a layer's need, and how far it reaches."""
    if isinstance(layer, MambaSpec):
        return GroupKind.STATE, 0
    kind, attribute = _REACH.get(type(layer).__name__, (GroupKind.FULL, ""))
    return kind, getattr(layer, attribute) if attribute else 0


def _one_group_advice(kv_cache_config: KVCacheConfig) -> str:
    if not _fits_one_group(layers_of(kv_cache_config)):
        return ". Or run it without s3kv"
    return (
        ". Or start it with --disable-hybrid-kv-cache-manager: vLLM then keeps the KV of every "
        "token in every layer, which takes more memory per token and gives the same answers. Or "
        "run it without s3kv"
    )


def _fits_one_group(layers: Sequence[KVCacheSpec]) -> bool:
    """Whether vLLM can keep all these layers as full attention, in one group that s3kv serves.

    vLLM's own function decides. It raises for models that vLLM cannot start in this way, such as
    those with windows of two sizes.
    """
    planner = grouping_module()
    specs = {str(number): layer for number, layer in enumerate(layers)}
    kinds = {type(layer).__name__ for layer in layers}
    if not (kinds & _FULL and kinds & set(_REACH)):
        return False
    quiet = planner.logger.disabled
    planner.logger.disabled = True  # it would warn that the manager is on
    try:
        planner.unify_hybrid_kv_cache_specs(specs)
        return UniformTypeKVCacheSpecs.from_specs(specs) is not None
    except (AssertionError, TypeError, ValueError):  # vLLM would not start
        return False
    finally:
        planner.logger.disabled = quiet
