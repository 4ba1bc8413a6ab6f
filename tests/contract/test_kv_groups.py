"""KV-cache groups of vLLM's own objects: which are served, and how they are joined."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

from s3kv.config import Config
from s3kv.connectors.kv_groups import check_groups_are_served, coverages, states_of
from s3kv.connectors.kv_shards import equal_ranks
from s3kv.connectors.kv_translate import KVGeometry, geometry
from s3kv.device.layout import PageLayout
from s3kv.errors import ConfigError, UnsupportedError
from s3kv.planning.group_kinds import FullAttention, LocalAttention, SlidingWindow, States
from tests.contract.configurations import (
    BLOCK_TOKENS,
    FULL,
    LATENT,
    SHAPE,
    WINDOW,
    grouping_module,
    groups,
)

OTHER_WINDOW = dataclasses.replace(WINDOW, sliding_window=256)
LOCAL = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=512)
STATE = MambaSpec(
    block_size=BLOCK_TOKENS,
    shapes=((3, 16), (8, 16)),
    dtypes=(torch.bfloat16, torch.float32),
    mamba_cache_mode="align",
    mamba_type=MambaAttentionBackendEnum.SHORT_CONV,
)
KINDS = MambaAttentionBackendEnum
BOTH = dict.fromkeys("ab", FULL)
PRECISIONS = {"a": FULL, "b": dataclasses.replace(FULL, dtype=torch.float32)}


@pytest.mark.parametrize(
    "specs",
    [
        (FULL,),
        (MLAAttentionSpec(**SHAPE | {"num_kv_heads": 1}),),
        (UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs=BOTH),),
        (dataclasses.replace(FULL, sliding_window=64),),
        (UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs=PRECISIONS),),
        (FULL, WINDOW),
        (WINDOW, WINDOW, FULL, OTHER_WINDOW),
        (LOCAL, LOCAL, FULL),
        (WINDOW,),
        (FULL, FULL),
        (dataclasses.replace(WINDOW, block_size=256), FULL),
    ],
    ids=lambda specs: "-".join(type(spec).__name__ for spec in specs),
)
def test_attention_of_these_kinds_is_served(tiny_config: Any, specs: tuple[Any, ...]) -> None:
    check_groups_are_served(tiny_config, groups(*specs))


@pytest.fixture
def keeps_states(tiny_config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tiny_config.cache_config, "mamba_cache_mode", "align")
    return tiny_config


@pytest.mark.parametrize("kind", ["SHORT_CONV", "GDN_ATTN", "MAMBA2"])
def test_states_are_served_alone_and_beside_attention(keeps_states: Any, kind: str) -> None:
    state = dataclasses.replace(STATE, mamba_type=KINDS[kind])
    for specs in ((state,), (state, state, FULL), (state, WINDOW, FULL)):
        check_groups_are_served(keeps_states, groups(*specs))


@pytest.mark.parametrize(
    "refused",
    [
        ("cache_config", "mamba_cache_mode", "all", "mamba_cache_mode is 'all'.*serves \"align\""),
        ("cache_config", "use_replayssm", True, "with --use-replayssm"),
        (None, "speculative_config", SimpleNamespace(use_eagle=bool), "tokens that are rejected"),
    ],
)
def test_states_that_are_not_in_the_block_that_ends_with_them_are_refused(
    keeps_states: Any, monkeypatch: pytest.MonkeyPatch, refused: tuple[str | None, str, Any, str]
) -> None:
    owner, name, value, reason = refused
    config = getattr(keeps_states, owner) if owner else keeps_states
    monkeypatch.setattr(config, name, value, raising=False)
    with pytest.raises(UnsupportedError, match=reason):
        check_groups_are_served(keeps_states, groups(STATE, FULL))
    check_groups_are_served(keeps_states, groups(FULL))


def test_the_content_of_a_state_is_in_the_fingerprint(keeps_states: Any) -> None:
    """Their pages are bytes."""

    def content(state: Any) -> Any:
        cache = groups(state, FULL, state)
        full, states = coverages(cache, BLOCK_TOKENS)
        assert states_of(keeps_states, cache, full) == {}
        return states_of(keeps_states, cache, states)

    others = (
        dataclasses.replace(STATE, dtypes=(torch.float16, torch.float32)),
        dataclasses.replace(STATE, shapes=((16, 3), (8, 16))),
        dataclasses.replace(STATE, mamba_type=KINDS["GDN_ATTN"]),
    )
    assert len({json.dumps(content(state)) for state in (STATE, *others)}) == 4


def test_states_beside_latent_attention_are_by_rank(keeps_states: Any) -> None:
    """The latent heads are equal on all ranks, and the states are not: a small Kimi Linear."""
    delta = MambaSpec(
        block_size=128,
        shapes=((3, 384), (4, 32, 32)),
        dtypes=(torch.float32, torch.float32),
        page_size_padded=294_912,
        mamba_cache_mode="align",
        mamba_type=KINDS["GDN_ATTN"],
    )
    latent_spec = dataclasses.replace(LATENT, head_size=576, dtype=torch.float32)
    cache = groups(delta, delta, delta, latent_spec)
    check_groups_are_served(keeps_states, cache)
    latent, states = coverages(cache, 128)
    assert (latent.kind, latent.members) == (FullAttention(), (3,))
    assert states.members == (0, 1, 2)
    assert states.kind == States(interval_tokens=4 * 3 * 4 * (3 * 384 + 4 * 32 * 32) // (4 * 576))
    cache.kv_tp_replicas = grouping_module().kv_cache_groups_tp_replicas(cache.kv_cache_groups, 2)
    assert equal_ranks(keeps_states, cache, 2) == 1


def test_an_indexer_is_cached_with_its_latent_attention(tiny_config: Any) -> None:
    """DeepSeek-V3.2: vLLM puts both into one group, with blocks of 64 tokens on a GPU."""
    layers = {
        f"{n}.{name}": dataclasses.replace(LATENT, block_size=64, head_size=head, dtype=dtype)
        for n in range(3)
        for name, head, dtype in (("attn", 576, torch.bfloat16), ("indexer", 132, torch.uint8))
    }
    together = UniformTypeKVCacheSpecs.from_specs(layers)
    cache = KVCacheConfig(4, [], [KVCacheGroupSpec(list(layers), together)])
    check_groups_are_served(tiny_config, cache)
    assert coverages(cache, 128)[0].kind == FullAttention()
    cache.kv_tp_replicas = grouping_module().kv_cache_groups_tp_replicas(cache.kv_cache_groups, 8)
    model = SimpleNamespace(use_mla=True)
    assert equal_ranks(SimpleNamespace(model_config=model), cache, 8) == 8  # type: ignore[arg-type]
    tensors = {
        name: torch.zeros(4, 1, 64, layer.head_size, dtype=layer.dtype)
        for name, layer in layers.items()
    }
    layout = PageLayout.of(tensors, 4, list(layers), blocks_per_chunk=2)
    pages = [(64 * 576 * 2, "BF16"), (64 * 132, "U8")] * 3
    assert [(layer.block_bytes, layer.dtype) for layer in layout.layers] == pages
    assert layout.payload_bytes == 2 * sum(nbytes for nbytes, _ in pages)


MIXED = UniformTypeKVCacheSpecs(block_size=BLOCK_TOKENS, kv_cache_specs={"a": FULL, "b": WINDOW})


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        (
            [FULL, dataclasses.replace(STATE, mamba_type=KINDS["LINEAR"])],
            r"layers of kind MambaSpec \(LINEAR\); s3kv serves full attention",
        ),
        (
            [dataclasses.replace(STATE, mamba_type=KINDS["MAMBA1"]), FULL],
            r"layers of kind MambaSpec \(MAMBA1\); s3kv serves full attention",
        ),
        (
            [SlidingWindowMLASpec(**SHAPE | {"num_kv_heads": 1}, sliding_window=128)],
            "layers of kind SlidingWindowMLASpec",
        ),
        ([MIXED], "different positions are in one KV-cache group"),
        ([], "this model has no KV cache"),
    ],
    ids=["linear", "jamba", "deepseek-v4", "mixed", "none"],
)
def test_other_groups_are_refused_with_the_reason(
    tiny_config: Any, specs: list[Any], reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"{reason}.*Run it without s3kv$"):
        check_groups_are_served(tiny_config, groups(*specs))


def test_windows_that_vllm_keeps_longer_or_with_eagle_are_refused(tiny_config: Any) -> None:
    kept = dataclasses.replace(WINDOW, extra_retained_tokens=3)
    with pytest.raises(UnsupportedError, match="does not cache the prefix of these layers"):
        check_groups_are_served(tiny_config, groups(FULL, kept))
    cache = groups(FULL, WINDOW)
    cache.kv_cache_groups[0].is_eagle_group = True
    with pytest.raises(UnsupportedError, match=r"EAGLE.*--disable-hybrid-kv-cache-manager"):
        check_groups_are_served(tiny_config, cache)
    layers = {"a": FULL, "b": WINDOW}  # and with that option:
    grouping_module().unify_hybrid_kv_cache_specs(layers)
    check_groups_are_served(tiny_config, groups(UniformTypeKVCacheSpecs.from_specs(layers)))


def test_groups_that_need_the_same_positions_share_their_objects() -> None:
    joined = coverages(groups(WINDOW, OTHER_WINDOW, WINDOW, FULL, LOCAL, FULL), 256)
    assert [(c.number, c.kind, c.members) for c in joined] == [
        (0, FullAttention(), (3, 5)),
        (1, SlidingWindow(64), (0, 2)),
        (2, SlidingWindow(256), (1,)),
        (3, LocalAttention(512), (4,)),
    ]
    (full, state) = coverages(groups(STATE, FULL, STATE), 128)
    assert (full.kind, type(state.kind), state.members) == (FullAttention(), States, (0, 2))


@pytest.mark.parametrize(
    ("state_bytes", "layers", "interval"),
    [(4_096, "a", 16), (4_096, "ab", 32), (16, "a", 1), (0, "a", 1)],
    ids=["large", "more-layers", "small", "none"],
)
def test_states_are_saved_after_four_times_their_bytes_of_kv(
    state_bytes: int, layers: str, interval: int
) -> None:
    """The layer with full attention has 1,024 bytes of KV per token here. layers: with states."""
    wide = dataclasses.replace(STATE, shapes=((state_bytes,),), dtypes=(torch.uint8,))
    full = FullAttentionSpec(BLOCK_TOKENS, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)
    cache = groups(wide, full)
    cache.kv_cache_groups[0].layer_names = list(layers)
    _, states = coverages(cache, BLOCK_TOKENS)
    assert states.kind == States(interval_tokens=interval)
    (alone,) = coverages(groups(wide), BLOCK_TOKENS)
    assert alone.kind == States(), "beside which KV?"


def sizes_of(vllm_config: Any, *specs: Any, **settings: Any) -> KVGeometry:
    return geometry(Config(bucket="kv-cache", **settings), vllm_config, groups(*specs))


def test_a_chunk_is_a_whole_number_of_the_blocks_of_every_group(tiny_config: Any) -> None:
    """As in Gemma 4: blocks of 256 tokens with a window, of 128 without."""
    specs = dataclasses.replace(WINDOW, block_size=256), FULL
    sizes = sizes_of(tiny_config, *specs)
    assert (sizes.block_tokens, sizes.hash_tokens, sizes.chunk_tokens) == (256, 128, 256)
    with pytest.raises(ConfigError, match=r"128 tokens here \(for example 256 or 384\)"):
        sizes_of(tiny_config, FULL, chunk_tokens=300)
    for chunk_tokens, near in ((384, "256 or 512"), (128, "256")):
        with pytest.raises(ConfigError) as refused:
            sizes_of(tiny_config, *specs, chunk_tokens=chunk_tokens)
        assert str(refused.value) == (
            f"chunk_tokens is {chunk_tokens}: allowed is a multiple of the KV block size, which is "
            f"256 tokens here, the least common multiple of [128, 256] (for example {near})"
        )


def test_the_kinds_of_layers_shorten_a_chunk(tiny_config: Any) -> None:
    """A prompt's last state is after its last block, and a chunk divides attention's reach."""
    near = dataclasses.replace(LOCAL, attention_chunk_size=384)
    for specs, chunk in (
        ((FULL,), 256),
        ((STATE, FULL), 128),
        ([dataclasses.replace(spec, block_size=1_152) for spec in (STATE, FULL)], 1_152),
        ((FULL, LOCAL), 256),
        ((FULL, near), 128),
    ):
        assert sizes_of(tiny_config, *specs).chunk_tokens == chunk
    with pytest.raises(ConfigError, match="chunk_tokens is 256: allowed is a divisor of 384"):
        sizes_of(tiny_config, FULL, near, chunk_tokens=256)


def test_one_group_with_full_attention_has_a_table_that_only_grows(tiny_config: Any) -> None:
    for specs in ((FULL,), (WINDOW,), (FULL, FULL), (FULL, WINDOW)):
        assert sizes_of(tiny_config, *specs).is_plain == (specs == (FULL,))
