"""Translation between vLLM and s3kv for KV: which models are served, their sizes, their steps, and
the messages that vLLM carries between scheduler and workers.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
)

from s3kv.config import Config
from s3kv.connectors.adapter_loads import NO_STEP, AdapterReport, AdapterStep
from s3kv.errors import ConfigError, UnsupportedError
from s3kv.messages import StepPlan, StepReport
from s3kv.objects.keys import shard_name
from s3kv.planning.requests import ScheduledRequest
from s3kv.types import default_chunk_tokens

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

GROUP = 0
"""The KV-cache group that is served. So far s3kv serves only models with one group."""

_FULL = {"FullAttentionSpec", "MLAAttentionSpec"}
_PROMOTED = {"SlidingWindowSpec", "ChunkedLocalAttentionSpec"}
"""Layers that vLLM can keep as full attention, beside layers with full attention, if its hybrid
manager is off. MLA with a window is not among them: in DeepSeek-V4 such layers have other pages.
"""


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Sizes of blocks, block hashes and chunks, in tokens. They are equal on every rank."""

    block_tokens: int
    hash_tokens: int
    chunk_tokens: int

    @property
    def chunk_blocks(self) -> int:
        return self.chunk_tokens // self.block_tokens


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise `UnsupportedError` for a model or engine that s3kv cannot serve correctly.

    Layers with a window of tokens are served if vLLM keeps the KV of all their tokens, as for full
    attention: in one group, in pages that it frees only with the request.
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


def _layers(groups: Sequence[KVCacheSpec]) -> list[KVCacheSpec]:
    return [
        layer
        for spec in groups
        for layer in (
            spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
        )
    ]


def _check_layers(groups: Sequence[KVCacheSpec]) -> None:
    layers = _layers(groups)
    kinds = {type(layer).__name__ for layer in layers}
    if len(groups) != 1:
        remedy = "Run it without s3kv"
        if _fits_one_group(layers):
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
        # A subclass is refused, because it may keep state that is not in the pages.
        name = type(layer).__name__
        if name not in _FULL or not isinstance(layer, FullAttentionSpec):
            raise UnsupportedError(
                f"this model has layers of kind {name}; s3kv serves full attention (with MLA) and, "
                "beside it, layers with a window. Run it without s3kv"
            )


def _fits_one_group(layers: Sequence[KVCacheSpec]) -> bool:
    """Whether vLLM can keep all these layers as full attention, in one group that s3kv serves.

    vLLM's own function decides. It raises for models that vLLM cannot start in this way, such as
    those with windows of two sizes.
    """
    planner = grouping_module()
    specs = {str(number): layer for number, layer in enumerate(layers)}
    kinds = {type(layer).__name__ for layer in layers}
    if not (kinds <= _FULL | _PROMOTED and kinds & _FULL and kinds & _PROMOTED):
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


def grouping_module() -> Any:
    """The module of vLLM that divides layers into groups. It has another name from 0.33 on."""
    try:
        return importlib.import_module("vllm.v1.core.kv_cache_planning")
    except ModuleNotFoundError:
        return importlib.import_module("vllm.v1.core.kv_cache_utils")


def writes_before_fences(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, sizes: KVGeometry
) -> bool:
    """Whether a step may write to blocks before it calls `handle_preemptions`, which sets fences.

    The second-generation model runner does so while it takes in the step's requests, in two cases.
    It zeroes new blocks, if layers have different precisions. It copies the block in which a
    partial hit ends, if hashes are finer than blocks.
    """
    return vllm_config.use_v2_model_runner and _writes_before_forward(kv_cache_config, sizes)


def writes_after_fences(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, sizes: KVGeometry
) -> bool:
    """Whether a step may write to the blocks of its loads after `handle_preemptions`.

    The first-generation model runner does so, in the cases of `writes_before_fences`.
    """
    return not vllm_config.use_v2_model_runner and _writes_before_forward(kv_cache_config, sizes)


def _writes_before_forward(kv_cache_config: KVCacheConfig, sizes: KVGeometry) -> bool:
    return kv_cache_config.needs_kv_cache_zeroing or sizes.hash_tokens < sizes.block_tokens


def _check_hashes_are_stable(vllm_config: VllmConfig) -> None:
    """Raise `ConfigError` if the block hashes differ between processes. vLLM's own function returns
    the seed; a random seed is another one at each call.
    """
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
            "process. So no process could find what another has put into the bucket. Set "
            "PYTHONHASHSEED to the same number on all instances, or use sha256_cbor"
        )


def geometry(config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> KVGeometry:
    """The KV geometry. Raises `ConfigError` if chunk_tokens does not fit the block size."""
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


def equal_ranks(kv_cache_config: KVCacheConfig, tp_size: int) -> int:
    """Number of consecutive tensor-parallel ranks whose KV is equal in every layer.

    vLLM says so from 0.31 on. Before that, they are equal if all layers are MLA. A draft model's
    layers count, too: those with heads of their own differ between the ranks.
    """
    said: int | None = getattr(kv_cache_config, "kv_tp_replicas", None)
    if said is not None:
        return said
    layers = _layers([group.kv_cache_spec for group in kv_cache_config.kv_cache_groups])
    return tp_size if all(type(layer).__name__ == "MLAAttentionSpec" for layer in layers) else 1


def shard_names(model: ModelConfig, tp_size: int, pp_size: int, equal: int = 1) -> list[str]:
    """The shard of each rank, as it stands in object keys: pipeline stage by pipeline stage. Ranks
    with one name hold the same, and the first of them uploads it.

    equal: as `equal_ranks` returns it. Raises `UnsupportedError` for a stage without a layer.
    """
    from vllm.distributed.utils import get_pp_indices

    # With MLA every rank holds all of the KV: one latent head. A model's code may leave either
    # count out (None or 0). Then the ranks are counted, so that each has a name.
    heads = 1 if model.use_mla else model.get_total_num_kv_heads() or tp_size
    layers = model.get_total_num_hidden_layers() or pp_size
    stages = [range(*get_pp_indices(layers, stage, pp_size)) for stage in range(pp_size)]
    if not all(stages):
        raise UnsupportedError(f"the pipeline stages have the layers {stages}: one has none")
    return [
        shard_name(
            max(1, heads // tp_size),
            heads,
            stage,
            layers,
            tp_rank=rank,
            tp_size=tp_size,
            replicas=equal,
        )
        for stage in stages
        for rank in range(tp_size)
    ]


def scheduled_requests(output: SchedulerOutput) -> Iterator[ScheduledRequest]:
    """The requests of one engine step. A request that was preempted comes back as a new request on
    the second-generation model runner, and as a resumed one on the first. Its blocks are replaced
    in both cases.
    """
    tokens = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield ScheduledRequest(
            new.req_id, (new.block_ids[GROUP],), True, new.num_computed_tokens, tokens[new.req_id]
        )
    cached = output.scheduled_cached_reqs
    for request_id, blocks, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        yield ScheduledRequest(
            request_id,
            (blocks[GROUP],) if blocks else (),
            request_id in cached.resumed_req_ids,
            computed,
            tokens[request_id],
        )


@dataclass(frozen=True, slots=True)
class PlanMetadata(KVConnectorMetadata):
    """The plan of a step, from the scheduler to every worker."""

    plan: StepPlan
    step: AdapterStep = NO_STEP


@dataclass(frozen=True, slots=True)
class WorkerHello(KVConnectorHandshakeMetadata):
    """A worker's message to the scheduler when it is ready to serve. A worker sends one."""

    namespace: str
    slot_count: int
    slot_bytes: int


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """The workers' report to the scheduler. vLLM merges the reports of all ranks into one.

    hellos: those that vLLM did not collect before the first step. adapters: None without LoRA.
    """

    report: StepReport
    hellos: tuple[WorkerHello, ...] = ()
    adapters: AdapterReport | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerReport)
        self.report.merge(other.report)
        self.hellos += other.hellos
        if self.adapters is not None and other.adapters is not None:
            self.adapters.merge(other.adapters)
        else:
            self.adapters = None
        return self
