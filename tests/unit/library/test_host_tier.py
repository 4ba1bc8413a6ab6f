"""Host memory of blocks: what is put, found, flushed and waited for."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest

from lab.faults import Fault, s3_error
from lab.proxy import Proxy
from s3kv.config import Config
from s3kv.host.slab import Slab
from s3kv.io.tier import Slots, Tier, introduce
from s3kv.library.host_tier import HostTier
from s3kv.types import ChunkKey, Location, Outcome, TensorSpec
from tests.servers import BUCKET, KEYS, boto_client
from tests.unit.library.hand_client import HandClient
from tests.unit.library.stores import (
    big,
    block,
    gives,
    hash_of,
    new_pools,
    opening,
    opening_big,
    room,
)
from tests.waiting import until


async def test_a_block_put_while_it_is_fetched_is_kept(config: Config) -> None:
    """The fetch finds nothing; neither a put nor a put_block may count on it."""
    pools = new_pools(4)
    async with await opening(config, pools=pools) as store:
        assert store.prefetch([hash_of(1), hash_of(2)]) == 2
        number = store.allocate()
        for name, tensor in block(2).items():
            pools[name][number] = tensor
        assert store.put_block(hash_of(2), number)
        store.release(number)
        assert await store.put(hash_of(1), block(1))
        assert store.where(hash_of(1)).host
        await store.flush()
        assert store.where(hash_of(1)).bucket
        assert store.where(hash_of(2)).bucket
    async with await opening(config) as store:
        for key in (1, 2):
            assert await gives(store, key)


async def test_a_prefetch_leaves_room_and_a_put_can_await_it(behind: tuple[Proxy, Config]) -> None:
    between, config = behind
    a_quarter = 220_000
    pools = {"big": big(5, a_quarter)["big"][None]}
    async with opening_big(config, a_quarter, pools=pools) as store:
        between.fault(Fault(kind="delay", seconds=3, verbs=("GET", "PUT")))
        assert store.prefetch(hash_of(number) for number in range(100, 200)) == 2
        for number in (1, 2):
            assert await store.put(hash_of(number), big(number, a_quarter))
        assert not await store.put(hash_of(3), big(3, a_quarter))
        assert not store.put_block(hash_of(5), store.allocate())
        waiting, cancelled = (
            asyncio.create_task(store.put(hash_of(number), big(number, a_quarter), wait=True))
            for number in (3, 4)
        )
        await asyncio.sleep(0.02)
        assert not waiting.done()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        between.lift()
        assert await waiting
        assert not store.where(hash_of(4)).host
        assert store.counters["saves_dropped"] == store.counters["saves_without_room"] == 2


@pytest.mark.parametrize(
    ("fault", "end", "told"),
    [
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
    between, config = behind
    numbers = (21, 22, 23)
    async with opening(config) as store:
        between.fault(fault)
        for number in numbers:
            assert await store.put(hash_of(number), block(number))
        for _ in range(2):  # they are still in host memory, and still not in the bucket
            assert set(await store.flush()) == set(map(hash_of, numbers))
        assert store.counters[f"upload_{end}"] == 3 * len(numbers)
        assert store.counters["uploads_given_up"] == len(numbers)
        for number in numbers:
            assert store.where(hash_of(number)) == Location(device=False, host=True, bucket=None)
            assert await store.get(hash_of(number), room())
        said = [r.getMessage() for r in caplog.records if told in r.getMessage()]
        assert len(said) == 1, "once, however often it happens"

        between.lift()
        assert await store.put(hash_of(24), block(24))
        assert await store.flush() == ()
    async with opening(config) as store:
        for number in numbers:
            assert await gives(store, number)


async def test_many_writers_of_one_block_cause_one_upload(config: Config) -> None:
    async with opening(config) as store:
        puts = (store.put(hash_of(7), block(7)) for _ in range(8))
        assert await asyncio.gather(*puts) == [True] * 8
        await store.flush()
        assert store.counters["saves"] == store.counters["upload_ok"] == 1


async def test_a_damaged_object_is_a_miss(config: Config) -> None:
    async with opening(config) as store:
        assert await store.put(hash_of(12), block(12))
    client = boto_client(str(config.endpoint_url), KEYS)
    found = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{config.prefix}/")["Contents"]
    (address,) = (e["Key"] for e in found if not e["Key"].endswith("manifest.json"))
    data = client.get_object(Bucket=BUCKET, Key=address)["Body"].read()
    flipped = bytes([*data[:-1], data[-1] ^ 1])
    for bad, reason in ((flipped, "digest"), (data[:-1], "length")):
        client.put_object(Bucket=BUCKET, Key=address, Body=bad)
        async with opening(config) as store:
            assert not await store.get(hash_of(12), room())
            corrupt = {n for n, count in store.counters.items() if "fetch_corrupt_" in n and count}
            assert corrupt == {f"fetch_corrupt_{reason}"}
            assert store.where(hash_of(12)).bucket is False


async def test_while_the_bucket_is_away_the_disk_is_asked_and_does_not_answer_for_it() -> None:
    client, key = HandClient(), ChunkKey(0, bytes(32))
    config = Config(bucket="bkt", host_bytes=2**20, disk_path="/disk", disk_bytes=1)
    groups = {0: (TensorSpec("block", "U8", (64,)),)}
    handshake = introduce(config, {"model": "test"}, "block", groups=groups)
    slots = Slots.of(handshake)
    host = HostTier(slots, Tier(handshake, Slab.create(slots.nbytes), cast(Any, client), None))
    for _ in range(5):
        host.ledger.breaker.failed(time.monotonic())
    fetch, save = host.fetch(key), host.reserve(key)
    assert client.sent[fetch.job_id].near
    host.copied(save, ok=True)
    client.end(fetch.job_id, Outcome.OK, near=True, fresh_s=0.0)
    await until(lambda: not host.ledger.fetches_inflight)
    client.end(save.job_id, Outcome.FAILED)
    assert await host.flush() == (key.block_hash,), "the bucket may lack it"
    await host.close(0.0)
