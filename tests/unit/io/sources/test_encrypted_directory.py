"""A directory that encrypts: objects come back through it, and damaged ones as unreadable."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.memory_store import MemoryStore
from s3kv.io.sources.disk import DiskSource, WorkerThreads
from s3kv.io.sources.encrypted_directory import EncryptedDirectory
from s3kv.io.sources.transfer_job import TransferJob
from s3kv.messages import JobKind
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.encryption import SEGMENT_BYTES, Keyring, encrypted_bytes
from s3kv.place import Place
from s3kv.stores.disk import Directory
from s3kv.stores.store import UNREADABLE
from s3kv.types import TensorSpec
from s3kv.upkeep.refreshing import Refresher, RefreshRule
from tests.system.forms import flipped
from tests.unit.io import rig
from tests.unit.stores.test_disk import wanted

MASTER, OTHER = bytes(range(32)), bytes(range(1, 33))
KEY = rig.object_key(1)
DATA = random.Random(1).randbytes(2 * SEGMENT_BYTES + 77)


@pytest.fixture
def plain(tmp_path: Path) -> Directory:
    directory = Directory.open(str(tmp_path / "cache"), "s3kv", 2**30)
    directory.correct(0, None)
    return directory


@pytest.fixture
def directory(plain: Directory) -> EncryptedDirectory:
    return EncryptedDirectory(plain, Keyring([MASTER]))


def read(directory: Directory, nbytes: int = len(DATA), key: str = KEY) -> tuple[int | None, bytes]:
    place = Place.of(bytearray(nbytes), min(4096, nbytes))
    return directory.read(key, place, wanted), bytes(place)


@pytest.mark.parametrize("nbytes", [1, 4097, SEGMENT_BYTES, len(DATA)])
def test_an_object_comes_back(directory: EncryptedDirectory, nbytes: int) -> None:
    data = DATA[:nbytes]
    assert read(directory, nbytes)[0] is None
    assert directory.write(KEY, Place.of(data), wanted) == "written"
    assert directory.write(KEY, Place.of(data), wanted) == "there"
    assert read(directory, nbytes) == (nbytes, data)
    (file,) = directory.files()
    assert file.path == str(directory.file_of(KEY))
    assert file.nbytes == encrypted_bytes(nbytes)
    assert directory.used_bytes() == file.nbytes
    assert nbytes < 100 or data[:100] not in Path(file.path).read_bytes()
    assert rig.chunk(1).block_hash.hex() not in file.path
    assert str(directory.file_of(directory.key_of(file.path))) == file.path


def test_header_and_payload_need_not_adjoin(directory: EncryptedDirectory) -> None:
    parts = (memoryview(bytearray(DATA[:300])), memoryview(bytearray(DATA[300:])))
    assert directory.write(KEY, Place(*parts), wanted) == "written"
    place = Place(memoryview(bytearray(300)), memoryview(bytearray(len(DATA))))
    assert directory.read(KEY, place, wanted) == len(DATA)
    assert bytes(place)[: len(DATA)] == DATA


def test_a_damaged_file_is_unreadable(directory: EncryptedDirectory) -> None:
    directory.write(KEY, Place.of(DATA), wanted)
    file = directory.file_of(KEY)
    data = bytearray(file.read_bytes())
    for at in (0, 300, len(data) - 1):
        data[at] ^= 1
        file.write_bytes(data)
        assert read(directory)[0] == UNREADABLE
        data[at] ^= 1
    file.write_bytes(data)
    assert read(directory) == (len(DATA), DATA)
    file.write_bytes(data[:-1])
    assert read(directory)[0] == UNREADABLE
    assert directory.delete(file)
    assert read(directory)[0] is None


def test_the_true_length_of_an_object_that_is_too_long(directory: EncryptedDirectory) -> None:
    directory.write(KEY, Place.of(DATA), wanted)
    assert read(directory, 5000) == (len(DATA), bytes(5000))


def test_a_file_of_another_object_is_unreadable(directory: EncryptedDirectory) -> None:
    directory.write(KEY, Place.of(DATA), wanted)
    other = rig.object_key(2)
    directory.file_of(other).parent.mkdir(parents=True, exist_ok=True)
    directory.file_of(KEY).rename(directory.file_of(other))
    assert read(directory, key=other)[0] == UNREADABLE


def test_files_of_an_older_key_are_read(directory: EncryptedDirectory, plain: Directory) -> None:
    directory.write(KEY, Place.of(DATA), wanted)
    assert read(EncryptedDirectory(plain, Keyring([OTHER, MASTER]))) == (len(DATA), DATA)
    assert read(EncryptedDirectory(plain, Keyring([OTHER])))[0] is None


def test_a_bad_file_of_an_older_key_is_the_one_to_delete(
    directory: EncryptedDirectory, plain: Directory
) -> None:
    directory.write(KEY, Place.of(DATA), wanted)
    rotated = EncryptedDirectory(plain, Keyring([OTHER, MASTER]))
    file = rotated.file_of(KEY)
    assert file == directory.file_of(KEY)
    file.write_bytes(flipped(file.read_bytes()))
    assert read(rotated)[0] == UNREADABLE
    assert rotated.delete(rotated.file_of(KEY))
    assert rotated.write(KEY, Place.of(DATA), wanted) == "written"
    assert rotated.file_of(KEY) != file
    assert read(rotated) == (len(DATA), DATA)


async def test_room_is_made_for_the_file_and_not_for_the_object(
    directory: EncryptedDirectory,
) -> None:
    """Of the two, only the object would fit without deleting anything."""
    form = ChunkFormat("0" * 32, (TensorSpec("g0", "U8", (80_000,)),), 0, "whole")
    assert directory.write(rig.object_key(2), Place.of(DATA[:900_000]), wanted) == "written"
    used = directory.used_bytes()
    assert used == encrypted_bytes(900_000)
    directory.most_bytes = used + form.object_bytes + 100
    refresher = Refresher(MemoryStore(), RefreshRule(math.inf, random.Random(0)), lambda: False)
    source = DiskSource(directory, WorkerThreads(1), refresher, keeps_uploads=True)
    place = Place.of(bytearray(form.object_bytes), form.header_bytes)
    for _ in range(2):
        await source.keep(TransferJob(1, JobKind.UPLOAD, KEY, b"hash", form, place), place.nbytes)
        await asyncio.wait(source._tasks)
    await source.close()
    assert source.counters["io_disk_evicted_bytes"] == used
    assert source.counters["io_disk_writes"] == 1


def test_nothing_is_written_or_read_once_it_is_over(directory: EncryptedDirectory) -> None:
    assert directory.write(KEY, Place.of(DATA), lambda: True) == "over"
    assert not list(directory.files())
    directory.write(KEY, Place.of(DATA), wanted)
    is_over = False

    @contextlib.contextmanager
    def ending() -> Iterator[None]:
        """A lock whose holder before has said that it is over."""
        nonlocal is_over
        is_over = True
        yield

    place = Place.of(bytearray(len(DATA)))
    assert directory.read(KEY, place, lambda: is_over, ending()) is None
    assert not any(bytes(place))
