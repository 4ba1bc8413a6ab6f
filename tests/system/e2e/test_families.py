"""Models of many families on the real engine: with several KV-cache groups, with windows, and with
states instead of KV in some or all layers.

In float32, where the length of a hit does not change the tokens, but where vLLM's kernels for CPUs
compute in bf16 alone. A block of a layer with states is the state after its last token, and the
engine writes it only where a step ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lab import families, models
from lab.engine import Ask
from tests.system.e2e.conftest import (
    FLOAT32,
    START_AND_STOP_S,
    Rig,
    answered,
    at_rest,
    cached,
    changed,
    check_tiers,
    family_params,
    in_every_tier,
    needs_short_convolutions,
    tokens,
)
from tests.system.forms import blank
from tests.versions import VERSION
from tests.waiting import wait_until

SHARED = 512


class Case(NamedTuple):
    """hit, short: tokens that a repetition of the prompt need not compute, of a longer prompt and a
    shorter one, which is one token longer. chunk: its tokens, or 0 for a block. zeroed: coverages
    without whose content tokens differ. objects: of a rank and a short prompt, those of full
    attention and those of windows or states. answer: its tokens on two ranks. prepare: of `Engine`.
    states: whether vLLM's own tokens depend on the ranks and the steps. The reference is then an
    engine that takes the same steps; on two ranks it is the first engine while the bucket is empty,
    with the prompts in its own cache."""

    name: str
    objects: int
    hit: int = 768
    short: int = 384
    chunk: int = 128
    zeroed: tuple[int, ...] = (0, 1)
    answer: int = 8
    dtype: str = "float32"
    prepare: str | None = None
    states: bool = False

    @property
    def args(self) -> dict[str, Any]:
        args = {"dtype": self.dtype, "enable_prefix_caching": True, "prepare": self.prepare}
        # vLLM chooses the type of states by the processor, and so the length of a block.
        return args | ({"mamba_ssm_cache_dtype": "float32"} if self.states else {})


GEMMA3 = Case("gemma3", 3 + 3)
GEMMA4 = Case("gemma4", 2 + 2, short=512, chunk=256, answer=40)
"""The first tokens of an answer may not depend on the KV of the prompt."""
LLAMA4 = Case("llama4", 5 + 4, short=640)
"""Local attention begins anew after 512 tokens: a hit of 512 needs none of its KV, so the fourth
chunk is not saved."""
LFM2 = Case("lfm2", 3 + 2, zeroed=(1,), states=True)
"""States are saved after two chunks and after three."""
# Before 0.32 its convolutions do not compute in float32 on a processor with AVX512-BF16, and blocks
# of bfloat16 have twice the tokens.
DTYPE, CHUNK = ("float32", 128) if VERSION >= (0, 32) else ("bfloat16", 256)
GRANITE4 = Case(
    "granite4",
    512 // CHUNK + 1,
    short=512,
    chunk=CHUNK,
    zeroed=(1,),
    dtype=DTYPE,
    prepare="lab.on_cpu:one_state_per_step",
    states=True,
)
"""States are large, and the last alone is saved."""
MAMBA2 = GRANITE4._replace(name="mamba2", objects=2, hit=784, short=384, chunk=0, zeroed=(0,))
"""Blocks of 16 tokens. Without full attention, the state at each end of a step within the prompt is
saved: after 256 tokens and after 384."""
QWEN3_NEXT = Case("qwen3_next", 2 + 1, 2_304, 2_304, 0, zeroed=(1,), dtype="bfloat16", states=True)
"""Two blocks of 1,152 tokens, each a step. States are large: the last alone is saved."""
CASES = (
    *(GEMMA3, GEMMA4, GEMMA4._replace(name="gemma4_shared"), LLAMA4),
    *(GEMMA3._replace(name=name) for name in ("cohere2", "gpt_oss", "llama")),
    Case("mistral", 3, zeroed=(0,)),
    *(LFM2, GRANITE4, MAMBA2, QWEN3_NEXT),
    *(GRANITE4._replace(name=name) for name in ("nemotron_h", "falcon_h1")),
    QWEN3_NEXT._replace(name="qwen3_5", prepare="lab.on_cpu:without_torchvision"),
)
"""The layers of `gemma4_shared` without KV of their own add nothing to an object, and no object."""


def shared_prefix(count: int) -> list[Ask]:
    (shared,) = models.prompts(1, SHARED, seed=3)
    return [Ask(shared + tail, max_tokens=40) for tail in models.prompts(count, 288, seed=4)]


def model_of(directory: Path, name: str) -> Path:
    if name == "llama":
        return models.build(directory, models.WINDOWED)
    return families.build(directory, getattr(families, name.upper()))


@pytest.mark.timeout(4 * START_AND_STOP_S)
@pytest.mark.parametrize(
    "case",
    family_params(CASES, default={"gemma3", "lfm2", "qwen3_next"}, long={"gemma4", "llama4"}),
)
def test_every_tier_gives_the_tokens_of_a_local_hit(rig: Rig, case: Case) -> None:
    """Then with the objects of each coverage zeroed, whose tokens differ: the objects matter."""
    model = model_of(rig.models_dir, case.name)
    prompts = models.prompts(2, case.hit + 1)
    asks = [Ask(prompt, max_tokens=40) for prompt in prompts]
    expected = tokens(rig.reference(model, prompts, max_tokens=40, **case.args))
    assert all(len(set(answer)) > 10 for answer in expected)
    connector = changed(rig.patient, integrity="none", chunk_tokens=case.chunk)
    found = in_every_tier(rig.serve, model, connector, asks, **case.args)
    check_tiers(found, expected, case.hit, cold=not case.states)
    for coverage in case.zeroed:
        of_it = [key for key in rig.objects() if f"/g{coverage}-" in key]
        assert rig.s3.change(rig.bucket, blank, of_it) >= 2
        with rig.serve(model, connector, **case.args) as engine:
            wrong = engine.generate(asks)
        assert cached(wrong) == [case.hit] * 2
        assert all(a != b for a, b in zip(tokens(wrong), expected, strict=True))


@pytest.mark.timeout(4 * START_AND_STOP_S)
@pytest.mark.parametrize("case", family_params(CASES, long={"gemma3"}))
def test_on_the_second_generation_runner(rig: Rig, case: Case) -> None:
    """It has tables, copies and zeroing of its own. In steps of 256 tokens windows move on while a
    prompt is computed."""
    model = model_of(rig.models_dir, case.name)
    prompts = models.prompts(2, case.short + 1, seed=5)
    args = case.args | {"second_runner": True}
    expected = tokens(rig.reference(model, prompts, **(args if case.states else case.args)))
    connector = changed(rig.patient, chunk_tokens=case.chunk)
    steps = {} if case.states else {"max_num_batched_tokens": 256}
    found = in_every_tier(rig.serve, model, connector, prompts, **args, **steps)
    check_tiers(found, expected, case.short, cold=not case.states)


@pytest.mark.timeout(4 * START_AND_STOP_S)
@pytest.mark.parametrize("case", family_params(CASES, long={"gemma3"}))
def test_two_tensor_ranks(rig: Rig, case: Case) -> None:
    """Each has its part of every object. Steps of 256 tokens: windows move on while a prompt is
    computed, and states end within it."""
    model = model_of(rig.models_dir, case.name)
    prompts = models.prompts(2, case.short + 1, seed=5)
    asks = [Ask(prompt, max_tokens=case.answer) for prompt in prompts]
    args: dict[str, Any] = case.args
    if not case.states:
        plain = rig.reference.engine(model, **args)
        plain.generate(asks)
        expected = tokens(plain.generate(asks))
    args |= {"tensor_parallel_size": 2, "max_num_batched_tokens": 256}
    connector = changed(rig.patient, chunk_tokens=case.chunk)

    def uploaded() -> bool:
        return len(rig.objects()) == 2 * len(asks) * case.objects

    with rig.launch(model, connector, **args) as engine:
        cold = [answer for ask in asks for answer in engine.generate([ask])]
        if case.states:
            own = engine.generate(asks)
            assert cached(own) == [case.short] * 2
            expected = tokens(own)
        wait_until("both ranks have uploaded", uploaded)
        engine.reset_prefix_cache()
        host = engine.generate(asks)
    with rig.launch(model, connector, **args) as engine:
        warm = engine.generate(asks)
        metrics = engine.metrics()
    assert metrics["vllm:s3kv_hit_tokens_bucket_total"] == 2 * case.short
    check_tiers((cold, host, warm), expected, case.short)


@pytest.mark.long
@pytest.mark.timeout(3 * START_AND_STOP_S)
def test_a_shared_prefix_is_hit_while_blocks_wander_from_group_to_group(rig: Rig) -> None:
    """Steps of 256 tokens and few blocks: what a group gives up is another group's in the same
    step, and saves read blocks that the next step wants."""
    model = families.build(rig.models_dir, families.GEMMA3)
    asks = shared_prefix(6)
    expected = tokens(rig.reference.engine(model, **FLOAT32).generate(asks))
    tight = FLOAT32 | {
        "max_model_len": 1_024,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": 40,
    }
    with rig.serve(model, rig.patient, **tight) as engine:
        assert tokens(engine.generate(asks[:1])) == expected[:1]
        at_rest(engine)
        engine.reset_prefix_cache()
        assert answered(engine.generate(asks[1:2])) == ([SHARED], expected[1:2])
        assert tokens(engine.generate(asks)) == expected
        at_rest(engine)
        engine.reset_prefix_cache()
        warm = engine.generate(asks)
        at_rest(engine)
    assert tokens(warm) == expected
    assert max(hit or 0 for hit in cached(warm)) == 768


@needs_short_convolutions
@pytest.mark.long
@pytest.mark.timeout(3 * START_AND_STOP_S)
def test_a_shared_prefix_of_states_is_hit_by_the_second_question(rig: Rig) -> None:
    """With steps of 256 tokens, one of which ends with the prefix. vLLM's own cache, which has the
    reference, keeps that state only if it is told to keep all."""
    model = families.build(rig.models_dir, families.LFM2)
    asks = shared_prefix(2)
    args = LFM2.args | {"max_num_batched_tokens": 256}
    without = rig.reference.engine(model, **args, prefix_cache_retention_interval=128)
    expected = without.generate(asks)
    assert cached(expected) == [0, SHARED]
    with rig.serve(model, rig.patient, **args) as engine:
        first = engine.generate(asks[:1])
        at_rest(engine)
        engine.reset_prefix_cache()
        second = engine.generate(asks[1:])
        at_rest(engine)
    assert answered(first + second) == ([0, SHARED], tokens(expected))
