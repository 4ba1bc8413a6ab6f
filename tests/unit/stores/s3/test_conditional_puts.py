"""`If-None-Match` on servers that know it, ignore it, or refuse it, and answers that get lost."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from s3kv.config import Config
from s3kv.errors import StoreDenied, StoreError, StoreUnavailable
from s3kv.place import Place
from s3kv.stores.s3.s3_store import open_store
from s3kv.stores.store import BulkStore
from tests import servers

CLIENT = "fast"
"""Which one a test opens; `each_client` sets it."""
BODY = memoryview(b"a chunk")


@pytest.fixture(autouse=True, params=["fast", "aiobotocore"])
def each_client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "CLIENT", request.param)


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    servers.set_credentials(monkeypatch)


class Shelf:
    """Keeps what is put. conditional: what it says to `If-None-Match`: a status and a code, None
    for what it should, "" for nothing at all. lose: answers to lose after having obeyed."""

    def __init__(self, conditional: tuple[int, str] | str | None) -> None:
        self.conditional = conditional
        self.lose = 0
        self.kept: dict[str, bytes] = {}
        self.puts: list[bool] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            (length,) = re.findall(r"(?i)content-length: (\d+)", head)
            body = await reader.readexactly(int(length))
            status, code = self._put(head.split(" ")[1], "if-none-match" in head.lower(), body)
            if self.lose:
                self.lose -= 1
                return
            text = f"<Error><Code>{code}</Code></Error>" if code else ""
            writer.write(
                f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()
            )
            await writer.drain()

    def _put(self, key: str, conditional: bool, body: bytes) -> tuple[int, str]:
        self.puts.append(conditional)
        if conditional and isinstance(self.conditional, tuple):
            return self.conditional
        if conditional and self.conditional is None and key in self.kept:
            return 412, "PreconditionFailed"
        self.kept[key] = body
        return 200, ""


@asynccontextmanager
async def shelf(
    conditional: tuple[int, str] | str | None,
) -> AsyncIterator[tuple[Shelf, BulkStore]]:
    server = Shelf(conditional)
    async with servers.scripted_server(server.serve) as port:
        url = f"http://127.0.0.1:{port}"
        store = open_store(Config(bucket="bkt", endpoint_url=url, client=CLIENT))
        try:
            yield server, store
        finally:
            await store.close()


async def put(store: BulkStore, key: str = "k") -> bool:
    return await store.put(key, Place.of(BODY), if_absent=True)


@pytest.mark.parametrize(
    "refusal",
    [(501, "NotImplemented"), (400, "InvalidArgument"), (400, "InvalidRequest"), (501, "")],
)
async def test_a_server_that_refuses_it_gets_plain_ones(
    refusal: tuple[int, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with shelf(refusal) as (server, store):
        assert [await put(store) for _ in range(3)] == [True, True, True]
        assert server.puts == [True, False, False, False], "found out once"
        assert server.kept == {"/bkt/k": bytes(BODY)}
    (said,) = [record.getMessage() for record in caplog.records if "Plain PUTs" in record.message]
    assert "s3:PutObject on arn:aws:s3:::bkt/k" in said


async def test_a_server_that_ignores_it_writes_again() -> None:
    async with shelf("") as (server, store):
        assert [await put(store), await put(store)] == [True, True]
        assert server.puts == [True, True]


async def test_a_server_that_knows_it_is_believed_from_then_on() -> None:
    async with shelf(None) as (server, store):
        assert [await put(store), await put(store)] == [True, False]
        server.conditional = (400, "InvalidArgument")
        with pytest.raises(StoreError):
            await put(store, "other")
        assert server.puts == [True, True, True]


async def test_a_refusal_for_another_reason_proves_nothing() -> None:
    async with shelf((400, "InvalidArgument")) as (server, store):
        server._put = lambda key, conditional, body: (400, "InvalidArgument")  # type: ignore[method-assign]
        with pytest.raises(StoreError, match="InvalidArgument"):
            await put(store)
        del server._put
        server.conditional = None
        assert await put(store)
        assert server.puts == [True]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((400, "RequestTimeout"), StoreUnavailable),
        ((409, "ConditionalRequestConflict"), StoreUnavailable),
        ((403, "AccessDenied"), StoreDenied),
        ((503, "SlowDown"), StoreUnavailable),
    ],
)
async def test_no_refusal_of_conditions(answer: tuple[int, str], error: type[StoreError]) -> None:
    async with shelf(answer) as (server, store):
        with pytest.raises(error):
            await put(store)
        assert server.puts == [True]


async def test_a_put_whose_answer_is_lost_finds_its_own_copy() -> None:
    async with shelf(None) as (server, store):
        server.lose = 1
        with pytest.raises(StoreUnavailable):
            await put(store)
        assert await put(store) is False
        assert server.kept == {"/bkt/k": bytes(BODY)}
