"""Requests of one step, on a store that takes its time: prefill instances, classification, warm-up.

The first engine sees a chunk once and computes it while the bucket has not answered yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lab import families, models
from lab.s3 import S3Server, moto_process
from tests.system.e2e.conftest import (
    SECOND,
    START_AND_STOP_S,
    Rig,
    at_rest,
    cached,
    changed,
    connector_for,
    needs_short_convolutions,
    new_bucket,
)

PROMPTS = models.prompts(6, 800)
CHUNK = 128
HIT = 768
PATIENT = {"max_wait_ms": 250_000, "recompute_gate": False, "request_timeout_ms": 480_000}


@pytest.fixture(scope="module")
def slow_s3() -> Iterator[S3Server]:
    """A server that answers after 0 to 300 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAB_S3_DELAY_MS", "300")
        with moto_process() as server:
            yield server


@pytest.mark.timeout(3 * START_AND_STOP_S)
@pytest.mark.parametrize(
    ("name", "args"),
    [
        pytest.param("", SECOND, id="full"),
        pytest.param("GEMMA3", {}, id="windows", marks=pytest.mark.long),
        pytest.param(
            "LFM2",
            {"dtype": "float32", "enable_prefix_caching": True},
            id="states",
            marks=[pytest.mark.long, needs_short_convolutions],
        ),
    ],
)
def test_another_engine_is_served_all_that_one_step_has_computed(
    rig: Rig, name: str, args: dict[str, Any], slow_s3: S3Server
) -> None:
    model = families.build(rig.models_dir, getattr(families, name)) if name else rig.tiny
    with new_bucket(slow_s3) as bucket:
        connector = changed(connector_for(slow_s3, bucket), chunk_tokens=CHUNK)
        with rig.serve(model, connector, env=slow_s3.env, **args) as engine:
            engine.generate(PROMPTS, max_tokens=1)
            at_rest(engine)
        with rig.serve(model, changed(connector, **PATIENT), env=slow_s3.env, **args) as engine:
            answers = engine.generate(PROMPTS, max_tokens=1)
            at_rest(engine)
        assert cached(answers) == [HIT] * len(PROMPTS)
