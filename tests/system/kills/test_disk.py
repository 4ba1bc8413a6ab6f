"""Processes on one directory, killed at any moment; and a real disk that fills up, is emptied, or
holds foreign files: nothing wrong, nothing stuck, nothing left, and no fetch or upload lost."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from lab.memory_store import MemoryStore
from s3kv.io.sources import disk as source
from s3kv.objects.keys import LAYOUT
from s3kv.place import Place
from s3kv.stores import disk
from s3kv.stores.disk import Directory
from s3kv.types import Outcome
from s3kv.upkeep.disk_cleaning import clean, is_crowded
from tests.unit.io import rig
from tests.unit.stores.suite import pattern

PROCESSES = 3
OBJECTS = 60
MOST_BYTES = 4_000_000
LARGEST_BYTES = 300_000
KILLS = 40

FORK = multiprocessing.get_context("fork")


def content(number: int) -> bytes:
    return bytes(pattern(1 + number * 7919 % LARGEST_BYTES, number))


def work(path: str, seed: int) -> None:
    """Write, read and clean, until killed. Ends with 3 after a wrong object."""
    rng, buffer = random.Random(seed), bytearray(LARGEST_BYTES + 1)
    directory = Directory.open(path, "s3kv", MOST_BYTES)
    while True:
        number = rng.randrange(OBJECTS)
        key = rig.object_key(number)
        if rng.random() < 0.5:
            directory.write(key, Place.of(content(number)), lambda: False)
        else:
            nbytes = directory.read(key, Place.of(buffer), lambda: False)
            if nbytes is not None and buffer[:nbytes] != content(number):
                os._exit(3)
        if rng.random() < 0.02:
            directory.delete(directory.file_of(key))
        if rng.random() < 0.1 and is_crowded(directory, LARGEST_BYTES):
            clean(directory, LARGEST_BYTES)


def is_stopped(process: BaseProcess) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZ"
    return True


@contextlib.contextmanager
def stopped(processes: list[BaseProcess]) -> Iterator[None]:
    for process in processes:
        os.kill(process.pid or 0, signal.SIGSTOP)
    while not all(map(is_stopped, processes)):
        time.sleep(0.001)
    yield
    for process in processes:
        os.kill(process.pid or 0, signal.SIGCONT)


def held_bytes(path: Path) -> int:
    folders = (path / LAYOUT, path / "writing")
    return sum(f.stat().st_size for folder in folders for f in folder.rglob("*") if f.is_file())


@pytest.fixture(autouse=True)
def all_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_FREE_SHARE", 0.0)  # whatever this machine's disk has left


def test_nothing_is_wrong_when_writers_are_killed(tmp_path: Path) -> None:
    seed = int(os.environ.get("S3KV_SEED", random.SystemRandom().randrange(2**32)))
    print(f"S3KV_SEED={seed}")
    rng, path = random.Random(seed), tmp_path / "cache"

    def begin() -> BaseProcess:
        process = FORK.Process(target=work, args=(str(path), rng.randrange(2**32)), daemon=True)
        process.start()
        return process

    processes = [begin() for _ in range(PROCESSES)]
    try:
        for _ in range(KILLS):
            time.sleep(rng.uniform(0.01, 0.08))
            with stopped(processes):
                assert held_bytes(path) <= MOST_BYTES + PROCESSES * LARGEST_BYTES
                assert all(process.exitcode is None for process in processes), "it has failed"
            victim = processes.pop(rng.randrange(PROCESSES))
            victim.kill()
            victim.join()
            assert victim.exitcode == -signal.SIGKILL
            processes.append(begin())
    finally:
        for process in processes:
            process.kill()
            process.join()
    directory = Directory.open(str(path), "s3kv", MOST_BYTES)
    clean(directory)
    assert not os.listdir(path / "writing")
    assert directory.used_bytes() == held_bytes(path) > 0
    for file in directory.files():
        key = directory.key_of(file.path)
        (number,) = (number for number in range(OBJECTS) if rig.object_key(number) == key)
        assert Path(file.path).read_bytes() == content(number)


ROOMY, READ_ONLY = "size=1m", "remount,ro"
FULL = f"remount,size={3 * rig.FORMAT.object_bytes}"


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Mounts a small file system under the directory, or remounts it. Without the right to, a limit
    for the length of files stands in for it."""
    (path := tmp_path / "small").mkdir(mode=0o700)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def mount(options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", f"mode=700,{options}", "tmpfs", str(path)]
        if subprocess.run(command, check=False, capture_output=True).returncode != 0:
            most = {ROOMY: limits[0], FULL: rig.FORMAT.object_bytes - 1, READ_ONLY: 0}[options]
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))

    yield mount
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    while subprocess.run(["umount", str(path)], check=False, capture_output=True).returncode == 0:
        pass


async def happens(worker: rig.Worker, name: str) -> None:
    """Come back when this counter is no longer 0."""
    while not (await worker.settled()).counters[f"io_disk_{name}"]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def fetched(worker: rig.Worker, number: int) -> str:
    """The source that it comes from."""
    worker.slot(1)[:] = bytes(rig.FORMAT.object_bytes)
    end = await worker.end_of(rig.fetch(number, slot=1))
    assert end.outcome is Outcome.OK
    assert bytes(worker.slot(1)) == rig.sealed(number)
    return end.source


async def test_a_disk_that_is_full_loses_no_upload(
    tmp_path: Path, mounted: Callable[[str], None]
) -> None:
    mounted(ROOMY)
    bucket, path = MemoryStore(), tmp_path / "small"
    how = {"disk_path": str(path), "disk_bytes": 2**30, "disk_writes": "all"}
    async with rig.serving(bucket, **how) as (worker, _):
        await rig.counted(path)
        mounted(FULL)
        for number in range(1, 12):
            worker.fill(1, number=number)
            assert (await worker.end_of(rig.upload(number, slot=1))).outcome is Outcome.OK
        assert len(bucket._objects) == 11
        await happens(worker, "failed")
        for number in range(1, 12):
            await fetched(worker, number)
    assert not os.listdir(path / "writing")


async def test_a_disk_that_becomes_read_only_costs_no_fetch(
    tmp_path: Path, mounted: Callable[[str], None]
) -> None:
    mounted(ROOMY)
    bucket, path = MemoryStore(), tmp_path / "small"
    rig.hold(bucket, 1, 2)
    async with rig.serving(bucket, disk_path=str(path), disk_bytes=2**30) as (worker, _):
        await rig.counted(path)
        assert await fetched(worker, 1) == "bucket"
        await happens(worker, "writes")
        mounted(READ_ONLY)
        assert await fetched(worker, 1) in ("disk", "bucket")
        assert await fetched(worker, 2) == "bucket"
        await happens(worker, "failed")
    Directory.open(str(path), "s3kv", 2**30)  # so an engine starts on it, too


async def test_a_directory_that_is_emptied_is_filled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "OFF_S", 0.02)
    monkeypatch.setattr(source, "_CLEAN_EVERY_S", 0.0)
    bucket, path = MemoryStore(), tmp_path / "cache"
    rig.hold(bucket, 1)
    async with rig.serving(bucket, disk_path=str(path), disk_bytes=2**30) as (worker, _):
        for _ in range(3):
            while await fetched(worker, 1) != "disk":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            for folder in path.iterdir():
                shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
        shutil.rmtree(path)
        assert await fetched(worker, 1) == "bucket"


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "another's"])
async def test_what_is_no_file_of_ours_is_neither_read_nor_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    bucket, path = MemoryStore(), tmp_path / "cache"
    rig.hold(bucket, 1)
    file = Directory(path, "s3kv", 0).file_of(rig.object_key(1))
    async with rig.serving(bucket, disk_path=str(path), disk_bytes=2**30) as (worker, _):
        await rig.counted(path)
        file.parent.mkdir(parents=True)
        (elsewhere := tmp_path / "elsewhere").write_bytes(rig.sealed(1))
        if kind == "link":
            file.symlink_to(elsewhere)
        elif kind == "fifo":
            os.mkfifo(file)
        elif kind == "folder":
            file.mkdir()
        else:
            file.write_bytes(rig.sealed(1))
            monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert await fetched(worker, 1) == "bucket"
        await happens(worker, "failed")
    assert elsewhere.read_bytes() == rig.sealed(1)
