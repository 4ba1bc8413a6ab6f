"""KV of which every rank holds all (MLA, or one KV head): one object for all ranks.

In float32, where a token does not depend on how long the hit was. vLLM's kernels for processors
with AMX compute MLA in bf16 alone, so tests in float32 take the backend without AMX everywhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lab import latent, models
from lab.engine import Engine
from tests.system.e2e.conftest import (
    FLOAT32,
    START_AND_STOP_S,
    Rig,
    cached,
    check_tiers,
    in_every_tier,
    tokens,
)
from tests.system.e2e.test_parallel import shards
from tests.system.e2e.test_prefix import zeroed
from tests.system.forms import plain_bytes
from tests.waiting import wait_until

PROMPTS = models.prompts(2, 800)
CHUNKS = 6
HIT = CHUNKS * 128
ARGS: dict[str, Any] = {
    **FLOAT32,
    "attention_backend": "CPU_MLA",
    "prepare": "lab.on_cpu:keep_prefix_cache",
}
ONE_HEAD = replace(models.TINY, name="tiny_one_head", kv_heads=1)


needs_amx = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="a processor without AMX"
)


@pytest.mark.long
@pytest.mark.timeout(3 * START_AND_STOP_S)
@pytest.mark.parametrize(
    ("is_latent", "ranks", "args"),
    [
        pytest.param(True, 2, ARGS, id="latent"),
        pytest.param(False, 2, FLOAT32, id="one head"),
        pytest.param(True, 1, ARGS, id="latent on one rank", marks=pytest.mark.nightly),
        pytest.param(True, 2, {}, id="latent with AMX", marks=[pytest.mark.nightly, needs_amx]),
    ],
)
def test_every_tier_serves_all_ranks_from_one_object(
    rig: Rig, is_latent: bool, ranks: int, args: dict[str, Any]
) -> None:
    model = latent.build(rig.models_dir) if is_latent else models.build(rig.models_dir, ONE_HEAD)

    def engine(connector: dict[str, Any] | None = rig.patient) -> Engine:
        return rig.launch(model, connector, tensor_parallel_size=ranks, **args)

    def in_bucket() -> int:
        return len(rig.objects())

    with engine(None) as plain:
        plain.generate(PROMPTS)
        expected = plain.generate(PROMPTS)
        assert all(hit >= HIT for hit in cached(expected))  # blocks may be of 16 tokens

    with engine() as cold:
        answers = cold.generate(PROMPTS[:1])
        wait_until("the first prompt is in the bucket", lambda: in_bucket() == CHUNKS)
        of_the_first = set(rig.objects())
        answers += cold.generate(PROMPTS[1:])
        assert cached(answers) == [0, 0]
        wait_until("all is in the bucket", lambda: in_bucket() == 2 * CHUNKS)
        cold.reset_prefix_cache()
        from_memory = cold.generate(PROMPTS)
        assert cached(from_memory) == [HIT] * 2
        uploads = cold.metrics()["vllm:s3kv_upload_ok_total"]
    assert tokens(from_memory) == tokens(expected)
    if args.get("dtype") == "float32":
        assert tokens(answers) == tokens(expected)
    assert uploads == 2 * CHUNKS, "the first rank uploads"
    found = shards(rig.s3, rig.bucket)
    assert len(found) == 2 * CHUNKS
    assert {name for shard in found.values() for name in shard} == {"h0-0of1-l0-3of4"}

    rig.s3.change(rig.bucket, zeroed, of_the_first)
    with engine() as warm:
        zeros, read = warm.generate(PROMPTS)
        count = warm.metrics()
    assert zeros.cached_tokens == read.cached_tokens == HIT
    assert read.tokens == expected[1].tokens
    assert zeros.tokens != expected[0].tokens, "what is read does not matter"
    assert count["vllm:s3kv_fetch_bytes_total"] == ranks * plain_bytes(rig.s3, rig.bucket)
    assert count["vllm:s3kv_internal_errors_total"] == 0


@pytest.mark.nightly
@pytest.mark.timeout(4 * START_AND_STOP_S)
def test_on_the_second_generation_runner(rig: Rig) -> None:
    model = latent.build(rig.models_dir)
    prompts = models.prompts(2, 400, seed=5)
    args = ARGS | {"second_runner": True}
    expected = tokens(rig.reference(model, prompts, **args))
    check_tiers(in_every_tier(rig.serve, model, rig.patient, prompts, **args), expected, 384)
