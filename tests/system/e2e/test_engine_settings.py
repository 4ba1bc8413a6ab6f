"""Settings of a whole engine, crossed with the cache: fp8, pooling, long prompts, parallel engines.

Each is tried by two processes, of which the second has nothing but the bucket. What it answers is
compared with what an engine answers that has hit its own cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lab import models
from lab.engine import Engine
from tests.system.e2e.conftest import (
    FLOAT32,
    START_AND_STOP_S,
    Rig,
    answered,
    at_rest,
    cached,
    changed,
    slabs,
)
from tests.waiting import wait_until

PROMPTS = models.prompts(3, 400, seed=50)
HIT = 3 * 128

pytestmark = pytest.mark.timeout(2 * START_AND_STOP_S)


@pytest.mark.long
@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's fp8 KV cache on a CPU needs AVX-512"
)
def test_fp8_kv_cache(rig: Rig) -> None:
    """In bf16: the hits are equally long."""
    args = {"kv_cache_dtype": "fp8"}
    expected = rig.reference(rig.tiny, PROMPTS, **args)
    for hit in (0, HIT):
        with rig.serve(rig.tiny, rig.patient, **args) as engine:
            assert cached(engine.generate(PROMPTS)) == [hit] * 3
            done = at_rest(engine)
            engine.reset_prefix_cache()
            assert answered(engine.generate(PROMPTS)) == answered(expected)
    assert done["fetch_ok"] == 3 * 3
    # One byte for each number, and not two.
    assert done["load_bytes"] == 3 * HIT * models.TINY.kv_bytes_per_token // 2


@pytest.mark.long
def test_pooling(rig: Rig) -> None:
    """Embeddings of prompts, of a model that would otherwise generate."""
    args: dict[str, Any] = {"runner": "pooling", "convert": "embed", **FLOAT32}
    with rig.serve(rig.tiny, rig.patient, **args) as engine:
        assert embedded(engine, [0] * 3)
        at_rest(engine)
        expected = embedded(engine, [HIT] * 3)
    with rig.serve(rig.tiny, rig.patient, **args) as engine:
        from_bucket = embedded(engine, [HIT] * 3)
        assert at_rest(engine)["hit_tokens_bucket"] == 3 * HIT
        engine.reset_prefix_cache()
        from_memory = embedded(engine, [HIT] * 3)
    for vectors in (from_bucket, from_memory):
        for vector, wanted in zip(vectors, expected, strict=True):
            assert vector == pytest.approx(wanted, abs=1e-5)


def embedded(engine: Engine, hits: Sequence[int]) -> list[list[float]]:
    replies = engine.call("tests.system.e2e.inside_requests:embed", prompts=PROMPTS)
    assert [reply["cached"] for reply in replies] == hits
    return [reply["embedding"] for reply in replies]


@pytest.mark.nightly
def test_a_prompt_of_32_000_tokens(rig: Rig) -> None:
    """Computed in steps of 8,192 tokens, and read in one. In bf16: the hits are equally long."""
    model = models.build(rig.models_dir, models.LONG)
    prompts = models.prompts(1, 32_000, seed=52)
    args = {"max_model_len": 32_200, "max_num_batched_tokens": 8_192}
    chunked = changed(rig.patient, chunk_tokens=1_024)
    hit = 32_000 // 1_024 * 1_024
    with rig.serve(model, chunked, **args) as engine:
        engine.generate(prompts)
        assert at_rest(engine)["upload_ok"] == hit // 1_024
        engine.reset_prefix_cache()
        (from_memory,) = engine.generate(prompts)
        assert from_memory.cached_tokens == hit
        engine.limit_hits(hit)
        (expected,) = engine.generate(prompts)
    assert expected.cached_tokens == hit
    with rig.serve(model, chunked, **args) as engine:
        (answer,) = engine.generate(prompts)
        assert at_rest(engine)["hit_tokens_bucket"] == hit
    assert answer.cached_tokens == hit
    assert answer.tokens == from_memory.tokens == expected.tokens


@pytest.mark.long
def test_two_data_parallel_engines_share_the_bucket(rig: Rig) -> None:
    """Each has a worker with an I/O process and a slab of its own, and what one has computed the
    next two read, whichever is asked."""
    prompts = models.prompts(6, 400, seed=53)
    expected = rig.truth(prompts)
    for hit in (0, HIT):
        with rig.launch(rig.tiny, rig.patient, data_parallel_size=2, **FLOAT32) as engine:
            assert len(engine.io_processes()) == 2
            mapped = Counter(slab for process in engine.processes() for slab in slabs(process))
            assert sorted(mapped.values()) == [2, 2], "a worker and its I/O process map a slab"
            assert answered(engine.generate(prompts, concurrency=6)) == ([hit] * 6, expected)
            wait_until("all is in the bucket", lambda: len(rig.objects()) == 6 * 3)
            assert engine.metrics()["vllm:s3kv_internal_errors_total"] == 0
