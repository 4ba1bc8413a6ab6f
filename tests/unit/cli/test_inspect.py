"""`s3kv inspect`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from s3kv.config import Config
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.integrity import Integrity
from s3kv.objects.keys import Namespace
from s3kv.place import Place
from s3kv.types import ChunkKey, TensorSpec
from tests import servers
from tests.unit.cli.conftest import Run

NAMESPACE = Namespace("s3kv", "a" * 32)
SHARD = "h0-7of8-l0-31of32"
HASH = b"0123456789abcdef"
KEY = NAMESPACE.chunk(ChunkKey(0, HASH), SHARD)
SECRET = "0123456789abcdef-secret"


TENSORS = (TensorSpec("layer.0", "BF16", (2, 8)), TensorSpec("layer.1", "F32", (4,)))


def sealed(integrity: Integrity | None = None) -> bytearray:
    chunk = ChunkFormat(NAMESPACE.digest, TENSORS, 0, SHARD, integrity or Integrity())
    buffer = bytearray(range(chunk.object_bytes % 251)) + bytearray(chunk.object_bytes)
    del buffer[chunk.object_bytes :]
    chunk.seal(Place.of(buffer, chunk.header_bytes), HASH)
    return buffer


def put(boto: Any, data: bytes | bytearray, key: str = KEY) -> None:
    boto.put_object(Bucket=servers.BUCKET, Key=key, Body=bytes(data))


def test_a_good_object(run: Run, boto: Any) -> None:
    put(boto, sealed())
    result = run("inspect", KEY, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["refusal"] is None
    assert document["header"]["block_hash"] == HASH.hex()
    assert [t["shape"] for t in document["header"]["tensors"]] == [[2, 8], [4]]
    text = run("inspect", KEY)
    assert "layer.1  F32 [4]" in text.stdout
    assert "the object matches its key" in text.stdout


def flipped() -> bytearray:
    data = sealed()
    data[-1] ^= 1
    return data


@pytest.mark.parametrize(
    ("data", "refusal"),
    [
        (flipped(), "digest"),
        (sealed()[:-1], "header"),
        (b"no object of ours", "header"),
        (b"", "header"),
        (sealed(Integrity("none")), "algorithm"),
    ],
    ids=["flipped", "truncated", "foreign", "empty", "unsigned"],
)
def test_a_bad_object(run: Run, boto: Any, data: bytes, refusal: str) -> None:
    put(boto, data)
    result = run("inspect", KEY, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["refusal"] == refusal
    assert f"refused: {refusal}" in run("inspect", KEY).stdout


@pytest.mark.parametrize(
    ("key", "refusal"),
    [
        (Namespace("s3kv", "b" * 32).chunk(ChunkKey(0, HASH), SHARD), "namespace"),
        (NAMESPACE.chunk(ChunkKey(1, HASH), SHARD), "coverage"),
        (NAMESPACE.chunk(ChunkKey(0, HASH), "h4-7of8-l0-31of32"), "shard"),
        (NAMESPACE.chunk(ChunkKey(0, HASH[::-1]), SHARD), "block_hash"),
    ],
)
def test_a_good_object_in_the_wrong_place(run: Run, boto: Any, key: str, refusal: str) -> None:
    put(boto, sealed(), key)
    result = run("inspect", key, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["refusal"] == refusal


def test_a_keyed_object(run: Run, boto: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3KV_INTEGRITY_SECRET", SECRET)
    put(boto, sealed(Integrity.of(Config(bucket="bkt", integrity="blake3-keyed"))))
    keyed = ("inspect", KEY, "--set", "integrity=blake3-keyed")
    assert run(*keyed).exit_code == 0
    monkeypatch.setenv("S3KV_INTEGRITY_SECRET", SECRET[::-1])
    assert run(*keyed).exit_code == 1
    monkeypatch.delenv("S3KV_INTEGRITY_SECRET")
    assert run(*keyed).exit_code == 2


@pytest.mark.parametrize(
    ("key", "code", "said"),
    [
        (KEY, 1, "there is no object"),
        ("s3kv/v2/something", 2, "which looks like s3kv/v2/NAMESPACE/"),
    ],
)
def test_no_such_object(run: Run, key: str, code: int, said: str) -> None:
    result = run("inspect", key)
    assert result.exit_code == code
    assert said in result.stderr
