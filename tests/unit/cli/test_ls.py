"""`s3kv ls`: namespaces, and summaries."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from s3kv.cli.walk import AGES
from s3kv.objects.keys import Namespace, canonical_json, fingerprint_digest
from s3kv.types import ChunkKey
from tests.unit.cli.conftest import SHARD, Run, put, refused

HALF = {"model": {"name": "[red]m@main", "dtype": "half"}, "chunk_tokens": 256, "\x1b[2J": 1}
FULL = {"model": {"name": "m@main", "dtype": "float"}, "chunk_tokens": 256}
HALVES, FULLS = (Namespace("s3kv", fingerprint_digest(f)) for f in (HALF, FULL))
GC = ("gc", "--max-bytes", "0")
NAMELESS = Namespace("s3kv", "f" * 32)


@pytest.fixture(autouse=True)
def filled(boto: Any) -> None:
    put(boto, HALVES.manifest, canonical_json(HALF))
    put(boto, FULLS.manifest, canonical_json(FULL))
    put(boto, NAMELESS.manifest, canonical_json(HALF))  # not what the name is a digest of
    for number in range(30):
        put(boto, HALVES.chunk(ChunkKey(number % 2, bytes([number])), SHARD), b"1" * 10)
    put(boto, FULLS.chunk(ChunkKey(0, b"x"), SHARD), b"1" * 100)
    put(boto, f"{HALVES.root}somebody-elses", b"1" * 1000)
    put(boto, "s3kv/v3/no-namespace/x", b"1" * 1000)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_namespaces(run: Run) -> None:
    result = run("ls", "--json")
    assert result.exit_code == 0, result.output
    models = {HALVES.digest: "[red]m@main", FULLS.digest: "m@main", NAMELESS.digest: None}
    found = [(line["namespace"], line["model"]) for line in lines(result.stdout)]
    assert found == sorted(models.items())
    text = run("ls").stdout
    assert FULLS.digest in text
    assert "[red]m@main" in text


@pytest.mark.parametrize("options", [(), ("--summary",)])
@pytest.mark.parametrize("name", ["", "0000000", "no-name"])
def test_a_namespace_that_is_not_one(run: Run, options: tuple[str, ...], name: str) -> None:
    result = run("ls", name, *options)
    assert result.exit_code == 2
    assert HALVES.digest in result.stderr or "is not a namespace" in result.stderr


def test_the_summary_as_documents(run: Run) -> None:
    result = run("ls", "--summary", "--json")
    assert result.exit_code == 0, result.output
    halves, fulls, nameless = sorted(lines(result.stdout), key=lambda one: -one["objects"])
    assert (halves["namespace"], halves["objects"], halves["nbytes"]) == (HALVES.digest, 30, 300)
    assert (fulls["namespace"], fulls["objects"], fulls["nbytes"]) == (FULLS.digest, 1, 100)
    assert halves["manifest"]["chunk_tokens"] == "256"
    assert halves["bytes_by_age"]["under 1 h"] == 300
    age = datetime.now(timezone.utc) - datetime.fromisoformat(halves["oldest"])
    assert abs(age) < timedelta(hours=1)
    assert nameless == {
        "namespace": NAMELESS.digest, "model": None, "objects": 0, "nbytes": 0,
        "oldest": None, "newest": None, "bytes_by_age": dict.fromkeys(AGES, 0), "manifest": {},
    }  # fmt: skip


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_the_summary_tells_namespaces_apart(run: Run) -> None:
    text = run("ls", "--summary").stdout
    found = words(text)
    assert [HALVES.digest, "[red]m@main", "30", "300", "B", "0", "min", "0", "min"] in found
    assert [NAMELESS.digest, "–", "0", "0", "B", "–", "–"] in found
    assert ["total", "31", "400", "B"] in found
    assert ["under", "1", "h", "400", "B"] in found
    assert [HALVES.digest, "model.dtype", '"half"'] in found
    assert [HALVES.digest, r"\u001b[2J", "1"] in found
    assert [FULLS.digest, "model.dtype", '"float"'] in found
    assert [NAMELESS.digest, *["no", "manifest", "of", "its", "own"]] in found
    assert "chunk_tokens" not in text


def test_the_summary_of_one_namespace_has_its_whole_manifest(run: Run) -> None:
    found = words(run("ls", FULLS.digest[:8]).stdout)
    assert ["total", "1", "100", "B"] in found
    assert [FULLS.digest, "chunk_tokens", "256"] in found
    assert not any(HALVES.digest in line for line in found)


def test_an_empty_prefix(run: Run) -> None:
    for options in ((), ("--summary",)):
        result = run("ls", *options, "--prefix", "nothing-here", "--json")
        assert (result.exit_code, result.stdout) == (0, "")
        result = run("ls", *options, "--prefix", "nothing-here")
        assert (result.exit_code, result.stdout) == (0, ""), "no table without a row"


@pytest.mark.parametrize("command", [("ls",), ("ls", "--summary"), ("verify",), GC])
def test_what_lies_next_to_a_mistyped_prefix_is_told(run: Run, command: tuple[str, ...]) -> None:
    result = run(*command, "--prefix", "s3kw", "--json")
    assert result.exit_code == 0
    (line,) = result.stderr.splitlines()
    assert "nothing of s3kv is under 's3kw/'" in line
    assert line.endswith("next to it: 's3kv/'")


def test_what_lies_next_to_it_need_not_be_a_cache(run: Run, boto: Any) -> None:
    put(boto, "team/models/x", b"")
    told = run("ls", "--prefix", "team/s3kv").stderr
    assert told.endswith("next to it: 'team/models/'\n")
    assert run("ls", "--prefix", "teams/s3kv").stderr.endswith("next to it: nothing\n")
    assert run("ls").stderr == ""


def test_a_bucket_that_is_not_there(run: Run) -> None:
    refused(run("ls", "--summary", bucket="no-such-bucket"), "create the bucket", code=3)
