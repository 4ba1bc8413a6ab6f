"""Models with windows or states on two tensor ranks: each has its part of every object.

In float32, where the length of a hit does not change the tokens. vLLM's kernels for a Gated
DeltaNet compute in bf16 alone on a CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lab import models
from lab.engine import Ask, Engine
from lab.s3 import S3Server
from tests.system.e2e.conftest import (
    START_AND_STOP_S,
    References,
    cached,
    changed,
    family_params,
    tokens,
)
from tests.system.e2e.test_failures import wait_until
from tests.system.e2e.test_groups import model_of


class Case(NamedTuple):
    """hit: tokens of a prompt, in chunks of `chunk`, or of a block where that is 0. objects: of a
    rank and a prompt, those of full attention and those of windows or states. answer: its tokens.
    prepare: of `Engine`.
    alike: whether vLLM's own tokens depend on the ranks and the steps. They are then those of the
    first engine while the bucket is empty, with the prompts in its own cache."""

    name: str
    hit: int
    objects: int
    chunk: int = 128
    answer: int = 8
    dtype: str = "float32"
    prepare: str | None = None
    alike: bool = False


GEMMA3 = Case("gemma3", 384, 3 + 3)
GEMMA4 = Case("gemma4", 512, 2 + 2, chunk=256, answer=40)
"""The first tokens of an answer may not depend on the KV of the prompt."""
GEMMA4_SHARED = GEMMA4._replace(name="gemma4_shared")
"""The layers without KV of their own add nothing to an object, and no object."""
GPT_OSS = Case("gpt_oss", 384, 3 + 3)
LLAMA = Case("llama", 384, 3 + 3)
LLAMA4 = Case("llama4", 640, 5 + 4)
"""Local attention begins anew after 512 tokens: a hit of 512 needs none of its KV, so the fourth
chunk is not saved."""
COHERE2 = LLAMA._replace(name="cohere2")
MISTRAL = Case("mistral", 384, 3)
LFM2 = Case("lfm2", 384, 3 + 2, alike=True)
"""States are saved after two chunks and after three."""
GRANITE4 = Case(
    "granite4",
    512,
    4 + 1,
    prepare="lab.states:one_state_per_step",
    alike=True,
)
"""States are large, and the last alone is saved."""
NEMOTRON_H = GRANITE4._replace(name="nemotron_h")
"""Three layers with states and one with KV, of the same sizes."""
FALCON_H1 = GRANITE4._replace(name="falcon_h1")
MAMBA2 = GRANITE4._replace(name="mamba2", hit=384, objects=2, chunk=0)
"""Without full attention, the state at each end of a step within the prompt is saved: after 256
tokens and after 384."""
QWEN3_NEXT = Case("qwen3_next", 2_304, 2 + 1, chunk=0, dtype="bfloat16", alike=True)
"""Two blocks of 1,152 tokens, and a step ends with each. States are large: the last alone is
saved."""
QWEN3_5 = QWEN3_NEXT._replace(
    name="qwen3_5",
    prepare="lab.text_only:without_torchvision",
)
CASES = (
    *(GEMMA3, GEMMA4, GEMMA4_SHARED, GPT_OSS, COHERE2, LLAMA, LLAMA4, MISTRAL, LFM2),
    *(GRANITE4, NEMOTRON_H, FALCON_H1, MAMBA2, QWEN3_NEXT, QWEN3_5),
)


@pytest.mark.timeout(4 * START_AND_STOP_S)
@pytest.mark.parametrize("case", family_params(CASES, long={"gemma3"}))
def test_two_tensor_ranks(
    case: Case,
    models_dir: Path,
    s3: S3Server,
    bucket: str,
    patient: dict[str, Any],
    reference: References,
    tmp_path: Path,
) -> None:
    """Steps of 256 tokens: windows move on while a prompt is computed, and states end within it."""
    model = model_of(models_dir, case.name)
    prompts = models.prompts(2, case.hit + 1, seed=5)
    asks = [Ask(prompt, max_tokens=case.answer) for prompt in prompts]
    args: dict[str, Any] = {"dtype": case.dtype, "enable_prefix_caching": True}
    args |= {"prepare": case.prepare}
    if not case.alike:
        plain = reference.engine(model, **args)
        plain.generate(asks)
        expected = tokens(plain.generate(asks))
    args |= {
        "in_process": False,
        "tensor_parallel_size": 2,
        "max_num_batched_tokens": 256,
    }
    connector = changed(patient, chunk_tokens=case.chunk)

    def engine_of(life: str) -> Engine:
        log = tmp_path / f"{life}.log"
        return Engine(model, connector=connector, log_path=log, env=s3.env, **args)

    def uploaded() -> bool:
        return len(s3.objects(bucket)) == 2 * len(asks) * case.objects

    with engine_of("first") as engine:
        cold = [answer for ask in asks for answer in engine.generate([ask])]
        if case.alike:
            own = engine.generate(asks)
            assert cached(own) == [case.hit] * 2
            expected = tokens(own)
        wait_until("both ranks have uploaded", uploaded, 120.0)
        engine.reset_prefix_cache()
        host = engine.generate(asks)
    with engine_of("second") as engine:
        warm = engine.generate(asks)
        metrics = engine.metrics()
    assert metrics["vllm:s3kv_hit_tokens_bucket_total"] == 2 * case.hit
    for answers, hit in ((cold, 0), (host, case.hit), (warm, case.hit)):
        assert tokens(answers) == expected
        assert cached(answers) == [hit] * 2
