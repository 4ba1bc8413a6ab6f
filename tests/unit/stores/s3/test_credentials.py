"""Credentials that change while the store is in use: none of its requests may be lost to that."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from s3kv.config import Config
from s3kv.errors import StoreDenied, StoreUnavailable
from s3kv.place import Place
from s3kv.stores.s3 import credentials
from s3kv.stores.s3.s3_store import open_store
from s3kv.stores.store import BulkStore
from tests import servers

CLIENT = "fast"
"""Which one a test opens; `each_client` sets it."""
OBJECT = b"x" * 1000


@pytest.fixture(autouse=True, params=["fast", "aiobotocore"])
def each_client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "CLIENT", request.param)


class Guarded:
    """An S3 that knows one access key at a time, as AWS does after a rotation."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.code = "InvalidAccessKeyId"
        self.asked_by: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if length := re.search(r"content-length: (\d+)", head, re.IGNORECASE):
                await reader.readexactly(int(length[1]))
            (key,) = re.findall(r"Credential=(\w+)/", head)
            self.asked_by.append(key)
            kept = b"" if head.startswith("PUT") else OBJECT
            body, status = (kept, "200 OK") if key == self.key else (self._refusal, "403 No")
            body = b"" if head.startswith("HEAD") else body
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            )
            await writer.drain()

    @property
    def _refusal(self) -> bytes:
        return f"<Error><Code>{self.code}</Code></Error>".encode()


@asynccontextmanager
async def guarded(key: str) -> AsyncIterator[tuple[Guarded, BulkStore]]:
    server = Guarded(key)
    async with servers.scripted_server(server.serve) as port:
        url = f"http://127.0.0.1:{port}"
        store = open_store(Config(bucket="bkt", endpoint_url=url, client=CLIENT))
        try:
            yield server, store
        finally:
            await store.close()


async def read(store: BulkStore) -> int | None:
    info = await store.get_into("k", Place.of(bytearray(len(OBJECT))))
    return None if info is None else info.nbytes


@pytest.fixture
def keys_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    servers.forget_credentials(monkeypatch)
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    write_keys(path, "first")
    return path


def write_keys(path: Path, key: str) -> None:
    path.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = x\n")


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "ExpiredToken", "SignatureDoesNotMatch"])
async def test_a_shared_credentials_file_is_rewritten(keys_file: Path, code: str) -> None:
    async with guarded("first") as (server, store):
        server.code = code
        assert await read(store) == len(OBJECT)
        write_keys(keys_file, "second")
        server.key = "second"
        assert await store.put("k", Place.of(OBJECT), if_absent=True)
        assert await read(store) == len(OBJECT)
        assert server.asked_by == ["first", "first", "second", "second"]


async def test_all_requests_under_way_survive_it(keys_file: Path) -> None:
    async with guarded("first") as (server, store):
        await read(store)
        write_keys(keys_file, "second")
        server.key = "second"
        assert await asyncio.gather(*(read(store) for _ in range(20))) == [len(OBJECT)] * 20


async def test_a_refusal_that_is_meant_is_an_error(keys_file: Path) -> None:
    """And the files are not read anew for every request."""
    async with guarded("another") as (server, store):
        for _ in range(5):
            with pytest.raises(StoreDenied, match=r"s3:GetObject on arn:aws:s3:::bkt/k"):
                await read(store)
        assert server.asked_by == ["first"] * 5
        write_keys(keys_file, "another")
        with pytest.raises(StoreDenied):
            await read(store)
        await asyncio.sleep(1.1)  # the pause between two looks
        assert await read(store) == len(OBJECT)


async def test_what_may_not_be_done_is_no_matter_of_credentials(keys_file: Path) -> None:
    async with guarded("another") as (server, store):
        server.code = "AccessDenied"
        write_keys(keys_file, "second")
        for _ in range(3):
            with pytest.raises(StoreDenied, match="grant the action"):
                await read(store)
        assert set(server.asked_by) == {"second"}


class ContainerEndpoint:
    """What a container's credentials come from: a URL, a token, and an expiry."""

    def __init__(self) -> None:
        self.number = 0
        self.lifetime = timedelta(hours=6)
        self.tokens: list[str] = []
        self.asked, self.open = asyncio.Event(), asyncio.Event()
        self.open.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.tokens += re.findall(r"(?i)authorization: (\S+)", head)
        self.asked.set()
        await self.open.wait()
        end = datetime.now(timezone.utc) + self.lifetime
        body = json.dumps(
            {
                "AccessKeyId": f"container{self.number}",
                "SecretAccessKey": "x",
                "Token": "session",
                "Expiration": end.strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
        ).encode()
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()


@asynccontextmanager
async def container(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ContainerEndpoint]:
    endpoint = ContainerEndpoint()
    servers.forget_credentials(monkeypatch)
    monkeypatch.setattr("botocore.utils.ContainerMetadataFetcher.TIMEOUT_SECONDS", 20)
    async with servers.scripted_server(endpoint.serve) as port:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{port}/creds")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "let-me-in")
        yield endpoint


async def test_a_container_endpoint_is_asked_before_they_expire(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with container(monkeypatch) as endpoint, guarded("container0") as (server, store):
        endpoint.lifetime = timedelta(minutes=1)
        await read(store)
        endpoint.number, server.key = 1, "container1"
        assert await read(store) == len(OBJECT)
        assert server.asked_by == ["container0", "container1"], "nothing was sent with the old ones"
        assert set(endpoint.tokens) == {"let-me-in"}


async def test_a_container_endpoint_is_asked_when_they_are_revoked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with container(monkeypatch) as endpoint, guarded("container0") as (server, store):
        await read(store)
        await read(store)
        assert len(endpoint.tokens) == 1
        endpoint.number, server.key = 1, "container1"
        assert await read(store) == len(OBJECT)
        assert server.asked_by[-2:] == ["container0", "container1"]


async def test_requests_do_not_wait_for_a_renewal_that_is_not_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twelve minutes before their end botocore looks for others, and the endpoint is silent."""
    async with container(monkeypatch) as endpoint, guarded("container0") as (server, store):
        endpoint.lifetime = timedelta(minutes=12)
        await read(store)
        endpoint.open.clear()
        asked = len(endpoint.tokens)
        for _ in range(3):
            assert await read(store) == len(OBJECT)
        assert len(endpoint.tokens) <= asked + 1, "botocore has not given up yet"
        endpoint.number, endpoint.lifetime = 1, timedelta(hours=6)
        endpoint.open.set()
        server.key = "container1"
        assert await read(store) == len(OBJECT)
        assert server.asked_by[-1] == "container1"


async def test_a_request_that_is_cancelled_leaves_the_search_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with container(monkeypatch) as endpoint, guarded("container0") as (_, store):
        endpoint.open.clear()
        requests = [asyncio.ensure_future(read(store)) for _ in range(5)]
        await endpoint.asked.wait()
        requests[0].cancel()
        await asyncio.wait(requests[:1])
        endpoint.open.set()
        assert await asyncio.gather(*requests[1:]) == [len(OBJECT)] * 4
        assert len(endpoint.tokens) == 1


async def test_an_answer_of_sts_that_cannot_be_read_is_an_outage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if length := re.search(r"content-length: (\d+)", head, re.IGNORECASE):
                await reader.readexactly(int(length[1]))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n<html>\n")
            await writer.drain()

    servers.forget_credentials(monkeypatch)
    token = tmp_path / "token"
    token.write_text("a token")
    async with guarded("any") as (_, store), servers.scripted_server(babble) as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/s3kv")
        with pytest.raises(StoreUnavailable, match="credentials could not be fetched"):
            await read(store)


EXPIRES_SOON = json.dumps(
    {
        "Version": 1,
        "AccessKeyId": "helper",
        "SecretAccessKey": "x",
        "SessionToken": "session",
        "Expiration": "soon",
    }
)


@pytest.mark.parametrize(
    "helper",
    ["/nonexistent/helper", "/bin/echo rubbish", f"/bin/echo '{EXPIRES_SOON}'"],
    ids=["gone", "rubbish", "bad date"],
)
async def test_a_helper_program_that_is_broken_is_an_outage(
    helper: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What botocore raises then are none of its own errors."""
    servers.forget_credentials(monkeypatch)
    settings = tmp_path / "config"
    settings.write_text(f"[default]\ncredential_process = {helper}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(settings))
    async with guarded("any") as (_, store):
        with pytest.raises(StoreUnavailable, match="credentials could not be fetched"):
            await read(store)
    directory = Config(bucket="b--usw2-az1--x-s3", region="us-west-2")
    with pytest.raises(StoreUnavailable, match="CreateSession"):
        await credentials.SessionCredentials(directory).frozen()


async def test_a_token_file_that_is_not_there_yet_is_an_outage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    servers.forget_credentials(monkeypatch)
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/s3kv")
    async with guarded("any") as (_, store):
        with pytest.raises(StoreUnavailable, match="credentials could not be fetched"):
            await read(store)


async def test_a_source_that_hangs_is_an_outage_until_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with container(monkeypatch) as endpoint, guarded("container0") as (_, store):
        endpoint.open.clear()
        monkeypatch.setattr(credentials, "_LOOK_S", 0.01)
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="credentials could not be fetched"):
                await read(store)
        await endpoint.asked.wait()
        monkeypatch.setattr(credentials, "_LOOK_S", 60.0)
        endpoint.open.set()
        assert await read(store) == len(OBJECT)
        assert len(endpoint.tokens) == 1, "the search went on"
