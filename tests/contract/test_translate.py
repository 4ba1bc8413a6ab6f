"""What s3kv serves, refuses, and takes for the same, told by vLLM's own configuration objects."""

from __future__ import annotations

import dataclasses
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
    UniformTypeKVCacheSpecs,
)

from lab import models
from lab.engine import ENGINE_ARGS, ENVIRONMENT
from s3kv.config import Config
from s3kv.connectors.translate import check_supported, fingerprint, geometry
from s3kv.errors import ConfigError, UnsupportedError
from s3kv.objects.keys import fingerprint_digest

BLOCK_TOKENS = 128
SHAPE: dict[str, Any] = {
    "block_size": BLOCK_TOKENS,
    "num_kv_heads": 4,
    "head_size": 32,
    "dtype": torch.bfloat16,
}
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=64)


def groups(*specs: Any) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=10,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer.{n}"], spec) for n, spec in enumerate(specs)],
    )


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def configured(model: Path, **engine_args: Any) -> Any:
    """The VllmConfig an engine of that model would have."""
    args = {name: value for name, value in ENGINE_ARGS.items() if name != "disable_log_stats"}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        return EngineArgs(model=str(model), **(args | engine_args)).create_engine_config()


@pytest.fixture(scope="session")
def tiny_config(directory: Path) -> Any:
    return configured(models.build(directory, models.TINY))


# ---------------------------------------------------------------------------- what is served


@pytest.mark.parametrize(
    "spec",
    [
        FULL,
        MLAAttentionSpec(**SHAPE | {"num_kv_heads": 1}),
        UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs={"a": FULL, "b": FULL}),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_full_attention_is_served(tiny_config: Any, spec: Any) -> None:
    check_supported(tiny_config, groups(spec))


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        ((FULL, WINDOW), "2 KV-cache groups.*FullAttentionSpec, SlidingWindowSpec"),
        ((WINDOW,), "layers of kind SlidingWindowSpec"),
        ((dataclasses.replace(FULL, sliding_window=64),), "sliding-window layers"),
        (
            (
                UniformTypeKVCacheSpecs(
                    block_size=BLOCK_TOKENS, kv_cache_specs={"a": FULL, "b": WINDOW}
                ),
            ),
            "layers of kind SlidingWindowSpec",
        ),
    ],
    ids=["hybrid", "sliding", "window", "uniform"],
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


# ----------------------------------------------------------------------- what is the same


def digest(vllm_config: Any, page: dict[str, Any] | None = None, **settings: Any) -> str:
    config = Config(bucket="kv-cache", **settings)
    cache = groups(FULL)
    sizes = geometry(config, vllm_config, cache)
    return fingerprint_digest(
        fingerprint(config, vllm_config, cache, sizes, page or {"layers": []})
    )


def test_the_same_model_is_the_same(directory: Path, tiny_config: Any) -> None:
    again = configured(models.build(directory, models.TINY))
    assert digest(again) == digest(tiny_config)


def test_what_changes_the_bytes_changes_the_namespace(directory: Path, tiny_config: Any) -> None:
    model = models.build(directory, models.TINY)
    other_seed = configured(models.build(directory, models.TINY, seed=1))
    others = {
        "seed, by the path": digest(other_seed),
        "shape": digest(configured(models.build(directory, models.FAT))),
        "dtype": digest(configured(model, dtype="float32")),
        "rope": digest(configured(model, hf_overrides={"rope_theta": 20_000.0})),
        "hash": digest(configured(model, prefix_caching_hash_algo="sha256_cbor")),
        "model_id": digest(tiny_config, model_id="prod"),
        "chunk": digest(tiny_config, chunk_tokens=512),
        "page": digest(tiny_config, page={"layers": [{"shape": [1]}]}),
    }
    assert digest(tiny_config) not in others.values()
    assert len(set(others.values())) == len(others)


def test_a_model_id_stands_for_the_path_only(directory: Path, tiny_config: Any) -> None:
    elsewhere = configured(models.build(directory / "elsewhere", models.TINY))
    fat = configured(models.build(directory, models.FAT))
    assert digest(elsewhere) != digest(tiny_config)
    assert digest(elsewhere, model_id="prod") == digest(tiny_config, model_id="prod")
    assert digest(fat, model_id="prod") != digest(tiny_config, model_id="prod")


def test_the_hash_seed_is_part_of_it(tiny_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    without = digest(tiny_config)
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert digest(tiny_config) != without
