"""Objects of both forms arrive in every order and in every step, and no wrong payload is right."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import pytest

from s3kv.io.sources import speeds
from s3kv.io.sources.ranges import cut
from s3kv.io.sources.reception import Decoder, Reception
from s3kv.io.sources.transfer_job import TransferJob
from s3kv.messages import JobKind
from s3kv.objects.codec import ChunkFormat
from s3kv.objects.compression import Codec
from s3kv.objects.headers import Mismatch
from s3kv.objects.integrity import Integrity
from s3kv.objects.item_format import ItemFormat, object_bytes
from s3kv.place import Place
from s3kv.types import ItemShape, TensorSpec
from tests.unit.io import compressed, rig
from tests.unit.io.compressed import FORMAT, Held

HASH = rig.chunk(1).block_hash
DATA, OTHER_DATA = compressed.payload(1), compressed.payload(2)
PLAIN, STORED = compressed.plain(DATA), compressed.stored(DATA)
OTHER = compressed.stored(OTHER_DATA)
FORMS = pytest.mark.parametrize("data", [PLAIN, STORED], ids=["plain", "compressed"])


class AtOnce(Executor):
    """Runs calls in the thread that submits them."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        future.set_result(fn(*args, **kwargs))
        return future


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture(params=["threads", "at once"])
def decoder(request: pytest.FixtureRequest, pool: ThreadPoolExecutor) -> Decoder:
    executor: Executor = pool if request.param == "threads" else AtOnce()
    return Decoder(time.monotonic, compressed.codec(), executor)


def decoder_of(executor: Executor, codec: Codec | None = None, *, seals: bool = False) -> Decoder:
    return Decoder(time.monotonic, codec or compressed.codec(), executor, seals=seals)


def job_of(place: Place | None = None, form: ChunkFormat | ItemFormat = FORMAT) -> TransferJob:
    """A fetch into a place (None: one of its own, header and payload apart)."""
    if place is None:
        place = compressed.apart(form)
    return TransferJob(1, JobKind.FETCH, "key", HASH, form, place)


async def receive(reception: Reception, data: bytes, steps: int = 1) -> Mismatch | None:
    """Receive a whole object in so many steps, and verify it."""
    memory = reception.land(len(data))
    for step in cut(len(data), steps, 1):
        memory.write(data[step.start : step.stop], step.start)
        reception.progress(step.stop)
    try:
        return await reception.check(len(data))
    finally:
        await reception.stop()


def write_range(reception: Reception, data: bytes, bounds: range) -> None:
    """Receive the range of an object, as far as it has one."""
    part = data[bounds.start : bounds.stop]
    reception.land(len(data), bounds).write(part)
    reception.came(range(bounds.start, bounds.start + len(part)))


def ranges_of(nbytes: int, count: int) -> list[range]:
    """Ranges of an object whose length was expected to be that; the last goes on to the end."""
    *ranges, last = cut(nbytes, count, 1)
    return [*ranges, range(last.start, FORMAT.object_bytes)]


# --- right objects -----------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("steps", [1, 2, 7, 400])
@pytest.mark.parametrize("adjoin", [True, False])
async def test_an_object_arrives_whole(
    decoder: Decoder, data: bytes, steps: int, *, adjoin: bool
) -> None:
    both = bytearray(FORMAT.object_bytes)
    job = job_of(Place.of(both, FORMAT.header_bytes) if adjoin else None)
    assert await receive(Reception(decoder, job), data, steps) is None
    assert bytes(job.place.payload) == DATA
    expected = (1, FORMAT.object_bytes, len(STORED)) if data is STORED else (0, 0, 0)
    assert tuple(decoder.counters.values()) == expected


@FORMS
@pytest.mark.parametrize("count", [1, 2, 3, 6])
@pytest.mark.parametrize("seed", range(4))
async def test_ranges_arrive_in_any_order(
    decoder: Decoder, data: bytes, count: int, seed: int
) -> None:
    """Some of them twice, the first time in part."""
    rng = random.Random(seed)
    job = job_of()
    reception = Reception(decoder, job)
    ranges = ranges_of(len(STORED), count)
    rng.shuffle(ranges)
    for bounds in ranges:
        if rng.random() < 0.5:
            part = data[bounds.start : bounds.stop]
            reception.land(len(data), bounds).write(part[: len(part) // 2])
        write_range(reception, data, bounds)
    assert await reception.check(len(data)) is None
    await reception.stop()
    assert bytes(job.place.payload) == DATA


async def test_an_object_of_numbers_of_any_size_and_segments_that_do_not_shrink(
    decoder: Decoder,
) -> None:
    names = ("F64", "F32", "BF16", "F8_E4M3", "U8")
    form = ChunkFormat("0" * 32, tuple(TensorSpec(name, name, (10**5,)) for name in names), 0, "w")
    rng = random.Random(3)
    data = compressed.payload(3, form.payload_bytes - 10**5) + rng.randbytes(10**5)
    job = job_of(form=form)
    whole = compressed.stored(data, block_hash=HASH, form=form)
    assert await receive(Reception(decoder, job), whole, 5) is None
    assert bytes(job.place.payload) == data


async def test_bytes_arrive_from_a_thread_while_others_decode(pool: ThreadPoolExecutor) -> None:
    decoder = decoder_of(pool)
    for seed in range(12):
        print(f"seed {seed}")
        rng, job = random.Random(seed), job_of()
        reception = Reception(decoder, job)

        def arrive(rng: random.Random, reception: Reception) -> None:
            memory, at = reception.land(len(STORED)), 0
            while at < len(STORED):
                end = min(len(STORED), at + rng.choice([1, 100, 4096, 10**5, 10**6]))
                memory.write(STORED[at:end], at)
                if rng.random() < 0.9:
                    reception.progress(end)
                at = end

        await asyncio.to_thread(arrive, rng, reception)
        assert await reception.check(len(STORED)) is None
        await reception.stop()
        assert bytes(job.place.payload) == DATA
    assert decoder.counters["io_decoded"] == 12


async def test_an_item_may_be_shorter_than_its_place(decoder: Decoder) -> None:
    form = ItemFormat("0" * 32, "BF16", ItemShape(9, object_bytes("BF16", 9, 400_000)))
    shorter = ItemFormat("0" * 32, "BF16", ItemShape(9, object_bytes("BF16", 9, 300_000)))
    data = bytearray(shorter.object_bytes)
    shorter.seal(Place.of(data, shorter.header_bytes), HASH)
    job = job_of(Place.of(bytearray(form.object_bytes), form.header_bytes), form)
    assert await receive(Reception(decoder, job), bytes(data), 3) is None
    assert bytes(job.place).startswith(data)
    assert decoder.envelope(form) is None


@pytest.mark.parametrize("mode", ["none", "xxh3"])
async def test_formats_without_a_compressed_form_are_received_as_ever(
    decoder: Decoder, mode: Any
) -> None:
    nbytes = 2**20 if mode == "none" else 2**17
    tensors = (TensorSpec("g0", "U8", (nbytes,)),)
    form = ChunkFormat("0" * 32, tensors, 0, "whole", Integrity(mode))
    assert decoder.envelope(form) is None
    data = random.Random(1).randbytes(nbytes)
    whole = compressed.plain(data, form=form)
    job = job_of(form=form)
    assert await receive(Reception(decoder, job), whole, 3) is None
    assert bytes(job.place.payload) == data
    assert await receive(Reception(decoder, job_of(form=form)), whole[:-1]) == "length"


# --- other objects -----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 4])
async def test_a_range_of_an_object_of_another_length_does_not_land(
    decoder: Decoder, count: int
) -> None:
    assert len(OTHER) != len(STORED)
    for first, then in ((STORED, OTHER), (STORED, PLAIN), (PLAIN, STORED)):
        reception = Reception(decoder, job_of())
        bounds, *others = ranges_of(len(STORED), count)
        write_range(reception, first, bounds)
        for other in others:
            assert reception.land(len(then), other) is None
        await reception.stop()
        assert reception.land(len(first), others[0]) is not None


async def test_a_range_of_another_object_is_not_written_over_what_is_decoded(
    decoder: Decoder,
) -> None:
    """An object of the same length: it is refused by its digests, if not by its ETag before."""
    for swapped in (range(1, 4), range(3, 4), range(1, 2)):
        job = job_of()
        reception = Reception(decoder, job)
        other = STORED[: len(STORED) // 4] + bytes(3 * len(STORED) // 4 + 1)
        assert len(other) >= len(STORED)
        for number, bounds in enumerate(ranges_of(len(STORED), 4)):
            write_range(reception, (other if number in swapped else STORED)[: len(STORED)], bounds)
        assert await reception.check(len(STORED)) == "digest"
        await reception.stop()
        if swapped.start == 3:  # the first segment was decoded before
            first = decoder.envelope(FORMAT).segments[0]
            assert bytes(job.place.payload[: first.stop]) == DATA[: first.stop]


async def test_an_object_too_long_for_its_place_does_not_land(decoder: Decoder) -> None:
    reception = Reception(decoder, job_of())
    memory = reception.land(FORMAT.object_bytes + 1)
    assert memory.nbytes == FORMAT.object_bytes
    assert await reception.check(FORMAT.object_bytes + 1) == "length"


@FORMS
async def test_an_object_that_has_not_landed_is_not_right(decoder: Decoder, data: bytes) -> None:
    assert await Reception(decoder, job_of()).check(len(data)) == "length"
    assert await receive(Reception(decoder, job_of()), b"") in ("length", "header")


def damaged(rng: random.Random) -> bytes:
    """An object of the chunk with some damage, or another's."""
    data = bytearray(rng.choice([PLAIN, STORED]))
    header_bytes = rng.choice([100, 8192, len(data)])
    match rng.randrange(6):
        case 0:
            data[rng.randrange(header_bytes)] ^= 1 << rng.randrange(8)
        case 1:
            del data[rng.randrange(len(data)) :]
        case 2:
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(1, 10**6)] = b""
        case 3:
            at, end = sorted(rng.randrange(len(data)) for _ in range(2))
            data[at:end] = OTHER[at:end]
        case 4:
            at = rng.randrange(header_bytes)
            data[at : at + 8] = rng.randbytes(8)
        case _:
            at = rng.randrange(len(data))
            data[at:at] = rng.randbytes(rng.randrange(10**6))
    return bytes(data)


@pytest.mark.parametrize("seed", range(5))
async def test_no_wrong_payload_is_ever_right(decoder: Decoder, seed: int) -> None:
    """And nothing is written outside of the place."""
    rng = random.Random(seed)
    for number in range(30):
        print(f"seed {seed}, object {number}")
        data, margin = damaged(rng), 4096
        around = bytearray(rng.randbytes(FORMAT.object_bytes + 2 * margin))
        before = bytes(around)
        job = job_of(Place.of(memoryview(around)[margin:-margin], FORMAT.header_bytes))
        reception = Reception(decoder, job)
        if len(data) > FORMAT.object_bytes:
            continue
        if rng.random() < 0.5:
            reason = await receive(reception, data, rng.randrange(1, 9))
        else:
            ranges = ranges_of(len(STORED), rng.randrange(2, 6))
            rng.shuffle(ranges)
            for bounds in (it for it in ranges if it.start < len(data)):
                write_range(reception, data, bounds)
            reason = await reception.check(len(data))
            await reception.stop()
        assert reason is not None or bytes(job.place.payload) == DATA
        assert reason is not None or data in (PLAIN, STORED)
        assert around[:margin] + around[-margin:] == before[:margin] + before[-margin:]


# --- without a codec ---------------------------------------------------------------------------


@pytest.mark.parametrize("in_ranges", [True, False])
async def test_without_a_codec_a_compressed_object_is_refused_as_such(*, in_ranges: bool) -> None:
    async def reason_of(data: bytes) -> Mismatch | None:
        reception = Reception(Decoder(time.monotonic), job_of())
        if not in_ranges:
            return await receive(reception, data, 3)
        for bounds in ranges_of(len(STORED), 3):
            write_range(reception, data, bounds)
        reason = await reception.check(len(data))
        await reception.stop()
        return reason

    assert await reason_of(STORED) == "codec"
    assert await reason_of(PLAIN) is None
    flipped = bytearray(STORED)
    flipped[flipped.index(b"xxh3")] ^= 1
    assert await reason_of(bytes(flipped)) not in (None, "codec")


# --- the end of a reception --------------------------------------------------------------------


@pytest.mark.parametrize("seals", [True, False])
async def test_nothing_is_written_after_it_has_been_stopped(
    pool: ThreadPoolExecutor, *, seals: bool
) -> None:
    codec, job = Held(), job_of()
    reception = Reception(decoder_of(pool, codec, seals=seals), job)
    reception.land(len(STORED)).write(STORED)
    reception.progress(len(STORED))
    assert await asyncio.to_thread(codec.begun.wait, 60)
    stopping = asyncio.ensure_future(reception.stop())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not stopping.done(), "a thread is writing to the place"
    codec.gate.set()
    await stopping
    assert codec.done == 1
    left = bytes(job.place)
    reception.progress(len(STORED))
    pool.shutdown()
    assert bytes(job.place) == left
    assert codec.done == 1


async def test_a_cancellation_does_not_shorten_the_end(pool: ThreadPoolExecutor) -> None:
    codec = Held()
    reception = Reception(decoder_of(pool, codec), job_of())

    async def fetch() -> None:
        try:
            reception.land(len(STORED)).write(STORED)
            await reception.check(len(STORED))
        finally:
            await reception.stop()

    fetching = asyncio.ensure_future(fetch())
    await asyncio.sleep(0)
    assert await asyncio.to_thread(codec.begun.wait, 60)
    for _ in range(3):
        fetching.cancel()
        await asyncio.sleep(0)
    assert not fetching.done()
    codec.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert codec.done == 1


async def test_one_that_waits_for_a_thread_is_stopped(pool: ThreadPoolExecutor) -> None:
    """Behind others, and it writes nothing when it is its turn."""
    codec = Held()
    decoder = decoder_of(pool, codec)
    receptions = [Reception(decoder, job_of()) for _ in range(3)]
    for reception in receptions:
        reception.land(len(STORED)).write(STORED)
        reception.progress(len(STORED))
    stopping = asyncio.ensure_future(receptions[2].stop())
    await asyncio.sleep(0)
    codec.gate.set()
    await stopping
    for reception in receptions[:2]:
        assert await reception.check(len(STORED)) is None
    assert codec.done == 6


async def test_a_thread_that_fails_fails_the_reception(pool: ThreadPoolExecutor) -> None:
    failing = Held()
    failing.error = MemoryError("full")
    failing.gate.set()
    decoder = decoder_of(pool, failing)
    with pytest.raises(MemoryError):
        await receive(Reception(decoder, job_of()), STORED, 9)
    assert not any(decoder.counters.values())


async def test_the_header_of_the_plain_object_is_written_if_asked(pool: ThreadPoolExecutor) -> None:
    job = job_of()
    assert await receive(Reception(decoder_of(pool, seals=True), job), STORED, 3) is None
    assert bytes(job.place) == PLAIN
    bad = STORED[:-1] + bytes([STORED[-1] ^ 1])
    job = job_of()
    assert await receive(Reception(decoder_of(pool, seals=True), job), bad, 3) == "digest"
    assert bytes(job.place.header) != PLAIN[: FORMAT.header_bytes]


async def test_one_thread_at_a_time_has_the_place() -> None:
    """From its first look at the clock to its last. So `stop` waits for the last one only."""
    using, most = list[int](), 0

    def clock() -> float:
        nonlocal most
        if threading.current_thread() is threading.main_thread():  # the loop's
            return time.monotonic()
        using.append(threading.get_ident())
        most = max(most, len(using))
        time.sleep(0.001)
        using.remove(threading.get_ident())
        return time.monotonic()

    with ThreadPoolExecutor(3) as pool:
        for _ in range(5):
            reception = Reception(Decoder(clock, compressed.codec(), pool, seals=True), job_of())
            reception.land(len(STORED)).write(STORED)
            for step in cut(len(STORED), 20, 1):
                reception.progress(step.stop)
                await asyncio.sleep(0.001)
            assert await reception.check(len(STORED)) is None
            await reception.stop()
    assert most == 1


@FORMS
async def test_the_speeds_are_noted(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "_FEWEST_BYTES", 1)
    now_s = 100.0

    def clock() -> float:
        nonlocal now_s
        now_s += 1.0
        return now_s

    decoder = Decoder(clock, compressed.codec(), AtOnce())
    assert await receive(Reception(decoder, job_of()), data) is None
    if data is PLAIN:  # from its landing to its end
        assert decoder.speeds.wire_bytes_per_s == len(PLAIN)
        assert decoder.speeds.decoding_bytes_per_s is None
    else:  # and before and after the threads have decoded
        assert decoder.speeds.wire_bytes_per_s == len(STORED) / 3
        assert decoder.speeds.decoding_bytes_per_s == FORMAT.object_bytes


async def test_a_bad_object_tells_nothing_of_the_speed_of_decoding(
    monkeypatch: pytest.MonkeyPatch, decoder: Decoder
) -> None:
    monkeypatch.setattr(speeds, "_FEWEST_BYTES", 1)
    bad = STORED[:-1] + bytes([STORED[-1] ^ 1])
    assert await receive(Reception(decoder, job_of()), bad) == "digest"
    assert decoder.counters["io_decoded"] == 0
    assert decoder.speeds.decoding_bytes_per_s is None
    assert decoder.speeds.wire_bytes_per_s is not None
