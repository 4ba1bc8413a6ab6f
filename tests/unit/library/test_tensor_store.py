"""Tensors by content hash over a real I/O process and an S3 server."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from typing import Any

import pytest
import torch

from lab.faults import Fault, s3_error
from lab.proxy import Proxy
from s3kv.config import Config
from s3kv.errors import ConfigError, StoreMissing
from s3kv.library.tensor_store import TensorRows, TensorStore
from s3kv.library.tiered_store import TieredStore
from s3kv.objects.item_format import HEADER_BYTES, ItemFormat
from s3kv.objects.keys import parse
from s3kv.types import ItemShape, Location
from tests.servers import BUCKET, KEYS, boto_client
from tests.unit.library.stores import MAX_ITEM_BYTES, NAMESPACE, ROWS, SHAPES, WIDTH, block, room

LARGEST_ROWS = (MAX_ITEM_BYTES - HEADER_BYTES) // ROWS.row_bytes


def item(number: int, rows: int = 7) -> tuple[bytes, torch.Tensor]:
    """A tensor whose content follows from its number."""
    generator = torch.Generator().manual_seed(number)
    tensor = torch.randn((rows, WIDTH), generator=generator).to(torch.bfloat16)
    return hashlib.sha256(str(number).encode()).digest(), tensor


async def opened(config: Config, rows: TensorRows = ROWS) -> TensorStore:
    return await TensorStore.open(config, rows, namespace=NAMESPACE)


async def saved(config: Config, *items: tuple[bytes, torch.Tensor]) -> None:
    """Have these in the bucket, by a store that is gone then."""
    async with await opened(config) as store:
        for key, tensor in items:
            assert await store.put(key, tensor)
        await store.flush()


def objects(config: Config) -> tuple[Any, list[str]]:
    client = boto_client(str(config.endpoint_url), KEYS)
    found = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{config.prefix}/").get("Contents", [])
    return client, [e["Key"] for e in found if not e["Key"].endswith("manifest.json")]


def same(got: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    return got is not None and got.dtype == tensor.dtype and torch.equal(got, tensor)


async def test_a_tiered_store_keeps_tensors_beside_its_blocks(config: Config) -> None:
    key, tensor = item(1)
    tensors = block(1)
    async with await TieredStore.open(
        config, shapes=SHAPES, namespace=NAMESPACE, tensors=ROWS
    ) as store:
        assert await store.put(key, tensors)
        assert await store.put_tensor(key, tensor)
        assert store.where_tensor(key).host
        assert same(await store.get_tensor(key), tensor)
        await store.flush()
        assert store.where(key).bucket is True
        assert store.where_tensor(key).bucket is True
        assert store.tensor_counters["upload_ok"] == 1

    async with await TieredStore.open(
        config, shapes=SHAPES, namespace=NAMESPACE, tensors=ROWS
    ) as other:
        assert other.where_tensor(key).bucket is None
        assert same(await other.get_tensor(key, device="cpu"), tensor)
        into = room()
        assert await other.get(key, into)
        assert all(torch.equal(into[name], tensors[name]) for name in SHAPES)


async def test_a_store_for_blocks_alone_says_how_to_open_it_for_tensors(config: Config) -> None:
    key, tensor = item(1)
    async with await TieredStore.open(config, shapes=SHAPES, namespace=NAMESPACE) as store:
        with pytest.raises(ConfigError, match="tensors=TensorRows"):
            await store.put_tensor(key, tensor)
        with pytest.raises(ConfigError, match="tensors=TensorRows"):
            await store.get_tensor(key)


@pytest.mark.parametrize(
    "rows",
    [
        TensorRows((), torch.int64, 2**19),
        TensorRows((3, 5), torch.float8_e4m3fn, 2**19),
        TensorRows((7,), torch.uint8, 2**19),
        TensorRows((2,), torch.float64, 2**19),
    ],
)
async def test_rows_of_every_shape_and_dtype_come_back(config: Config, rows: TensorRows) -> None:
    tensors = {
        bytes([n]): (torch.arange(n * rows.row_bytes) % 251)
        .to(torch.uint8)
        .view(rows.dtype)
        .view(n, *rows.shape)
        for n in (1, 2, 31)
    }
    async with await opened(config, rows) as store:
        for key, tensor in tensors.items():
            assert await store.put(key, tensor)
    async with await opened(config, rows) as store:
        for key, tensor in tensors.items():
            got = await store.get(key)
            assert got is not None
            assert got.shape == tensor.shape
            assert got.dtype == rows.dtype
            assert torch.equal(got.view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


async def test_what_a_caller_does_to_its_tensor_changes_nothing_here(config: Config) -> None:
    key, tensor = item(2)
    async with await opened(config) as store:
        mine = tensor.clone()
        assert await store.put(key, mine)
        mine.zero_()
        got = await store.get(key)
        assert got is not None
        got.zero_()
        assert same(await store.get(key), tensor)
        await store.flush()
    async with await opened(config) as store:
        assert same(await store.get(key), tensor)


async def test_a_strided_tensor_is_kept_as_it_looks(config: Config) -> None:
    key, tensor = item(3, rows=WIDTH)
    await saved(config, (key, tensor.t()))
    async with await opened(config) as store:
        assert same(await store.get(key), tensor.t())


async def test_a_miss_is_none_and_known(config: Config) -> None:
    key, tensor = item(4)
    async with await opened(config) as store:
        assert await store.get(key) is None
        assert store.where(key).bucket is False
        assert await store.get(key) is None
        assert store.counters["fetches"] == 1
        assert await store.put(key, tensor)
        await store.flush()
        assert store.where(key).bucket is True


async def test_another_namespace_or_row_sees_nothing(config: Config) -> None:
    key, tensor = item(5)
    await saved(config, (key, tensor))
    for rows in (
        dataclasses.replace(ROWS, shape=(WIDTH // 2,)),
        dataclasses.replace(ROWS, dtype=torch.float16),
    ):
        async with await opened(config, rows) as store:
            assert await store.get(key) is None
    async with await TensorStore.open(config, ROWS, namespace={"model": "another"}) as other:
        assert await other.get(key) is None


async def test_many_readers_of_one_tensor_cause_one_fetch(config: Config) -> None:
    key, tensor = item(6)
    await saved(config, (key, tensor))
    async with await opened(config) as store:
        got = await asyncio.gather(*(store.get(key) for _ in range(32)))
        assert all(same(one, tensor) for one in got)
        assert store.counters["fetches"] == 1


async def test_many_writers_of_one_tensor_cause_one_upload(config: Config) -> None:
    key, tensor = item(7)
    async with await opened(config) as store:
        puts = (store.put(key, tensor) for _ in range(8))
        gets = (store.get(key) for _ in range(8))
        done = await asyncio.gather(*puts, *gets)
        assert done[:8] == [True] * 8
        assert all(same(one, tensor) for one in done[8:] if one is not None)
        await store.flush()
        assert store.counters["saves"] == store.counters["upload_ok"] == 1


async def test_memory_smaller_than_the_tensors_still_serves_them_all(config: Config) -> None:
    items = [item(n, 1 + n * 37 % LARGEST_ROWS) for n in range(120)]
    async with await opened(config) as store:
        for key, tensor in items:
            while not await store.put(key, tensor):
                await store.flush()
        await store.flush()
        assert store.counters["evictions"] > 0
    async with await opened(config) as store:
        for wave in range(0, len(items), 20):
            part = items[wave : wave + 20]
            got = await asyncio.gather(*(store.get(key) for key, _ in part))
            assert all(same(one, tensor) for one, (_, tensor) in zip(got, part, strict=True))
        assert store.counters["evictions"] > 0


async def test_small_tensors_from_the_bucket_fill_memory_to_the_brim(config: Config) -> None:
    """They arrive in places as large as the largest, and are kept in places of their size."""
    items = [item(n) for n in range(48)]
    await saved(config, *items)
    async with await opened(config) as store:
        await asyncio.gather(*(store.get(key) for key, _ in items))
        assert all(store.where(key).host for key, _ in items)
        assert store.counters["evictions"] == 0


async def test_a_cancelled_get_leaves_the_store_whole(config: Config) -> None:
    key, tensor = item(8)
    await saved(config, (key, tensor))
    async with await opened(config) as store:
        reader = asyncio.create_task(store.get(key))
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert same(await store.get(key), tensor)
        assert store.counters["fetches"] == 1


async def test_close_finishes_the_uploads(config: Config) -> None:
    items = [item(n) for n in range(8)]
    async with await opened(config) as store:
        for key, tensor in items:
            assert await store.put(key, tensor)
    async with await opened(config) as store:
        for key, tensor in items:
            assert same(await store.get(key), tensor)


@pytest.mark.parametrize(
    ("fault", "end", "told"),
    [
        (Fault(kind="refuse"), "failed", "upload failed"),
        (s3_error(500, "InternalError", verbs=("PUT",)), "failed", "upload failed"),
        (s3_error(403, "AccessDenied", verbs=("PUT",)), "denied", "s3:PutObject"),
    ],
)
async def test_an_upload_that_fails_is_told_and_tried_again_when_the_bucket_is_back(
    behind: tuple[Proxy, Config],
    short_pauses: None,
    caplog: pytest.LogCaptureFixture,
    fault: Fault,
    end: str,
    told: str,
) -> None:
    store_of, config = behind
    items = [item(number) for number in (21, 22, 23)]
    async with await opened(config) as store:
        store_of.fault(fault)
        for key, tensor in items:
            assert await store.put(key, tensor)
        assert set(await store.flush()) == {key for key, _ in items}
        assert store.counters[f"upload_{end}"] == 3 * len(items)
        assert store.counters["uploads_given_up"] == len(items)
        for key, tensor in items:
            assert store.where(key) == Location(device=False, host=True, bucket=None)
            assert same(await store.get(key), tensor)
        said = [r.getMessage() for r in caplog.records if told in r.getMessage()]
        assert len(said) == 1, "once, however often it happens"

        store_of.lift()
        assert await store.put(*item(24))
        assert await store.flush() == ()
        assert all(store.where(key).bucket for key, _ in items)
    async with await opened(config) as store:
        for key, tensor in items:
            assert same(await store.get(key), tensor)


async def test_a_tensor_whose_upload_failed_makes_room_for_others(
    behind: tuple[Proxy, Config], short_pauses: None
) -> None:
    """Nothing stays pinned for a bucket that is gone: memory never fills up for good."""
    store_of, config = behind
    async with await opened(config) as store:
        store_of.fault(Fault(kind="refuse"))
        for number in range(3 * ROWS.host_bytes // config.max_item_bytes):
            assert await store.put(*item(number, rows=LARGEST_ROWS))
            await store.flush()
        assert store.counters["saves_dropped"] == 0
        assert store.counters["evictions"] > 0
        assert await store.get(item(0)[0]) is None


async def test_tensors_the_store_was_not_opened_for_are_refused(config: Config) -> None:
    key, tensor = item(9)
    async with await opened(config) as store:
        for wrong in (tensor[0], tensor[None], tensor[:, 1:], tensor[:0], tensor.float()):
            with pytest.raises(ValueError, match=r"allowed is \[rows, 48\] torch.bfloat16"):
                await store.put(key, wrong)
        for bad_hash in (b"", bytes(65)):
            with pytest.raises(ValueError, match="1 to 64"):
                await store.get(bad_hash)
    with pytest.raises(ValueError, match="allowed is one of"):
        TensorRows((WIDTH,), torch.complex64)
    with pytest.raises(ValueError, match="holds nothing"):
        TensorRows((0,), torch.bfloat16)


async def test_a_tensor_too_large_is_not_kept_and_counted(config: Config) -> None:
    async with await opened(config) as store:
        assert await store.put(*item(10, LARGEST_ROWS))
        assert not await store.put(*item(11, LARGEST_ROWS + 1))
        assert store.counters["items_too_large"] == 1


async def test_a_store_that_cannot_work_says_why_at_start(config: Config) -> None:
    with pytest.raises(ConfigError, match="host_bytes of the tensors is 65536: allowed is 131072"):
        await opened(config, dataclasses.replace(ROWS, host_bytes=2**16))
    missing = dataclasses.replace(config, bucket="no-such-bucket")
    with pytest.raises(StoreMissing, match="no-such-bucket"):
        await opened(missing)
    with pytest.raises(ConfigError, match="host_bytes of the tensors"):
        await TieredStore.open(
            config,
            shapes=SHAPES,
            namespace=NAMESPACE,
            tensors=dataclasses.replace(ROWS, host_bytes=1),
        )


async def test_a_damaged_object_is_a_miss(config: Config) -> None:
    key, tensor = item(12)
    await saved(config, (key, tensor))
    client, (address,) = objects(config)
    data = client.get_object(Bucket=BUCKET, Key=address)["Body"].read()
    flipped = bytes([*data[:-1], data[-1] ^ 1])
    for bad, reason in ((flipped, "digest"), (data[:-1], "length"), (data + data, "header")):
        client.put_object(Bucket=BUCKET, Key=address, Body=bad)
        async with await opened(config) as store:
            assert await store.get(key) is None
            corrupt = {n for n, count in store.counters.items() if "fetch_corrupt_" in n and count}
            assert corrupt == {f"fetch_corrupt_{reason}"}
            assert store.where(key).bucket is False


async def test_an_object_larger_than_its_berth_is_a_miss(config: Config) -> None:
    key, tensor = item(13)
    await saved(config, (key, tensor))
    client, (address,) = objects(config)
    client.put_object(Bucket=BUCKET, Key=address, Body=bytes(config.max_item_bytes + 1))
    async with await opened(config) as store:
        assert await store.get(key) is None
        assert store.counters["fetch_corrupt_length"] == 1


async def test_a_well_sealed_object_of_no_whole_rows_is_a_miss(config: Config) -> None:
    key, tensor = item(14)
    await saved(config, (key, tensor))
    client, (address,) = objects(config)
    place = parse(address)
    assert place is not None
    data = bytearray(HEADER_BYTES + ROWS.row_bytes + 2)
    ItemFormat(place.namespace.digest, "BF16", ItemShape(1, len(data))).seal(memoryview(data), key)
    client.put_object(Bucket=BUCKET, Key=address, Body=bytes(data))
    async with await opened(config) as store:
        assert await store.get(key) is None
        assert store.counters["fetch_corrupt_rows"] == 1
        assert store.where(key).bucket is False
