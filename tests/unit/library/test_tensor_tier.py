"""Tensors of unknown length on their way through the berths, job by job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from s3kv.device.tensors import TensorRows
from s3kv.host.room import PAGE_BYTES, Extents
from s3kv.host.table import Table
from s3kv.library.tensor_tier import TensorTier
from s3kv.objects.item_format import HEADER_BYTES
from s3kv.types import ChunkKey, Outcome, Span
from tests.unit.library.hand_client import HandClient, tier_of, until

CPU = torch.device("cpu")
WIDTH = 64
ROWS = TensorRows((WIDTH,), torch.bfloat16, host_bytes=2**20)
BERTH_BYTES = 2**16
TABLE_PAGES = 64
BERTHS = 2


def key(number: int) -> ChunkKey:
    return ChunkKey(0, number.to_bytes(4, "big"))


@pytest.fixture
async def made() -> AsyncIterator[tuple[TensorTier, HandClient]]:
    client = HandClient()
    begin = TABLE_PAGES * PAGE_BYTES
    tier = tier_of(client, begin + BERTHS * BERTH_BYTES, max_item_bytes=BERTH_BYTES)
    berths = [Span(begin + n * BERTH_BYTES, BERTH_BYTES) for n in range(BERTHS)]
    tensors = TensorTier(ROWS, Table(Extents(TABLE_PAGES)), berths, tier)
    yield tensors, client
    await tensors.close(0.0)
    assert sorted(tensors._berths) == berths, "every berth is free again"


def bring(tensors: TensorTier, client: HandClient, number: int, rows: int) -> torch.Tensor:
    """Have the fetch of a tensor end well."""
    job = client.fetches()[key(number)]
    _, _, offset, _ = client.sent[job]
    tensor = torch.full((rows, WIDTH), number, dtype=torch.bfloat16)
    nbytes = rows * ROWS.row_bytes
    begin = offset + HEADER_BYTES
    tensors.slab.view[begin : begin + nbytes] = tensor.view(torch.uint8).numpy().data.cast("B")
    client.end(job, Outcome.OK, HEADER_BYTES + nbytes)
    return tensor


async def test_fetches_take_turns_at_the_berths(made: tuple[TensorTier, HandClient]) -> None:
    tensors, client = made
    got = [asyncio.create_task(tensors.get(key(n), CPU)) for n in range(5)]
    for number in range(5):
        await until(lambda number=number: key(number) in client.fetches())
        assert len(client.fetches()) <= BERTHS
        places = {place for _, _, place, _ in client.sent.values()}
        assert len(places) == len(client.sent), "nobody shares a berth"
        expected = bring(tensors, client, number, rows=number + 1)
        found = await got[number]
        assert found is not None
        assert torch.equal(found, expected)
    assert tensors.counters["fetch_ok"] == 5
    tensors.ledger.check()


async def test_a_fetch_that_waits_for_a_berth_is_a_miss_once_the_bucket_is_gone(
    made: tuple[TensorTier, HandClient],
) -> None:
    tensors, client = made
    got = [asyncio.create_task(tensors.get(key(n), CPU)) for n in range(12)]
    await until(lambda: len(client.fetches()) == BERTHS)
    sent = 0
    while client.fetches():
        for job in client.fetches().values():
            sent += 1
            client.end(job, Outcome.FAILED)
        await until(lambda: not client.ended)
        await asyncio.sleep(0)
    assert await asyncio.gather(*got) == [None] * 12
    assert sent < 12, "the breaker opened meanwhile"
    assert not tensors._waiting


async def test_a_reader_that_is_cancelled_leaves_no_pin(
    made: tuple[TensorTier, HandClient],
) -> None:
    tensors, client = made
    gone, stays = (asyncio.create_task(tensors.get(key(1), CPU)) for _ in range(2))
    await until(lambda: key(1) in client.fetches())
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    expected = bring(tensors, client, 1, rows=3)
    found = await stays
    assert found is not None
    assert torch.equal(found, expected)
    await until(lambda: not tensors.ledger.table.statistics().pinned)


async def test_a_tensor_that_finds_no_room_is_a_miss_and_frees_its_berth(
    made: tuple[TensorTier, HandClient],
) -> None:
    tensors, client = made
    largest = (BERTH_BYTES - HEADER_BYTES) // ROWS.row_bytes
    count = TABLE_PAGES * PAGE_BYTES // BERTH_BYTES
    for number in range(count):
        full = torch.zeros(largest, WIDTH, dtype=torch.bfloat16)
        assert await tensors.put(key(number), full, wait=False)
    assert not await tensors.put(key(98), full, wait=False), "nothing is uploaded yet"
    assert tensors.counters["saves_dropped"] == 1
    got = asyncio.create_task(tensors.get(key(99), CPU))
    await until(lambda: key(99) in client.fetches())
    bring(tensors, client, 99, rows=largest)
    assert await got is None
    assert tensors.counters["fetches_without_room"] == 1
    assert len(tensors._berths) == BERTHS


async def test_a_flush_waits_for_uploads_that_the_timer_has_ordered(
    made: tuple[TensorTier, HandClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket is back: one upload succeeds, and the pump tries the other again by itself."""
    monkeypatch.setattr("s3kv.planning.uploads.UPLOAD_RETRY_S", ())
    tensors, client = made
    tensor = torch.zeros(1, WIDTH, dtype=torch.bfloat16)

    def upload(number: int) -> int:
        (job,) = (job for job, (_, sent, *_) in client.sent.items() if sent == key(number))
        return job

    assert await tensors.put(key(1), tensor, wait=False)
    client.end(upload(1), Outcome.FAILED)
    assert await tensors.flush() == (key(1).block_hash,)
    tensors.hit(key(1))
    assert await tensors.put(key(2), tensor, wait=False)
    flushing = asyncio.create_task(tensors.flush())
    await asyncio.sleep(0)
    client.end(upload(2), Outcome.OK)
    # Both happen before the flush runs again.
    tensors.pump._take_ends()
    tensors._is_busy()
    client.end(upload(1), Outcome.OK)
    assert await flushing == ()


async def test_an_object_of_no_whole_rows_is_known_to_be_absent(
    made: tuple[TensorTier, HandClient],
) -> None:
    tensors, client = made
    got = asyncio.create_task(tensors.get(key(1), CPU))
    await until(lambda: key(1) in client.fetches())
    client.end(client.fetches()[key(1)], Outcome.OK, HEADER_BYTES + ROWS.row_bytes + 1)
    assert await got is None
    assert tensors.in_bucket(key(1)) is False
    assert tensors.counters["fetch_corrupt_rows"] == 1


async def test_what_the_bucket_is_not_known_to_have_is_uploaded_by_the_next_put(
    made: tuple[TensorTier, HandClient],
) -> None:
    tensors, client = made
    tensor = torch.zeros(1, WIDTH, dtype=torch.bfloat16)
    assert await tensors.put(key(1), tensor, wait=False)
    (job,) = client.sent
    client.end(job, Outcome.INVALID)
    assert await tensors.flush() == (key(1).block_hash,)
    assert await tensors.put(key(1), tensor, wait=False)
    (job,) = client.sent
    client.end(job, Outcome.OK, HEADER_BYTES + ROWS.row_bytes)
    assert await tensors.flush() == ()
    assert await tensors.put(key(1), tensor, wait=False)
    assert not client.sent
