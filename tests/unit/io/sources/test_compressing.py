"""Uploads are compressed where it pays and as far as it keeps up, and plain otherwise."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from s3kv.config import Config
from s3kv.errors import ConfigError, StoreUnavailable
from s3kv.io.sources import compressing
from s3kv.io.sources.compressing import Compressor, open_compressor
from s3kv.io.sources.reception import Decoder
from s3kv.io.sources.transfer_job import TransferJob
from s3kv.messages import JobKind
from s3kv.objects import compression
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.item_format import ItemFormat, object_bytes
from s3kv.place import Place
from s3kv.types import ItemShape, TensorSpec
from tests.unit.io import compressed, rig
from tests.unit.io.compressed import FORMAT, Held
from tests.unit.io.sources.test_executors import refused
from tests.waiting import until

DATA = compressed.payload(1)
STORED = compressed.stored(DATA)
RANDOM = random.Random(1).randbytes(FORMAT.payload_bytes)


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held(encodes=True)
    yield held
    held.gate.set()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def compressor_of(
    pool: ThreadPoolExecutor,
    mode: compressing.CompressSetting = "on",
    codec: Any = None,
    **how: Any,
) -> Compressor:
    return Compressor(mode, Decoder(time.monotonic, codec or compressed.codec()), pool, **how)


def job_of(data: bytes = DATA, form: ChunkFormat | ItemFormat = FORMAT) -> TransferJob:
    data = data.ljust(form.object_bytes - form.header_bytes, b"\0")
    place = Place(memoryview(bytearray(form.header_bytes)), memoryview(bytearray(data)))
    form.seal(place, rig.chunk(1).block_hash)
    return TransferJob(1, JobKind.UPLOAD, "key", rig.chunk(1).block_hash, form, place)


async def stored(compressor: Compressor, job: TransferJob) -> bytes:
    async with compressor.stored(job) as place:
        return bytes(place)


def counted(compressor: Compressor) -> dict[str, int]:
    return {name.removeprefix("io_"): count for name, count in compressor.counters.items() if count}


def is_idle(compressor: Compressor) -> bool:
    """Whether it has given back all memory, and nobody waits for it."""
    return not compressor._memory.leased_bytes and not compressor._waiting


@pytest.mark.parametrize("mode", ["on", "auto"])
async def test_an_upload_is_compressed(mode: Any, pool: ThreadPoolExecutor) -> None:
    compressor, job = compressor_of(pool, mode), job_of()
    for times in range(1, 4):
        assert await stored(compressor, job) == STORED
        sizes = (times * FORMAT.object_bytes, times * len(STORED))
        expected = {"encoded": times, "encoded_bytes": sizes[0], "encoded_stored_bytes": sizes[1]}
        assert counted(compressor) == expected
    assert bytes(job.place) == compressed.plain(DATA)
    assert is_idle(compressor)


ITEM = ItemFormat("0" * 32, "BF16", ItemShape(9, object_bytes("BF16", 9, 400_000)))
SMALL = ChunkFormat("0" * 32, (TensorSpec("g0", "U8", (2**17,)),), 0, "whole")


@pytest.mark.parametrize("form", [ITEM, SMALL], ids=["item", "small"])
async def test_formats_without_a_compressed_form_are_uploaded_plain(
    form: Any, pool: ThreadPoolExecutor
) -> None:
    compressor, job = compressor_of(pool), job_of(b"", form)
    async with compressor.stored(job) as place:
        assert place is job.place
    assert counted(compressor) == {}


async def test_without_a_codec_or_the_setting_uploads_are_plain(pool: ThreadPoolExecutor) -> None:
    for compressor in (compressor_of(pool, "off"), Compressor("off", Decoder(time.monotonic))):
        assert await stored(compressor, job_of()) == compressed.plain(DATA)
        assert counted(compressor) == {}


async def test_what_would_not_be_shorter_is_uploaded_plain(pool: ThreadPoolExecutor) -> None:
    compressor = compressor_of(pool)
    job = job_of(RANDOM)
    async with compressor.stored(job) as place:
        assert place is job.place
    assert counted(compressor) == {"left_plain|no_gain": 1}
    assert is_idle(compressor)


async def test_no_more_than_two_wait_for_the_thread(pool: ThreadPoolExecutor, held: Held) -> None:
    compressor = compressor_of(pool, codec=held)
    first = [asyncio.ensure_future(stored(compressor, job_of())) for _ in range(2)]
    await until(held.begun.is_set)
    assert await stored(compressor, job_of()) == compressed.plain(DATA)
    assert counted(compressor) == {"left_plain|busy": 1}
    held.gate.set()
    assert await asyncio.gather(*first) == [STORED, STORED]
    assert await stored(compressor, job_of()) == STORED
    assert is_idle(compressor)


async def test_the_memory_lasts_until_the_upload_has_ended(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressing, "MOST_ENCODED_BYTES", 2 * FORMAT.object_bytes)
    compressor = compressor_of(pool)
    async with compressor.stored(job_of()) as first, compressor.stored(job_of()) as second:
        assert await stored(compressor, job_of()) == compressed.plain(DATA)
        assert counted(compressor)["left_plain|busy"] == 1
        assert bytes(first) == bytes(second) == STORED
    assert await stored(compressor, job_of()) == STORED
    assert is_idle(compressor)


@pytest.mark.parametrize("error", [StoreUnavailable("away"), asyncio.CancelledError()])
@pytest.mark.parametrize("data", [DATA, RANDOM], ids=["shrinks", "does not"])
async def test_an_upload_that_fails_gives_back_the_memory(
    pool: ThreadPoolExecutor, error: BaseException, data: bytes
) -> None:
    compressor = compressor_of(pool)
    with pytest.raises(type(error)):
        async with compressor.stored(job_of(data)):
            raise error
    assert is_idle(compressor)
    assert await stored(compressor, job_of()) == STORED


async def test_an_encoder_that_fails_gives_back_the_memory(
    pool: ThreadPoolExecutor, held: Held
) -> None:
    compressor = compressor_of(pool, codec=held)
    held.error = MemoryError("full")
    held.gate.set()
    with pytest.raises(MemoryError):
        await stored(compressor, job_of())
    assert is_idle(compressor)
    held.error = None
    assert await stored(compressor, job_of()) == STORED


async def test_nothing_reads_the_payload_after_a_cancellation(
    pool: ThreadPoolExecutor, held: Held
) -> None:
    """Neither of the object in the thread, nor of the one that waits for it."""
    compressor = compressor_of(pool, codec=held)
    tasks = [asyncio.ensure_future(stored(compressor, job_of())) for _ in range(2)]
    await until(held.begun.is_set)
    for _ in range(3):
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0)
    assert not tasks[0].done(), "its payload is being read"
    held.gate.set()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)
    assert held.done == 1
    assert is_idle(compressor)
    assert counted(compressor) == {}
    assert await stored(compressor, job_of()) == STORED


async def test_auto_follows_the_speeds_and_says_so_once(
    pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "s3kv.io")
    compressor = compressor_of(pool, "auto", threads=2, bytes_per_s=1e9)
    speeds, at_s = compressor.decoder.speeds, 0.0

    async def after(wire_bytes_per_s: float) -> bool:
        """Whether uploads are compressed after objects have arrived that fast."""
        nonlocal at_s
        for _ in range(50):
            begin_s, at_s = at_s, at_s + 2**28 / wire_bytes_per_s
            speeds.received(2**28, begin_s, at_s)
        uploads = [await stored(compressor, job_of()) for _ in range(2)]
        assert uploads[0] == uploads[1]
        return uploads[0] == STORED

    assert await after(0.6e9)
    assert caplog.messages == []
    assert not await after(1.0e9)
    assert not await after(0.6e9)
    (said,) = caplog.messages
    assert "uploaded plain" in said
    assert "bucket 1.00 GB/s, decoding 2.00" in said
    assert await after(0.4e9)
    assert len(caplog.messages) == 2
    assert "are now compressed" in caplog.messages[1]
    assert counted(compressor)["left_plain|fast_wire"] == 4
    for _ in range(50):  # a host whose cores are taken
        speeds.decoded(2**28, 2**28 / 0.1e9)
    assert not await after(0.4e9)


async def test_on_does_not_ask_the_speeds(pool: ThreadPoolExecutor) -> None:
    compressor = compressor_of(pool, "on")
    compressor.decoder.speeds.received(2**30, 0.0, 1e-3)
    assert await stored(compressor, job_of()) == STORED


def opened(**settings: Any) -> Compressor:
    return open_compressor(Config(**{"bucket": "bkt", **settings}), time.monotonic)


@pytest.mark.parametrize(
    ("disk", "seals"), [({}, False), ({"disk_path": "/x", "disk_bytes": 2**30}, True)]
)
def test_with_a_disk_alone_the_plain_object_is_sealed(disk: dict[str, Any], seals: bool) -> None:
    compressor = opened(**disk)
    assert compressor.decoder.seals is seals
    compressor.close()


async def test_without_the_package_the_setting_on_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compression, "codec", lambda: None)
    with pytest.raises(ConfigError, match=r"compress is 'on'.*pip install .*'auto'"):
        opened(compress="on")
    for mode in ("auto", "off"):
        compressor = opened(compress=mode)
        assert compressor.decoder.codec is None
        assert await stored(compressor, job_of()) == compressed.plain(DATA)
        compressor.close()


def test_objects_that_are_not_verified_are_not_decoded() -> None:
    assert opened(integrity="none").decoder.codec is None


def test_the_speed_of_one_thread_is_that_of_its_best_segment() -> None:
    times_s = iter([0.0, 9.0, 10.0, 10.5, 20.0, 21.0])
    assert compression.decoding_speed(compressed.codec(), lambda: next(times_s)) == 2 * 2**20
    assert compression.decoding_speed(compressed.codec(), lambda: 1.0) > 0


async def test_a_system_without_further_threads_does_not_matter_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Work that waits for such a thread would be done in memory of another job."""
    compressor = opened(compress="on")
    with refused(monkeypatch):
        assert await stored(compressor, job_of()) == STORED
        future = compressor.decoder.run(lambda: None)
        await asyncio.wrap_future(future)
    assert is_idle(compressor)
    compressor.close()


async def test_its_threads_end_when_it_is_closed() -> None:
    before = threading.active_count()
    compressor = opened(compress="on")
    assert await stored(compressor, job_of()) == STORED
    future = compressor.decoder.run(lambda: None)
    await asyncio.wrap_future(future)
    compressor.close()
    compressor.close()
    await until(lambda: threading.active_count() <= before)
