"""Beside another KV connector, under vLLM's `MultiConnector`, on the real engine."""

from __future__ import annotations

from typing import Any

import pytest

from lab import models
from lab.engine import Engine, EngineFailed
from lab.offloading import offloading
from tests.system.e2e.conftest import FLOAT32, SECOND, Rig, answered, at_rest, changed, tokens

PROMPTS = models.prompts(3, 700, seed=40)
HIT = 5 * 128


def several(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def neighbour(**settings: Any) -> dict[str, Any]:
    return {
        "kv_connector": "Neighbour",
        "kv_connector_module_path": "lab.neighbours",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }


@pytest.mark.parametrize(
    "first",
    [pytest.param(True, id="before"), pytest.param(False, id="behind", marks=pytest.mark.nightly)],
)
def test_vllms_offloading_serves_from_memory_and_s3kv_a_new_process(rig: Rig, first: bool) -> None:
    expected = rig.truth(PROMPTS)

    def both(life: str) -> dict[str, Any]:
        other = offloading({"type": "fs", "root_dir": str(rig.tmp_path / life)}, 2**26)
        return several(rig.patient, other) if first else several(other, rig.patient)

    with rig.serve(rig.tiny, both("first"), **FLOAT32) as engine:
        assert tokens(engine.generate(PROMPTS)) == expected
        assert at_rest(engine)["upload_ok"] == 15
        engine.reset_prefix_cache()
        assert answered(engine.generate(PROMPTS)) == ([HIT] * 3, expected)
        assert (at_rest(engine)["hit_tokens_host"] == 3 * HIT) is first
    with rig.serve(rig.tiny, both("second"), **FLOAT32) as engine:
        assert answered(engine.generate(PROMPTS)) == ([HIT] * 3, expected)
        assert at_rest(engine)["hit_tokens_bucket"] == 3 * HIT


@pytest.mark.parametrize("in_process", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_behind_a_connector_with_a_handshake_s3kv_serves_from_the_second_step_on(
    rig: Rig, in_process: bool
) -> None:
    """vLLM hands on one connector's handshake, the first one's that has any. The requests of the
    first step are computed, and harm nobody."""
    expected = rig.truth(PROMPTS)
    both = several(neighbour(greets=True), rig.patient)
    args: dict[str, Any] = {"in_process": in_process, **FLOAT32, **SECOND}
    with rig.serve(rig.tiny, both, **args) as engine:
        assert tokens(engine.generate(PROMPTS, concurrency=3)) == expected
        if in_process:
            # Who was there before the scheduler knew the workers is not saved; the others are.
            assert at_rest(engine)["saves"] <= 10
        engine.reset_prefix_cache()
        assert tokens(engine.generate(PROMPTS)) == expected
        if in_process:
            assert at_rest(engine)["saves"] == 15
    with rig.serve(rig.tiny, both, **args) as engine:
        engine.generate([PROMPTS[0][:20]])
        assert answered(engine.generate(PROMPTS)) == ([HIT] * 3, expected)


def test_with_the_handshakes_the_other_way_round_vllm_does_not_start(rig: Rig) -> None:
    both = several(rig.patient, neighbour(greets=True))
    engine = Engine(rig.tiny, connector=both, log_path=rig.tmp_path / "log", env=rig.s3.env)
    with pytest.raises(EngineFailed, match="WorkerHandshake"):
        engine.start()


def test_a_bucket_that_is_not_there_leaves_the_engine_without_its_cache(rig: Rig) -> None:
    expected = rig.truth(PROMPTS)
    both = several(neighbour(greets=True), changed(rig.patient, bucket="nobodys-bucket"))
    with rig.serve(rig.tiny, both, at_rest=False, **FLOAT32) as engine:
        assert tokens(engine.generate(PROMPTS)) == expected
        log = engine.log_path.read_text("utf-8")
    assert "bucket 'nobodys-bucket' cannot be used" in log
    assert "runs without its cache" in log


def test_nothing_is_saved_of_what_another_connector_loads_while_the_step_runs(rig: Rig) -> None:
    """Here it loads nothing, and the engine computes with what is in the blocks."""
    with rig.serve(
        rig.tiny, several(neighbour(offers=256), rig.patient), **FLOAT32, **SECOND
    ) as engine:
        engine.generate(PROMPTS)
        assert at_rest(engine)["saves"] == 0
    assert rig.objects() == {}
