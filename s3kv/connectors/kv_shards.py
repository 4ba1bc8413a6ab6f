"""Shards: which part of a chunk each rank holds, which ranks hold the same, and whether ranks of
other parallel sizes can read the objects of this one."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from s3kv.connectors.kv_groups import layers_of
from s3kv.device.layout import PageLayout
from s3kv.errors import UnsupportedError
from s3kv.objects.keys import shard_name
from s3kv.objects.rearranging import Pages, follows, is_page, order_of
from s3kv.objects.shards import Shard

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("s3kv")

_BY_HEADS = {"FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"}
_HEAD_COUNT = re.compile(
    "kv_?head|key_value_head|head_kv|heads_in_group|attention_group|query_group"
)
"""Names in a model's configuration that hold or determine a number of KV heads."""
_PLAIN = (str, int, float, bool, type(None))
_KINDS = _BY_HEADS | {"MLAAttentionSpec"}
_DTYPES = {"BF16", "F16", "F32"}
"""Dtypes of KV that is not quantised. Quantised KV stays per rank: scales may differ between ranks,
and may be in the pages."""
_ORDERS = dict.fromkeys(("LBHNC", "BLHNC", "LHBNC", "BHLNC"), "HNC")
_ORDERS |= dict.fromkeys(("LBNHC", "BLNHC"), "NHC")
"""vLLM's name of a layout, and the order of the dimensions of a page in it."""


def equal_ranks(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, tp_size: int) -> int:
    """Number of consecutive tensor-parallel ranks whose KV is equal in every layer.
    vLLM reports this number for MLA. The layers of a draft model also count: those with heads of
    their own differ between ranks. For a model with fewer KV heads than ranks, vLLM reports
    nothing. It gives each head to consecutive ranks (`QKVParallelLinear`), so these are equal if
    all layers have the same number of heads."""
    if kv_cache_config.kv_tp_replicas > 1:
        return int(kv_cache_config.kv_tp_replicas)
    layers = list(layers_of(kv_cache_config))
    kinds = {type(layer).__name__ for layer in layers}
    model = vllm_config.model_config
    heads = 0 if model.use_mla else model.get_total_num_kv_heads()
    if not heads or tp_size % heads or not kinds <= _BY_HEADS:
        return 1
    # A draft may have other heads, and Transformers' code divides them in its own way.
    is_known = vllm_config.speculative_config is None and not model.using_transformers_backend()
    # Quantised KV has one byte per number, and its scales may differ between ranks.
    alike = all(layer.num_kv_heads == 1 and layer.dtype.itemsize > 1 for layer in layers)
    return tp_size // heads if is_known and alike and _has_heads(model, heads) else 1


def _has_heads(model: ModelConfig, heads: int) -> bool:
    """Whether the model's configuration names this number of KV heads, and no other. If it names
    others, layers may differ (MiMo-V2, Step-3.5, Nemotron-NAS), even if each rank has one head of
    each layer."""
    counts = list(_head_counts(model.hf_text_config.to_dict()))
    return bool(counts) and all(count == heads for count in counts)


def _head_counts(config: Mapping[Any, Any]) -> Iterator[Any]:
    """The numbers of KV heads in a configuration, at every depth; None for an unreadable value."""
    for name, value in config.items():
        counts = _HEAD_COUNT.search(str(name)) is not None
        for element in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(element, Mapping):
                yield from _head_counts(element)
            elif counts:
                yield element
            elif not isinstance(element, (*_PLAIN, list, tuple)):
                yield None


def shard_names(model: ModelConfig, tp_size: int, pp_size: int, equal: int = 1) -> list[str]:
    """The shard name of each rank, as in object keys, pipeline stage by pipeline stage. Ranks with
    the same name hold the same KV, and the first of them uploads it.
    equal: as `equal_ranks` returns it. Raises `UnsupportedError` for a stage without a layer."""
    from vllm.distributed.utils import get_pp_indices

    # With MLA every rank holds all of the KV: one latent head. A model's code may leave either
    # count out (None or 0). Then the number of ranks replaces it, so each has its own name.
    heads = 1 if model.use_mla else model.get_total_num_kv_heads() or tp_size
    layers = model.get_total_num_hidden_layers() or pp_size
    stages = [range(*get_pp_indices(layers, stage, pp_size)) for stage in range(pp_size)]
    if not all(stages):
        raise UnsupportedError(f"the pipeline stages have the layers {stages}: one has none")
    sizes = {"tp_size": tp_size, "replicas": equal}
    return [
        shard_name(max(1, heads // tp_size), heads, stage, layers, tp_rank=rank, **sizes)
        for stage in stages
        for rank in range(tp_size)
    ]


def shared_pages(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    layouts: Mapping[int, PageLayout],
    shard_name: str,
) -> Pages | None:
    """Features that the pages of this rank share with those of ranks of other sizes. None, with the
    reason in the log, if they cannot be divided by heads.
    layouts: by vLLM's number of the group. shard_name: this rank's."""
    try:
        order = _order(vllm_config, kv_cache_config)
        shard = _share(vllm_config, layouts, shard_name, order)
    except _Indivisible as reason:
        logger.warning(
            "s3kv: share_ranks has no effect, chunks are shared with engines of the same size "
            "alone: %s",
            reason,
        )
        return None
    return Pages(order, _template(vllm_config, layouts, shard))


class _Indivisible(Exception):
    """Pages cannot be divided by heads, for this reason."""


def _order(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """The order of the dimensions of a page. Raises `_Indivisible`."""
    if kinds := sorted({type(layer).__name__ for layer in layers_of(kv_cache_config)} - _KINDS):
        raise _Indivisible(f"the model has layers of kind {', '.join(kinds)}")
    layout = kv_cache_config.kv_cache_layout
    order = _ORDERS.get(str(layout))
    if order is None:
        raise _Indivisible(f"this vLLM names no layout of pages that s3kv knows ({layout})")
    if vllm_config.device_config.device_type == "cpu" and order != "HNC":
        raise _Indivisible("on a CPU pages are packed")
    if os.environ.get("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "0") not in ("", "0"):
        raise _Indivisible("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT is set")
    if vllm_config.speculative_config is not None:
        raise _Indivisible("a draft may have other heads than the model")
    return order


def _share(
    vllm_config: VllmConfig, layouts: Mapping[int, PageLayout], shard_name: str, order: str
) -> Shard:
    """This rank's shard, a whole share of the model's heads in every page. Raises `_Indivisible`,
    also for copies that may differ: layers may have more heads than the name has."""
    tp_size, model = vllm_config.parallel_config.tensor_parallel_size, vllm_config.model_config
    known = 1 if model.use_mla else model.get_total_num_kv_heads()
    shard = Shard.parse(shard_name)
    total = 0 if shard is None else shard.total_heads
    divides = total > 0 and (total % tp_size == 0 or tp_size % total == 0)
    share = max(1, total // tp_size) if divides and total == known else 0
    if shard is None or shard.copies != 1 or len(shard.heads) != share:
        raise _Indivisible(f"{shard_name} is not a whole share of the model's heads")
    for layer in (layer for layout in layouts.values() for layer in layout.layers):
        if layer.dtype not in _DTYPES:
            raise _Indivisible(f"{layer.name} has the dtype {layer.dtype}")
        if not is_page(layer.spec, len(shard.heads), order):
            raise _Indivisible(f"{layer.name} has pages {layer.spec.order} {layer.spec.shape}")
    return shard


def _template(vllm_config: VllmConfig, layouts: Mapping[int, PageLayout], shard: Shard) -> str:
    """The pattern of the layers' names, if it also yields the layers of other stages."""
    total = vllm_config.model_config.get_total_num_hidden_layers()
    if len(layouts) > 1 or shard.total_layers != total:
        return ""
    (layout,) = layouts.values()
    return follows([layer.spec for layer in layout.layers], shard.layers)


def kinds_of_layers(
    layout: PageLayout, pages: Pages | None, shard_name: str
) -> list[dict[str, Any]]:
    """The different kinds of layers, without names, for the fingerprint. They are the same on every
    pipeline rank. With shared pages, each has all of the model's heads, so all sizes agree."""
    shard = Shard.parse(shard_name)
    kinds: list[dict[str, Any]] = []
    for layer in layout.describe()["layers"]:
        kind = {name: value for name, value in layer.items() if name != "name"}
        if pages is not None and shard is not None:
            kind |= _whole(kind, pages, shard.total_heads)
        if kind not in kinds:
            kinds.append(kind)
    return kinds


def _whole(kind: dict[str, Any], pages: Pages, heads: int) -> dict[str, Any]:
    """Order and page of a layer that has all of the model's heads."""
    sizes = dict(zip(kind["order"], kind["page"], strict=True)) | {"H": heads}
    order = ("B" if "B" in sizes else "") + order_of(pages.order, heads)
    return {"order": order, "page": [sizes[dimension] for dimension in order]}
