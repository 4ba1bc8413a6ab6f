"""`s3kv du`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from s3kv.cli.usage import AGES, DAY_S, HOUR_S, NamespaceUsage
from s3kv.objects.keys import Namespace, canonical_json, fingerprint_digest
from s3kv.objects.store import ObjectInfo
from s3kv.types import ChunkKey
from tests import servers
from tests.cli.conftest import Run

FINGERPRINT = {"model": {"name": "[red]m@main"}}
SMALL = Namespace("s3kv", "a" * 32)
LARGE = Namespace("s3kv", fingerprint_digest(FINGERPRINT))


def fill(boto: Any) -> None:
    def put(key: str, data: bytes) -> None:
        boto.put_object(Bucket=servers.BUCKET, Key=key, Body=data)

    put(SMALL.chunk(ChunkKey(0, b"x"), "t0of1-p0of1"), b"1" * 10)
    put(LARGE.chunk(ChunkKey(0, b"x"), "t0of1-p0of1"), b"1" * 100)
    put(LARGE.chunk(ChunkKey(0, b"y"), "t0of1-p0of1"), b"1" * 200)
    put(LARGE.manifest, canonical_json(FINGERPRINT))
    put("s3kv/v1/somebody-elses", b"1" * 1000)
    put("other/v1/elsewhere", b"1" * 1000)
    put(Namespace("s3kv/v1/nested", "c" * 32).chunk(ChunkKey(0, b"x"), "t0of1-p0of1"), b"1" * 1000)


def test_by_namespace(run: Run, boto: Any) -> None:
    fill(boto)
    result = run("du", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["nbytes"] == 310
    large, small = document["namespaces"]
    assert (large["digest"], large["model"], large["objects"]) == (LARGE.digest, "[red]m@main", 2)
    assert (small["digest"], small["model"], small["nbytes"]) == ("a" * 32, None, 10)
    assert large["bytes_by_age"]["under 1 h"] == 300


def test_as_text(run: Run, boto: Any) -> None:
    fill(boto)
    result = run("du")
    assert result.exit_code == 0, result.output
    assert "[red]m@main" in result.stdout
    assert "310 B" in result.stdout


def test_an_empty_bucket(run: Run) -> None:
    assert json.loads(run("du", "--json").stdout) == {"namespaces": [], "nbytes": 0}
    assert run("du").exit_code == 0


def test_a_bucket_that_is_not_there(run: Run) -> None:
    result = run("du", "--json", bucket="no-such-bucket")
    assert result.exit_code == 3
    assert "create the bucket" in result.stderr


@pytest.mark.parametrize(
    ("age_s", "name"),
    [
        (-5.0, "under 1 h"),
        (HOUR_S - 1, "under 1 h"),
        (HOUR_S, "1 h to 1 d"),
        (DAY_S, "1 to 7 d"),
        (7 * DAY_S, "7 to 30 d"),
        (30 * DAY_S, "over 30 d"),
        (9000 * DAY_S, "over 30 d"),
    ],
)
def test_ages(age_s: float, name: str) -> None:
    usage = NamespaceUsage("a" * 32)
    usage.add(ObjectInfo("key", 7, 1e9 - age_s), 1e9)
    assert {n: b for (n, _), b in zip(AGES, usage.bytes_by_age, strict=True) if b} == {name: 7}
