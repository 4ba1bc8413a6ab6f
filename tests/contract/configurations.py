"""vLLM's own configuration objects, as an engine would have them."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from lab.engine import ENGINE_ARGS, ENVIRONMENT
from s3kv.connectors.kv_translate import KVGeometry
from s3kv.planning.group_kinds import Coverage

BLOCK_TOKENS = 128
SHAPE: dict[str, Any] = {
    "block_size": BLOCK_TOKENS,
    "num_kv_heads": 4,
    "head_size": 32,
    "dtype": torch.bfloat16,
}
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=64)
LATENT = MLAAttentionSpec(**SHAPE | {"num_kv_heads": 1}, max_tp_shards=1)
SIZES = KVGeometry(16, 16, 32, (Coverage(16, 32),))
"""Sizes of small chunks, in one group with full attention."""


def grouping_module() -> Any:
    """The module of vLLM that divides layers into groups. It has another name from 0.33 on."""
    try:
        return importlib.import_module("vllm.v1.core.kv_cache_planning")
    except ModuleNotFoundError:
        return importlib.import_module("vllm.v1.core.kv_cache_utils")


def groups(*specs: Any) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=10,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer.{n}"], spec) for n, spec in enumerate(specs)],
    )


def configured(model: Path, **engine_args: Any) -> Any:
    """The VllmConfig an engine of that model would have."""
    args = {name: value for name, value in ENGINE_ARGS.items() if name != "disable_log_stats"}
    # What the CPU platform takes; from 0.33 on the engine asks it, and not the configuration.
    args["block_size"] = BLOCK_TOKENS
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        return EngineArgs(model=str(model), **(args | engine_args)).create_engine_config()
