"""The fingerprint: everything that changes the bytes of a chunk or what they mean.

What is in the block hashes already (tokens, salts, images by content, prompt embeddings) is not
repeated here. What is in doubt is in: a field too many costs sharing between engines that could
have shared, a field too few costs wrong tokens. tests/contract/test_identity.py changes each.

Adapters (LoRA) come and go with requests, so theirs is no matter of the namespace; see `requests`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from s3kv.config import Config
from s3kv.connectors.weights import weights_digest
from s3kv.objects.codec import FORMAT_VERSION
from s3kv.objects.integrity import Integrity

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from s3kv.connectors.translate import KVGeometry

logger = logging.getLogger("s3kv")

_VOLATILE = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "id2label", "label2id"}
)
"""Of a model's configuration: where it came from, which library wrote it, names for classes."""
_SPELLED_MAX_BYTES = 2**17
_MULTIMODAL = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_hasher_algorithm",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "video_pruning_rate",
    "video_pruning_method",
)
_LORA = ("lora_dtype", "target_modules", "enable_tower_connector_lora")
_SPECULATIVE = ("method", "model", "revision", "code_revision", "quantization", "kv_cache_dtype")


def fingerprint(
    config: Config,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    sizes: KVGeometry,
    page: Mapping[str, Any],
    integrity: Integrity,
) -> dict[str, Any]:
    """As plain JSON values, equal on every rank.

    page: the byte layout of a page on this rank, without what differs between ranks.
    """
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    on_cpu = vllm_config.device_config.device_type == "cpu"
    stages = parallel.pipeline_parallel_size
    return {
        "format": FORMAT_VERSION,
        "vllm": ".".join(_vllm_version()),
        "model": _model(config, vllm_config),
        "speculative": _fields(vllm_config.speculative_config, _SPECULATIVE),
        "multimodal": _fields(vllm_config.model_config.multimodal_config, _MULTIMODAL),
        "lora": _fields(vllm_config.lora_config, _LORA),
        "kv_cache": {
            "dtype": cache.cache_dtype,
            "unquantized_layers": sorted(getattr(cache, "kv_cache_dtype_skip_layers", ())),
            "layout": getattr(kv_cache_config, "kv_cache_layout", None),
            "page": dict(page),
            "attention": _attention_backends(vllm_config, kv_cache_config),
            "cpu_isa": _cpu_isa() if on_cpu else None,
        },
        "ranks": {
            "tensor": parallel.tensor_parallel_size,
            "pipeline": stages,
            "layers": os.environ.get("VLLM_PP_LAYER_PARTITION") if stages > 1 else None,
        },
        "block_tokens": sizes.block_tokens,
        "chunk_tokens": sizes.chunk_tokens,
        "hash": _hash_identity(cache.prefix_caching_hash_algo, sizes.hash_tokens),
        "integrity": integrity.identity(),
    }


def encoder_fingerprint(
    config: Config, vllm_config: VllmConfig, integrity: Integrity
) -> dict[str, Any]:
    """Everything that changes an encoder's output but the item itself and its adapter.

    Parallel sizes are not in it: every rank has the whole output, whatever computed it.
    """
    import transformers

    model = vllm_config.model_config
    return {
        "format": FORMAT_VERSION,
        "content": "encoder outputs",
        "vllm": ".".join(_vllm_version()),
        # Its processors make what the encoder is given.
        "transformers": transformers.__version__,
        "model": _model(config, vllm_config),
        "processor": _plain(getattr(model, "hf_image_processor_config", None)),
        "multimodal": _fields(model.multimodal_config, _MULTIMODAL),
        "lora": _fields(vllm_config.lora_config, _LORA),
        "integrity": integrity.identity(),
    }


def _model(config: Config, vllm_config: VllmConfig) -> dict[str, Any]:
    model = vllm_config.model_config
    dummy = str(vllm_config.load_config.load_format) == "dummy"
    text = json.dumps(model.hf_config.to_dict(), default=str)
    return {
        "name": config.model_id or f"{model.model}@{model.revision or ''}",
        # What a branch such as "main" meant on the day it was downloaded.
        "commit": getattr(model.hf_config, "_commit_hash", None),
        "code_revision": model.code_revision,
        "weights": None if dummy else _weights(model),
        "dummy_seed": model.seed if dummy else None,
        "config": _spelled(model.hf_config.to_dict()),
        "implementation": str(model.model_impl),
        "class_overrides": _plain(getattr(model, "model_class_overrides", None)),
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "quantization_config": _plain(getattr(model, "quantization_config", None)),
        "disable_sliding_window": model.disable_sliding_window,
        # vLLM scales these by the longest prompt it is told to expect.
        "max_model_len": model.max_model_len if "longrope" in text else None,
    }


def _weights(model: ModelConfig) -> str | None:
    path = getattr(model, "model_weights", "") or model.model
    try:
        return weights_digest(path)
    except OSError as error:
        logger.warning(
            "s3kv cannot look at the weights in %s (%s): if they ever change there, set model_id",
            path,
            error,
        )
        return None


def _attention_backends(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[str]:
    """Two backends are free to lay out one shape differently; the CPU's do."""
    layers = vllm_config.compilation_config.static_forward_context
    names = (n for group in kv_cache_config.kv_cache_groups for n in group.layer_names)
    backends = (getattr(layers.get(name), "attn_backend", None) for name in names)
    return sorted({backend.get_name() for backend in backends if backend is not None})


def _fields(settings: Any, names: Iterable[str]) -> dict[str, Any] | None:
    if settings is None:
        return None
    return {name: _plain(getattr(settings, name, None)) for name in names}


def _spelled(tree: Mapping[str, Any]) -> Any:
    """A model's configuration, so that a difference can be told by its name; a digest if it is
    so long that it would not fit into a message."""
    plain = _plain({k: v for k, v in tree.items() if k not in _VOLATILE})
    text = json.dumps(plain, sort_keys=True).encode()
    return plain if len(text) <= _SPELLED_MAX_BYTES else hashlib.sha256(text).hexdigest()


def _plain(value: Any) -> Any:
    """The same in JSON values. What has none is told by its text, as long as that is the same in
    every process, and by its type otherwise."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in sorted(value.items(), key=_by_text)}
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=str)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    text = str(value)
    return text if " at 0x" not in text else f"a {type(value).__qualname__}"


def _by_text(item: tuple[Any, Any]) -> str:
    return str(item[0])


def _cpu_isa() -> str:
    """The instruction sets that decide how vLLM's CPU attention packs a page."""
    amx = torch.cpu._is_amx_tile_supported() if platform.machine() == "x86_64" else False
    return f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}-amx{int(amx)}"


def _vllm_version() -> tuple[str, str]:
    import vllm

    major, minor = vllm.__version__.split(".")[:2]
    return major, minor


def _hash_identity(algorithm: str, hash_tokens: int) -> dict[str, Any]:
    return {
        "algorithm": algorithm,
        "tokens": hash_tokens,
        "seed": os.environ.get("PYTHONHASHSEED", "vllm-none-hash"),
        # sha256 hashes pickles, which are a matter of the Python version.
        "python": list(sys.version_info[:2]) if algorithm == "sha256" else None,
    }
