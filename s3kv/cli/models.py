"""What a model's KV weighs, read off its config.json, without loading anything of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from s3kv.config import Config
from s3kv.errors import ConfigError, UnsupportedError
from s3kv.objects.codec import ALIGN_BYTES, ChunkFormat
from s3kv.types import TensorSpec, default_chunk_tokens

_NESTED = ("text_config", "llm_config", "language_config")
"""Where a multi-modal model keeps what its language model is."""
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32", "float": "F32"}
_QUANTISED = ("fp8", "fp8_e4m3", "fp8_e5m2")
_WINDOWED = {"sliding_attention", "chunked_attention"}
KV_DTYPES = ("auto", "bfloat16", "float16", *_QUANTISED)
"""What `--kv-cache-dtype` may be here. auto: as the model's weights."""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How an engine is split over workers: vLLM's options of these names."""

    tensor: int = 1
    pipeline: int = 1


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV of one worker. content: numbers per token, layer and head, keys with values.
    has_windows: some of the model's layers look at a window of tokens.
    """

    layers: int
    heads: int
    content: int
    dtype: str
    has_windows: bool = False

    @property
    def bytes_per_token(self) -> int:
        return TensorSpec("", self.dtype, (self.layers, self.heads, self.content)).nbytes

    def __str__(self) -> str:
        return f"{self.layers} layers × {self.heads} KV heads × {self.content} {self.dtype}"


@dataclass(frozen=True, slots=True)
class HostFit:
    """What of a model fits into host memory. Sizes are of one worker; an object fills a slot."""

    chunk_tokens: int
    slot_bytes: int
    chunks: int

    @property
    def tokens(self) -> int:
        return self.chunks * self.chunk_tokens


def read_shape(file: Path, parallel: Parallelism, kv_dtype: str = "auto") -> KVShape:
    """The KV of one worker of the model whose config.json this is.

    Raises `ConfigError` for a file that does not tell, `UnsupportedError` for a model that s3kv
    would refuse at start as far as this file shows it.
    """
    try:
        held = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--model-config {str(file)!r} cannot be read as JSON: {error}"
        ) from error
    if not isinstance(held, dict):
        raise ConfigError(f"--model-config {str(file)!r} is no JSON object")
    model = next((held[name] for name in _NESTED if isinstance(held.get(name), dict)), held)
    has_windows = _has_windows(model)
    dtype = _dtype(model, held, kv_dtype)
    layers = -(-_count(model, "num_hidden_layers", "n_layer") // parallel.pipeline)
    if "kv_lora_rank" in model:
        latent, rope = _count(model, "kv_lora_rank"), _count(model, "qk_rope_head_dim")
        return KVShape(layers, 1, latent + rope, dtype, has_windows)  # every worker holds all of it
    heads = _count(model, "num_attention_heads", "n_head")
    kv_heads = model.get("num_key_value_heads") or heads
    width = model.get("head_dim") or _count(model, "hidden_size", "n_embd") // heads
    return KVShape(layers, max(1, kv_heads // parallel.tensor), 2 * width, dtype, has_windows)


def fit(config: Config, shape: KVShape, block_tokens: int) -> HostFit:
    """How many chunks `host_bytes` holds. Raises `ConfigError` when it holds none."""
    chunk_tokens = config.chunk_tokens or default_chunk_tokens(block_tokens)
    if chunk_tokens % block_tokens:
        raise ConfigError(
            f"chunk_tokens is {chunk_tokens}: allowed is a multiple of the KV block size, which is "
            f"{block_tokens} tokens here (--block-size)"
        )
    page = (chunk_tokens // block_tokens, shape.heads, block_tokens, shape.content)
    names = (f"model.layers.{number}.self_attn.attn" for number in range(shape.layers))
    tensors = (TensorSpec(name, shape.dtype, page) for name in names)
    layout = ChunkFormat("0" * 32, tuple(tensors), 0, "t0of1-p0of1")
    slot_bytes = -(-layout.object_bytes // ALIGN_BYTES) * ALIGN_BYTES
    found = HostFit(chunk_tokens, slot_bytes, config.host_bytes // slot_bytes)
    if found.chunks < 1:
        raise ConfigError(
            f"host_bytes is {config.host_bytes}: allowed is at least one chunk, which is "
            f"{slot_bytes} bytes for this model (or make chunk_tokens smaller)"
        )
    return found


def _count(model: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = model.get(name)
        if isinstance(value, int) and value > 0:
            return value
    raise ConfigError(f"--model-config has no {names[0]}: is it a language model's config.json?")


def _dtype(model: Mapping[str, Any], held: Mapping[str, Any], kv_dtype: str) -> str:
    if kv_dtype in _QUANTISED:
        return "U8"
    said = kv_dtype
    if kv_dtype == "auto":
        said = str(
            next((m[n] for m in (model, held) for n in ("dtype", "torch_dtype") if n in m), "")
        )
    if said not in _DTYPES:
        raise ConfigError(
            f"--model-config says {said!r} of its dtype: give --kv-cache-dtype as the engine has it"
        )
    return _DTYPES[said]


def _has_windows(model: Mapping[str, Any]) -> bool:
    """A file without `layer_types` does not tell whether all of its layers have the window."""
    kinds = set(model.get("layer_types") or ())
    others = kinds - {"full_attention"}
    if others - _WINDOWED or (kinds and others == kinds):
        raise UnsupportedError(
            f"this model has layers of the kind {', '.join(sorted(others))}; s3kv serves full "
            "attention, and beside it layers with a window"
        )
    if kinds:
        return bool(others)
    return bool(model.get("sliding_window")) and bool(model.get("use_sliding_window", True))
