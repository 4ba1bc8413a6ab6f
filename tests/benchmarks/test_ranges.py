"""The server with the shape of S3 answers as S3 does, and the benchmark on it runs to its end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from benchmarks import ranges
from benchmarks.shaped import Shape, shaped
from s3kv.config import Config
from s3kv.errors import StoreThrottled, StoreUnranged
from s3kv.objects.s3.s3_store import open_store
from tests import servers
from tests.unit.objects.suite import pattern

FAST = Shape(connection_mb_s=0, host_mb_s=0, first_byte_ms=0, sigma=0)


pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    servers.set_credentials(monkeypatch)


@pytest.mark.parametrize("tls", [False, True])
async def test_it_answers_as_s3_does(tmp_path: Path, tls: bool) -> None:
    certificate = servers.self_signed(tmp_path / "tls", "IP:127.0.0.1") if tls else ""
    data = pattern(2**20 + 5, 1)
    buffer = memoryview(bytearray(len(data)))
    with shaped(FAST, str(certificate)) as url:
        store = open_store(Config(bucket="bkt", endpoint_url=url, verify_tls=False))
        await store.check()
        assert await store.get_into("k", buffer) is None
        assert await store.put("k", data, if_absent=False)
        whole = await store.get_into("k", buffer)
        assert whole == await store.head("k")
        assert buffer == data
        assert await store.get_range("k", 7, buffer[:500_000]) == whole
        assert buffer[:500_000] == data[7:500_007]
        for first in (len(data) - 1, len(data)):
            with pytest.raises(StoreUnranged):
                await store.get_range("k", first, buffer[:2])
        await store.delete("k")
        assert await store.head("k") is None
        await store.close()


async def test_it_throttles() -> None:
    with shaped(Shape(first_byte_ms=0, requests_per_s=1)) as url:
        store = open_store(Config(bucket="bkt", endpoint_url=url))
        asked = [store.check() for _ in range(50)]
        said = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(answer) for answer in said} == {type(None), StoreThrottled}
        await store.close()


def test_the_quick_benchmark_ends(tmp_path: Path) -> None:
    ranges.main(["--quick", "--connection-mb-s", "0", "--json", str(tmp_path / "result")])
    result = json.loads((tmp_path / "result").read_text())
    assert result["objects"]["32 MiB"]["requests"] == 8
    assert {name: set(result["objects"]["32 MiB"][name]) for name in ranges.ROWS} == {
        name: {"ms", "of_ideal", "of_plain_ranges"} for name in ranges.ROWS
    }
