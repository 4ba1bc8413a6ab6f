"""Files on the host's disk before the bucket, on the real engine: the connector and the tier. Each
has few slots or rows, so that a hit comes from the disk and not from host memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lab import models
from lab.offloading import offloading
from lab.s3 import S3Server
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
from tests.system.e2e.servers import Store
from tests.system.e2e.test_tier import tier
from tests.system.forms import flipped, plain_of

PROMPTS = models.prompts(2, 800, seed=37)
HIT = 6 * 128


@pytest.fixture(params=["connector", "tier"])
def connector(
    request: pytest.FixtureRequest, s3: S3Server, store: Store, tmp_path: Path
) -> dict[str, Any]:
    disk = {"disk_path": str(tmp_path / "disk"), "disk_bytes": "1GiB", "disk_writes": "all"}
    place = S3Server(store.url, s3.env), Store.BUCKET
    settings: dict[str, Any] = {"on_unavailable": "serve", **disk}
    if request.param == "tier":
        return offloading(tier(*place, fails=True, **settings), 2**28)
    return changed(patient_for(*place, fails=True), **settings)


def files(tmp_path: Path) -> Sequence[Path]:
    return sorted((tmp_path / "disk").rglob("*.safetensors"))


@pytest.mark.timeout(4 * START_AND_STOP_S)
def test_files_serve_a_new_process_without_a_bucket_and_bad_ones_are_a_miss_of_the_disk_alone(
    rig: Rig, connector: dict[str, Any], store: Store
) -> None:
    expected = tokens(rig.reference(rig.tiny, PROMPTS, **FLOAT32))
    store.start()
    with rig.serve(rig.tiny, connector, **FLOAT32) as engine:
        engine.generate(PROMPTS)
        at_rest(engine)
    assert len(files(rig.tmp_path)) == 12

    store.remember()
    store.kill()
    with rig.serve(rig.tiny, connector, at_rest=False, **FLOAT32) as engine:
        assert answered(engine.generate(PROMPTS)) == ([HIT] * 2, expected)

    store.start()
    for file in files(rig.tmp_path):
        file.write_bytes(flipped(file.read_bytes()))
    with rig.serve(rig.tiny, connector, **FLOAT32) as engine:
        assert answered(engine.generate(PROMPTS)) == ([HIT] * 2, expected)
    for key, data in store.s3.contents(Store.BUCKET).items():
        (file,) = (f for f in files(rig.tmp_path) if f.name.startswith(Path(key).parent.name))
        is_whole = file.read_bytes() == plain_of(data)
        assert is_whole
