"""The shards of ranks, and the ranks whose KV is equal, from what vLLM's configuration says."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from s3kv.connectors.kv_shards import equal_ranks, shard_names
from s3kv.errors import UnsupportedError
from tests.contract.configurations import (
    BLOCK_TOKENS,
    FULL,
    LATENT,
    WINDOW,
    grouping_module,
    groups,
)


def model_of(heads: int | None, layers: int | None, *, use_mla: bool = False) -> Any:
    counts = {"get_total_num_kv_heads": heads, "get_total_num_hidden_layers": layers}
    told = {name: lambda count=count: count for name, count in counts.items()}
    return SimpleNamespace(use_mla=use_mla, **told)


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
    model = model_of(None, 61, use_mla=True)
    assert shard_names(model, 2, 1) == ["h0-0of1-l0-60of61-r0of2", "h0-0of1-l0-60of61-r1of2"]
    assert shard_names(model, 2, 1, 2) == ["h0-0of1-l0-60of61"] * 2
    with_stages = shard_names(model, 2, 2, 2)
    assert [with_stages.index(name) for name in with_stages] == [0, 0, 2, 2]


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
def test_ranks_are_equal_if_all_layers_are(layers: dict[str, Any], equal: int) -> None:
    spec = UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs=layers)
    config = groups(spec)
    replicas = grouping_module().kv_cache_groups_tp_replicas
    config.kv_tp_replicas = replicas(config.kv_cache_groups, 4)
    vllm_config: Any = SimpleNamespace(model_config=SimpleNamespace(use_mla=True))
    assert equal_ranks(vllm_config, config, 4) == equal


@pytest.mark.parametrize("missing", [0, None])
def test_a_model_that_leaves_a_count_out_has_a_name_for_every_rank(missing: int | None) -> None:
    assert len(set(shard_names(model_of(missing, missing), 2, 2))) == 4


def test_a_stage_without_a_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "0,32")
    with pytest.raises(UnsupportedError, match="one has none"):
        shard_names(model_of(8, 32), 1, 2)


ONE_HEAD = replace(FULL, num_kv_heads=1)
UNIFORM = {"num_key_value_heads": 2, "num_hidden_layers": 4, "rope_scaling": {"factor": 8.0}}


def engine(config: dict[str, Any], **changes: Any) -> Any:
    """vLLM's configuration of a model with two KV heads and four layers."""
    model = model_of(2, 4)
    model.using_transformers_backend = lambda: changes.get("transformers", False)
    model.hf_text_config = SimpleNamespace(to_dict=lambda: config)
    return SimpleNamespace(model_config=model, speculative_config=changes.get("draft"))


def test_ranks_with_one_head_are_equal(tiny_config: Any) -> None:
    for layers in ([ONE_HEAD], [ONE_HEAD, replace(WINDOW, num_kv_heads=1)]):
        cache = groups(*layers)
        found = [equal_ranks(engine(UNIFORM), cache, tp_size) for tp_size in (1, 2, 3, 4, 8)]
        assert found == [1, 1, 1, 2, 4]
    names = shard_names(engine(UNIFORM).model_config, 4, 1, 2)
    assert names == ["h0-0of2-l0-3of4"] * 2 + ["h1-1of2-l0-3of4"] * 2
    # As transformers names its heads, of which the tiny model has four.
    assert [equal_ranks(tiny_config, groups(ONE_HEAD), tp_size) for tp_size in (4, 8)] == [1, 2]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(UNIFORM | {"swa_num_key_value_heads": 4}, id="MiMo-V2"),
        pytest.param(UNIFORM | {"num_global_key_value_heads": None}, id="Gemma 4"),
        pytest.param(
            {"num_attention_groups": 2, "attention_other_setting": {"num_attention_groups": 4}},
            id="Step-3.5",
        ),
        pytest.param(
            UNIFORM | {"block_configs": [{"attention": {"n_heads_in_group": 8}}]}, id="Nemotron-NAS"
        ),
        pytest.param(UNIFORM | {"block_configs": [object()]}, id="an object of the model's code"),
        pytest.param({"num_kv_heads": [2, 2, 4, 4]}, id="OpenELM"),
        pytest.param({"hidden_size": 64}, id="none is named"),
    ],
)
def test_layers_whose_heads_may_differ_are_not_taken_for_equal(config: dict[str, Any]) -> None:
    """Each rank has one head of every layer, but neighbours have the same of some layers only."""
    assert equal_ranks(engine(config), groups(ONE_HEAD), 4) == 1


@pytest.mark.parametrize(
    ("changes", "layer"),
    [
        ({"draft": SimpleNamespace()}, ONE_HEAD),
        ({"transformers": True}, ONE_HEAD),
        ({}, replace(FULL, num_kv_heads=2)),
        ({}, replace(ONE_HEAD, dtype=torch.uint8)),
    ],
)
def test_heads_that_others_divide_are_not_taken_for_equal(changes: Any, layer: Any) -> None:
    assert equal_ranks(engine(UNIFORM, **changes), groups(layer), 4) == 1
