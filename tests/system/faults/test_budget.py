"""A bucket that two I/O processes fill ten times over, and that they keep to its budget meanwhile.

With the real client, the real cleaner and its real intervals, on moto and on Ceph RGW.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Iterator

import pytest
import torch

from lab.constants import changed
from lab.s3 import moto_process
from s3kv.config import Config
from s3kv.library.tiered_store import TieredStore
from tests.servers import REAL_SERVERS, REGION, boto_client, set_credentials
from tests.unit.library.stores import block, hash_of, opening

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1_800)]

BUDGET_BYTES = 200 * 10**6
BLOCKS = 500
SHAPES = {"kv": ((1_000, 1_024), torch.float32)}
BLOCK_BYTES = 1_000 * 1_024 * 4
"""Below 4 MiB: what a gateway of Ceph deletes of larger objects it frees hours later."""
CROWDED_BYTES = 10**9
"""The uploads pause while the bucket holds more, so that sweeps come between them."""
HANG_S = 600.0
"""No measure, only the end of a test that hangs."""


@pytest.fixture(autouse=True)
def deleted_at_any_age() -> Iterator[None]:
    with changed(bucket_min_age_s=0.0):
        yield


class Bucket:
    """A second opinion on what is there."""

    def __init__(self, url: str, keys: dict[str, str]) -> None:
        self.url, self.keys = url, keys
        self.name = f"budget-{uuid.uuid4().hex}"
        self._client = boto_client(url, keys)
        self._client.create_bucket(Bucket=self.name)

    def put(self, key: str) -> None:
        self._client.put_object(Bucket=self.name, Key=key, Body=b"not ours")

    def lengths(self) -> dict[str, int]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.name)
        return {o["Key"]: o["Size"] for page in pages for o in page.get("Contents", ())}

    async def falls_below(self, nbytes: int) -> None:
        end_s = time.monotonic() + HANG_S
        while (held := sum((await asyncio.to_thread(self.lengths)).values())) > nbytes:
            assert time.monotonic() < end_s, f"the bucket still holds {held} bytes"
            await asyncio.sleep(2.0)


@pytest.fixture(params=["moto", *REAL_SERVERS])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    if request.param != "moto":
        gateway = request.getfixturevalue(request.param)
        set_credentials(monkeypatch, gateway.keys)
        yield Bucket(gateway.url, gateway.keys)
        return
    with moto_process() as server:
        set_credentials(monkeypatch, {k: v for k, v in server.env.items() if "KEY" in k})
        yield Bucket(server.url, server.env)


async def test_two_that_fill_a_bucket_keep_it_to_its_budget(
    bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "s3kv.io")  # the I/O processes' lines are logged here
    config = Config(
        bucket=bucket.name,
        endpoint_url=bucket.url,
        region=REGION,
        bucket_bytes=BUDGET_BYTES,
        host_bytes=96 * 2**20,
        request_timeout_ms=480_000,
        compress="off",
    )
    foreign = {"cleaner.json", "s3kv-of-others/v3/x.safetensors", "s3kv/notes.txt"}
    for key in foreign:
        bucket.put(key)
    draw = random.Random(18)

    async def check(store: TieredStore, number: int) -> bool:
        found = {"kv": torch.empty((1_000, 1_024))}
        hit = await store.get(hash_of(number), found)
        assert not hit or torch.equal(found["kv"], block(number, SHAPES)["kv"]), f"block {number}"
        return hit

    async with opening(config, shapes=SHAPES) as one, opening(config, shapes=SHAPES) as two:
        for first in range(0, BLOCKS, 50):
            for number in range(first, first + 50):
                store = (one, two)[number % 2]
                assert await store.put(hash_of(number), block(number, SHAPES), wait=True)
            for _ in range(4):
                await check(one, draw.randrange(first + 50))
                await check(two, draw.randrange(first + 50))
            await asyncio.gather(one.flush(), two.flush())
            await bucket.falls_below(CROWDED_BYTES)
        await bucket.falls_below(BUDGET_BYTES)
        hits = [number for number in range(BLOCKS) if await check(one, number)]
    held = bucket.lengths()
    assert len(hits) * BLOCK_BYTES <= sum(held.values()) <= BUDGET_BYTES
    assert len(hits) > BLOCKS // 20, "a sweep leaves most of the budget"
    assert foreign < set(held)
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
    told = "\n".join(caplog.messages)
    assert "this process now enforces bucket_bytes" in told
    assert not [word for word in ("Traceback", "cannot", "error") if word in told], told
