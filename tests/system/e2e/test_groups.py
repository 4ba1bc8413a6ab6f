"""Models with several KV-cache groups, with vLLM's hybrid KV cache manager on, on the real engine.

In float32, where the length of a hit does not change the tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

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
    family_params,
    tokens,
)

PROMPTS = models.prompts(2, 800)
ASKS = [Ask(prompt, max_tokens=40) for prompt in PROMPTS]
EXACT = {"dtype": "float32"}
HIT = 768
SHARED = 512


class Case(NamedTuple):
    """chunk: its tokens. hit_in_steps: tokens of the hit where prompts are a little longer than it
    and computed in steps of 256. coverages: their number."""

    name: str
    chunk: int = 128
    hit_in_steps: int = 384
    coverages: int = 2


CASES = (
    Case("gemma3"),
    Case("gemma4", 256, 512),
    Case("gemma4_shared", 256, 512),
    Case("cohere2"),
    Case("llama"),
    Case("gpt_oss"),
    Case("llama4", 128, 640),
    Case("mistral", coverages=1),
)


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
    "case", family_params(CASES, default={"gemma3"}, long={"gemma4", "llama4"})
)
def test_every_tier_gives_the_tokens_of_a_local_hit(
    case: Case,
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
    model = model_of(models_dir, case.name)
    expected = tokens(reference(model, PROMPTS, max_tokens=40, **EXACT))
    assert len({tuple(answer) for answer in expected}) == 2
    connector = changed(patient, integrity="none", chunk_tokens=case.chunk)
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
    for coverage in range(case.coverages):
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


@pytest.mark.timeout(4 * START_AND_STOP_S)
@pytest.mark.parametrize("case", family_params(CASES, long={"gemma3"}))
def test_on_the_second_generation_runner(
    case: Case,
    models_dir: Path,
    patient: dict[str, Any],
    serve: Serve,
    reference: References,
) -> None:
    """In steps of 256 tokens, so that windows move on while a prompt is computed."""
    model = model_of(models_dir, case.name)
    prompts = models.prompts(2, case.hit_in_steps + 16, seed=5)
    expected = tokens(reference(model, prompts, **EXACT))
    args: dict[str, Any] = {**EXACT, "second_runner": True, "max_num_batched_tokens": 256}
    connector = changed(patient, chunk_tokens=case.chunk)
    with serve(model, connector, **args) as engine:
        cold = engine.generate(prompts)
        at_rest(engine)
        engine.reset_prefix_cache()
        host = engine.generate(prompts)
        at_rest(engine)
    with serve(model, connector, **args) as engine:
        warm = engine.generate(prompts)
    for answers, hit in ((cold, 0), (host, case.hit_in_steps), (warm, case.hit_in_steps)):
        assert tokens(answers) == expected
        assert cached(answers) == [hit] * 2
