"""What s3kv serves and refuses, told by vLLM's own configuration objects."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    MambaSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from lab import models
from s3kv.config import Config
from s3kv.connectors.translate import (
    KVGeometry,
    check_supported,
    geometry,
    writes_before_fences,
)
from s3kv.errors import ConfigError, UnsupportedError
from tests.contract.configurations import BLOCK_TOKENS, FULL, SHAPE, WINDOW, configured, groups

OTHER_WINDOW = dataclasses.replace(WINDOW, sliding_window=256)
MAMBA = MambaSpec(block_size=BLOCK_TOKENS, shapes=((16, 16),), dtypes=(torch.float32,))

# ---------------------------------------------------------------------------- what is served


@pytest.mark.parametrize(
    "spec",
    [
        FULL,
        MLAAttentionSpec(**SHAPE | {"num_kv_heads": 1}),
        UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs={"a": FULL, "b": FULL}),
        dataclasses.replace(FULL, sliding_window=64),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_full_attention_is_served(tiny_config: Any, spec: Any) -> None:
    check_supported(tiny_config, groups(spec))


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        (
            (FULL, WINDOW),
            "2 KV-cache groups.*FullAttentionSpec, SlidingWindowSpec.*--disable-hybrid-kv-cache",
        ),
        ((FULL, MAMBA), r"2 KV-cache groups.*FullAttentionSpec, MambaSpec[^-]*$"),
        ((WINDOW, OTHER_WINDOW), r"2 KV-cache groups.*\(SlidingWindowSpec\)[^-]*$"),
        ((WINDOW,), "layers of kind SlidingWindowSpec"),
        (
            (
                UniformTypeKVCacheSpecs(
                    block_size=BLOCK_TOKENS, kv_cache_specs={"a": FULL, "b": WINDOW}
                ),
            ),
            "layers of kind SlidingWindowSpec",
        ),
    ],
    ids=["windows", "mamba", "two-windows", "window", "uniform"],
)
def test_other_attention_is_refused_with_the_reason(
    tiny_config: Any, specs: tuple[Any, ...], reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        check_supported(tiny_config, groups(*specs))


def test_random_hashes_are_refused(
    tiny_config: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.build(directory, models.TINY)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match=r"prefix_caching_hash_algo is 'xxhash'.*PYTHONHASHSEED"):
        check_supported(configured(model, prefix_caching_hash_algo="xxhash"), groups(FULL))
    check_supported(tiny_config, groups(FULL))
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    check_supported(configured(model, prefix_caching_hash_algo="xxhash"), groups(FULL))


def test_scales_of_one_engines_own_are_refused(
    tiny_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_config.cache_config, "calculate_kv_scales", True, raising=False)
    with pytest.raises(UnsupportedError, match="calculate_kv_scales"):
        check_supported(tiny_config, groups(FULL))


@pytest.mark.parametrize(
    ("chunk_tokens", "near"), [(100, "128"), (300, "256 or 384"), (129, "128 or 256")]
)
def test_a_chunk_is_a_multiple_of_the_block(tiny_config: Any, chunk_tokens: int, near: str) -> None:
    config = Config(bucket="kv-cache", chunk_tokens=chunk_tokens)
    with pytest.raises(ConfigError) as caught:
        geometry(config, tiny_config, groups(FULL))
    said = str(caught.value)
    assert f"chunk_tokens is {chunk_tokens}: allowed is a multiple" in said
    assert "128 tokens here" in said
    assert near in said


@pytest.mark.parametrize(("block", "chunk"), [(32, 256), (96, 288), (384, 384), (1024, 1024)])
def test_a_chunk_is_about_256_tokens_by_default(directory: Path, block: int, chunk: int) -> None:
    vllm_config = configured(models.build(directory, models.TINY), block_size=block)
    cache = groups(dataclasses.replace(FULL, block_size=block))
    sizes = geometry(Config(bucket="kv-cache"), vllm_config, cache)
    assert (sizes.block_tokens, sizes.chunk_tokens) == (block, chunk)


# ---------------------------------------------------------------------------- the order of a step

MIXED = UniformTypeKVCacheSpecs(
    block_size=BLOCK_TOKENS,
    kv_cache_specs={"a": FULL, "b": dataclasses.replace(FULL, dtype=torch.float32)},
)


@pytest.mark.parametrize(
    ("second_runner", "spec", "hash_tokens", "before"),
    [
        (False, MIXED, 64, False),
        (True, FULL, BLOCK_TOKENS, False),
        (True, MIXED, BLOCK_TOKENS, True),
        (True, FULL, 64, True),
    ],
)
def test_which_steps_write_before_their_fences(
    second_runner: bool, spec: Any, hash_tokens: int, before: bool
) -> None:
    vllm_config: Any = SimpleNamespace(use_v2_model_runner=second_runner)
    sizes = KVGeometry(BLOCK_TOKENS, hash_tokens, 2 * BLOCK_TOKENS)
    assert writes_before_fences(vllm_config, groups(spec), sizes) is before


def test_layers_of_several_precisions_are_served(tiny_config: Any) -> None:
    check_supported(tiny_config, groups(MIXED))


def test_on_this_machine_fences_come_first(tiny_config: Any) -> None:
    """vLLM's CPU build has the first runner alone."""
    assert not tiny_config.use_v2_model_runner
