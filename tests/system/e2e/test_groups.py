"""Models with several KV-cache groups, with vLLM's hybrid KV cache manager on, on the real engine.

In float32, where the length of a hit does not change the tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab import families, models
from lab.engine import Ask
from lab.s3 import S3Server
from s3kv.objects.headers import read_header
from tests.system.e2e.conftest import (
    START_AND_STOP_S,
    References,
    Serve,
    at_rest,
    cached,
    changed,
    needs_second_runner,
    tokens,
)
from tests.versions import since

PROMPTS = models.prompts(2, 800)
ASKS = [Ask(prompt, max_tokens=40) for prompt in PROMPTS]
EXACT = {"dtype": "float32"}
HIT = 768
SINKS = since(0, 31, "a CPU kernel for attention sinks in float32")
SHARED = 512


def zeroed(s3: S3Server, bucket: str, coverage: int) -> int:
    """Replace the payload of every object of this coverage by zeros. Returns their number."""
    client, count = s3.client(), 0
    for key in s3.objects(bucket):
        if f"/g{coverage}-" in key:
            data = client.get_object(Bucket=bucket, Key=key)["Body"].read()
            header = read_header(memoryview(data))
            blank = data[: header.header_bytes] + bytes(header.payload_bytes)
            client.put_object(Bucket=bucket, Key=key, Body=blank)
            count += 1
    return count


def shared_prefix(count: int) -> list[Ask]:
    """Requests whose prompts have their first `SHARED` tokens in common."""
    (shared,) = models.prompts(1, SHARED, seed=3)
    tails = models.prompts(count, 288, seed=4)
    return [Ask(shared + tail, max_tokens=40) for tail in tails]


def model_of(directory: Path, name: str) -> Path:
    if name == "llama":
        return models.build(directory, models.WINDOWED)
    return families.build(directory, getattr(families, name.upper()))


@pytest.mark.timeout(4 * START_AND_STOP_S)
@pytest.mark.parametrize(
    ("name", "coverages", "chunk_tokens"),
    [
        pytest.param("gemma3", 2, 128, id="gemma3"),
        pytest.param("gemma4", 2, 256, marks=pytest.mark.long, id="gemma4"),
        pytest.param("gemma4_shared", 2, 256, marks=pytest.mark.nightly, id="gemma4_shared"),
        pytest.param("cohere2", 2, 128, marks=pytest.mark.nightly, id="cohere2"),
        pytest.param("llama", 2, 128, marks=pytest.mark.nightly, id="llama"),
        pytest.param("gpt_oss", 2, 128, marks=[pytest.mark.nightly, SINKS], id="gpt_oss"),
        pytest.param("llama4", 2, 128, marks=pytest.mark.long, id="llama4"),
        pytest.param("mistral", 1, 128, marks=pytest.mark.nightly, id="mistral"),
    ],
)
def test_every_tier_gives_the_tokens_of_a_local_hit(
    name: str,
    coverages: int,
    chunk_tokens: int,
    models_dir: Path,
    s3: S3Server,
    bucket: str,
    patient: dict[str, Any],
    serve: Serve,
    reference: References,
) -> None:
    """Cold, from host memory, and in a new process from the bucket. Then with the objects of each
    coverage zeroed, whose tokens differ: what is stored matters.
    """
    model = model_of(models_dir, name)
    expected = tokens(reference(model, PROMPTS, max_tokens=40, **EXACT))
    assert len({tuple(answer) for answer in expected}) == 2
    connector = changed(patient, integrity="none", chunk_tokens=chunk_tokens)
    with serve(model, connector, **EXACT) as engine:
        cold = engine.generate(ASKS)
        engine.reset_prefix_cache()
        host = engine.generate(ASKS)
        at_rest(engine)
    with serve(model, connector, **EXACT) as engine:
        warm = engine.generate(ASKS)
        at_rest(engine)
    for answers, hit in ((cold, 0), (host, HIT), (warm, HIT)):
        assert tokens(answers) == expected
        assert cached(answers) == [hit] * 2
    for coverage in range(coverages):
        assert zeroed(s3, bucket, coverage) >= 2
        with serve(model, connector, **EXACT) as engine:
            wrong = engine.generate(ASKS)
        assert cached(wrong) == [HIT] * 2
        assert all(a != b for a, b in zip(tokens(wrong), expected, strict=True))


@pytest.mark.long
@pytest.mark.timeout(3 * START_AND_STOP_S)
def test_a_shared_prefix_is_hit_while_blocks_wander_from_group_to_group(
    models_dir: Path, patient: dict[str, Any], serve: Serve, reference: References
) -> None:
    """Steps of 256 tokens and few blocks: what a group gives up is another group's in the same
    step, and saves read blocks that the next step wants.
    """
    model = families.build(models_dir, families.GEMMA3)
    asks = shared_prefix(6)
    expected = tokens(reference.engine(model, **EXACT).generate(asks))
    tight = EXACT | {
        "max_model_len": 1_024,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": 40,
    }
    with serve(model, patient, **tight) as engine:
        assert tokens(engine.generate(asks[:1])) == expected[:1]
        at_rest(engine)
        engine.reset_prefix_cache()
        second = engine.generate(asks[1:2])
        assert (cached(second), tokens(second)) == ([SHARED], expected[1:2])
        assert tokens(engine.generate(asks)) == expected
        at_rest(engine)
        engine.reset_prefix_cache()
        warm = engine.generate(asks)
        at_rest(engine)
    assert tokens(warm) == expected
    assert max(hit or 0 for hit in cached(warm)) == HIT


@needs_second_runner
@pytest.mark.timeout(4 * START_AND_STOP_S)
@pytest.mark.parametrize(
    ("name", "chunk_tokens", "hit"),
    [
        pytest.param("gemma3", 128, 384, marks=pytest.mark.long, id="gemma3"),
        pytest.param("gemma4", 256, 512, marks=pytest.mark.nightly, id="gemma4"),
        pytest.param("gemma4_shared", 256, 512, marks=pytest.mark.nightly, id="gemma4_shared"),
        pytest.param("cohere2", 128, 384, marks=pytest.mark.nightly, id="cohere2"),
        pytest.param("llama", 128, 384, marks=pytest.mark.nightly, id="llama"),
        pytest.param("gpt_oss", 128, 384, marks=[pytest.mark.nightly, SINKS], id="gpt_oss"),
        pytest.param("mistral", 128, 384, marks=pytest.mark.nightly, id="mistral"),
        pytest.param("llama4", 128, 640, marks=pytest.mark.nightly, id="llama4"),
    ],
)
def test_on_the_second_generation_runner(
    name: str,
    chunk_tokens: int,
    hit: int,
    models_dir: Path,
    patient: dict[str, Any],
    serve: Serve,
    reference: References,
) -> None:
    """In steps of 256 tokens, so that windows move on while a prompt is computed."""
    model = model_of(models_dir, name)
    prompts = models.prompts(2, hit + 16, seed=5)
    expected = tokens(reference(model, prompts, **EXACT))
    args: dict[str, Any] = {**EXACT, "second_runner": True, "max_num_batched_tokens": 256}
    connector = changed(patient, chunk_tokens=chunk_tokens)
    with serve(model, connector, **args) as engine:
        cold = engine.generate(prompts)
        at_rest(engine)
        engine.reset_prefix_cache()
        host = engine.generate(prompts)
        at_rest(engine)
    with serve(model, connector, **args) as engine:
        warm = engine.generate(prompts)
    for answers, length in ((cold, 0), (host, hit), (warm, hit)):
        assert tokens(answers) == expected
        assert cached(answers) == [length] * 2
