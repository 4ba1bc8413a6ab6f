"""Shared pages: whether ranks of other parallel sizes can read the objects of this rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from s3kv.connectors.kv_groups import layers_of
from s3kv.device.layout import PageLayout
from s3kv.objects.rearranging import Pages, follows, is_page, order_of
from s3kv.objects.shards import Shard

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("s3kv")

_KINDS = {"FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"}
_DTYPES = {"BF16", "F16", "F32"}
"""Dtypes of KV that is not quantised. Quantised KV stays by rank: scales may differ between ranks,
and may be in the pages."""
_ORDERS = {"LBHNC": "HNC", "BLHNC": "HNC", "LHBNC": "HNC", "BHLNC": "HNC"} | {
    "LBNHC": "NHC",
    "BLNHC": "NHC",
}
"""vLLM's name of a layout, and the order of the dimensions of a page in it."""


def shared_pages(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    layouts: Mapping[int, PageLayout],
    shard_name: str,
) -> Pages | None:
    """Features that the pages of this rank share with those of ranks of other sizes. None, with the
    reason in the log, if they cannot be told apart by heads.

    layouts: by vLLM's number of the group. shard_name: this rank's.
    """
    reason, order = _order(vllm_config, kv_cache_config)
    shard = Shard.parse(shard_name)
    if not reason and (shard is None or not _fits(shard, vllm_config)):
        reason = f"{shard_name} is not a whole share of the model's heads"
    if not reason and shard is not None:
        for layout in layouts.values():
            for layer in layout.layers:
                if layer.dtype not in _DTYPES:
                    reason = f"{layer.name} has the dtype {layer.dtype}"
                elif not is_page(layer.spec, len(shard.heads), order):
                    reason = f"{layer.name} has pages {layer.spec.order} {layer.spec.shape}"
    if reason or shard is None:
        logger.warning(
            "s3kv: share_ranks has no effect, chunks are shared with engines of the same size "
            "alone: %s",
            reason,
        )
        return None
    return Pages(order, _template(vllm_config, layouts, shard))


def _order(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[str, str]:
    """Why pages cannot be told apart by heads (empty: they can), and the order of their
    dimensions."""
    kinds = sorted({type(layer).__name__ for layer in layers_of(kv_cache_config)} - _KINDS)
    if kinds:
        return f"the model has layers of kind {', '.join(kinds)}", ""
    layout = getattr(kv_cache_config, "kv_cache_layout", None)
    order = _ORDERS.get(str(layout))
    if order is None:
        return f"this vLLM names no layout of pages that s3kv knows ({layout})", ""
    if vllm_config.device_config.device_type == "cpu" and order != "HNC":
        return "on a CPU pages are packed", ""
    if os.environ.get("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "0") not in ("", "0"):
        return "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT is set", ""
    if vllm_config.speculative_config is not None:
        return "a draft may have other heads than the model", ""
    return "", order


def _fits(shard: Shard, vllm_config: VllmConfig) -> bool:
    """Whether the ranks' heads are whole shares of the model's."""
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    total = shard.total_heads
    model = vllm_config.model_config
    known = 1 if model.use_mla else model.get_total_num_kv_heads()
    divides = total % tp_size == 0 or tp_size % total == 0
    return divides and total == known and len(shard.heads) == max(1, total // tp_size)


def _template(vllm_config: VllmConfig, layouts: Mapping[int, PageLayout], shard: Shard) -> str:
    """The pattern of the layers' names, where another stage's layers follow from it."""
    total = vllm_config.model_config.get_total_num_hidden_layers()
    if len(layouts) > 1 or shard.total_layers != total:
        return ""
    (layout,) = layouts.values()
    return follows([layer.spec for layer in layout.layers], shard.layers)


def kinds_of_layers(
    layout: PageLayout, pages: Pages | None, shard_name: str
) -> list[dict[str, Any]]:
    """The different kinds of layers, without names, for the fingerprint. Every pipeline rank has
    the same. With shared pages, each has all of the model's heads, so every size has the same."""
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
