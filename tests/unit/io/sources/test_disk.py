"""The disk is asked first, verified, and kept full by everything else; its failures cost only its
hits. The I/O process is served in the test's loop; files and threads are real."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from lab.memory_store import MemoryStore
from s3kv.errors import StoreUnavailable
from s3kv.io import wire
from s3kv.io.server import process
from s3kv.io.sources import disk as source
from s3kv.messages import JobEnd
from s3kv.stores.disk import Directory
from s3kv.types import Outcome
from tests.unit.io import rig
from tests.unit.io.rig import Worker
from tests.unit.io.sources.test_chain import Bucket as Hanging
from tests.unit.io.sources.test_executors import refused
from tests.waiting import until

Serving = Callable[..., AbstractAsyncContextManager[Worker]]


@pytest.fixture
def serving(bucket: MemoryStore, tmp_path: Path) -> Serving:
    """A process that has counted the files of its disk."""

    @asynccontextmanager
    async def serving(
        disk_bytes: int = 2**30, store: MemoryStore = bucket, **settings: Any
    ) -> AsyncIterator[Worker]:
        how = {"disk_path": str(tmp_path / "cache"), "disk_bytes": disk_bytes, **settings}
        async with rig.serving(store, max_wait_ms=200, **how) as (worker, _):
            await rig.counted(tmp_path / "cache")
            yield worker

    return serving


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return Directory(tmp_path / "cache", "s3kv", 0).file_of(rig.object_key(1))


class Hold:
    """Calls of functions of `os` that wait. begun: one does. let_go: they go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.begun, self.let_go = threading.Event(), threading.Event()

    def all(self, name: str) -> None:
        """Have all calls of this function wait from now on."""
        call = getattr(os, name)

        def held(*how: Any, **more: Any) -> Any:
            self.begun.set()
            self.let_go.wait()
            return call(*how, **more)

        self._monkeypatch.setattr(os, name, held)


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    """Let go at the end, too: a thread that waits would keep the tests from ending."""
    hold = Hold(monkeypatch)
    yield hold
    hold.let_go.set()


async def counters(worker: Worker) -> dict[str, int]:
    found = (await worker.settled()).counters
    return {name.removeprefix("io_disk_"): n for name, n in found.items() if "disk" in name and n}


async def until_counted(worker: Worker, **expected: int) -> None:
    """Come back when the counters are these, of those named."""
    while True:
        now = await counters(worker)
        if {name: now.get(name, 0) for name in expected} == expected:
            return
        await asyncio.sleep(0.01)


async def fetched(worker: Worker, number: int = 1) -> JobEnd:
    worker.slot(number)[:] = bytes(rig.FORMAT.object_bytes)
    end = await worker.end_of(rig.fetch(number))
    whole = bytes(worker.slot(number)) == rig.sealed(number)
    assert whole == (end.outcome is Outcome.OK)
    return end


async def test_an_object_of_the_bucket_is_fetched_once_per_host(
    serving: Serving, bucket: MemoryStore, file: Path
) -> None:
    rig.hold(bucket, 1)
    async with serving() as worker:
        assert (await fetched(worker)).source == "bucket"
        await until_counted(worker, writes=1, written_bytes=rig.FORMAT.object_bytes)
        assert file.read_bytes() == rig.sealed(1)
        assert (await fetched(worker)).source == "disk"
    async with serving() as worker:  # the next engine on this host
        end = await fetched(worker)
        assert (end.source, end.nbytes) == ("disk", rig.FORMAT.object_bytes)
        await until_counted(worker, reads=1, read_bytes=rig.FORMAT.object_bytes, writes=0)
    assert bucket.asked["get_into"] == 1


async def test_an_upload_is_not_written_unless_asked(serving: Serving, file: Path) -> None:
    async with serving() as worker:
        worker.fill(1, number=1)
        assert (await worker.end_of(rig.upload(1))).outcome is Outcome.OK
    assert not file.exists()


async def test_a_use_is_noted_once_an_hour(serving: Serving, bucket: MemoryStore) -> None:
    rig.hold(bucket, 1)
    async with serving(refresh_after_s=3600.0) as worker:
        await fetched(worker)
        await until_counted(worker, writes=1)
        fresh_s = [(await fetched(worker)).fresh_s for _ in range(3)]
        assert fresh_s == sorted(fresh_s, reverse=True)
        await until_counted(worker, reads=3)
        await until(lambda: bucket.asked["head"])
    assert bucket.asked["head"] == 1


@pytest.mark.parametrize("bucket_is_away", [False, True])
async def test_an_upload_leaves_a_file_whatever_the_bucket_answers(
    serving: Serving, bucket: MemoryStore, file: Path, *, bucket_is_away: bool
) -> None:
    async with serving(disk_writes="all") as worker:
        if bucket_is_away:
            bucket.errors["put"] = [StoreUnavailable("away")] * 9
        worker.fill(1, number=1)
        worker.say(rig.upload(1))
        outcome = Outcome.FAILED if bucket_is_away else Outcome.OK
        assert (await worker.done(1))[1].outcome is outcome
        worker.slot(1)[:] = bytes(rig.FORMAT.object_bytes)  # the slot is another's now
        await until_counted(worker, writes=1)
        assert file.read_bytes() == rig.sealed(1)
        assert (await fetched(worker)).source == "disk"


@pytest.mark.parametrize("damage", ["flipped", "shorter", "longer", "another's", "empty"])
async def test_a_bad_file_is_deleted_and_the_bucket_asked(
    serving: Serving, bucket: MemoryStore, file: Path, damage: str
) -> None:
    rig.hold(bucket, 1)
    good = rig.sealed(1)
    async with serving() as worker:
        file.parent.mkdir(parents=True)
        file.write_bytes(
            {
                "flipped": good[:-1] + bytes([good[-1] ^ 1]),
                "shorter": good[:-1],
                "longer": good + b"\0",
                "another's": rig.sealed(2),
                "empty": b"",
            }[damage]
        )
        end = await fetched(worker)
        assert (end.outcome, end.source) == (Outcome.OK, "bucket")
        await until_counted(worker, corrupt=1, writes=1)
        assert file.read_bytes() == good
        assert (await fetched(worker)).source == "disk"


async def test_many_bad_files_are_logged_once_a_minute(
    serving: Serving, bucket: MemoryStore, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig.hold(bucket, 1)
    async with serving() as worker:
        for number in range(1, 4):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(rig.sealed(2))
            assert (await fetched(worker)).source == "bucket"
            await until_counted(worker, corrupt=number, writes=number)
    assert caplog.text.count("on the disk failed verification") == 1


@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS, errno.ESTALE])
async def test_a_disk_that_fails_is_not_used_for_a_while(
    serving: Serving,
    bucket: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: int,
) -> None:
    def fail(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    rig.hold(bucket, 1, 2, 3)
    is_gone = error == errno.EIO  # it may be the file's alone
    async with serving() as worker:
        assert (await fetched(worker)).source == "bucket"
        await until_counted(worker, writes=1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fail)
            patch.setattr(os, "pwritev", fail)
            for dropped, number in enumerate((1, 2, 3, 1)):
                assert (await fetched(worker, number)).source == "bucket"
                failed = 2 if dropped or is_gone else 1
                await until_counted(worker, failed=failed, dropped=dropped + is_gone)
        lines = [r.getMessage() for r in caplog.records if " there for " in r.message]
        assert len(lines) == 2, "one for reading, and one for writing"
    async with serving() as worker:
        assert (await fetched(worker)).source == ("bucket" if is_gone else "disk")


async def test_a_file_that_cannot_be_read_fails_the_disk_once(
    serving: Serving, bucket: MemoryStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv

    def read(fd: int, *how: Any) -> int:
        if os.fstat(fd).st_ino == inode:
            raise OSError(errno.EIO, "a bad sector")
        return preadv(fd, *how)

    monkeypatch.setattr(source, "OFF_S", 0.0)
    rig.hold(bucket, 1)
    async with serving() as worker:
        await fetched(worker)
        await until_counted(worker, writes=1)
        with file.open("rb") as kept:  # nor has another file its number then
            inode = os.fstat(kept.fileno()).st_ino
            monkeypatch.setattr(os, "preadv", read)
            assert (await fetched(worker)).source == "bucket"
            await until_counted(worker, failed=1, writes=2)
            assert (await fetched(worker)).source == "disk"
        await until_counted(worker, failed=1)


@pytest.fixture
def hanging() -> Hanging:
    """It answers until `answers` is cleared."""
    hanging = Hanging()
    hanging.answers.set()
    return hanging


@pytest.mark.parametrize("near", [True, False])
async def test_a_bucket_that_hangs_holds_back_no_hit(
    near: bool, serving: Serving, hanging: Hanging
) -> None:
    rig.hold(hanging, 1)
    async with serving(store=hanging, max_inflight_requests=1) as worker:
        assert (await fetched(worker)).source == "bucket"
        await until_counted(worker, writes=1)
        hanging.answers.clear()
        worker.say(rig.fetch(2))
        await until(lambda: hanging.asked["get_into"] == 2)
        end = await asyncio.wait_for(worker.end_of(structs.replace(rig.fetch(1), near=near)), 30)
        assert (end.outcome, end.source) == (Outcome.OK, "disk")
        hanging.answers.set()
        assert (await worker.done(1))[2].outcome is Outcome.MISSING


async def test_an_upload_waits_for_the_bucket_that_its_fetch_asks_after_the_disk(
    serving: Serving, hanging: Hanging
) -> None:
    rig.hold(hanging, 1)
    async with serving(store=hanging) as worker:
        hanging.answers.clear()
        worker.fill(2, number=1)
        worker.say(rig.fetch(1), rig.upload(2, number=1))
        await until(lambda: hanging.asked["get_into"] == 1)
        await worker.settled()
        hanging.answers.set()
        ends = await worker.done(2)
        assert (ends[1].outcome, ends[2].outcome) == (Outcome.OK, Outcome.EXISTS)
        assert hanging.asked["put"] == 0


async def test_a_fetch_is_given_up_wherever_it_is(serving: Serving, hanging: Hanging) -> None:
    """Read from the disk, waiting for the bucket, or read from it; it ends once."""
    hanging.answers.clear()
    async with serving(store=hanging, max_inflight_requests=1) as worker:
        worker.say(*map(rig.fetch, range(1, 5)))
        await until(lambda: hanging.asked["get_into"] == 1)
        worker.say(*(wire.Cancel(number) for number in range(4, 0, -1)), wire.Drain(100.0))
        assert {end.outcome for end in (await worker.done(4)).values()} == {Outcome.CANCELLED}
        assert await worker.hear() == wire.Drained(0)


async def test_a_read_that_hangs_costs_its_patience(
    serving: Serving, bucket: MemoryStore, monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> None:
    """And none begins while too many hang: their queue would grow for days."""
    rig.hold(bucket, 1)
    async with serving() as worker:
        await fetched(worker)
        await until_counted(worker, writes=1)
        monkeypatch.setattr(source, "OFF_S", 0.0)
        monkeypatch.setattr(source, "_MOST_READS", 2)
        hold.all("preadv")
        for failed, patience_s in ((1, 0.02), (2, 0.02), (3, 600.0)):
            monkeypatch.setattr(source, "PATIENCE_S", patience_s)
            assert (await asyncio.wait_for(fetched(worker), 60)).source == "bucket"
            await until_counted(worker, failed=failed)
        hold.let_go.set()
        while (await fetched(worker)).source != "disk":
            pass


async def test_a_slot_is_not_written_after_its_job_has_ended(
    serving: Serving, bucket: MemoryStore, monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> None:
    rig.hold(bucket, 1)
    read, ended = Directory.read, threading.Event()

    def read_to_the_end(*how: Any) -> int | None:
        try:
            return read(*how)
        finally:
            ended.set()

    async with serving() as worker:
        await fetched(worker)
        await until_counted(worker, writes=1)
        hold.all("preadv")
        monkeypatch.setattr(Directory, "read", read_to_the_end)
        worker.say(rig.fetch(1))
        await asyncio.to_thread(hold.begun.wait)
        worker.say(wire.Cancel(1))
        assert (await worker.done(1))[1].outcome is Outcome.CANCELLED, "though the read goes on"
        worker.slot(1)[:] = bytes(rig.FORMAT.object_bytes)
        hold.let_go.set()
        await asyncio.to_thread(ended.wait)
        assert not any(worker.slot(1))


async def test_a_system_without_further_threads_does_not_matter_later(
    serving: Serving, bucket: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.hold(bucket, 1)
    async with serving() as worker:
        with refused(monkeypatch):
            assert (await fetched(worker)).source == "bucket"
            await until_counted(worker, writes=1)
            assert (await fetched(worker)).source == "disk"


async def test_a_system_that_refuses_threads_at_the_start_is_told(
    bucket: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = {"disk_path": str(tmp_path / "cache"), "disk_bytes": 2**30}
    with refused(monkeypatch):
        async with rig.served(lambda _: bucket, on_unavailable="serve", **how) as (worker, _):
            ready = await worker.hear()
    assert (ready.serving, ready.trouble) == (False, "config")
    assert "threads (s3kv-disk-read)" in ready.message
    assert "pids.max" in ready.message


async def test_objects_are_dropped_when_the_disk_is_behind(
    serving: Serving, bucket: MemoryStore, monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> None:
    monkeypatch.setattr(source, "MOST_COPIED_BYTES", 2 * rig.FORMAT.object_bytes)
    rig.hold(bucket, 1, 2, 3)
    async with serving() as worker:
        hold.all("pwritev")
        for number in (1, 2, 3):
            assert (await fetched(worker, number)).source == "bucket"
        await until_counted(worker, dropped=1)
        hold.let_go.set()
        await until_counted(worker, dropped=1, writes=2)


async def test_the_budget_is_kept(
    serving: Serving, bucket: MemoryStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "_CLEAN_EVERY_S", 0.0)
    rig.hold(bucket, *range(1, 31))
    most_bytes = 10 * rig.FORMAT.object_bytes
    cache, write, after_writes = file.parents[3], Directory.write, list[int]()

    def measured(*args: Any) -> str:  # in the one thread that also deletes
        result = write(*args)
        after_writes.append(sum(path.stat().st_size for path in cache.rglob("*.safetensors")))
        return result

    monkeypatch.setattr(Directory, "write", measured)
    async with serving(disk_bytes=most_bytes) as worker:
        for number in range(1, 31):
            await fetched(worker, number)
        while not (await counters(worker)).get("evicted_bytes"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert 0 < max(after_writes) <= most_bytes


async def test_the_last_objects_are_written_before_the_process_ends(
    serving: Serving, bucket: MemoryStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "_CLOSE_TIMEOUT_S", 100.0)  # a busy machine may use the usual up
    rig.hold(bucket, 1)
    async with serving() as worker:
        await fetched(worker)
    assert file.read_bytes() == rig.sealed(1)
    assert not os.listdir(file.parents[3] / "writing")


async def test_a_disk_that_hangs_at_start_keeps_nobody_from_starting(
    bucket: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> None:
    for module in (process, source):
        monkeypatch.setattr(module, "PATIENCE_S", 0.5)
    hold.all("mkdir")
    rig.hold(bucket, 1)
    how = {"disk_path": str(tmp_path / "cache"), "disk_bytes": 2**30}
    async with rig.serving(bucket, **how) as (worker, _):
        assert hold.begun.is_set()
        assert (await fetched(worker)).source == "bucket"


@pytest.mark.parametrize("on_unavailable", ["fail", "serve"])
async def test_a_directory_that_cannot_be_used_at_start(
    bucket: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, on_unavailable: str
) -> None:
    (tmp_path / "cache").write_bytes(b"")
    how = {"disk_path": str(tmp_path / "cache"), "disk_bytes": 2**30}
    rig.hold(bucket, 1)
    async with rig.served(lambda _: bucket, on_unavailable=on_unavailable, **how) as (worker, _):
        ready = await worker.hear()
        if on_unavailable == "fail":
            assert (ready.serving, ready.trouble) == (False, "config")
            assert "disk_path" in ready.message
        else:
            assert ready.serving
            assert (await fetched(worker)).source == "bucket"
            assert "The disk is off until the next start" in caplog.text
