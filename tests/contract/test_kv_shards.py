"""Ranks of different sizes: which share, and that they read what vLLM's mapping says is there."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from lab import models
from s3kv.config import Config
from s3kv.connectors.kv_shards import equal_ranks, shard_names, shared_pages
from s3kv.connectors.kv_translate import geometry
from s3kv.connectors.kv_worker import WorkerSide
from s3kv.device.layout import PageLayout
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.rearranging import Pages, rearrangements
from s3kv.objects.shards import Shard, covers
from s3kv.place import Place
from tests.contract.configurations import BLOCK_TOKENS, FULL, LATENT, WINDOW, configured, groups
from tests.contract.test_equal_ranks import model_of

CHUNK_BLOCKS = 2
NUM_BLOCKS = 3


def cache_of(spec: Any, order: str, blocks: int = NUM_BLOCKS) -> torch.Tensor:
    """A layer's cache as vLLM registers it: [blocks, heads, tokens, content], laid out so."""
    content = spec.head_size * (1 if isinstance(spec, MLAAttentionSpec) else 2)
    sizes = {"H": spec.num_kv_heads, "N": spec.block_size, "C": content}
    cache = torch.zeros(blocks, *(sizes[d] for d in order), dtype=spec.dtype)
    return cache.permute(0, *(1 + order.index(d) for d in "HNC"))


def layout_of(specs: dict[str, Any], order: str) -> PageLayout:
    caches = {name: cache_of(spec, order) for name, spec in specs.items()}
    return PageLayout.of(caches, NUM_BLOCKS, list(specs), CHUNK_BLOCKS)


@dataclass(frozen=True)
class Rank:
    """A rank as vLLM's mapping sees it, and as s3kv does."""

    shard: Shard
    form: ChunkFormat
    mapping: Any

    def object(self, canonical: Sequence[bytes]) -> bytes:
        """The rank's object of blocks whose canonical pages are these: by vLLM's mapping alone."""
        data = bytearray(self.form.header_bytes)
        for page in canonical:
            local = bytearray(self.mapping.local_page_size_bytes)
            for run in self.mapping.runs:
                for i in range(run.num_fragments):
                    to, of = run.local_offset, run.canonical_offset
                    to, of = to + i * run.local_stride, of + i * run.canonical_stride
                    local[to : to + run.fragment_size] = page[of : of + run.fragment_size]
            data += local
        return bytes(data)


def rank_of(derive: Any, spec: Any, order: str, total: int, tp_size: int, rank: int) -> Rank:
    latent = isinstance(spec, MLAAttentionSpec)
    if not latent:
        spec = replace(spec, num_kv_heads=max(1, total // tp_size))
    parallel = SimpleNamespace(
        tensor_parallel_size=tp_size,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
        cp_kv_cache_interleave_size=1,
        world_size=tp_size,
        rank=rank,
    )
    model = model_of(total, 1, use_mla=latent)
    cache_config = groups(spec)
    cache_config.num_blocks = NUM_BLOCKS
    caches = {"layer.0": cache_of(spec, order)}
    vllm_config = SimpleNamespace(parallel_config=parallel, model_config=model)
    mapping = derive(vllm_config, cache_config, caches)["layer.0"]
    assert mapping.parallelism_agnostic, "vLLM's mapping does not know this page"
    equal = tp_size if latent else max(1, tp_size // total)
    name = shard_names(model, tp_size, 1, equal)[rank]
    part = layout_of({"layer.0": spec}, order).part("g0")
    return Rank(Shard.parse(name), ChunkFormat("0" * 32, (part,), 0, name), mapping)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    heads=st.integers(1, 8),
    sizes=st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8, 16]), st.sampled_from([1, 2, 3, 4, 8])),
    order=st.sampled_from(["HNC", "NHC"]),
    tokens=st.sampled_from([2, 4, 16]),
    head_size=st.sampled_from([1, 2, 8]),
    kind=st.sampled_from([FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 2**32),
)
def test_ranks_read_of_others_what_vllm_says_they_hold(
    heads: int,
    sizes: tuple[int, int],
    order: str,
    tokens: int,
    head_size: int,
    kind: Any,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """For random heads, ranks, replicas, layouts and kinds of layers."""
    mapping = pytest.importorskip(
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping"
    )
    derive = mapping.derive_canonical_mappings
    latent = kind is MLAAttentionSpec
    total = 1 if latent else heads
    if any(total % tp and tp % total for tp in sizes):
        return
    like: Any = LATENT if latent else FULL if kind is FullAttentionSpec else WINDOW
    size = {"head_size": 2 * head_size} | ({} if latent else {"head_size_v": 2 * head_size})
    spec = replace(like, block_size=tokens, dtype=dtype, **size)
    readers, writers = (
        [rank_of(derive, spec, order, total, tp, rank) for rank in range(tp)] for tp in sizes
    )
    rng = random.Random(seed)
    nbytes = readers[0].mapping.canonical_page_size_bytes
    assert {rank.mapping.canonical_page_size_bytes for rank in readers + writers} == {nbytes}
    pages = [rng.randbytes(nbytes) for _ in range(CHUNK_BLOCKS)]
    stored = {rank.shard: rank for rank in writers}
    for reader in readers:
        if reader.shard in stored:  # then it is asked for by its own name
            assert stored[reader.shard].object(pages) == reader.object(pages)
            assert stored[reader.shard].form == reader.form
            continue
        (cover,) = covers(reader.shard, stored)
        found = rearrangements(reader.form, reader.shard, cover, Pages(order))
        made = Place.of(bytearray(reader.form.object_bytes), reader.form.header_bytes)
        for part, shard in zip(found, cover, strict=True):
            assert part.format == stored[shard].form
            part.apply(Place.of(stored[shard].object(pages), part.format.header_bytes), made)
        assert bytes(made) == reader.object(pages)


class Engine:
    """An engine of the tiny model (4 heads, 4 layers) of some size."""

    def __init__(self, vllm_config: Any, spec: Any = FULL, order: str = "HNC") -> None:
        self.vllm = vllm_config
        parallel = vllm_config.parallel_config
        tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        latent = isinstance(spec, MLAAttentionSpec)
        self.spec = spec if latent else replace(spec, num_kv_heads=max(1, 4 // tp))
        self.order = order
        self.cache = groups(self.spec)
        equal = tp if latent else equal_ranks(vllm_config, self.cache, tp)
        self.shards = shard_names(vllm_config.model_config, tp, pp, equal)
        self.cache.kv_cache_layout = {"HNC": "LBHNC", "NHC": "LBNHC"}[order]

    def layouts(self, rank: int) -> dict[int, PageLayout]:
        names = [f"model.layers.{number}.attn" for number in Shard.parse(self.shards[rank]).layers]
        return {0: layout_of(dict.fromkeys(names, self.spec), self.order)}

    def pages(self, rank: int = 0) -> Pages | None:
        return shared_pages(self.vllm, self.cache, self.layouts(rank), self.shards[rank])

    def identity(self, rank: int = 0, *, shares: bool = True) -> dict[str, Any]:
        config = Config(bucket="bkt", chunk_tokens=CHUNK_BLOCKS * BLOCK_TOKENS, share_ranks=shares)
        side = WorkerSide(config, self.vllm, self.cache, geometry(config, self.vllm, self.cache))
        pages = self.pages(rank) if shares else None
        return side._identity(self.layouts(rank), pages, self.shards[rank])


@pytest.fixture
def sized(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the engine of a size: on a GPU, where either order of pages occurs."""
    vllm_config = configured(models.build(directory, models.TINY))

    def make(tp: int = 1, pp: int = 1, **kind: Any) -> Engine:
        parallel = vllm_config.parallel_config.__dict__
        monkeypatch.setitem(parallel, "tensor_parallel_size", tp)
        monkeypatch.setitem(parallel, "pipeline_parallel_size", pp)
        return Engine(vllm_config, **kind)

    monkeypatch.setitem(vllm_config.device_config.__dict__, "device_type", "cuda")
    return make


ANY_SIZE = {"tensor": "any", "pipeline": "any", "layers": None}


def refused(engine: Engine, caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    assert engine.pages() is None
    return caplog.text


def test_sizes_share_a_namespace_for_each_order(sized: Any) -> None:
    """Also where ranks have one head each, whose place in memory cannot be seen."""
    assert sized().pages() == Pages("HNC", "model.layers.{}.attn")
    namespaces = [sized(order=order).identity() for order in ("HNC", "NHC")]
    assert namespaces[0] != namespaces[1]
    for order, one in zip(("HNC", "NHC"), namespaces, strict=True):
        assert one["ranks"] == ANY_SIZE
        for tp, pp in ((2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 4)):
            engine = sized(tp, pp, order=order)
            for rank in (0, tp * pp - 1):
                assert engine.identity(rank) == one, (tp, pp, rank)


@pytest.mark.parametrize("order", ["HNC", "NHC"])
def test_latent_attention_has_one_shard_for_all_tensor_ranks(
    sized: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, order: str
) -> None:
    """Of any size, in one namespace. On a CPU, vLLM lays its pages out with tokens outermost."""
    monkeypatch.setattr(type(sized().vllm.model_config), "use_mla", True)
    one = sized(spec=LATENT, order=order).identity()
    assert one["ranks"] == ANY_SIZE
    for tp, pp in ((2, 1), (8, 1), (1, 2), (2, 2)):
        engine = sized(tp, pp, spec=LATENT, order=order)
        assert set(engine.shards[:tp]) == {"h0-0of1-l0-3of4" if pp == 1 else "h0-0of1-l0-1of4"}
        assert engine.identity(tp * pp - 1) == one, (tp, pp)
    engine = sized(spec=LATENT, order="NHC")
    monkeypatch.setitem(engine.vllm.device_config.__dict__, "device_type", "cpu")
    assert "packed" in refused(engine, caplog)


def test_without_sharing_there_is_a_namespace_for_each_size(sized: Any) -> None:
    sizes = ((1, 1), (2, 1), (1, 2), (2, 2))
    found = [sized(*size).identity(shares=False) for size in sizes]
    assert [(one["ranks"]["tensor"], one["ranks"]["pipeline"]) for one in found] == [*sizes]
    assert found[0] != sized().identity()


class Packed(FullAttentionSpec):
    pass


@pytest.mark.parametrize(
    "case",
    [
        ({"spec": replace(FULL, dtype=torch.uint8)}, {}, "dtype U8"),
        ({}, {"layout": None}, "names no layout"),
        ({}, {"layout": "LBNHC"}, "has pages HNC"),  # the caches are laid out in another way
        ({"tp": 2}, {"shards": ["h0-3of4-l0-3of4"] * 2}, "not a whole share"),
        ({}, {"shards": ["h0-1of2-l0-3of4"]}, "not a whole share"),
        ({"tp": 8}, {"shards": [f"h0-0of4-l0-3of4-r{n}of2" for n in (0, 1)]}, "not a whole share"),
        (
            {"tp": 2},
            {"shards": ["h0-1of4-l0-3of4"] * 2, "spec": replace(FULL, num_kv_heads=4)},
            r"has pages HNC \(4,",
        ),
        ({}, {"cache": groups(Packed(**vars(FULL)))}, "kind Packed"),
        ({}, {"vllm": ("", "speculative_config", SimpleNamespace())}, "draft"),
        ({"order": "NHC"}, {"vllm": ("device_config", "device_type", "cpu")}, "packed"),
        ({}, {"environment": "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT"}, "SHUFFLE"),
    ],
)
def test_pages_that_cannot_be_divided_by_heads_are_refused_with_the_reason(
    sized: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, case: Any
) -> None:
    made, changed, reason = case
    engine = sized(**made)
    for name, value in changed.items():
        if name == "environment":
            monkeypatch.setenv(value, "1")
        elif name == "layout":
            engine.cache.kv_cache_layout = value
        elif name == "vllm":
            owner = getattr(engine.vllm, value[0]) if value[0] else engine.vllm
            monkeypatch.setitem(owner.__dict__, *value[1:])
        else:
            setattr(engine, name, value)
    assert re.search(reason, refused(engine, caplog))


def test_a_cpus_pages_by_heads_are_shared(sized: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sized()
    monkeypatch.setitem(engine.vllm.device_config.__dict__, "device_type", "cpu")
    assert engine.pages() is not None


def test_stages_stay_apart_where_another_stages_layers_are_not_known(sized: Any) -> None:
    """With several groups of layers, the namespace keeps the stages and loses the tensor size."""
    engine = sized(2)
    layouts = {0: engine.layouts(0)[0], 1: engine.layouts(0)[0]}
    assert shared_pages(engine.vllm, engine.cache, layouts, engine.shards[0]) == Pages("HNC", "")
