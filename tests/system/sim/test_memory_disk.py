"""`Directory` does on the disk in memory what it does on a real one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3kv.place import Place
from s3kv.stores import disk
from s3kv.stores.disk import Directory
from s3kv.upkeep.disk_cleaning import clean
from tests.system.sim import memory_disk
from tests.system.sim.memory_disk import ROOT, Disk, Kernel
from tests.unit.io import rig
from tests.unit.stores.suite import pattern

MOST_BYTES = 10_000


@pytest.fixture(params=["real", "in memory"])
def directory(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Directory]:
    """Of no objects, counted."""
    monkeypatch.setattr(disk, "_FREE_SHARE", 0.0)  # whatever this machine's disk has left
    monkeypatch.setattr(disk, "PIECE_BYTES", 1000)
    if request.param == "real":
        directory = Directory.open(str(tmp_path / "cache"), "s3kv", MOST_BYTES)
        assert clean(directory) == 0
        yield directory
        return
    seconds = iter(range(1_000_000))
    kernel = Kernel(Disk(random.Random(1), MOST_BYTES, lambda: float(next(seconds))))
    with memory_disk.under(), kernel.entered():
        directory = Directory.open(ROOT, "s3kv", MOST_BYTES)
        assert clean(directory) == 0
        yield directory


def wanted() -> bool:
    return False


def write(directory: Directory, number: int, nbytes: int = 2500) -> disk.Written:
    return directory.write(rig.object_key(number), Place.of(pattern(nbytes, number)), wanted)


def read(directory: Directory, number: int, room: int = 4096) -> bytes | None:
    buffer = bytearray(room)
    nbytes = directory.read(rig.object_key(number), Place.of(buffer), wanted)
    return None if nbytes is None else bytes(buffer[:nbytes])


def test_objects_are_written_once_and_read(directory: Directory) -> None:
    assert read(directory, 1) is None
    assert [write(directory, 1), write(directory, 1)] == ["written", "there"]
    assert read(directory, 1) == bytes(pattern(2500, 1))
    assert len(read(directory, 1, room=700) or b"") == 700, "it is longer than its place"
    assert directory.read(rig.object_key(1), Place.of(bytearray(2500)), lambda: True) is None


def test_the_budget_counts_what_is_written_and_deleted(directory: Directory) -> None:
    assert [write(directory, n) for n in range(5)] == [*["written"] * 4, "full"]
    assert directory.used_bytes() == 10_000
    path = directory.file_of(rig.object_key(0))
    assert [directory.delete(path), directory.delete(path)] == [2500, 0]
    assert directory.used_bytes() == 7_500
    assert directory.write(rig.object_key(9), Place.of(bytes(100)), lambda: True) == "over"
    assert directory.used_bytes() == 7_500
    assert sorted(file.nbytes for file in directory.files()) == [2500] * 3


def test_a_cleaning_counts_and_deletes_the_files_used_longest_ago(directory: Directory) -> None:
    for number in range(4):
        write(directory, number)
    read(directory, 0)
    directory.correct(1, None)  # which is wrong
    with directory.cleaning() as is_mine:
        assert is_mine
        assert clean(directory) == 0, "somebody else cleans"
    assert clean(directory) == 2_500
    assert directory.used_bytes() == 7_500
    assert clean(directory, wanted_bytes=2_501) == 2_500
    assert len(list(directory.files())) == 2


def test_locks_and_folders_that_are_gone(directory: Directory) -> None:
    with directory._locked(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "_LOCK_TRIES", 2)
        with pytest.raises(BlockingIOError):
            directory.used_bytes()
    fd, path = directory._reserve(100) or (0, "")
    assert directory.unfinished_bytes() == 100
    directory_os = vars(disk)["os"]
    directory_os.close(fd)
    assert directory.unfinished_bytes() == 0
    assert not directory_os.path.exists(path), "its writer is dead"
    clean(directory)
    assert write(directory, 1) == "written"
