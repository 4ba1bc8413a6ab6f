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
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

from lab import models
from s3kv.config import Config
from s3kv.connectors.kv_translate import (
    KVGeometry,
    check_supported,
    equal_ranks,
    geometry,
    grouping_module,
    shard_names,
    writes_after_fences,
    writes_before_fences,
)
from s3kv.errors import ConfigError, UnsupportedError
from tests.contract.configurations import BLOCK_TOKENS, FULL, SHAPE, WINDOW, configured, groups

LATENT = MLAAttentionSpec(
    **SHAPE | {"num_kv_heads": 1},
    **({"max_tp_shards": 1} if hasattr(FULL, "max_tp_shards") else {}),
)
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


def deepseek_v4() -> list[Any]:
    """The KV-cache groups that vLLM 0.32 makes of a small DeepSeek-V4."""

    def spec(kind: type, head: int, block: int, dtype: torch.dtype, page: int, **more: Any) -> Any:
        shape = {"block_size": block, "num_kv_heads": 1, "head_size": head, "dtype": dtype}
        return kind(**shape, page_size_padded=page, **more)

    byte, number = torch.uint8, torch.float32
    window = spec(SlidingWindowMLASpec, 512, 64, byte, 37_440, sliding_window=128)
    sparse = {
        "indexer": spec(MLAAttentionSpec, 132, 256, byte, 8_640, tokens_per_state=4),
        "layer.2": spec(MLAAttentionSpec, 512, 256, byte, 37_440, tokens_per_state=4),
        "layer.3": spec(MLAAttentionSpec, 512, 256, byte, 1_728, tokens_per_state=128),
    }
    return [
        *[window] * 4,
        UniformTypeKVCacheSpecs(block_size=256, kv_cache_specs=sparse),
        spec(SlidingWindowMLASpec, 512, 4, number, 8_640, sliding_window=8),
        spec(SlidingWindowMLASpec, 1_024, 8, number, 32_832, sliding_window=128),
    ]


NO_ADVICE: dict[str, tuple[list[Any], str]] = {
    "deepseek-v4": (deepseek_v4(), r"7 KV-cache groups \(MLAAttentionSpec, SlidingWindowMLASpec"),
    "two-windows": ([FULL, WINDOW, OTHER_WINDOW], "3 KV-cache groups"),
}
"""Windows beside full attention that vLLM cannot keep whole: with the option it does not start."""


@pytest.mark.parametrize(("specs", "says"), NO_ADVICE.values(), ids=NO_ADVICE)
def test_no_advice_that_vllm_would_die_of(tiny_config: Any, specs: list[Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says) as refused:
        check_supported(tiny_config, groups(*specs))
    assert str(refused.value).endswith("Run it without s3kv")
    assert "--disable-hybrid" not in str(refused.value)


def test_vllm_does_not_start_with_windows_of_two_sizes_in_one_group() -> None:
    layers = {"a": FULL, "b": WINDOW, "c": OTHER_WINDOW}
    with pytest.raises(ValueError, match="same window size"):
        grouping_module().unify_hybrid_kv_cache_specs(layers)


def test_the_advice_is_one_that_vllm_can_take(tiny_config: Any) -> None:
    """What is advised is served once vLLM has done it."""
    layers = {"a": FULL, "b": WINDOW}
    with pytest.raises(UnsupportedError, match="--disable-hybrid-kv-cache-manager"):
        check_supported(tiny_config, groups(*layers.values()))
    grouping_module().unify_hybrid_kv_cache_specs(layers)
    check_supported(tiny_config, groups(UniformTypeKVCacheSpecs.from_specs(layers)))


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
    ("spec", "hash_tokens", "writes"),
    [(FULL, BLOCK_TOKENS, False), (MIXED, BLOCK_TOKENS, True), (FULL, 64, True)],
)
@pytest.mark.parametrize("second_runner", [False, True])
def test_which_steps_write_before_their_forward(
    second_runner: bool, spec: Any, hash_tokens: int, writes: bool
) -> None:
    vllm_config: Any = SimpleNamespace(use_v2_model_runner=second_runner)
    sizes = KVGeometry(BLOCK_TOKENS, hash_tokens, 2 * BLOCK_TOKENS)
    step = vllm_config, groups(spec), sizes
    assert writes_before_fences(*step) is (writes and second_runner)
    assert writes_after_fences(*step) is (writes and not second_runner)


def test_layers_of_several_precisions_are_served(tiny_config: Any) -> None:
    check_supported(tiny_config, groups(MIXED))


def test_on_this_machine_fences_come_first(tiny_config: Any) -> None:
    """vLLM's CPU build has the first runner alone."""
    assert not tiny_config.use_v2_model_runner


def test_a_rank_s_shard_says_its_heads_and_layers(tiny_config: Any) -> None:
    model = tiny_config.model_config
    heads, layers = model.get_total_num_kv_heads(), model.get_total_num_hidden_layers()
    whole = f"h0-{heads - 1}of{heads}-l0-{layers - 1}of{layers}"
    assert shard_names(model, 1, 1) == [whole]
    halves = shard_names(model, 2, 2)
    assert len(set(halves)) == 4
    assert halves[3] == (
        f"h{heads // 2}-{heads - 1}of{heads}-l{layers // 2}-{layers - 1}of{layers}"
    )


def test_with_mla_every_rank_holds_one_head_in_an_object_of_its_own_or_in_one_for_all() -> None:
    model: Any = SimpleNamespace(use_mla=True, get_total_num_hidden_layers=lambda: 61)
    assert shard_names(model, 2, 1) == ["h0-0of1-l0-60of61-r0of2", "h0-0of1-l0-60of61-r1of2"]
    assert shard_names(model, 2, 1, 2) == ["h0-0of1-l0-60of61"] * 2
    with_stages = shard_names(model, 2, 2, 2)
    assert [with_stages.index(name) for name in with_stages] == [0, 0, 2, 2]


@pytest.mark.parametrize("says", [True, False], ids=["said by vLLM", "told by the layers"])
@pytest.mark.parametrize(
    ("layers", "equal"),
    [
        ({"a": LATENT, "b": LATENT}, 4),
        # A draft model without MLA, in the group of a model with it.
        ({"a": LATENT, "draft": FULL}, 1),
        ({"a": FULL}, 1),
    ],
    ids=["latent", "latent and a draft", "full"],
)
def test_ranks_are_equal_if_all_layers_are(layers: dict[str, Any], equal: int, says: bool) -> None:
    spec = UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs=layers)
    config = groups(spec)
    if says:
        count = getattr(grouping_module(), "kv_cache_groups_tp_replicas", None)
        if count is None:
            pytest.skip("this version says nothing")
        config.kv_tp_replicas = count(config.kv_cache_groups, 4)
    else:
        config = SimpleNamespace(kv_cache_groups=config.kv_cache_groups)
    assert equal_ranks(config, 4) == equal


@pytest.mark.parametrize("missing", [0, None])
def test_a_model_that_leaves_a_count_out_has_a_name_for_every_rank(missing: int | None) -> None:
    model: Any = SimpleNamespace(
        use_mla=False,
        get_total_num_kv_heads=lambda: missing,
        get_total_num_hidden_layers=lambda: missing,
    )
    assert len(set(shard_names(model, 2, 2))) == 4


def test_a_stage_without_a_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "0,32")
    model: Any = SimpleNamespace(
        use_mla=False, get_total_num_kv_heads=lambda: 8, get_total_num_hidden_layers=lambda: 32
    )
    with pytest.raises(UnsupportedError, match="one has none"):
        shard_names(model, 1, 2)
