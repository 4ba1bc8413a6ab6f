"""Compressed objects on the real engine: the connector and the tier write them, and engines read
them that compress nothing themselves, or miss them where nothing can decode them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab import models
from lab.engine import ROOT
from lab.offloading import offloading
from lab.s3 import S3Server
from s3kv.objects.headers import COMPRESSED_TENSOR, read_header
from tests.system.e2e.conftest import (
    FLOAT32,
    START_AND_STOP_S,
    Rig,
    answered,
    at_rest,
    changed,
    patient_for,
    tokens,
)
from tests.system.e2e.test_tier import tier

pytest.importorskip("blosc2")

PROMPTS = models.prompts(2, 1_100, seed=90)
HIT = 1_024


def of_connector(s3: S3Server, bucket: str, **settings: Any) -> dict[str, Any]:
    """Chunks of 2 MiB, which are two segments."""
    return changed(patient_for(s3, bucket), **{"chunk_tokens": 512} | settings)


def of_tier(s3: S3Server, bucket: str, **settings: Any) -> dict[str, Any]:
    return offloading(tier(s3, bucket, **settings), 2**28)


def check_compressed(stored: dict[str, bytes]) -> None:
    for key, data in stored.items():
        header = read_header(memoryview(data))
        payload_bytes = sum(tensor.nbytes for tensor in header.tensors)
        assert header.codec == "blosc2", key
        assert f'"{COMPRESSED_TENSOR}"'.encode() in data[: header.header_bytes]
        assert len(data) - header.header_bytes < payload_bytes


@pytest.fixture
def without_codec(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "without"
    folder.mkdir()
    (folder / "blosc2.py").write_text('raise ImportError("it is not installed")\n')
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


@pytest.mark.timeout(5 * START_AND_STOP_S)
@pytest.mark.parametrize("connect", [of_connector, of_tier], ids=["connector", "tier"])
def test_compressed_objects_are_hits_or_misses_and_never_wrong(
    rig: Rig, connect: Callable[..., dict[str, Any]], without_codec: dict[str, str]
) -> None:
    expected = tokens(rig.reference(rig.tiny, PROMPTS, **FLOAT32))
    with rig.serve(rig.tiny, connect(rig.s3, rig.bucket, compress="on"), **FLOAT32) as engine:
        assert answered(engine.generate(PROMPTS)) == ([0, 0], expected)
        at_rest(engine)
    stored = rig.s3.contents(rig.bucket)
    assert stored
    check_compressed(stored)

    with rig.serve(rig.tiny, connect(rig.s3, rig.bucket, compress="off"), **FLOAT32) as engine:
        assert answered(engine.generate(PROMPTS)) == ([HIT] * 2, expected)
        assert at_rest(engine)["fetch_corrupt"] == 0

    with rig.serve(rig.tiny, connect(rig.s3, rig.bucket), env=without_codec, **FLOAT32) as engine:
        assert answered(engine.generate(PROMPTS)) == ([0, 0], expected)
        at_rest(engine)
        assert engine.metrics()["vllm:s3kv_fetch_corrupt_codec_total"] >= len(PROMPTS)
    assert rig.s3.contents(rig.bucket) == stored, "they are not replaced"
