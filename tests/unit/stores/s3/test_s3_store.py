"""Which client serves: what a proxy or an ARN needs, said in the log, and refused if wrong."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest

from s3kv.config import Config
from s3kv.errors import ConfigError, StoreError, StoreUnavailable
from s3kv.host.slab import Slab
from s3kv.io.client import IoClient
from s3kv.place import Place
from s3kv.stores.http.pool import Pool
from s3kv.stores.s3 import fast_client, s3_store
from s3kv.stores.s3.fast_client import FastClient
from s3kv.stores.s3.s3_store import open_store
from s3kv.stores.s3.sdk_client import SdkClient
from tests import servers
from tests.unit.io import rig
from tests.unit.stores.relay import relay
from tests.unit.stores.s3.conftest import OpenStore, facing, opened
from tests.unit.stores.s3.test_address import ACCOUNT, POINT
from tests.unit.stores.suite import fetch, pattern


class OldServer:
    """It knows only the first ListObjects, and holds more keys than it lists at once."""

    def answer(self, head: str, body: bytes) -> bytes:
        keys = int(re.findall(r"max-keys=(\d+)", head)[0])
        one = (
            "<Contents><Key>s3kv/k</Key><Size>1</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        )
        more = "<Name>bkt</Name><IsTruncated>true</IsTruncated>"
        return servers.http(f"<ListBucketResult>{more}{one * keys}</ListBucketResult>")


async def test_a_listing_that_cannot_go_on_is_an_error(s3_store: OpenStore) -> None:
    async with facing(OldServer(), s3_store) as (_, store):
        assert await store.check()
        with pytest.raises(StoreError, match="lists only 1,000 keys"):
            assert [info async for info in store.list("s3kv/")] == []
        assert await store.folders("s3kv/", 1_000) == []
        with pytest.raises(StoreError, match="ListObjectsV2"):
            await store.folders("s3kv/", 2_000)


PROXY = {"HTTPS_PROXY": "http://u:secret@proxy.example:3128"}


@pytest.mark.parametrize(
    ("settings", "environment", "kind", "said"),
    [
        ({}, {}, FastClient, ""),
        ({"client": "fast"}, {}, FastClient, ""),
        ({"client": "fast"}, {**PROXY, "NO_PROXY": "amazonaws.com"}, FastClient, ""),
        ({"client": "aiobotocore"}, {}, SdkClient, "client is 'aiobotocore'"),
        ({}, PROXY, SdkClient, "the environment names the proxy http://***:***@proxy.example:3128"),
        ({"bucket": POINT, "region": "eu-west-1"}, {}, SdkClient, "bucket is an ARN"),
    ],
)
async def test_the_client_that_serves(
    settings: dict[str, str],
    environment: dict[str, str],
    kind: type,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO, "s3kv"):
        store = open_store(Config(**{"bucket": "bkt", **settings}))
    assert type(store.client) is kind
    assert len(caplog.messages) == (1 if said else 0)
    assert all(said in line and "processor time" in line for line in caplog.messages)
    assert "secret" not in caplog.text
    await store.close()
    if said and "client" not in settings:
        with pytest.raises(ConfigError, match=rf"'fast', and {re.escape(said)}.*'auto' or 'aio"):
            open_store(Config(**{"bucket": "bkt", "client": "fast", **settings}))


async def use(url: str) -> None:
    """Each kind of request once, and one that finds nothing."""
    async with opened(url, bucket=servers.BUCKET) as store:
        await store.check()
        assert await store.put("relayed/k", Place.of(pattern(300_000, 1)), if_absent=False)
        assert await fetch(store, "relayed/k", room=300_000) == bytes(pattern(300_000, 1))
        assert await store.head("relayed/none") is None
        await store.delete("relayed/k")


async def test_plain_requests_go_through_the_proxy(
    moto_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with relay() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        await use(moto_url)
        asked = [line.split("?")[0] for line in proxy.asked]
        url = f"{moto_url}/{servers.BUCKET}"
        k, none = f"{url}/relayed/k", f"{url}/relayed/none"
        assert asked == [f"GET {url}", f"PUT {k}", f"GET {k}", f"HEAD {none}", f"DELETE {k}"]
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        await use(moto_url)
        assert proxy.asked[5:] == []


async def test_tls_goes_through_a_tunnel(
    certificate: Path, server_tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is verified against the server's own authority, not the proxy's."""
    authority = {"ca_bundle": f"{certificate}.crt"}
    async with servers.canned(servers.http("chunk"), tls=server_tls) as at, relay() as proxy:
        monkeypatch.setenv("https_proxy", proxy.url)
        async with opened(at.url, **authority) as store:
            assert await fetch(store, "k") == b"chunk"
            assert await fetch(store, "k") == b"chunk"
        assert proxy.asked == [f"CONNECT {at.url.removeprefix('https://')}"]
        async with opened(at.url) as store:
            with pytest.raises(StoreUnavailable, match=r"certificate.*ca_bundle") as caught:
                await fetch(store, "k")
        assert caught.value.code == "untrusted"
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        async with opened(at.url, client="fast", **authority) as store:
            assert await fetch(store, "k") == b"chunk"
        assert len(proxy.asked) == 2


LISTING = b"<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>"


async def test_more_folders_than_a_page_has(s3_store: OpenStore) -> None:
    def page(head: str, _: bytes) -> bytes:
        last = "token=more" in head
        more = "" if last else "<NextContinuationToken>more</NextContinuationToken>"
        name = f"<CommonPrefixes><Prefix>p/{'b' if last else 'a'}/</Prefix></CommonPrefixes>"
        return servers.http(LISTING.replace(b"<K", f"{name}{more}<K".encode()))

    async with servers.canned(page) as at, s3_store(at.url) as store:
        assert list(await store.folders("p/", 2000)) == ["a", "b"]
        assert list(await store.folders("p/", 1000)) == ["a"], "one request, however many keys"


async def test_an_io_process_keeps_tls_connections_ready(
    certificate: Path, server_tls: ssl.SSLContext
) -> None:
    opened = 0
    all_open = asyncio.Event()

    async def serve(reader: Any, writer: Any) -> None:
        nonlocal opened
        opened += 1
        if opened == 3:
            all_open.set()
        while True:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(servers.http(LISTING))

    async with servers.scripted_server(serve, tls=server_tls) as port:
        settings = {"endpoint_url": f"https://127.0.0.1:{port}", "max_inflight_requests": 3}
        config = Config(bucket="bkt", ca_bundle=f"{certificate}.crt", **settings)
        with contextlib.closing(Slab.create(2**20)) as slab:
            client = IoClient(rig.handshake(config), slab)
            client.start()
            try:
                await all_open.wait()
            finally:
                await asyncio.to_thread(client.close)
    assert opened == 3


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("scheme", "keeps_ready", "kept"), [("https", True, 32), ("https", False, 0), ("http", True, 0)]
)
async def test_connections_are_kept_ready_with_tls_alone(
    scheme: str, keeps_ready: bool, kept: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the threads together, which a process has whose requests come in bursts."""
    asked: list[int] = []
    monkeypatch.setattr(s3_store, "NETWORK_THREADS", threads)

    class Noting(Pool):
        def __init__(self, *args: Any, ready: int, **more: Any) -> None:
            super().__init__(*args, ready=ready, **more)
            asked.append(ready)

    monkeypatch.setattr(fast_client, "Pool", Noting)
    config = Config(bucket="bkt", endpoint_url=f"{scheme}://127.0.0.1:1")
    store = open_store(config, keeps_ready=keeps_ready)
    with pytest.raises(StoreUnavailable):
        await fetch(store, "k")
    served = [thread.name for thread in threading.enumerate() if thread.name == "s3kv-network"]
    await store.close()
    expected = threads if keeps_ready else 1
    assert asked == [-(-kept // expected)] * expected
    assert len(served) == (expected if expected > 1 else 0)


async def test_a_proxy_that_refuses_or_is_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n"
    async with relay(refusal) as proxy:
        for url, said in (
            (proxy.url.replace("//", "//user:secret@"), r"407.*HTTPS_PROXY"),
            ("http://127.0.0.1:1", "HTTPS_PROXY"),
            ("http://proxy.invalid:1", r"proxy http://proxy\.invalid:1 .*HTTPS_PROXY"),
        ):
            monkeypatch.setenv("HTTPS_PROXY", url)
            async with opened("https://store.invalid") as store:
                with pytest.raises(StoreUnavailable, match=said) as caught:
                    await fetch(store, "k")
            assert caught.value.code == "proxy"
            assert "secret" not in str(caught.value)


async def test_an_access_point_is_asked_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy answers in AWS's place."""
    async with relay(servers.http("chunk")) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        async with opened("http://s3.invalid", bucket=POINT, region="eu-west-1") as store:
            assert await fetch(store, "a/k") == b"chunk"
    assert proxy.asked == [f"GET http://chunks-{ACCOUNT}.s3.invalid/a/k"]
