"""`s3kv gc`: the command, and what an engine notices of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from lab.faults import s3_error
from lab.proxy import proxy
from s3kv.objects.keys import Namespace
from tests import servers
from tests.project import ROOT
from tests.unit.cli.conftest import Run, chunk, left, put, refused

OLD = Namespace("s3kv", "a" * 32)


def fill(boto: Any, count: int = 12) -> None:
    for number in range(count):
        put(boto, chunk(OLD, number), b"x" * 1000)


def test_the_command(run: Run, boto: Any) -> None:
    assert json.loads(run("gc", "--max-bytes", "5kB", "--json").stdout)["namespaces"] == []
    fill(boto)
    told = run("gc", "--max-bytes", "5kB", "--dry-run", "--json")
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["deleted_bytes"] == 7000
    assert len(left(boto)) == 12
    done = run("gc", "--max-bytes", "5kB", "--yes")
    assert done.exit_code == 0, done.output
    assert len(left(boto)) == 5
    assert OLD.digest in done.stdout
    assert json.loads(run("gc", "--older-than", "1h", "--json").stdout)["deleted_bytes"] == 0
    assert len(left(boto)) == 5


def test_one_namespace_is_emptied_and_the_others_stay(run: Run, boto: Any) -> None:
    fill(boto)
    other = Namespace("s3kv", "b" * 32)
    for key in (OLD.manifest, other.manifest, chunk(other, 0)):
        put(boto, key, b"{}")
    assert run("gc", "aaaa", "--max-bytes", "0").exit_code == 2, "more than half of its bytes"
    assert run("gc", "aaaa", "--max-bytes", "0", "--yes").exit_code == 0
    assert len(left(boto)) == 2
    put(boto, OLD.manifest, b"{}")  # as an engine that runs restores it
    assert run("gc", "aaaa", "--max-bytes", "0").exit_code == 0
    assert len(left(boto)) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--max-bytes, --older-than or both"),
        (["--max-bytes", "many"], "is not a size"),
        (["--older-than", "yesterday"], "is not a time"),
    ],
)
def test_the_command_used_wrongly(run: Run, arguments: list[str], said: str) -> None:
    refused(run("gc", *arguments), said)


def test_who_may_not_delete_is_told_so(run: Run, boto: Any, url: str) -> None:
    fill(boto)
    with proxy(url) as between:
        between.fault(s3_error(403, "AccessDenied", verbs=("POST",)))
        result = run("gc", "--max-bytes", "0", "--yes", at=between.url)
    assert result.exit_code == 3
    assert "s3:DeleteObject" in result.stderr
    assert len(left(boto)) == 12


@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_more_than_half_wants_a_yes(run: Run, boto: Any, as_json: tuple[str, ...]) -> None:
    fill(boto)
    result = run("gc", "--max-bytes", "5999", *as_json)
    assert result.exit_code == 2
    assert "gc would delete 5.9 KiB of 11.7 KiB, more than half: nothing was" in result.stderr
    assert "--yes" in result.stderr
    assert (result.stdout, len(left(boto))) == ("", 12)
    assert run("gc", "--max-bytes", "5999", "--dry-run", *as_json).exit_code == 0
    assert run("gc", "--max-bytes", "6000", *as_json).exit_code == 0
    assert len(left(boto)) == 6


@pytest.mark.parametrize(("answer", "code", "stay"), [("y", 0, 0), ("n", 2, 12), ("", 2, 12)])
def test_a_person_is_asked(url: str, boto: Any, answer: str, code: int, stay: int) -> None:
    fill(boto)
    screen, keyboard = os.openpty()
    try:
        os.write(screen, f"{answer}\n".encode())
        bucket = ["--bucket", servers.BUCKET, "--endpoint-url", url]
        done = subprocess.run(
            [sys.executable, "-m", "s3kv.cli", "gc", "--max-bytes", "0", *bucket],
            cwd=ROOT, stdin=keyboard, capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        os.close(screen)
        os.close(keyboard)
    assert "gc would delete 11.7 KiB of 11.7 KiB, more than half. Delete them?" in done.stderr
    assert (done.returncode, len(left(boto))) == (code, stay), done.stderr
