"""Connections spread over the addresses of a name, and leave those that fail."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lab.certificates import self_signed
from s3kv.errors import StoreUnavailable
from s3kv.stores.http.exchange import Request
from s3kv.stores.http.pool import BAD_S, Addresses, Pool
from s3kv.stores.http.watch import Patience

GET = Request("GET", "/k", {"Host": "store"})
NAME = "store.test"
V4, V6 = socket.AF_INET, socket.AF_INET6
PATIENT = Patience(connect_ms=60_000, first_byte_ms=60_000, progress_ms=60_000, min_bytes_per_s=1)


Resolver = dict[str, list[tuple[int, str]]]
"""Families and addresses by name."""


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    known: Resolver = {}

    async def look_up(host: str, port: int) -> list[Any]:
        more = {V4: (), V6: (0, 0)}
        return [(f, socket.SOCK_STREAM, 6, "", (a, port, *more[f])) for f, a in known[host]]

    monkeypatch.setattr("s3kv.stores.http.pool.look_up", look_up)
    return known


async def test_the_resolver_is_not_asked_for_an_address() -> None:
    assert await Addresses("127.0.0.9", 80).in_order() == ["127.0.0.9"]
    assert await Addresses("fe80::1%lo", 80).in_order() == ["fe80::1%lo"]


async def test_the_address_with_the_fewest_connections_comes_first(resolver: Resolver) -> None:
    resolver[NAME] = [(V4, "a"), (V4, "b"), (V4, "c")]
    addresses = Addresses(NAME, 80)
    seen = []
    for _ in range(7):
        seen.append((await addresses.in_order())[0])
        addresses.taken(seen[-1])
    assert seen == ["a", "b", "c", "a", "b", "c", "a"]
    addresses.left("c")
    assert await addresses.in_order() == ["c", "b", "a"]
    resolver[NAME] = [(V4, "d"), (V4, "a")]  # the name has moved
    assert await addresses.in_order() == ["d", "a"]


async def test_another_family_comes_after_the_resolvers_first(resolver: Resolver) -> None:
    resolver[NAME] = [(V6, "::1"), (V4, "a"), (V6, "::2")]
    addresses = Addresses(NAME, 80)
    addresses.taken("::1")
    assert await addresses.in_order() == ["::2", "::1", "a"]


async def test_an_address_that_failed_comes_last_for_a_while(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver[NAME] = [(V4, "a"), (V4, "b")]
    addresses = Addresses(NAME, 80)
    addresses.failed("a")
    addresses.taken("b")
    assert await addresses.in_order() == ["b", "a"]
    loop = asyncio.get_running_loop()
    now_s = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now_s + BAD_S + 1)
    assert await addresses.in_order() == ["a", "b"]


class Servers:
    """Servers at several addresses with one port. requests: by address. silent: only read."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.requests: Counter[str] = Counter()
        self.silent: set[str] = set()
        self.gate = asyncio.Event()
        """Answers wait for it."""
        self._arrived = asyncio.Condition()
        self.port = 0
        self._tls = tls
        self._running: dict[str, asyncio.Server] = {}

    async def start(self, address: str) -> None:
        self._running[address] = server = await asyncio.start_server(
            self._serve, address, self.port, ssl=self._tls
        )
        self.port = server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = writer.get_extra_info("sockname")[0]
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                self.requests[address] += 1
                async with self._arrived:
                    self._arrived.notify_all()
                if address in self.silent:
                    continue
                await self.gate.wait()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def asked(self, requests: int) -> None:
        """Wait until so many requests have come."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: sum(self.requests.values()) >= requests)

    def stop(self) -> None:
        for server in self._running.values():
            server.close()


@asynccontextmanager
async def serving(*addresses: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[Servers]:
    servers = Servers(tls)
    servers.gate.set()
    for address in addresses:
        await servers.start(address)
    try:
        yield servers
    finally:
        servers.stop()


def pool_on(servers: Servers, tls: Any = None, patience: Patience = PATIENT) -> Pool:
    return Pool(NAME, servers.port, tls=tls, size=8, patience=patience)


async def test_connections_spread_over_all_addresses(resolver: Resolver) -> None:
    """Idle ones to an address that is left are not used."""
    hosts = ["127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"]
    resolver[NAME] = [(V4, host) for host in hosts]
    async with serving(*hosts) as servers:
        servers.gate.clear()
        pool = pool_on(servers)
        running = [asyncio.ensure_future(pool.request(GET)) for _ in range(8)]
        await servers.asked(8)
        servers.gate.set()
        await asyncio.gather(*running)
        assert servers.requests == dict.fromkeys(hosts, 2)
        pool._leave("127.0.0.2")
        await asyncio.gather(*(pool.request(GET) for _ in range(8)))
        assert servers.requests["127.0.0.2"] == 2
        assert servers.requests.total() == 16
        await pool.close()


async def test_an_address_that_refuses_is_left(resolver: Resolver) -> None:
    resolver[NAME] = [(V4, "127.0.0.2"), (V4, "127.0.0.3")]
    async with serving("127.0.0.3") as servers:
        pool = pool_on(servers)
        for _ in range(4):
            assert (await pool.request(GET)).status == 200
        await pool.close()
        resolver[NAME] = [(V4, "127.0.0.2"), (V4, "127.0.0.4")]
        pool = pool_on(servers)
        with pytest.raises(StoreUnavailable, match="refused"):
            await pool.request(GET)


async def test_an_address_that_does_not_answer_is_left(resolver: Resolver) -> None:
    hosts = ["127.0.0.2", "127.0.0.3"]
    resolver[NAME] = [(V4, host) for host in hosts]
    short = Patience(connect_ms=60_000, first_byte_ms=50, progress_ms=50, min_bytes_per_s=1)
    async with serving(*hosts) as servers:
        servers.silent = {"127.0.0.2"}
        pool = pool_on(servers, patience=short)
        with pytest.raises(StoreUnavailable, match="no answer"):
            await pool.request(GET)
        servers.requests.clear()
        pool._patience = PATIENT
        await asyncio.gather(*(pool.request(GET) for _ in range(8)))
        assert servers.requests == {"127.0.0.3": 8}
        await pool.close()


async def test_the_certificate_is_that_of_the_name(resolver: Resolver, tmp_path: Path) -> None:
    resolver[NAME] = resolver["other.test"] = [(V4, "127.0.0.2")]
    certificate = self_signed(tmp_path / "tls", f"DNS:{NAME}")
    there = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    there.load_cert_chain(certificate)
    here = ssl.create_default_context(cafile=f"{certificate}.crt")
    async with serving("127.0.0.2", tls=there) as servers:
        pool = pool_on(servers, tls=here)
        assert (await pool.request(GET)).status == 200
        await pool.close()
        pool = Pool("other.test", servers.port, tls=here, size=1, patience=PATIENT)
        with pytest.raises(StoreUnavailable, match="not trusted"):
            await pool.request(GET)
