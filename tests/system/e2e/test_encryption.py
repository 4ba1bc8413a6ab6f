"""Encrypted objects on the real engine: the connector and the tier write nothing else, to bucket
and disk, and read them with the key that they were written with, as long as it is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab import models
from lab.s3 import S3Server
from s3kv.objects import keys
from s3kv.objects.encryption import MasterKey
from tests.system.e2e.conftest import FLOAT32, START_AND_STOP_S, Rig, answered, at_rest, tokens
from tests.system.e2e.test_compression import HIT, of_connector, of_tier

pytest.importorskip("blosc2")

PROMPTS = models.prompts(2, 1_100, seed=91)
FIRST, SECOND, OTHER = (bytes([n] * 32) for n in (1, 2, 3))
Connect = Callable[..., dict[str, Any]]


def check_encrypted(stored: dict[str, bytes]) -> None:
    """That nothing but manifests and shapes can be read, in bytes or names."""
    chunks = {key: data for key, data in stored.items() if keys.parse_sign(key) is None}
    assert chunks
    for key, data in chunks.items():
        address = keys.parse(key)
        assert address.is_encrypted, key
        assert MasterKey(FIRST).id.encode() in data[:256], key
        for word in (b"s3kv.block_hash", b"s3kv.digests", b"layers", b"segments"):
            assert word not in data, key


CASES = [
    pytest.param(of_connector, id="connector"),
    pytest.param(of_tier, id="tier", marks=pytest.mark.nightly),
]


@pytest.fixture(params=CASES)
def connect(request: pytest.FixtureRequest, s3: S3Server, bucket: str, tmp_path: Path) -> Connect:
    """Settings with these master keys, the first of which encrypts."""

    def connect(*masters: bytes, **settings: Any) -> dict[str, Any]:
        file = tmp_path / "keys"
        file.write_text("".join(f"{master.hex()}\n" for master in masters))
        given = {"encryption": "aes-gcm", "encryption_keys_file": str(file)}
        found: dict[str, Any] = request.param(s3, bucket, **given | settings)
        return found

    return connect


@pytest.mark.timeout(5 * START_AND_STOP_S)
def test_what_one_key_has_encrypted_that_key_alone_decrypts(rig: Rig, connect: Connect) -> None:
    expected = tokens(rig.reference(rig.tiny, PROMPTS, **FLOAT32))
    disk = rig.tmp_path / "disk"
    on_disk = {"disk_path": str(disk), "disk_bytes": "1GiB", "disk_writes": "all"}
    with rig.serve(rig.tiny, connect(FIRST, compress="on", **on_disk), **FLOAT32) as engine:
        assert answered(engine.generate(PROMPTS)) == ([0, 0], expected)
        at_rest(engine)
    stored = rig.s3.contents(rig.bucket)
    check_encrypted(stored)
    (nbytes,) = {len(data) for key, data in stored.items() if keys.parse(key)}
    assert nbytes < 0.9 * 2 ** nbytes.bit_length(), "it is compressed: plain ones are 2^n and more"
    files = [*(disk / "v3").rglob("*.safetensors")]
    check_encrypted({f"s3kv/v3/{_key(disk, file)}": file.read_bytes() for file in files})

    with rig.serve(rig.tiny, connect(SECOND, FIRST), **FLOAT32) as engine:
        assert answered(engine.generate(PROMPTS)) == ([HIT] * 2, expected)
        assert at_rest(engine)["fetch_corrupt"] == 0

    with rig.serve(rig.tiny, connect(OTHER), **FLOAT32) as engine:
        assert answered(engine.generate(PROMPTS)) == ([0, 0], expected)
        assert at_rest(engine)["fetch_corrupt"] == 0, "it asks for other names"
    after = rig.s3.contents(rig.bucket)
    assert {key: after[key] for key in stored} == stored


def _key(disk: Path, file: Path) -> str:
    folder, _, name = str(file.relative_to(disk / "v3")).rpartition("/")
    return f"{folder}/{name.replace('.', '/', 1)}"
