"""Every request a store sends is counted, and what it is taken to cost."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter

import pytest

from s3kv.config import Config
from s3kv.errors import StoreUnavailable
from s3kv.place import Place
from s3kv.prices import TABLE, Prices
from s3kv.stores.s3.s3_store import open_store
from s3kv.stores.traffic import ANSWERS, VERBS, Traffic
from s3kv.upkeep.costs import nanodollars, prices_of
from tests import servers
from tests.servers import BUCKET

STANDARD, EXPRESS = TABLE["us-east-1/standard"], TABLE["us-east-1/express"]


async def test_requests_are_counted_by_verb_and_answer(
    moto_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.set_credentials(monkeypatch)
    store = open_store(Config(bucket=BUCKET, endpoint_url=moto_url))
    buffer = memoryview(bytearray(100))
    await store.check()
    assert await store.get_into("traffic/k", Place.of(buffer)) is None
    assert await store.put("traffic/k", Place.of(b"x" * 40), if_absent=True)
    assert not await store.put("traffic/k", Place.of(b"x" * 40), if_absent=True)
    assert (await store.get_into("traffic/k", Place.of(buffer))).nbytes == 40
    assert (await store.get_into("traffic/k", Place.of(buffer[:10]))).nbytes == 40
    await store.head("traffic/k")
    await store.delete("traffic/k")
    assert [info async for info in store.list("traffic/")] == []
    await store.close()
    traffic = store.traffic
    counts = {"LIST|2xx": 2, "GET|4xx": 1, "GET|2xx": 2, "PUT|2xx": 1, "PUT|4xx": 1}
    assert traffic.requests == counts | {"HEAD|2xx": 1, "DELETE|2xx": 1}
    assert (traffic.sent_bytes, traffic.received_bytes) == (40, 80)
    assert traffic.host == "127.0.0.1"
    for verb, answer in (request.split("|") for request in traffic.requests):
        assert verb in VERBS
        assert answer in ANSWERS
    assert nanodollars(STANDARD, traffic) == 4 * 5_000 + 4 * 400


async def test_a_request_without_an_answer_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    servers.set_credentials(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        store = open_store(Config(bucket=BUCKET, endpoint_url=url, request_timeout_ms=400))
        with pytest.raises(StoreUnavailable):
            await store.get_into("traffic/k", Place.of(bytearray(10)))
        abandoned = asyncio.create_task(store.get_into("traffic/k", Place.of(bytearray(10))))
        await asyncio.sleep(0.05)
        abandoned.cancel()
        await asyncio.wait([abandoned])
        await store.close()
    assert store.traffic.requests == Counter({"GET|none": 2})
    assert nanodollars(STANDARD, store.traffic) == 0


FREE = Prices()


@pytest.mark.parametrize(
    ("bucket", "host", "region", "expected"),
    [
        ("bkt", "s3.amazonaws.com", "eu-central-1", TABLE["eu-central-1/standard"]),
        ("bkt", "x.s3.vpce.amazonaws.com", "us-west-2", STANDARD),
        ("b--use1-az4--x-s3", "z.us-east-1.amazonaws.com", "us-east-1", EXPRESS),
        ("bkt", "minio.example.com", "us-east-1", FREE),
        ("bkt", "", "", FREE),
    ],
)
def test_prices_follow_from_where_the_bucket_is(
    bucket: str, host: str, region: str, expected: Prices
) -> None:
    assert prices_of(Config(bucket=bucket), Traffic(host=host, region=region)) == expected


def test_a_thousand_requests_cost_what_the_list_says() -> None:
    reads = Traffic(Counter({"GET|2xx": 500, "GET|4xx": 300, "HEAD|2xx": 200, "GET|5xx": 9_000}))
    writes = Traffic(Counter({"PUT|2xx": 600, "LIST|2xx": 400, "DELETE|2xx": 5, "PUT|5xx": 70}))
    assert nanodollars(STANDARD, reads) == 400_000  # $0.0004
    assert nanodollars(STANDARD, writes) == 5_000_000  # $0.005
    assert nanodollars(EXPRESS, reads) == 30_000  # $0.00003
    assert nanodollars(EXPRESS, writes) == 1_130_000  # $0.00113
    moved = Traffic(received_bytes=10 * 2**30, sent_bytes=2**30)
    assert nanodollars(EXPRESS, moved) == 6_000_000 + 3_200_000  # $0.0006 and $0.0032 per GiB
    assert nanodollars(STANDARD, moved) == 0, "nothing within the region"
    assert nanodollars(FREE, writes) == 0
