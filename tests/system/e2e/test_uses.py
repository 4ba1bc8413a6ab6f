"""A prefix that the engine serves from its own cache stays in the bucket."""

from __future__ import annotations

from datetime import datetime

import pytest

from lab import models
from lab.engine import Engine
from lab.offloading import offloading
from lab.s3 import S3Server
from tests.system.e2e.conftest import FLOAT32, START_AND_STOP_S, Rig, changed
from tests.system.e2e.test_tier import tier

PROMPT = models.prompts(1, 400)[0]
CHUNKS = 3
STEPS = 2_000
"""Requests, at most: many times as many as any store needs to refresh a chunk or take one."""


def written(s3: S3Server, bucket: str) -> dict[str, datetime]:
    """When each chunk was last written."""
    listed = s3.client().list_objects_v2(Bucket=bucket).get("Contents", ())
    return {
        one["Key"]: one["LastModified"] for one in listed if one["Key"].endswith(".safetensors")
    }


def refreshed(rig: Rig, engine: Engine) -> set[str]:
    """The chunks of the prompt, once all have been written twice."""
    for _ in range(STEPS):
        engine.generate([PROMPT])
        if len(before := written(rig.s3, rig.bucket)) == CHUNKS:
            break
    assert len(before) == CHUNKS
    for _ in range(STEPS):
        (answer,) = engine.generate([PROMPT])
        now = written(rig.s3, rig.bucket)
        if all(now[key] > before[key] for key in before):
            assert answer.cached_tokens == CHUNKS * 128
            return set(before)
    raise AssertionError("the engine uses chunks that are never refreshed")


def test_a_prefix_in_vllms_caches_is_refreshed_by_the_tier(rig: Rig) -> None:
    connector = offloading(tier(rig.s3, rig.bucket, refresh_after_s=1.0), 2**28)
    with rig.serve(rig.tiny, connector, **FLOAT32) as engine:
        refreshed(rig, engine)


@pytest.mark.timeout(START_AND_STOP_S)
def test_a_prefix_in_the_engines_own_cache_is_refreshed_and_comes_back(rig: Rig) -> None:
    with rig.serve(rig.tiny, changed(rig.patient, refresh_after_s=1.0)) as engine:
        first = engine.generate([PROMPT])
        before = refreshed(rig, engine)
        for key in before:
            rig.s3.client().delete_object(Bucket=rig.bucket, Key=key)
        for _ in range(STEPS):
            answers = engine.generate([PROMPT])
            if written(rig.s3, rig.bucket).keys() == before:
                break
        else:
            raise AssertionError("the engine uses chunks that never come back")
        assert answers[0].tokens == first[0].tokens
        counted = engine.metrics()
        assert counted["vllm:s3kv_fetch_ok_total"] == 0, "all was served from above the bucket"
        assert counted["vllm:s3kv_uploads_again_total"] >= 1
