"""`s3kv ls` and `s3kv stat`."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from s3kv.objects.keys import Namespace, canonical_json, fingerprint_digest
from s3kv.types import ChunkKey
from tests import servers
from tests.cli.conftest import Run

HALF = {"model": {"name": "m@main", "dtype": "half"}, "chunk_tokens": 256}
FULL = {"model": {"name": "m@main", "dtype": "float"}, "chunk_tokens": 256}
HALVES, FULLS = (Namespace("s3kv", fingerprint_digest(f)) for f in (HALF, FULL))
NAMELESS = Namespace("s3kv", "f" * 32)


@pytest.fixture(autouse=True)
def filled(boto: Any) -> None:
    def put(key: str, data: bytes) -> None:
        boto.put_object(Bucket=servers.BUCKET, Key=key, Body=data)

    put(HALVES.manifest, canonical_json(HALF))
    put(FULLS.manifest, canonical_json(FULL))
    put(NAMELESS.manifest, canonical_json(HALF))  # not what the name is a digest of
    for number in range(30):
        put(HALVES.chunk(ChunkKey(number % 2, bytes([number])), "t0of1-p0of1"), b"1" * 10)
    put(FULLS.chunk(ChunkKey(0, b"x"), "t0of1-p0of1"), b"1" * 100)
    put(f"{HALVES.root}somebody-elses", b"1" * 1000)
    put("s3kv/v1/no-namespace/x", b"1" * 1000)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_namespaces(run: Run) -> None:
    result = run("ls", "--json")
    assert result.exit_code == 0, result.output
    names = sorted([HALVES.digest, FULLS.digest, NAMELESS.digest])
    assert [line["namespace"] for line in lines(result.stdout)] == names
    assert {line["namespace"]: line["model"] for line in lines(result.stdout)} == {
        HALVES.digest: "m@main",
        FULLS.digest: "m@main",
        NAMELESS.digest: None,
    }
    assert FULLS.digest in run("ls").stdout


def test_chunks_of_one_namespace(run: Run) -> None:
    result = run("ls", HALVES.digest[:12], "--json")
    assert result.exit_code == 0, result.output
    found = lines(result.stdout)
    assert [line["block_hash"] for line in found] == [f"{n:02x}" for n in range(30)]
    assert {(line["nbytes"], line["shard"]) for line in found} == {(10, "t0of1-p0of1")}
    age = datetime.now(timezone.utc) - datetime.fromisoformat(found[0]["modified"])
    assert abs(age) < timedelta(hours=1)
    text = run("ls", HALVES.digest, "--limit", "7")
    assert len(text.stdout.splitlines()) == 7
    assert "and more" in text.stderr
    assert "and more" not in run("ls", HALVES.digest, "--limit", "30").stderr


@pytest.mark.parametrize("command", ["ls", "stat"])
@pytest.mark.parametrize("name", ["", "0000000", "no-name"])
def test_a_namespace_that_is_not_one(run: Run, command: str, name: str) -> None:
    result = run(command, name)
    assert result.exit_code == 2
    assert HALVES.digest in result.stderr or "no namespace" in result.stderr


def test_totals_and_what_tells_namespaces_apart(run: Run) -> None:
    document = json.loads(run("stat", "--json").stdout)
    assert (document["objects"], document["nbytes"]) == (31, 400)
    by_name = {one["namespace"]: one for one in document["namespaces"]}
    assert by_name[HALVES.digest]["objects"] == 30
    assert by_name[HALVES.digest]["manifest"]["chunk_tokens"] == "256"
    assert by_name[NAMELESS.digest] == {
        "namespace": NAMELESS.digest,
        "objects": 0,
        "nbytes": 0,
        "oldest": None,
        "newest": None,
        "manifest": {},
    }
    text = run("stat").stdout
    assert 'model.dtype  "half"' in text
    assert 'model.dtype  "float"' in text
    assert "chunk_tokens" not in text
    assert "none that belongs to this namespace" in text
    assert "3 namespaces, 31 objects, 400 B" in text


def test_one_namespace_in_full(run: Run) -> None:
    text = run("stat", FULLS.digest).stdout
    assert "chunk_tokens  256" in text.replace("   ", "  ").replace("   ", "  ")
    assert "1 namespaces, 1 objects, 100 B" in text
