"""Settings of a whole engine, crossed with the cache: pooling, and very long prompts.

Each is tried by two processes, of which the second has nothing but the bucket. What it answers is
compared with what an engine answers that has hit its own cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lab import models
from lab.engine import Engine
from tests.system.e2e.conftest import START_AND_STOP_S, Serve, at_rest, changed

PROMPTS = models.prompts(3, 400, seed=50)
HIT = 3 * 128

pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * START_AND_STOP_S)]


def test_pooling(tiny: Path, patient: dict[str, Any], serve: Serve) -> None:
    """Embeddings of prompts, of a model that would otherwise generate."""
    args: dict[str, Any] = {"runner": "pooling", "convert": "embed", "dtype": "float32"}
    with serve(tiny, patient, **args) as engine:
        assert embedded(engine, [0] * 3)
        at_rest(engine)
        expected = embedded(engine, [HIT] * 3)
    with serve(tiny, patient, **args) as engine:
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


def test_a_prompt_of_32_000_tokens(models_dir: Path, patient: dict[str, Any], serve: Serve) -> None:
    """Computed in steps of 8,192 tokens, and read in one. In bf16: the hits are equally long."""
    model = models.build(models_dir, models.LONG)
    prompts = models.prompts(1, 32_000, seed=52)
    args = {"max_model_len": 32_200, "max_num_batched_tokens": 8_192}
    chunked = changed(patient, chunk_tokens=1_024)
    hit = 32_000 // 1_024 * 1_024
    with serve(model, chunked, **args) as engine:
        engine.generate(prompts)
        assert at_rest(engine)["upload_ok"] == hit // 1_024
        engine.reset_prefix_cache()
        (from_memory,) = engine.generate(prompts)
        assert from_memory.cached_tokens == hit
        engine.limit_hits(hit)
        (expected,) = engine.generate(prompts)
    assert expected.cached_tokens == hit
    with serve(model, chunked, **args) as engine:
        (answer,) = engine.generate(prompts)
        assert at_rest(engine)["hit_tokens_bucket"] == hit
    assert answer.cached_tokens == hit
    assert answer.tokens == from_memory.tokens == expected.tokens
