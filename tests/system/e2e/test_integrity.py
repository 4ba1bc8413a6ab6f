"""Objects forged in the bucket, on the real engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab import models
from lab.s3 import S3Server
from s3kv.objects.headers import read_header
from s3kv.objects.integrity import Integrity
from tests.system.e2e.conftest import (
    START_AND_STOP_S,
    References,
    Serve,
    at_rest,
    cached,
    changed,
    tokens,
)

PROMPTS = models.prompts(2, 800)
CHUNKS = 6
SECRET = "only the engines know this one"


def forged(data: bytes, key: bytes) -> bytes:
    """The object with a payload of zeros, sealed as an engine would, with a key of one's own."""
    header = read_header(memoryview(data))
    payload = bytes(header.payload_bytes)
    head, (said,) = data[: header.header_bytes], header.digests
    empty = head.replace(said.encode(), b"").ljust(header.header_bytes)
    digest = Integrity("blake3-keyed", key).digest(empty, 0, memoryview(payload))
    return head.replace(said.encode(), digest.encode()) + payload


@pytest.mark.nightly
@pytest.mark.timeout(2 * START_AND_STOP_S)
def test_what_is_sealed_without_the_secret_is_a_miss(
    tiny: Path,
    s3: S3Server,
    bucket: str,
    patient: dict[str, Any],
    serve: Serve,
    reference: References,
    tmp_path: Path,
) -> None:
    """Zeros under the right keys would change the tokens (test_prefix.py shows it)."""
    (tmp_path / "secret").write_text(SECRET)
    settings = {"integrity": "blake3-keyed", "integrity_secret_file": str(tmp_path / "secret")}
    connector = changed(patient, **settings)
    expected = reference(tiny, PROMPTS)
    with serve(tiny, connector) as engine:
        engine.generate(PROMPTS)
    client = s3.client()
    mine, *others = s3.objects(bucket)
    assert len(others) == 2 * CHUNKS - 1
    with serve(tiny, connector) as engine:
        warm = engine.generate(PROMPTS)
    assert (cached(warm), tokens(warm)) == (cached(expected), tokens(expected))

    for key in (mine, *others):
        data = client.get_object(Bucket=bucket, Key=key)["Body"].read()
        client.put_object(Bucket=bucket, Key=key, Body=forged(data, bytes(32)))
    with serve(tiny, connector) as engine:
        cold = engine.generate(PROMPTS)
        done = at_rest(engine)
        said = engine.log_path.read_text()
    assert cached(cold) == [0, 0]
    assert tokens(cold) == tokens(reference(tiny, PROMPTS, hit_tokens=0))
    assert done["fetch_corrupt"] == done["fetch_corrupt_digest"] == 2
    assert "fetch corrupt" in said
    assert SECRET not in said
