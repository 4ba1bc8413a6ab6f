"""A local disk used with one thing done wrong: what a fleet of engines with disks has to notice."""

from __future__ import annotations

import asyncio
import copy
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from s3kv.errors import ConfigError, StoreUnavailable
from s3kv.io.sources import chain, reception
from s3kv.io.sources import disk as source
from s3kv.io.sources.disk import DiskSource
from s3kv.io.sources.transfer_job import TransferJob
from s3kv.messages import JobEnd
from s3kv.place import Place, copy_bytes
from s3kv.stores import disk
from s3kv.stores.disk import Directory, File
from s3kv.stores.lanes import ended
from s3kv.upkeep import disk_cleaning
from tests.mutants import Mutants, Patch

calls: Any = disk
"""Where the calls of the kernel are those of the disk in memory."""

MUTANTS = Mutants()
mutant, instead_of, swap = MUTANTS.mutant, MUTANTS.instead_of, MUTANTS.swap

fetch, read_job = DiskSource.fetch, DiskSource._read
read, reserve, files = Directory.read, Directory._reserve, Directory.files
is_crowded = disk_cleaning.is_crowded

swap("takes_no_lock", disk, "_try_lock", lambda fd: True)
swap("does_not_count_what_it_cannot_list", disk, "_unless_gone", None)
swap("keeps_as_many_bytes_as_it_moved", chain, "BucketSource", SimpleNamespace(name=mock.ANY))
swap("believes_that_deleted_files_take_room", Directory, "correct", lambda self, *of: None)


@mutant
def keeps_what_it_has_decoded_without_a_header(patch: Patch) -> None:
    never = property(lambda self: False, lambda self, seals: None)
    patch.setattr(reception.Decoder, "seals", never, raising=False)


@instead_of(DiskSource, "_read")
async def believes_every_file(self: DiskSource, job: TransferJob) -> tuple[int | None, None]:
    nbytes, _ = await read_job(self, job)
    return nbytes, None


@instead_of(DiskSource, "fetch")
async def fails_a_fetch_when_the_disk_fails(self: DiskSource, job: TransferJob) -> JobEnd | None:
    before = self.counters["io_disk_failed"]
    end = await fetch(self, job)
    if self.counters["io_disk_failed"] > before and end is None:
        raise StoreUnavailable("the disk has failed")
    return end


@instead_of(DiskSource, "fetch")
async def takes_a_disk_without_the_file_for_a_bucket_without_it(
    self: DiskSource, job: TransferJob
) -> JobEnd | None:
    end = await fetch(self, job)
    if end is not None:
        end.reason = end.reason or "quarantined"
    return end


@instead_of(DiskSource, "keep")
async def copies_from_a_slot_after_the_job(self: DiskSource, job: TransferJob, nbytes: int) -> None:
    if (buffer := self._copies.take(nbytes)) is None:
        return

    async def copy_later() -> int:
        await asyncio.sleep(1.0)
        return copy_bytes(job.place.cut(0, nbytes).views, buffer)

    copying = asyncio.ensure_future(copy_later())
    copying.add_done_callback(lambda _: self._begin(self._write(job.key, buffer, copying)))


@instead_of(Directory, "read")
def reads_into_the_slot_after_the_job(
    self: Directory, key: str, place: Place, is_over: Callable[[], bool], *lock: Any
) -> int | None:
    return read(self, key, place, lambda: False, *lock)


@instead_of(DiskSource, "_read")
async def waits_for_a_disk_that_hangs(self: DiskSource, job: TransferJob) -> tuple[int | None, Any]:
    over = threading.Event()

    def read_now() -> tuple[int | None, Any]:
        nbytes = read(self._directory, job.key, job.place, over.is_set)
        if nbytes is None or over.is_set():
            return None, None
        return nbytes, job.format.check(job.place, nbytes, job.block_hash)

    reading = asyncio.ensure_future(self._workers.read(read_now))
    try:
        await asyncio.wait([reading])
    finally:
        over.set()
        await ended([reading])
    return reading.result()


@instead_of(Directory, "write")
def writes_under_the_name_itself(
    self: Directory, key: str, place: Place, is_over: Callable[[], bool]
) -> str:
    path = self.file_of(key)
    if calls.os.path.exists(path):
        return "there"
    if not reserves(self, place.nbytes):
        return "full"
    disk._make_folder(path.parent)
    fd = calls.os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        return "written" if disk._fill(fd, place, is_over) else "over"
    finally:
        calls.os.close(fd)


def reserves(directory: Directory, nbytes: int) -> bool:
    reserved = reserve(directory, nbytes)
    if reserved is not None:
        calls.os.close(reserved[0])
        calls.os.unlink(reserved[1])
    return reserved is not None


@instead_of(Directory, "_reserve")
def reserves_nothing(self: Directory, nbytes: int) -> tuple[int, str] | None:
    boundless = copy.copy(self)
    boundless.most_bytes = 2**60
    return reserve(boundless, nbytes)


@instead_of(Directory, "files")
def deletes_the_files_used_last(self: Directory) -> Any:
    return (File(file.path, file.nbytes, -file.used_s) for file in files(self))


@instead_of(source, "is_crowded")
def cleans_for_no_object(directory: Directory, wanted_bytes: int = 0) -> bool:
    return is_crowded(directory)


@instead_of(source, "is_crowded")
def never_cleans(directory: Directory, wanted_bytes: int = 0) -> bool:
    return directory.used_bytes() is None


@instead_of(Directory, "used_bytes")
def does_not_make_its_folders_again(self: Directory) -> int | None:
    with self._locked() as fd:
        return disk._read_used(fd)


@instead_of(Directory, "open")
def starts_on_a_sound_disk_alone(path: str, prefix: str, most_bytes: int) -> Directory:
    directory = Directory(Path(path), prefix, most_bytes)
    try:
        directory.used_bytes()
    except OSError as error:
        raise ConfigError(str(error)) from error
    return directory
