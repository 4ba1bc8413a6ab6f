"""The server with the shape of S3 answers as S3 does, plain and with TLS; and the floor of the
benchmarks, read from it and from another."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from benchmarks import rig
from benchmarks.floor import AT_ONCE, TIMES, Server
from benchmarks.shaped import BUCKET, FAST, Link, Shape, shaped
from lab.certificates import self_signed
from lab.s3 import moto_process
from s3kv.config import Config
from s3kv.errors import StoreThrottled, StoreUnranged
from s3kv.place import Place
from s3kv.stores.s3.s3_store import open_store
from tests import servers
from tests.unit.stores.suite import pattern

FAST_OPTIONS = ["--shaped", "--connection-mb-s", "0", "--host-mb-s", "0", "--first-byte-ms", "0"]


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    servers.set_credentials(monkeypatch)


@pytest.mark.parametrize("tls", [False, True])
async def test_it_answers_as_s3_does(tmp_path: Path, tls: bool) -> None:
    certificate = self_signed(tmp_path / "tls", "IP:127.0.0.2") if tls else ""
    data = pattern(2**20 + 5, 1)
    buffer = memoryview(bytearray(len(data)))
    with shaped(FAST, str(certificate)) as server:
        bundle = f"{certificate}.crt" if tls else None
        store = open_store(Config(bucket=BUCKET, endpoint_url=server.url, ca_bundle=bundle))
        await store.check()
        assert await store.get_into("k", Place.of(buffer)) is None
        assert await store.put("k", Place.of(data), if_absent=False)
        whole = await store.get_into("k", Place.of(buffer))
        assert whole == await store.head("k")
        assert buffer == data
        assert await store.get_into("k", Place.of(buffer[:500_000]), first=7) == whole
        assert buffer[:500_000] == data[7:500_007]
        assert await store.get_into("k", Place.of(buffer[:2]), first=len(data) - 1) == whole
        assert buffer[:1] == data[-1:]
        with pytest.raises(StoreUnranged):
            await store.get_into("k", Place.of(buffer[:2]), first=len(data))
        assert not await store.put("k", Place.of(data), if_absent=True)
        assert await store.put("dir/k 2", Place.of(data[:9]), if_absent=True)
        listed = [info async for info in store.list("")]
        assert [(info.key, info.nbytes) for info in listed] == [("dir/k 2", 9), ("k", len(data))]
        assert await store.refresh("k", listed[1].modified_s)
        await store.delete("k")
        assert await store.head("k") is None
        await store.close()


async def test_it_throttles() -> None:
    with shaped(Shape(first_byte_ms=0, requests_per_s=1)) as server:
        store = open_store(Config(bucket=BUCKET, endpoint_url=server.url))
        asked = [store.check() for _ in range(50)]
        said = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(answer) for answer in said} == {bool, StoreThrottled}
        await store.close()


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    rig.add_server(parser)
    return parser.parse_args([*FAST_OPTIONS, *arguments])


@pytest.mark.parametrize("tls", [False, True])
def test_benchmarks_reach_it(tls: bool) -> None:
    with rig.s3(options(*(["--tls"] if tls else []))) as store:
        client = store.s3.client()
        for number in range(8):
            client.put_object(Bucket=BUCKET, Key=f"p/{number}.safetensors", Body=b"a" * 1_000)
        assert store.s3.objects(BUCKET, "p/") == {f"p/{n}.safetensors": 1_000 for n in range(8)}
        with pytest.raises(ClientError, match="Precondition"):
            client.put_object(Bucket=BUCKET, Key="p/0.safetensors", Body=b"b", IfNoneMatch="*")
        floor = Server(store.url or "", BUCKET, store.env)
        floor.read("p/", 4)
        assert floor.told()["batches"] == 2 * TIMES
        told = store.told()
        assert told["shape"]["tls"] == tls
        assert told["server_cpu_s"] >= 0


def test_the_floor_is_read_from_a_server_that_closes_every_connection() -> None:
    count = 2 * max(AT_ONCE)
    with moto_process() as s3:
        client = s3.client()
        client.create_bucket(Bucket=BUCKET)
        for number in range(count):
            client.put_object(Bucket=BUCKET, Key=f"p/{number:02}.safetensors", Body=b"a" * 100_000)
        server = Server(s3.url, BUCKET, s3.env)
        assert server.told() == {"connections": None, "batches": 0, "median_ms": None}
        server.read("p/", count)
    told = server.told()
    assert told["batches"] == TIMES
    assert told["connections"] in AT_ONCE
    assert told["median_ms"] > 0


def test_keys_of_any_characters_are_listed_as_they_are() -> None:
    keys = {"p/a b", "p/a%40", "p/a@b", "p/a+b"}
    with rig.s3(options()) as store:
        for key in keys:
            store.s3.client().put_object(Bucket=BUCKET, Key=key, Body=b"a")
        assert store.s3.everything(BUCKET, "p/").keys() == keys


def test_a_link_passes_bytes_at_its_rate() -> None:
    link = Link(2.0)
    first_s = link.take(1_000_000)
    assert link.take(3_000_000) - first_s == pytest.approx(1.5)
    assert Link(0.0).take(10**12) == 0.0


def test_the_options_are_the_shape() -> None:
    assert options().shaped
    assert rig.shape_of(options("--requests-per-s", "300")).requests_per_s == 300.0
