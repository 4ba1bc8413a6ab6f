"""Hypothesis on every run, libFuzzer (atheris) every night."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from s3kv.io import wire
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.encryption import EncryptedForm
from s3kv.objects.envelope import Envelope
from s3kv.objects.headers import Mismatch, read_header
from s3kv.place import Place
from tests.project import ROOT, skip_or_fail
from tests.system.fuzz import chunks, targets
from tests.system.fuzz.targets import (
    DOWN,
    ENVELOPES,
    FORMATS,
    GOOD,
    HASH,
    SEEDS,
    TARGETS,
    UP,
    edited,
)

NIGHTLY_SECONDS = int(os.environ.get("S3KV_FUZZ_SECONDS", "60"))

edits = st.lists(
    st.tuples(st.integers(0, 2**16 - 1), st.binary(min_size=1, max_size=40)), max_size=5
).map(lambda pieces: b"".join(o.to_bytes(2, "little") + bytes([len(p)]) + p for o, p in pieces))
hostile = st.one_of(
    st.binary(max_size=300),
    edits,
    st.builds(edited, st.sampled_from([*GOOD.values(), DOWN, UP, DOWN[4:], UP[4:]]), edits),
)


@pytest.mark.parametrize("name", TARGETS)
def test_the_seeds_pass(name: str) -> None:
    for data in SEEDS[name]:
        TARGETS[name](data)


@pytest.mark.parametrize("name", TARGETS)
@given(data=hostile)
@settings(max_examples=200)
@example(data=b"")
@example(data=b"\xff" * 300)
def test_hostile_bytes(name: str, data: bytes) -> None:
    TARGETS[name](data)


@pytest.mark.parametrize("name", ["header", "frames", "manifests"])
@given(data=hostile)
@settings(max_examples=60)
@example(data=b"\xdd\xff\xff\xff\xff")
@example(data=b"\xc6\xff\xff\xff\xff")
@example(data=(2**63).to_bytes(8, "little"))
@example(data=b'{"t":{"dtype":"U8","shape":[' + b"9" * 2000 + b'],"data_offsets":[0,1]}}')
def test_memory_is_in_proportion(name: str, data: bytes) -> None:
    """Lengths that are announced are not believed: what is allocated follows what is there."""
    tracemalloc.start()
    try:
        TARGETS[name](data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2**20 + 200 * len(data)


FORMS = pytest.mark.parametrize(
    "form",
    [*FORMATS, *ENVELOPES],
    ids=["xxh3", "blake3-keyed", "xxh3, compressed", "blake3-keyed, compressed"],
)
OF_PAYLOADS = {ChunkFormat: (), Envelope: ("digest",)}
VALUES: list[Any] = ["", "0", "2", "x", "?", "00", "9" * 400, None, 0, -1, 2**70, 0.5, [], {}, [[]]]


@FORMS
def test_every_value_of_a_header_is_looked_at(form: ChunkFormat | Envelope) -> None:
    """Also those inside the text of `s3kv.layers`."""
    good = GOOD[form]
    members = json.loads(good[8 : form.header_bytes])
    refusals = set()
    for path in targets.places(members):
        for value in VALUES:
            refusals.add(targets.judge(form, good, targets.with_value(form, good, path, value)))
    layers = json.loads(members["__metadata__"]["s3kv.layers"])
    for path in targets.places(layers):
        for value in VALUES:
            changed = json.loads(json.dumps(layers))
            inner = changed
            for name in path[:-1]:
                inner = inner[name]
            inner[path[-1]] = value
            text = json.dumps(changed, separators=(",", ":"))
            place = ["__metadata__", "s3kv.layers"]
            data = targets.with_value(form, good, place, text)
            refusals.add(targets.judge(form, good, data))
            assert data == good or targets.judge(form, good, data) is not None
    # Every reason that is a value is given for some value. A compressed object with digests of
    # another length is refused for its header.
    others = {"length", "codec", "encryption", *OF_PAYLOADS[type(form)]}
    assert refusals >= {*get_args(Mismatch)} - others


@FORMS
def test_no_member_can_be_left_out_or_added(form: ChunkFormat | Envelope) -> None:
    good = GOOD[form]
    members = json.loads(good[8 : form.header_bytes])
    for part in (members, members["__metadata__"]):
        for name in list(part):
            held = part.pop(name)
            text = json.dumps(members, separators=(",", ":"))
            assert targets.judge(form, good, targets.with_header(form, good, text))
            part[name] = held
        part["more"] = "x"
        text = json.dumps(members, separators=(",", ":"))
        assert targets.judge(form, good, targets.with_header(form, good, text))
        del part["more"]


@pytest.mark.parametrize("form", FORMATS, ids=lambda f: f.integrity.mode)
def test_a_part_of_another_shard_is_refused(form: ChunkFormat) -> None:
    """One part of each from an object of another rank, with its digest and without."""
    other = dataclasses.replace(form, shard="h0-3of8-l0-31of32")
    theirs = bytearray(bytes(range(255, -1, -1)) * (other.object_bytes // 256 + 1))
    other.seal(Place.of(theirs, other.header_bytes), HASH)
    ours, header_bytes = GOOD[form], form.header_bytes
    digests = [
        read_header(memoryview(data)[:n], object_bytes=n).digests
        for data, n in ((ours, form.object_bytes), (theirs, other.object_bytes))
    ]
    for number, span in enumerate(form.segments):
        data = bytearray(ours)
        begin, end = header_bytes + span.start, header_bytes + span.stop
        data[begin:end] = theirs[begin:end]
        assert targets.judge(form, ours, bytes(data)) == "digest"
        renamed = bytes(data).replace(digests[0][number].encode(), digests[1][number].encode())
        if form.integrity.mode == "blake3-keyed":
            assert targets.judge(form, ours, renamed) == "digest"


def test_a_reader_that_believes_anything_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkFormat, "check", lambda *arguments: None)
    with pytest.raises(targets.Wrong, match="forgery"):
        targets.objects(b"\x00\x00\x01x")


def test_a_reader_that_decrypts_anything_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EncryptedForm, "decrypt", lambda *arguments: True)
    with pytest.raises(targets.Wrong, match="forgery"):
        targets.encrypted(b"\x00\x01\x01x")


def test_a_reader_that_hoards_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def hoard(self: Any, data: bytes) -> list[Any]:
        self._pending.extend(data)
        return []

    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 10)
    monkeypatch.setattr(wire.FrameReader, "feed", hoard)
    with pytest.raises(targets.Wrong, match="more than a frame"):
        targets.frames(b"x" * 100)


@pytest.mark.parametrize("seed", range(4))
def test_no_chunk_crashes_the_decoder(seed: int) -> None:
    """In a process of its own, whose last line is the chunk that it died of."""
    command = [sys.executable, "-X", "faulthandler", "-m", chunks.__name__, str(seed), "2000"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False
    )
    *_, last = done.stdout.splitlines()
    assert done.returncode == 0, f"seed {seed}, {last}: {done.stderr[-3000:]}"
    said = json.loads(last)
    assert said["decoded"] > 20, "every chunk is refused: what is changed lies too far in front"
    assert said["refused"] > 200


@pytest.mark.nightly
@pytest.mark.timeout(NIGHTLY_SECONDS + 120)
@pytest.mark.parametrize("name", [*TARGETS, "chunks"])
def test_libfuzzer(name: str, tmp_path: Path) -> None:
    """Guided by coverage; S3KV_FUZZ_SECONDS each. What fails is told in Base64."""
    if importlib.util.find_spec("atheris") is None:
        skip_or_fail("atheris is not installed")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, data in enumerate(SEEDS.get(name, [b""])):
        (corpus / str(number)).write_bytes(data)
    options = [f"-max_total_time={NIGHTLY_SECONDS}", "-rss_limit_mb=0", "-max_len=20000"]
    options += ["-timeout=10", f"-artifact_prefix={tmp_path}/", str(corpus)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.system.fuzz", name, *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=NIGHTLY_SECONDS + 100,
        check=False,
    )
    print(done.stderr[-1500:])
    assert done.returncode == 0, done.stderr[-5000:]
