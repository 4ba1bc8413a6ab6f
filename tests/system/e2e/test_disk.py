"""Files on the host's disk before the bucket, on the real engine: the connector and the tier. Each
has few slots or rows, so that a hit comes from the disk and not from host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lab import models
from lab.offloading import offloading
from lab.s3 import S3Server
from tests.system.e2e.conftest import (
    START_AND_STOP_S,
    References,
    Serve,
    at_rest,
    cached,
    changed,
    patient_for,
    tokens,
)
from tests.system.e2e.test_failures import Store
from tests.system.e2e.test_tier import flipped, tier
from tests.system.forms import plain_of

PROMPTS = models.prompts(2, 800, seed=37)
HIT = 6 * 128
EXACT: dict[str, Any] = {"dtype": "float32"}

Connect = Callable[..., dict[str, Any]]


def of_connector(s3: S3Server, bucket: str, **settings: Any) -> dict[str, Any]:
    return changed(patient_for(s3, bucket, fails=True), **settings)


def of_tier(s3: S3Server, bucket: str, **settings: Any) -> dict[str, Any]:
    return offloading(tier(s3, bucket, fails=True, **settings), 2**28)


@pytest.fixture(params=[of_connector, of_tier], ids=["connector", "tier"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    disk = {
        "disk_path": str(tmp_path / "disk"),
        "disk_bytes": "1GiB",
        "disk_writes": "all",
        "on_unavailable": "serve",
    }

    def connect(s3: S3Server, bucket: str, **settings: Any) -> dict[str, Any]:
        found: dict[str, Any] = request.param(s3, bucket, **disk | settings)
        return found

    return connect


def fill(serve: Serve, tiny: Path, connector: dict[str, Any]) -> None:
    """Have an engine compute the prompts, and leave their chunks behind."""
    with serve(tiny, connector, **EXACT) as engine:
        engine.generate(PROMPTS)
        at_rest(engine)


def files(tmp_path: Path) -> Sequence[Path]:
    return sorted((tmp_path / "disk").rglob("*.safetensors"))


@pytest.mark.timeout(4 * START_AND_STOP_S)
def test_a_new_process_is_served_from_the_disk_with_no_bucket(
    tiny: Path,
    s3: S3Server,
    serve: Serve,
    connect: Connect,
    reference: References,
    tmp_path: Path,
) -> None:
    expected = tokens(reference(tiny, PROMPTS, **EXACT))
    store = Store()
    gone = S3Server(store.url, s3.env)
    store.start()
    fill(serve, tiny, connect(gone, Store.BUCKET))
    store.kill()
    assert len(files(tmp_path)) == 12

    with serve(tiny, connect(gone, Store.BUCKET), at_rest=False, **EXACT) as engine:
        found = engine.generate(PROMPTS)
    assert (tokens(found), cached(found)) == (expected, [HIT] * 2)


@pytest.mark.timeout(3 * START_AND_STOP_S)
def test_a_bad_file_is_a_miss_of_the_disk_alone(
    tiny: Path,
    s3: S3Server,
    bucket: str,
    serve: Serve,
    connect: Connect,
    reference: References,
    tmp_path: Path,
) -> None:
    expected = tokens(reference(tiny, PROMPTS, **EXACT))
    fill(serve, tiny, connect(s3, bucket))
    for file in files(tmp_path):
        file.write_bytes(flipped(file.read_bytes()))
    with serve(tiny, connect(s3, bucket), **EXACT) as engine:
        found = engine.generate(PROMPTS)
        assert (tokens(found), cached(found)) == (expected, [HIT] * 2)
    client = s3.client()
    for key in s3.objects(bucket):
        (file,) = (f for f in files(tmp_path) if f.name.startswith(Path(key).parent.name))
        data = client.get_object(Bucket=bucket, Key=key)["Body"].read()
        is_whole = file.read_bytes() == plain_of(data)
        assert is_whole
