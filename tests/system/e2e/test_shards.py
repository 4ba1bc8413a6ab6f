"""Engines of several parallel sizes on one bucket: what one has stored is a hit for the others."""

from __future__ import annotations

from typing import Any

import pytest

from lab import families, latent, models
from lab.s3 import S3Server
from s3kv.objects.keys import parse
from tests.system.e2e.conftest import (
    START_AND_STOP_S,
    Rig,
    answered,
    at_rest,
    cached,
    changed,
    tokens,
)
from tests.system.e2e.test_latent import ARGS as LATENT
from tests.system.e2e.test_parallel import BOTH, WARMED_UP
from tests.waiting import wait_until

PROMPTS = models.prompts(3, 800)
CHUNKS = 6
ONE: dict[str, Any] = {}
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, **WARMED_UP}
NAMES = {
    id(ONE): {"h0-3of4-l0-3of4"},
    id(TENSOR): BOTH,
    id(STAGES): {"h0-3of4-l0-1of4", "h0-3of4-l2-3of4"},
}


def held(s3: S3Server, bucket: str) -> dict[str, int]:
    """Shard -> chunks of it in the bucket."""
    found: dict[str, int] = {}
    for key in s3.objects(bucket):
        shard = parse(key).shard
        found[shard] = found.get(shard, 0) + 1
    return found


def wait_until_there(s3: S3Server, bucket: str, stored: dict[str, int]) -> None:
    """Wait until the bucket has so many chunks of each shard, and says that it has such shards."""

    def there() -> bool:
        names = {key.rpartition("/")[2] for key in s3.everything(bucket)}
        return held(s3, bucket) == stored and stored.keys() <= names

    wait_until("what was computed is in the bucket", there)


def namespaces(s3: S3Server, bucket: str) -> set[str]:
    return {key.split("/")[2] for key in s3.everything(bucket)}


@pytest.mark.long
@pytest.mark.timeout(4 * START_AND_STOP_S)
@pytest.mark.parametrize(
    "engines",
    [
        pytest.param((ONE, TENSOR, ONE), id="tensor"),
        pytest.param((TENSOR, STAGES), id="pipeline", marks=pytest.mark.nightly),
    ],
)
def test_what_one_size_has_stored_others_hit(rig: Rig, engines: tuple[dict[str, Any], ...]) -> None:
    """Each engine hits all that those before it have computed, and computes one prompt more."""
    expected = rig.truth(PROMPTS)
    shares = changed(rig.patient, share_ranks=True, compress="on")
    stored: dict[str, int] = {}
    for number, engine_args in enumerate(engines):
        names = NAMES[id(engine_args)]
        with rig.launch(rig.tiny, shares, dtype="float32", **engine_args) as engine:
            answers = engine.generate(PROMPTS[: number + 1])
            assert answered(answers) == ([CHUNKS * 128] * number + [0], expected[: number + 1])
            counts = engine.metrics()
            assert counts["vllm:s3kv_internal_errors_total"] == 0
            assert counts["vllm:s3kv_hit_tokens_bucket_total"] == number * CHUNKS * 128
            for name in names:
                stored[name] = stored.get(name, 0) + CHUNKS
            wait_until_there(rig.s3, rig.bucket, stored)
    assert len(namespaces(rig.s3, rig.bucket)) == 1


@pytest.mark.nightly
@pytest.mark.timeout(2 * START_AND_STOP_S)
def test_without_the_setting_each_size_is_alone(rig: Rig) -> None:
    expected = rig.truth(PROMPTS[:1])
    stored: dict[str, int] = {}
    for engine_args in (ONE, TENSOR):
        with rig.launch(rig.tiny, rig.patient, dtype="float32", **engine_args) as engine:
            assert answered(engine.generate(PROMPTS[:1])) == ([0], expected)
            stored |= dict.fromkeys(NAMES[id(engine_args)], CHUNKS)
            wait_until_there(rig.s3, rig.bucket, stored)
    assert len(namespaces(rig.s3, rig.bucket)) == 2


@pytest.mark.nightly
@pytest.mark.timeout(2 * START_AND_STOP_S)
def test_latent_attention_on_a_cpu_keeps_each_size_alone(rig: Rig) -> None:
    """Though all name their shard alike: the log says so, and nobody reads another size's."""
    model = latent.build(rig.models_dir)
    shares = changed(rig.patient, share_ranks=True)
    for number, engine_args in enumerate((ONE, TENSOR)):
        with rig.launch(model, shares, **LATENT, **engine_args) as engine:
            assert cached(engine.generate(PROMPTS[:1])) == [0]
            assert engine.metrics()["vllm:s3kv_internal_errors_total"] == 0
            wait_until_there(rig.s3, rig.bucket, {"h0-0of1-l0-3of4": (number + 1) * CHUNKS})
        assert "share_ranks has no effect" in engine.log_path.read_text()
    assert len(namespaces(rig.s3, rig.bucket)) == 2


@pytest.mark.nightly
@pytest.mark.timeout(3 * START_AND_STOP_S)
def test_windows_are_shared_as_well(rig: Rig) -> None:
    """A model with two KV-cache groups, of which one has windows: one rank, then two."""
    model = families.build(rig.models_dir, families.GEMMA3)
    expected = tokens(rig.reference(model, PROMPTS[:1], dtype="float32"))
    shares = changed(rig.patient, share_ranks=True)
    with rig.serve(model, shares, dtype="float32") as engine:
        assert tokens(engine.generate(PROMPTS[:1])) == expected
        at_rest(engine)
        (shard,) = held(rig.s3, rig.bucket)
        wait_until_there(rig.s3, rig.bucket, held(rig.s3, rig.bucket))
    with rig.launch(model, shares, dtype="float32", **TENSOR) as engine:
        assert answered(engine.generate(PROMPTS[:1])) == ([CHUNKS * 128], expected)
        assert engine.metrics()["vllm:s3kv_internal_errors_total"] == 0
    assert set(held(rig.s3, rig.bucket)) == {shard}, "what is put together is not stored again"
    assert len(namespaces(rig.s3, rig.bucket)) == 1
