"""`TieredStore` between a device and a bucket, where there may be no package for S3."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from benchmarks.shaped import FAST, shaped
from tests.unit.device.devices import A_WHILE_CYCLES

for package in ("aiobotocore", "msgspec"):
    pytest.importorskip(package, reason="the I/O process needs it")

from s3kv.config import Config  # noqa: E402
from s3kv.library.tiered_store import TieredStore  # noqa: E402

BLOCKS = 6
SHAPE = (2, 16, 8, 64)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with shaped(FAST) as server:
        yield Config(bucket="test", endpoint_url=server.url, region="us-east-1", host_bytes=2**24)


def new_pool(device: str) -> torch.Tensor:
    """Halves of a block apart from each other, as engines keep keys and values."""
    return torch.zeros(2, BLOCKS, *SHAPE[1:], dtype=torch.bfloat16, device=device).movedim(1, 0)


def content(number: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)


def late(device: str) -> None:
    """What comes next on the current stream comes later than the host goes on."""
    if device == "cuda":
        torch.cuda._sleep(A_WHILE_CYCLES // 4)  # type: ignore[no-untyped-call]


async def opened(config: Config, pool: torch.Tensor) -> TieredStore:
    shapes = {"kv": (SHAPE, torch.bfloat16)}
    return await TieredStore.open(config, shapes=shapes, namespace={"m": 1}, pools={"kv": pool})


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_computed_late_come_back_from_the_bucket(config: Config, device: str) -> None:
    async def computed() -> None:
        pool = new_pool(device)
        async with await opened(config, pool) as store:
            for number in range(3 * BLOCKS):
                while (block := store.allocate()) is None:  # noqa: ASYNC110 no event is public
                    await asyncio.sleep(0.001)
                late(device)
                pool[block] = content(number).to(device)
                assert store.put_block(b"%d" % number, block)
                store.release(block)
            await store.flush()

    async def found() -> None:
        pool = new_pool(device)
        async with await opened(config, pool) as store:
            for number in range(3 * BLOCKS):
                block = await store.acquire(b"%d" % number)
                assert torch.equal(pool[block].cpu(), content(number))
                store.release(block)
            assert store.counters["loads"] == 3 * BLOCKS

    asyncio.run(computed())
    asyncio.run(found())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("other", DEVICES)
def test_tensors_of_any_device_go_in_and_come_out(config: Config, device: str, other: str) -> None:
    async def put_and_get() -> None:
        async with await opened(config, new_pool(device)) as store:
            for number in range(2 * BLOCKS):
                tensor = torch.empty(SHAPE, dtype=torch.bfloat16, device=other)
                late(other)
                tensor.copy_(content(number))
                assert await store.put(b"%d" % number, {"kv": tensor})
            for number in range(2 * BLOCKS):
                for where in (device, other):
                    into = torch.zeros(SHAPE, dtype=torch.bfloat16, device=where)
                    assert await store.get(b"%d" % number, {"kv": into})
                    assert torch.equal(into.cpu(), content(number))

    asyncio.run(put_and_get())
