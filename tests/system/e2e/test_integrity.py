"""Objects forged in the bucket, on the real engine."""

from __future__ import annotations

import pytest

from lab import models
from s3kv.objects.headers import read_header
from s3kv.objects.integrity import Integrity
from tests.system.e2e.conftest import START_AND_STOP_S, Rig, answered, at_rest, changed, tokens

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
def test_what_is_sealed_without_the_secret_is_a_miss(rig: Rig) -> None:
    """Zeros under the right keys would change the tokens (test_prefix.py shows it)."""
    (rig.tmp_path / "secret").write_text(SECRET)
    settings = {"integrity": "blake3-keyed", "integrity_secret_file": str(rig.tmp_path / "secret")}
    connector = changed(rig.patient, **settings)
    expected = rig.reference(rig.tiny, PROMPTS)
    with rig.serve(rig.tiny, connector) as engine:
        engine.generate(PROMPTS)
    assert len(rig.objects()) == 2 * CHUNKS
    with rig.serve(rig.tiny, connector) as engine:
        assert answered(engine.generate(PROMPTS)) == answered(expected)

    rig.s3.change(rig.bucket, lambda data: forged(data, bytes(32)))
    with rig.serve(rig.tiny, connector) as engine:
        cold = engine.generate(PROMPTS)
        done = at_rest(engine)
        said = engine.log_path.read_text()
    assert answered(cold) == ([0, 0], tokens(rig.reference(rig.tiny, PROMPTS, hit_tokens=0)))
    assert done["fetch_corrupt"] == done["fetch_corrupt_digest"] == 2
    assert "fetch corrupt" in said
    assert SECRET not in said
