"""A copy from host memory to the device that fails, on the engine that was promised it.

Blocks that were to be filled hold whatever was there before: an engine that is not told of the
failure computes wrong tokens from them. Run with every vLLM that s3kv supports.
"""

from __future__ import annotations

from typing import Any

import pytest

from lab import models
from lab.engine import Engine
from tests.system.e2e.conftest import SECOND, Rig, tokens

PROMPTS = models.prompts(2, 4 * 128 + 40)


@pytest.mark.parametrize(
    ("policy", "runner"),
    [pytest.param("recompute", SECOND, id="recompute"), pytest.param("fail", {}, id="fail")],
)
def test_a_failed_load_never_becomes_a_wrong_token(
    rig: Rig, policy: str, runner: dict[str, Any]
) -> None:
    expected = rig.truth(PROMPTS)
    connector = rig.patient | {"kv_load_failure_policy": policy}
    args = {"dtype": "float32", **runner}
    with Engine(
        rig.tiny, connector=connector, log_path=rig.tmp_path / "log", env=rig.s3.env, **args
    ) as engine:
        assert tokens(engine.generate(PROMPTS)) == expected
        engine.reset_prefix_cache()  # host memory has them
        # The blocks that the loads below get hold these prompts' KV.
        engine.generate([prompt[::-1] for prompt in PROMPTS])
        engine.reset_prefix_cache()
        engine.call("tests.system.e2e.inside:fail_loads", times=1)
        failed, loaded = engine.generate(PROMPTS, concurrency=2)
        if policy == "recompute":
            assert failed.finish_reason == "length"
            assert failed.tokens == expected[0]
        else:
            assert failed.finish_reason == "error"
        assert loaded.tokens == expected[1]
        assert engine.metrics()["vllm:s3kv_loads_failed_total"] == 1
        engine.reset_prefix_cache()
        assert tokens(engine.generate(PROMPTS)) == expected
        metrics = engine.metrics()
        assert metrics["vllm:s3kv_hit_tokens_host_total"] >= 3 * 4 * 128
        assert metrics["vllm:s3kv_internal_errors_total"] == 0
