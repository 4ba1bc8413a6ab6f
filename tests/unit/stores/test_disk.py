"""Objects in files: whole, verified by nobody here, within a budget that all processes share."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from s3kv.errors import ConfigError
from s3kv.objects.keys import LAYOUT
from s3kv.place import Place
from s3kv.stores import disk
from s3kv.stores.disk import Directory
from tests.mutants import Patch
from tests.unit.io import rig
from tests.unit.stores.suite import pattern

KEY = rig.object_key(1)
MOST_BYTES = 10_000


def wanted() -> bool:
    return False


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: Patch) -> Directory:
    monkeypatch.setattr(disk, "_FREE_SHARE", 0.0)  # whatever this machine's disk has left
    directory = Directory.open(str(tmp_path / "cache"), "s3kv", MOST_BYTES)
    directory.correct(0, None)
    return directory


def write(directory: Directory, number: int, nbytes: int) -> disk.Written:
    return directory.write(rig.object_key(number), Place.of(pattern(nbytes, number)), wanted)


def read(directory: Directory, number: int, room: int = 2**16) -> tuple[int | None, bytes]:
    buffer = bytearray(room)
    nbytes = directory.read(rig.object_key(number), Place.of(buffer), wanted)
    return nbytes, bytes(buffer[: nbytes or 0])


@pytest.mark.parametrize("piece_bytes", [1, 7, 4096])
def test_an_object_comes_back_whole(
    directory: Directory, monkeypatch: Patch, piece_bytes: int
) -> None:
    monkeypatch.setattr(disk, "PIECE_BYTES", piece_bytes)
    place = Place(memoryview(bytearray(b"head")), memoryview(pattern(3000, 1)))
    assert directory.write(KEY, place, wanted) == "written"
    header, payload = memoryview(bytearray(4)), memoryview(bytearray(4000))
    assert directory.read(KEY, Place(header, payload), wanted) == 3004
    assert (bytes(header), bytes(payload[:3000])) == (b"head", bytes(pattern(3000, 1)))
    assert not any(payload[3000:])
    assert os.stat(directory.file_of(KEY)).st_mode & 0o777 == 0o600
    assert not os.listdir(directory.path / "writing")


def test_a_place_too_small_is_filled_and_no_more(directory: Directory) -> None:
    write(directory, 1, 3000)
    assert read(directory, 1, room=1000)[0] == 3000


def test_the_names_of_files_lead_back_to_keys(directory: Directory) -> None:
    file = directory.file_of(KEY)
    assert directory.key_of(str(file)) == KEY
    assert file.relative_to(directory.path).parts[0] == LAYOUT, "the prefix is no part of it"
    write(directory, 1, 100)
    write(directory, 2, 200)
    keys = {directory.key_of(file.path): file.nbytes for file in directory.files()}
    assert keys == {rig.object_key(1): 100, rig.object_key(2): 200}


def test_what_is_there_is_not_written_again(directory: Directory) -> None:
    assert write(directory, 1, 3000) == "written"
    assert write(directory, 1, 2000) == "there"
    assert directory.used_bytes() == 3000
    assert read(directory, 2) == (None, b"")


def test_the_budget_is_reserved_before_a_byte_is_written(directory: Directory) -> None:
    assert [write(directory, n, 3000) for n in range(4)] == [*["written"] * 3, "full"]
    assert directory.used_bytes() == 9000
    assert directory.delete(directory.file_of(rig.object_key(0))) == 3000
    assert directory.delete(directory.file_of(rig.object_key(0))) == 0
    assert directory.used_bytes() == 6000
    assert write(directory, 3, 3000) == "written"


def test_part_of_the_file_system_stays_free(directory: Directory, monkeypatch: Patch) -> None:
    monkeypatch.setattr(disk, "_FREE_SHARE", 1.0)
    monkeypatch.setattr(disk, "_MOST_FREE_BYTES", 2**60)
    assert directory.missing_bytes() > 0
    assert write(directory, 1, 100) == "full"


def test_nothing_is_written_before_the_first_scan(tmp_path: Path) -> None:
    directory = Directory.open(str(tmp_path / "cache"), "s3kv", MOST_BYTES)
    assert directory.used_bytes() is None
    assert write(directory, 1, 100) == "full"
    directory.correct(7000, directory.used_bytes())
    assert directory.used_bytes() == 7000


def test_what_is_written_during_a_scan_counts_until_the_next(directory: Directory) -> None:
    before = directory.used_bytes()
    write(directory, 1, 3000)
    directory.correct(3000, before)
    assert directory.used_bytes() == 6000
    directory.correct(3000, directory.used_bytes())
    assert directory.used_bytes() == 3000


def test_nobody_reads_or_writes_what_nobody_wants(directory: Directory) -> None:
    assert directory.write(KEY, Place.of(pattern(3000, 1)), lambda: True) == "over"
    assert directory.used_bytes() == 0
    assert not os.listdir(directory.path / "writing")
    write(directory, 1, 3000)
    buffer = bytearray(3000)
    assert directory.read(KEY, Place.of(buffer), lambda: True) is None
    assert not any(buffer)


def test_a_failed_write_leaves_nothing_behind(directory: Directory, monkeypatch: Patch) -> None:
    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(OSError, match="No space"):
        write(directory, 1, 3000)
    assert directory.used_bytes() == 0
    assert not os.listdir(directory.path / "writing")


def test_the_faster_of_two_writers_wins(directory: Directory, monkeypatch: Patch) -> None:
    pwritev, others = os.pwritev, [write]

    def slow(fd: int, *how: object) -> int:
        if others:
            assert others.pop()(directory, 1, 3000) == "written"
        return pwritev(fd, *how)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwritev", slow)
    assert write(directory, 1, 3000) == "there"
    assert directory.used_bytes() == 3000
    assert read(directory, 1) == (3000, bytes(pattern(3000, 1)))


def test_a_use_makes_a_file_young(directory: Directory) -> None:
    write(directory, 1, 100)
    os.utime(directory.file_of(KEY), (0, 0))
    assert next(directory.files()).used_s == 0
    read(directory, 1)
    assert next(directory.files()).used_s > 0


def test_a_file_without_a_living_writer_is_deleted(directory: Directory) -> None:
    for name in ("dead", "alive"):
        (directory.path / "writing" / name).write_bytes(b"part")
    with open(directory.path / "writing" / "alive") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert directory.unfinished_bytes() == 4
        assert os.listdir(directory.path / "writing") == ["alive"]
    assert directory.unfinished_bytes() == 0


def test_one_process_cleans_at_a_time(directory: Directory) -> None:
    with directory.cleaning() as first, directory.cleaning() as second:
        assert (first, second) == (True, False)
    with directory.cleaning() as third:
        assert third


def test_a_lock_that_is_held_for_long_fails_the_call(
    directory: Directory, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(disk, "_LOCK_TRIES", 2)
    with open(directory.path / "used") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            directory.used_bytes()


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_no_other_kind_of_file_is_read(directory: Directory, tmp_path: Path, kind: str) -> None:
    file = directory.file_of(KEY)
    file.parent.mkdir(parents=True)
    if kind == "link":
        (tmp_path / "elsewhere").write_bytes(b"secret")
        file.symlink_to(tmp_path / "elsewhere")
    elif kind == "fifo":
        os.mkfifo(file)
    else:
        file.mkdir()
    with pytest.raises(OSError, match=r"symbolic link|not a file"):
        read(directory, 1)


def test_the_file_of_another_user_is_not_read(directory: Directory, monkeypatch: Patch) -> None:
    write(directory, 1, 100)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="not a file of this user"):
        read(directory, 1)


def test_every_folder_is_made_for_its_user_alone(directory: Directory, tmp_path: Path) -> None:
    write(directory, 1, 100)
    for path in (directory.path, tmp_path / "a" / "b"):
        Directory.open(str(path), "s3kv", 1)
    assert {os.stat(folder).st_mode & 0o777 for folder, _, _ in os.walk(tmp_path)} == {0o700}


@pytest.mark.parametrize("trouble", ["link", "file", "open to others", "another's", "below a file"])
def test_a_directory_open_to_others_is_refused(
    tmp_path: Path, monkeypatch: Patch, trouble: str
) -> None:
    path = tmp_path / "cache"
    if trouble == "link":
        path.symlink_to(tmp_path)
    elif trouble in ("file", "below a file"):
        path.write_bytes(b"")
        path = path / "cache" if trouble == "below a file" else path
    else:
        path.mkdir(mode=0o700)
    if trouble == "open to others":
        path.chmod(0o770)
    if trouble == "another's":
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match=f"^disk_path '{path}' cannot be used: "):
        Directory.open(str(path), "s3kv", 1)
