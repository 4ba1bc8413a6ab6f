"""The files used longest ago go first, once the directory is nearly full; by one process."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from s3kv.place import Place
from s3kv.stores import disk
from s3kv.stores.disk import Directory
from s3kv.upkeep.disk_cleaning import clean, is_crowded
from tests.unit.io import rig


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Directory:
    """With room for 100 files of 100 bytes, that hold no object. It has been looked at."""
    monkeypatch.setattr(disk, "_FREE_SHARE", 0.0)  # whatever this machine's disk has left
    directory = Directory.open(str(tmp_path / "cache"), "s3kv", 10_000)
    assert is_crowded(directory)
    assert clean(directory) == 0
    return directory


def fill(directory: Directory, numbers: range) -> None:
    """Files in order of their last uses, a second apart."""
    for number in numbers:
        key = rig.object_key(number)
        assert directory.write(key, Place.of(bytes(100)), lambda: False) == "written"
        os.utime(directory.file_of(key), (number, number))


def left(directory: Directory) -> set[int]:
    return {int(file.used_s) for file in directory.files()}


def test_the_first_look_counts_the_files(directory: Directory) -> None:
    assert not is_crowded(directory)
    fill(directory, range(95))
    os.unlink(directory.path / "used")
    assert is_crowded(directory)
    assert clean(directory) == 0
    assert directory.used_bytes() == 9_500


@pytest.mark.parametrize("jumps", [0, 40])
def test_the_files_used_longest_ago_go(directory: Directory, jumps: int) -> None:
    """A clock that jumps changes no more than the order. jumps: the first files are used then."""
    fill(directory, range(96))
    for number in range(jumps):
        os.utime(directory.file_of(rig.object_key(number)), (4e9 + number, 4e9 + number))
    assert is_crowded(directory)
    assert clean(directory) == 1_100
    assert left(directory) == {*range(jumps + 11, 96), *(4_000_000_000 + n for n in range(jumps))}
    assert directory.used_bytes() == 8_500


def test_reserved_bytes_of_a_dead_writer_are_free(directory: Directory) -> None:
    fill(directory, range(90))
    (directory.path / "writing" / "dead").write_bytes(bytes(100))
    directory.correct(10_000, None)  # as its reservation, and nine others, had left it
    assert clean(directory) == 0
    assert directory.used_bytes() == 9_000
    assert not os.listdir(directory.path / "writing")


def test_a_file_that_cannot_be_deleted_keeps_no_others(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(directory, range(96))
    stays, unlink = str(directory.file_of(rig.object_key(0))), os.unlink

    def refusing(path: str) -> None:
        if path == stays:
            raise OSError(errno.EUCLEAN, "structure needs cleaning")
        unlink(path)

    monkeypatch.setattr(os, "unlink", refusing)
    assert clean(directory) == 1_000
    assert left(directory) == {0, *range(11, 96)}
    assert directory.used_bytes() == 8_600


def test_only_one_process_deletes(directory: Directory) -> None:
    fill(directory, range(96))
    with directory.cleaning():
        assert clean(directory) == 0
    assert left(directory) == set(range(96))


def test_a_file_system_that_others_fill_gets_room(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(directory, range(50))
    monkeypatch.setattr(Directory, "missing_bytes", lambda self: 1_000)
    assert is_crowded(directory)
    assert clean(directory) == 2_000
    assert left(directory) == set(range(20, 50))


def test_a_use_during_a_cleaning_saves_a_file(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(directory, range(96))
    files, key = directory.files, rig.object_key(0)

    def used_meanwhile() -> object:
        found = list(files())
        os.utime(directory.file_of(key), (1e6, 1e6))
        return iter(found)

    monkeypatch.setattr(directory, "files", used_meanwhile)
    clean(directory)
    monkeypatch.undo()
    assert 1_000_000 in left(directory)
