"""`s3kv ls` and `s3kv gc` on a directory of `disk_path`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from s3kv.cli.app import cli
from s3kv.cli.invocation import now_s
from s3kv.objects.keys import Namespace
from s3kv.place import Place
from s3kv.stores.disk import Directory, File
from tests.unit.cli.conftest import chunk, refused

OLD, NEW = (Namespace("s3kv", digit * 32) for digit in "ab")
DAY_S = 86_400
OnDisk = Callable[..., Result]


def fill(directory: Directory, place: Namespace, count: int, age_s: float = 0) -> None:
    for number in range(count):
        key = chunk(place, number)
        assert directory.write(key, Place.of(b"x" * 1000), lambda: False) == "written"
        os.utime(directory.file_of(key), (0, now_s() - age_s))


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    directory = Directory.open(str(tmp_path / "disk"), "s3kv", 10**6)
    directory.correct(0, None)
    fill(directory, OLD, 4, age_s=3 * DAY_S)
    fill(directory, NEW, 8)
    (tmp_path / "disk/v3/somebody-elses").write_bytes(b"1")
    return directory


@pytest.fixture
def on_disk(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> OnDisk:
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str, disk: str = str(directory.path)) -> Result:
        return CliRunner().invoke(cli, [*arguments, "--disk", disk], catch_exceptions=False)

    return run


def left(directory: Directory, place: Namespace) -> int:
    return sum(f"/{place.digest}/" in file.path for file in directory.files())


def test_ls_counts_the_files_of_each_namespace(on_disk: OnDisk) -> None:
    result = on_disk("ls")
    assert result.exit_code == 0, result.output
    found = [line.split() for line in result.stdout.splitlines()]
    assert [OLD.digest, "–", "4", "3.9", "KiB", "3", "d", "3", "d"] in found
    assert [NEW.digest, "–", "8", "7.8", "KiB", "0", "min", "0", "min"] in found
    assert ["total", "12", "11.7", "KiB"] in found
    assert "last used" in result.stdout
    assert "manifest" not in result.stdout
    (one,) = on_disk("ls", "aaaa", "--json").stdout.splitlines()
    assert (json.loads(one)["objects"], json.loads(one)["nbytes"]) == (4, 4000)


def test_gc_deletes_what_was_used_longest_ago(on_disk: OnDisk, directory: Directory) -> None:
    used = directory.used_bytes()
    assert on_disk("gc", "--older-than", "1d", "--dry-run").exit_code == 0
    assert left(directory, OLD) == 4
    result = on_disk("gc", "--older-than", "1d")
    assert result.exit_code == 0, result.output
    assert (left(directory, OLD), left(directory, NEW)) == (0, 8)
    assert directory.used_bytes() == (used or 0) - 4000
    assert on_disk("gc", "--max-bytes", "5kB").exit_code == 0
    assert left(directory, NEW) == 5


def test_gc_empties_one_namespace(on_disk: OnDisk, directory: Directory) -> None:
    refused(on_disk("gc", "bbbb", "--max-bytes", "0"), "7.8 KiB of 7.8 KiB, more than half")
    refused(on_disk("gc", "", "--max-bytes", "0", "--yes"), "NAMESPACE is '', and 0 namespaces")
    assert on_disk("gc", "bbbb", "--max-bytes", "0", "--yes").exit_code == 0
    assert (left(directory, OLD), left(directory, NEW)) == (4, 0)


def test_gc_leaves_a_file_that_was_used_meanwhile(
    on_disk: OnDisk, directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Directory.files

    def list_and_use(self: Directory) -> Iterator[File]:
        yield from (listed := list(files(self)))
        os.utime(next(file.path for file in listed if OLD.digest in file.path))

    monkeypatch.setattr(Directory, "files", list_and_use)
    result = on_disk("gc", OLD.digest, "--max-bytes", "0", "--yes", "--json")
    (swept,) = json.loads(result.stdout)["namespaces"]
    assert (swept["deleted_objects"], swept["changed"]) == (3, 1)
    monkeypatch.undo()
    assert left(directory, OLD) == 1


def test_gc_waits_for_nobody_who_deletes(on_disk: OnDisk, directory: Directory) -> None:
    with directory.cleaning() as is_mine:
        assert is_mine
        refused(on_disk("gc", "--older-than", "1d"), "deleting files", "try again later", code=3)
    assert left(directory, OLD) == 4


def test_a_directory_that_is_none_of_ours(on_disk: OnDisk, tmp_path: Path) -> None:
    for command in (("ls",), ("gc", "--max-bytes", "0")):
        refused(on_disk(*command, disk=str(tmp_path)), "a directory with files of s3kv")
    assert list(tmp_path.iterdir()) == [tmp_path / "disk"], "nothing was made there"
    (tmp_path / "disk").chmod(0o777)
    refused(on_disk("ls"), "others may write", "chmod 700")


def test_an_empty_directory(on_disk: OnDisk, tmp_path: Path) -> None:
    path = str(Directory.open(str(tmp_path / "empty"), "s3kv", 1).path)
    result = on_disk("ls", disk=path)
    assert (result.exit_code, result.stdout) == (0, "")
    assert f"nothing of s3kv is under 's3kv/' in '{path}'" in result.stderr
