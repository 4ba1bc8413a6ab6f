"""Fingerprint of an engine: everything that changes a chunk's bytes or their meaning.

A setting counts if it changes the function that the engine computes from tokens, images and adapter
(weights, code, number format, mask), or the format of the result (layout). It does not count if it
only reorders the same arithmetic (kernels, compilation, batches): a different rounding is not a
different answer. The fingerprint leaves out what the block hashes cover (tokens, salts, images by
content, prompt embeddings).

When in doubt, a setting counts. One field too many separates engines that could have shared; one
field too few gives wrong tokens. tests/contract/kv_relevance/ classifies every setting of vLLM,
with the reason; tests/contract/test_identity.py changes each field of the fingerprint.

Adapters (LoRA) differ between requests, so they are not in the namespace; see `request_hashes`.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import vllm

from s3kv.config import Config
from s3kv.connectors.model_identity import (
    digest_of,
    fields,
    file_digest,
    local_weights,
    model_identity,
    plain,
    processor_identity,
    weights_path,
)
from s3kv.objects.headers import FORMAT_VERSION
from s3kv.objects.rearranging import Pages

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

    from s3kv.connectors.kv_translate import KVGeometry

_MULTIMODAL = (
    *("language_model_only", "mm_processor_kwargs", "media_io_kwargs", "mm_hasher_algorithm"),
    *("mm_device_do_normalize", "mm_encoder_attn_dtype"),
    *("video_pruning_rate", "video_pruning_method"),
)
_LORA = ("lora_dtype", "target_modules", "enable_tower_connector_lora")
_SPECULATIVE = (
    *("method", "quantization", "kv_cache_dtype", "parallel_drafting"),
    "index_share_for_mtp_iteration",
)
_ATTENTION = (
    *("use_non_causal", "indexer_kv_dtype", "use_fp4_indexer_cache", "indexer_sparse_logits"),
    *("use_trtllm_attention", "disable_flashinfer_q_quantization"),
    "use_prefill_query_quantization",
)
_KERNELS = (
    *("moe_backend", "linear_backend", "linear_backend_per_quant"),
    "sparse_indexer_topk_backend",
)
"""Some of these compute quantised layers with activations in a different number format."""
_DIFFUSION = ("canvas_length", "max_denoising_steps")
_RANKS = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
_SEQUENCE = ("cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size")
_STATES = ("mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode", "use_kda_recoverssm")
_WORKER = ("worker_cls", "worker_extension_cls")
ENVIRONMENT = (
    # Number formats in which layers compute, or exchange results.
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_XPU_INC_WNA16_BACKEND",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_USE_F16_ACCUM",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_USE_DEEP_GEMM",
    "VLLM_MOE_USE_DEEP_GEMM",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_USE_FLASHINFER_MOE_INT4",
    "VLLM_DISABLED_KERNELS",
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16",
    "VLLM_ROCM_USE_AITER",
    "VLLM_ROCM_USE_AITER_LINEAR",
    "VLLM_ROCM_USE_AITER_MOE",
    "VLLM_ROCM_USE_AITER_FP8BMM",
    "VLLM_ROCM_USE_AITER_FP4BMM",
    "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM",
    "VLLM_ROCM_USE_AITER_MOE_SITUV2",
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4",
    "VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE",
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT",
    # The layout of a page, or the computed function itself.
    "VLLM_MLA_DISABLE",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    # The source of a model by name, and the code that runs.
    "VLLM_USE_MODELSCOPE",
    "VLLM_PLUGINS",
    "VLLM_TEST_FORCE_LOAD_FORMAT",
    # The decoder of media files, between the hashed bytes and the processor.
    "VLLM_VIDEO_LOADER_BACKEND",
    "VLLM_MEDIA_CONNECTOR",
)
"""Environment variables of vLLM that no configuration object repeats. An unset variable and one set
to vLLM's default differ, because the default may change with vLLM's version."""


def fingerprint(
    config: Config,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    sizes: KVGeometry,
    page: Mapping[str, Any],
    pages: Pages | None = None,
) -> dict[str, Any]:
    """The fingerprint as plain JSON values, equal on every rank. `io.tier.introduce` adds how
    objects are sealed.
    page: byte layout of a page on this rank, without the parts that differ between ranks; with
        several KV-cache groups, of each group, and how the groups are joined.
    pages: of engines that share with other parallel sizes (`kv_shards`); None for others."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    attention = _attention_backends(vllm_config, kv_cache_config)
    layout = getattr(kv_cache_config, "kv_cache_layout", None)
    return {
        **_model(config, vllm_config),
        "kv_cache": _kv_cache(vllm_config, layout, page, attention),
        "ranks": {
            "tensor": parallel.tensor_parallel_size if pages is None else "any",
            **_stages(vllm_config, pages),
        },
        "block_tokens": sizes.block_tokens,
        "chunk_tokens": sizes.chunk_tokens,
        "hash": _hash_identity(cache.prefix_caching_hash_algo, sizes.hash_tokens),
    }


def offload_fingerprint(
    config: Config, vllm_config: VllmConfig, offloading: OffloadingConfig, row_bytes: int
) -> dict[str, Any]:
    """The same for the rows of vLLM's offloading, from the settings of the scheduler's process.
    A row has the KV of all ranks. Where vLLM declares its bytes independent of the parallel sizes
    (`canonical_layout`, MLA), these do not count. The attention backends run in the workers, and
    each may lay out pages differently. The inputs to their selection stand for them: the device and
    the requested backend."""
    from vllm.platforms import current_platform

    cache = offloading.cache
    is_any_size = offloading.parallel.is_parallelism_agnostic or offloading.replicated_layout
    page = {
        "row_bytes": row_bytes,
        "canonical": offloading.canonical_layout,
        "replicated": offloading.replicated_layout,
        "states": _states(vllm_config),
        "sequence": fields(vllm_config.parallel_config, _SEQUENCE),
        "groups": [[g.tokens_per_block, list(g.layer_names)] for g in offloading.groups],
    }
    device = [
        current_platform.device_type,
        plain(current_platform.get_device_capability()),
        fields(vllm_config.attention_config, ("backend", "backend_per_kind")),
    ]
    layout = offloading.kv_cache_layout
    return {
        **_model(config, vllm_config),
        "kv_cache": _kv_cache(vllm_config, layout, page, device),
        "ranks": "any" if is_any_size else fields(offloading.parallel, _RANKS),
        "chunk_blocks": cache.blocks_per_chunk,
        "hash": _hash_identity(
            vllm_config.cache_config.prefix_caching_hash_algo, cache.tokens_per_hash
        ),
        "content": "rows of vLLM's offloading",
    }


def _states(vllm_config: VllmConfig) -> list[Any] | None:
    """Settings that define a state's bytes, all padded to one length; None without states."""
    if not (vllm_config.model_config.has_inner_state or vllm_config.model_config.is_hybrid):
        return None
    drafts = fields(vllm_config.speculative_config, ("num_speculative_tokens",))
    rounding = vllm_config.mamba_config.enable_stochastic_rounding
    layout = vllm.envs.VLLM_SSM_CONV_STATE_LAYOUT
    return [fields(vllm_config.cache_config, _STATES), drafts, rounding, layout]


def _model(config: Config, vllm_config: VllmConfig) -> dict[str, Any]:
    """The part of the fingerprint that KV and the engine's computation have in common."""
    return {
        **_computation(config, vllm_config),
        "speculative": _speculative(config, vllm_config),
        "attention": fields(vllm_config.attention_config, _ATTENTION),
        "diffusion": fields(getattr(vllm_config, "diffusion_config", None), _DIFFUSION),
    }


def _kv_cache(
    vllm_config: VllmConfig, layout: str | None, page: Mapping[str, Any], attention: list[Any]
) -> dict[str, Any]:
    cache = vllm_config.cache_config
    return {
        "dtype": f"{cache.cache_dtype}{_fnuz()}",
        "unquantized_layers": sorted(getattr(cache, "kv_cache_dtype_skip_layers", ())),
        "layout": layout,
        "page": dict(page),
        "attention": attention,
        "cpu_isa": _cpu_isa() if vllm_config.device_config.device_type == "cpu" else None,
    }


def _fnuz() -> str:
    """A mark of the platforms on which the 8 bits of an fp8 mean other numbers: AMD's gfx94x."""
    from vllm.platforms import current_platform

    return " fnuz" if current_platform.is_fp8_fnuz() else ""


def _stages(vllm_config: VllmConfig, pages: Pages | None) -> dict[str, Any]:
    if pages is not None and pages.layer:
        return {"pipeline": "any", "layers": None}
    stages = vllm_config.parallel_config.pipeline_parallel_size
    partition = os.environ.get("VLLM_PP_LAYER_PARTITION") if stages > 1 else None
    return {"pipeline": stages, "layers": partition}


def encoder_fingerprint(config: Config, vllm_config: VllmConfig) -> dict[str, Any]:
    """Everything that changes an encoder's output, except the item itself and its adapter.
    Parallel sizes do not count: every rank has the whole output, whichever ranks computed it."""
    return {**_computation(config, vllm_config), "content": "encoder outputs"}


def _computation(config: Config, vllm_config: VllmConfig) -> dict[str, Any]:
    """The part of the fingerprint that describes the engine's computation."""
    model, load = vllm_config.model_config, vllm_config.load_config
    name = config.model_id or f"{model.model}@{model.revision or ''}"
    weights = local_weights(model, load, config.weights_digest)
    additional = getattr(vllm_config, "additional_config", None)  # a platform's; may be secret
    return {
        "format": FORMAT_VERSION,
        "vllm": ".".join(vllm.__version__.split(".")[:2]),
        "model": model_identity(model, load, name, weights),
        "processor": processor_identity(model),
        "multimodal": _multimodal(model),
        "lora": fields(vllm_config.lora_config, _LORA),
        "kernels": fields(getattr(vllm_config, "kernel_config", None), _KERNELS),
        "additional": digest_of(plain(additional)) if additional else None,
        "worker": fields(vllm_config.parallel_config, _WORKER),
        "environment": {n: _content(n) for n in ENVIRONMENT if n in os.environ},
    }


def _content(name: str) -> str | None:
    """The value of a variable; for a ..._CONFIG, the digest of the file that it names, if any."""
    value = os.environ[name]
    return file_digest(value) if name.endswith("_CONFIG") and os.path.isfile(value) else value


def _multimodal(model: ModelConfig) -> dict[str, Any] | None:
    found = fields(model.multimodal_config, _MULTIMODAL)
    if found is not None:
        scales = getattr(model.multimodal_config, "mm_encoder_fp8_scale_path", None)
        found["encoder_scales"] = file_digest(scales)
    return found


def _speculative(config: Config, vllm_config: VllmConfig) -> dict[str, Any] | None:
    """The part for speculative decoding. A draft model's KV is in the chunks of the model's KV."""
    speculative, target = vllm_config.speculative_config, vllm_config.model_config
    found = fields(speculative, _SPECULATIVE)
    draft = getattr(speculative, "draft_model_config", None)
    if found is None or draft is None or draft is target:
        return found
    load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    if weights_path(draft) == weights_path(target):
        name, weights = "in the model", None
    else:
        weights = local_weights(draft, load, config.weights_digest)
        # Weights with a digest need no name: the digest identifies them at any path.
        name = "" if weights else f"{draft.model}@{draft.revision or ''}"
    return {**found, "draft": model_identity(draft, load, name, weights)}


def _attention_backends(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[str]:
    """Names of the attention backends. CPU backends lay out the same shape differently."""
    layers = vllm_config.compilation_config.static_forward_context
    names = (n for group in kv_cache_config.kv_cache_groups for n in group.layer_names)
    backends = (getattr(layers.get(name), "attn_backend", None) for name in names)
    return sorted({backend.get_name() for backend in backends if backend is not None})


def _cpu_isa() -> str:
    """Instruction sets that determine how vLLM's CPU attention packs a page."""
    amx = torch.cpu._is_amx_tile_supported() if platform.machine() == "x86_64" else False
    return f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}-amx{int(amx)}"


def _hash_identity(algorithm: str, hash_tokens: int) -> dict[str, Any]:
    return {
        "algorithm": algorithm,
        "tokens": hash_tokens,
        "seed": os.environ.get("PYTHONHASHSEED", "vllm-none-hash"),
        # sha256 hashes pickles, which differ between Python versions.
        "python": list(sys.version_info[:2]) if algorithm == "sha256" else None,
    }
