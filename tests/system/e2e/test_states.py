"""Models that keep states instead of KV in some or all layers, on the real engine.

A block of such a layer is the state after its last token, and the engine writes it only where a
step ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lab import families, models
from lab.engine import Ask
from lab.s3 import S3Server
from tests.system.e2e.conftest import (
    START_AND_STOP_S,
    References,
    Serve,
    at_rest,
    cached,
    changed,
    family_params,
    needs_short_convolutions,
    tokens,
)
from tests.system.e2e.test_groups import zeroed
from tests.versions import VERSION


class Case(NamedTuple):
    """prompt: its length. hit: tokens of it that a repetition need not compute. states: number of
    their coverage. prepare: of `Engine`."""

    family: families.Family
    prompt: int
    hit: int
    states: int
    args: dict[str, Any]
    prepare: str | None = None

    @property
    def name(self) -> str:
        return self.family.name


EXACT = {"dtype": "float32"}
MAMBA2_ARGS: dict[str, Any] = EXACT if VERSION >= (0, 32) else {}
"""Before 0.32 its convolutions do not compute in float32 on a processor with AVX512-BF16."""
LFM2 = Case(families.LFM2, 769, 768, 1, EXACT)
"""One token after the hit, because a convolution looks back on two only."""
QWEN3_NEXT = Case(families.QWEN3_NEXT, 2_305, 2_304, 1, {})
"""Blocks of 1,152 tokens. vLLM's kernels for it compute in bf16 alone on a CPU."""
QWEN3_5 = Case(families.QWEN3_5, 2_305, 2_304, 1, {}, "lab.text_only:without_torchvision")
AT_ENDS = "lab.states:one_state_per_step"
MAMBA2 = Case(families.MAMBA2, 785, 784, 0, MAMBA2_ARGS, AT_ENDS)
"""Blocks of 16 tokens."""
GRANITE4 = Case(families.GRANITE4, 769, 768, 1, MAMBA2_ARGS, AT_ENDS)
"""Blocks of 128 tokens."""
NEMOTRON_H = Case(families.NEMOTRON_H, 769, 768, 1, MAMBA2_ARGS, AT_ENDS)
FALCON_H1 = Case(families.FALCON_H1, 769, 768, 1, MAMBA2_ARGS, AT_ENDS)
CASES = (LFM2, QWEN3_NEXT, QWEN3_5, MAMBA2, GRANITE4, NEMOTRON_H, FALCON_H1)


@pytest.mark.timeout(4 * START_AND_STOP_S)
@pytest.mark.parametrize("case", family_params(CASES, default={"lfm2", "qwen3_next"}))
def test_every_tier_gives_the_tokens_of_a_local_hit(
    case: Case,
    models_dir: Path,
    s3: S3Server,
    bucket: str,
    patient: dict[str, Any],
    serve: Serve,
    reference: References,
) -> None:
    """Cold, from host memory, and in a new process from the bucket. Then with every state zeroed,
    whose tokens differ: what is stored matters.
    """
    prompts = models.prompts(2, case.prompt)
    asks = [Ask(prompt, max_tokens=40) for prompt in prompts]
    args = case.args | {"enable_prefix_caching": True, "prepare": case.prepare}
    model = families.build(models_dir, case.family)
    expected = tokens(reference(model, prompts, max_tokens=40, **args))
    assert all(len(set(answer)) > 10 for answer in expected)
    connector = changed(patient, chunk_tokens=0, integrity="none")
    with serve(model, connector, **args) as engine:
        cold = engine.generate(asks)
        engine.reset_prefix_cache()
        host = engine.generate(asks)
        at_rest(engine)
    with serve(model, connector, **args) as engine:
        warm = engine.generate(asks)
        at_rest(engine)
    assert cached(cold) == [0] * 2
    for answers in (host, warm):
        assert cached(answers) == [case.hit] * 2
        assert tokens(answers) == expected
    assert zeroed(s3, bucket, case.states) >= 2
    with serve(model, connector, **args) as engine:
        wrong = engine.generate(asks)
    assert cached(wrong) == [case.hit] * 2
    assert all(a != b for a, b in zip(tokens(wrong), expected, strict=True))


@needs_short_convolutions
@pytest.mark.long
@pytest.mark.timeout(3 * START_AND_STOP_S)
def test_a_shared_prefix_is_hit_by_the_second_question(
    models_dir: Path, patient: dict[str, Any], serve: Serve, reference: References
) -> None:
    """With steps of 256 tokens, one of which ends with the prefix. vLLM's own cache, which has the
    reference, keeps that state only if it is told to keep all.
    """
    model = families.build(models_dir, families.LFM2)
    shared, *tails = models.prompts(1, 512, seed=3) + models.prompts(2, 288, seed=4)
    asks = [Ask(shared + tail, max_tokens=40) for tail in tails]
    args = EXACT | {"enable_prefix_caching": True, "max_num_batched_tokens": 256}
    without = reference.engine(model, **args, prefix_cache_retention_interval=128)
    expected = without.generate(asks)
    assert cached(expected) == [0, 512]
    with serve(model, patient, **args) as engine:
        first = engine.generate(asks[:1])
        at_rest(engine)
        engine.reset_prefix_cache()
        second = engine.generate(asks[1:])
        at_rest(engine)
    assert cached(first + second) == [0, 512]
    assert tokens(first + second) == tokens(expected)


@pytest.mark.timeout(4 * START_AND_STOP_S)
@pytest.mark.parametrize("case", family_params(CASES))
def test_on_the_second_generation_runner(
    case: Case,
    models_dir: Path,
    patient: dict[str, Any],
    serve: Serve,
    reference: References,
) -> None:
    """It has tables, copies and zeroing of its own."""
    model = families.build(models_dir, case.family)
    prompts = models.prompts(2, case.prompt, seed=5)
    args: dict[str, Any] = case.args | {"enable_prefix_caching": True, "prepare": case.prepare}
    args |= {"second_runner": True}
    expected = tokens(reference(model, prompts, **args))
    connector = changed(patient, chunk_tokens=0)
    with serve(model, connector, **args) as engine:
        cold = engine.generate(prompts)
        at_rest(engine)
        engine.reset_prefix_cache()
        host = engine.generate(prompts)
        at_rest(engine)
    with serve(model, connector, **args) as engine:
        warm = engine.generate(prompts)
        at_rest(engine)
    assert cached(cold) == [0] * 2
    for answers in (host, warm):
        assert cached(answers) == [case.hit] * 2
        assert tokens(answers) == expected
