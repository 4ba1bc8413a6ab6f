"""Models with several KV-cache groups on two tensor ranks: each has its part of every object.

In float32, where neither the length of a hit nor the number of ranks changes the tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab import families, models
from lab.engine import Engine
from lab.s3 import S3Server
from tests.system.e2e.conftest import START_AND_STOP_S, References, cached, tokens
from tests.system.e2e.test_failures import wait_until
from tests.system.e2e.test_groups import EXACT

PROMPTS = models.prompts(2, 385, seed=5)
HIT = 384
"""Three chunks."""
OBJECTS = 2 * 2 * (3 + 3)
"""Of two ranks and two prompts: those with windows, and those with full attention."""


@pytest.mark.long
@pytest.mark.timeout(4 * START_AND_STOP_S)
def test_two_tensor_ranks(
    models_dir: Path,
    s3: S3Server,
    bucket: str,
    patient: dict[str, Any],
    reference: References,
    tmp_path: Path,
) -> None:
    """Steps of 256 tokens: windows move on while a prompt is computed."""
    model = families.build(models_dir, families.GEMMA3)
    args: dict[str, Any] = EXACT | {"enable_prefix_caching": True}
    expected = tokens(reference(model, PROMPTS, **args))
    args |= {"in_process": False, "tensor_parallel_size": 2, "max_num_batched_tokens": 256}

    def engine_of(life: str) -> Engine:
        log = tmp_path / f"{life}.log"
        return Engine(model, connector=patient, log_path=log, env=s3.env, **args)

    with engine_of("first") as engine:
        cold = [answer for prompt in PROMPTS for answer in engine.generate([prompt])]
        wait_until("both ranks have uploaded", lambda: len(s3.objects(bucket)) == OBJECTS, 120.0)
        engine.reset_prefix_cache()
        host = engine.generate(PROMPTS)
    with engine_of("second") as engine:
        warm = engine.generate(PROMPTS)
        metrics = engine.metrics()
    assert metrics["vllm:s3kv_hit_tokens_bucket_total"] == 2 * HIT
    for answers, hit in ((cold, 0), (host, HIT), (warm, HIT)):
        assert tokens(answers) == expected
        assert cached(answers) == [hit] * 2
