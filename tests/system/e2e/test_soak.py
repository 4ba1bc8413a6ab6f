"""Everything at once for a while, and the same thing again and again."""

from __future__ import annotations

import os
import random

import pytest

from lab import models
from lab.engine import Ask
from tests.system.e2e.conftest import FLOAT32, Rig, at_rest, cached, changed, tokens
from tests.system.e2e.test_requests import CHUNK_BYTES


def crowd(seed: int) -> list[Ask]:
    """Eight that begin at once, with nothing cached: three blocks each, in a cache where seven fit,
    and five at their end. Some have to be preempted, however fast the machine is."""
    return [Ask(prompt, max_tokens=150) for prompt in models.prompts(8, 364, seed=seed)]


def draw_asks(draw: random.Random, count: int) -> list[Ask]:
    """Prompts that share prefixes of any length with each other, and sometimes are the same."""
    stems = models.prompts(4, 900, seed=draw.randrange(2**32))
    asks: list[Ask] = []
    for _ in range(count):
        if asks and draw.random() < 0.2:
            prompt = list(draw.choice(asks).prompt)
        else:
            stem = draw.choice(stems)[: draw.randrange(1, 900)]
            tail = [draw.randrange(2, models.VOCABULARY) for _ in range(draw.randrange(1, 400))]
            prompt = stem + tail
        ask = Ask(prompt, max_tokens=draw.choice([1, 8, 40, 150]))
        fate = draw.random()
        if fate < 0.15:
            ask = Ask(prompt, 300, abort_after_tokens=draw.randrange(1, 20))
        elif fate < 0.3:
            ask = Ask(prompt, 300, abort_after_s=draw.uniform(0.001, 0.3))
        asks.append(ask)
    return asks


@pytest.mark.long
def test_soak(rig: Rig) -> None:
    """88 requests, eight at once, in a KV cache of 24 blocks and a slab of 16 chunks.

    S3KV_SEED repeats a run, as far as the machine lets it: aborts happen at a time, and what the
    engine puts into a step depends on how fast the bucket is.
    """
    seed = int(os.environ.get("S3KV_SEED", random.SystemRandom().randrange(2**32)))
    print(f"S3KV_SEED={seed}")
    asks = crowd(seed) + draw_asks(random.Random(seed), 80)
    tight = changed(rig.patient, host_bytes=16 * CHUNK_BYTES)
    sizes = {
        "num_gpu_blocks_override": 24,
        "max_model_len": 2_048,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 8,
    }
    with rig.serve(rig.tiny, tight, **sizes, **FLOAT32) as engine:
        answers = engine.generate(asks, concurrency=8, timeout_s=200)
        done = at_rest(engine)
        preemptions = engine.metrics()["vllm:num_preemptions_total"]
    whole = [(ask, answer) for ask, answer in zip(asks, answers, strict=True)]
    assert {answer.finish_reason for _, answer in whole} == {"length", "abort"}
    # An aborted answer is right as far as it goes.
    expected = rig.reference.engine(rig.tiny, **FLOAT32).generate(
        [Ask(ask.prompt, len(answer.tokens)) for ask, answer in whole if answer.tokens],
        concurrency=16,
    )
    assert [answer.tokens for _, answer in whole if answer.tokens] == tokens(expected)
    assert preemptions > 0
    for counter in ("hit_tokens_host", "hit_tokens_bucket", "evictions", "upload_ok"):
        assert done[counter] > 0, counter


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "lives", [pytest.param(3, marks=pytest.mark.long), pytest.param(10, marks=pytest.mark.nightly)]
)
def test_one_life_after_another_on_one_bucket(rig: Rig, lives: int) -> None:
    prompts = models.prompts(3, 700, seed=20)
    expected = rig.reference(rig.tiny, prompts)
    for life in range(lives):
        with rig.serve(rig.tiny, rig.patient) as engine:
            answers = engine.generate(prompts)
            done = at_rest(engine)
        if life == 0:
            assert cached(answers) == [0, 0, 0]
            assert done["upload_ok"] == 3 * 5
        else:
            assert cached(answers) == cached(expected) == [640] * 3
            assert tokens(answers) == tokens(expected)
            assert done["fetch_ok"] == 3 * 5
            assert done["saves"] == 0
