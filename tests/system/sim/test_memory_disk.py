"""The simulation's stand-ins: `Directory` does on the disk in memory what it does on a real one,
and the loop has no clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3kv.place import Place
from s3kv.stores import disk
from s3kv.stores.disk import Directory
from s3kv.upkeep.disk_cleaning import clean
from tests.system.sim import memory_disk
from tests.system.sim.loop import OWNER, Owner, VirtualLoop
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


def test_time_jumps_and_order_stays() -> None:
    loop, log = VirtualLoop(), []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        log.append((name, loop.time()))

    async def start() -> None:
        for name, seconds in (("a", 3_600.0), ("b", 1.0), ("c", 1.0)):
            loop.create_task(sleeper(name, seconds))

    loop.create_task(start())
    loop.run_until(10.0)
    assert log == [("b", 1.0), ("c", 1.0)]
    assert loop.time() == 10.0
    loop.run_until(4_000.0)
    assert log[2:] == [("a", 3_600.0)]


def test_timeouts_and_events_are_those_of_asyncio() -> None:
    loop, log = VirtualLoop(), []

    async def waiter() -> None:
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 5.0)
        except asyncio.TimeoutError:
            log.append(loop.time())

    loop.create_task(waiter())
    loop.run_until(60.0)
    assert log == [5.0]


def test_what_nobody_catches_is_kept() -> None:
    loop = VirtualLoop()
    loop.call_soon(lambda: 1 / 0)
    loop.run_until(1.0)
    assert "ZeroDivisionError" in loop.failures[0]


def test_a_loop_that_spins_is_stopped() -> None:
    loop = VirtualLoop()

    def spin() -> None:
        loop.call_soon(spin)

    spin()
    with pytest.raises(AssertionError, match="no time passes"):
        loop.run_until(1.0)


def test_tasks_of_a_dead_owner_never_run() -> None:
    loop, owner, log = VirtualLoop(), Owner(), []

    async def work(name: str) -> None:
        log.append(name)
        await asyncio.sleep(1.0)
        log.append(f"{name} again")

    OWNER.set(owner)
    try:
        loop.create_task(work("a"))
        loop.run_until(0.5)
        owner.die()
        loop.create_task(work("b"))
        loop.run_until(5.0)
    finally:
        OWNER.set(None)
    assert log == ["a"]
