"""Models with several KV-cache groups on two tensor ranks: each has its part of every object.

In float32, where neither the length of a hit nor the number of ranks changes the tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lab import models
from lab.engine import Engine
from lab.s3 import S3Server
from tests.system.e2e.conftest import START_AND_STOP_S, References, cached, tokens
from tests.system.e2e.test_failures import wait_until
from tests.system.e2e.test_groups import EXACT, model_of


class Case(NamedTuple):
    """hit: tokens of a prompt, in whole chunks. objects: of a rank and a prompt, those with full
    attention and those with windows."""

    name: str
    hit: int
    objects: int


GEMMA3 = Case("gemma3", 384, 3 + 3)
LLAMA = Case("llama", 384, 3 + 3)


@pytest.mark.timeout(4 * START_AND_STOP_S)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(GEMMA3, marks=pytest.mark.long, id="gemma3"),
        pytest.param(LLAMA, marks=pytest.mark.nightly, id="llama"),
    ],
)
def test_two_tensor_ranks(
    case: Case,
    models_dir: Path,
    s3: S3Server,
    bucket: str,
    patient: dict[str, Any],
    reference: References,
    tmp_path: Path,
) -> None:
    """Steps of 256 tokens: windows move on while a prompt is computed."""
    model = model_of(models_dir, case.name)
    prompts = models.prompts(2, case.hit + 1, seed=5)
    args: dict[str, Any] = EXACT | {"enable_prefix_caching": True}
    expected = tokens(reference(model, prompts, **args))
    args |= {"in_process": False, "tensor_parallel_size": 2, "max_num_batched_tokens": 256}

    def engine_of(life: str) -> Engine:
        log = tmp_path / f"{life}.log"
        return Engine(model, connector=patient, log_path=log, env=s3.env, **args)

    def uploaded() -> bool:
        return len(s3.objects(bucket)) == 2 * len(prompts) * case.objects

    with engine_of("first") as engine:
        cold = [answer for prompt in prompts for answer in engine.generate([prompt])]
        wait_until("both ranks have uploaded", uploaded, 120.0)
        engine.reset_prefix_cache()
        host = engine.generate(prompts)
    with engine_of("second") as engine:
        warm = engine.generate(prompts)
        metrics = engine.metrics()
    assert metrics["vllm:s3kv_hit_tokens_bucket_total"] == 2 * case.hit
    for answers, hit in ((cold, 0), (host, case.hit), (warm, case.hit)):
        assert tokens(answers) == expected
        assert cached(answers) == [hit] * 2
