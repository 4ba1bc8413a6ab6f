"""Credentials that change while the store is in use: none of its requests may be lost to that."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from botocore.credentials import RefreshableCredentials

from s3kv.config import Config
from s3kv.errors import StoreDenied, StoreUnavailable
from s3kv.place import Place
from s3kv.stores.s3 import credentials
from s3kv.stores.store import ObjectStore
from tests import servers
from tests.unit.stores.s3.conftest import OpenStore, facing

OBJECT = b"x" * 1000
ROLE = "arn:aws:iam::123456789012:role/s3kv"


class Guarded:
    """An S3 that knows one access key at a time, as AWS does after a rotation."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.code = "InvalidAccessKeyId"
        self.asked_by: list[str] = []

    def answer(self, head: str, body: bytes) -> bytes:
        (key,) = re.findall(r"Credential=(\w+)/", head)
        self.asked_by.append(key)
        if key != self.key:
            return servers.refusal(403, self.code)
        return servers.http(b"" if head.startswith("PUT") else OBJECT)


async def read(store: ObjectStore) -> int | None:
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
async def test_a_shared_credentials_file_is_rewritten(
    s3_store: OpenStore, keys_file: Path, code: str
) -> None:
    """Requests under way survive it, too."""
    async with facing(Guarded("first"), s3_store) as (guard, store):
        guard.code = code
        assert await read(store) == len(OBJECT)
        write_keys(keys_file, "second")
        guard.key = "second"
        assert await store.put("k", Place.of(OBJECT), if_absent=True)
        assert await read(store) == len(OBJECT)
        assert guard.asked_by == ["first", "first", "second", "second"]
        write_keys(keys_file, "third")
        guard.key = "third"
        await asyncio.sleep(1.1)  # the pause between two looks
        assert await asyncio.gather(*(read(store) for _ in range(20))) == [len(OBJECT)] * 20


async def test_a_refusal_that_is_meant_is_an_error(
    s3_store: OpenStore, keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the files are not read anew for every request."""
    monkeypatch.setattr(credentials, "_LOOK_AGAIN_S", 600.0)  # longer than this test takes
    async with facing(Guarded("another"), s3_store) as (guard, store):
        for _ in range(5):
            with pytest.raises(StoreDenied, match=r"s3:GetObject on arn:aws:s3:::bkt/k"):
                await read(store)
        assert guard.asked_by == ["first"] * 5
        write_keys(keys_file, "another")
        with pytest.raises(StoreDenied):
            await read(store)


async def test_an_action_that_is_denied_is_no_matter_of_credentials(
    s3_store: OpenStore, keys_file: Path
) -> None:
    async with facing(Guarded("another"), s3_store) as (guard, store):
        guard.code = "AccessDenied"
        write_keys(keys_file, "second")
        for _ in range(3):
            with pytest.raises(StoreDenied, match="grant the action"):
                await read(store)
        assert guard.asked_by == ["second"] * 3


class ContainerEndpoint:
    """The source of a container's credentials: a URL, a token, and an expiry."""

    def __init__(self) -> None:
        self.number = 0
        self.keys = {"AccessKeyId": "container{}", "SecretAccessKey": "x", "Token": "t"}
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
        keys = {name: text.format(self.number) for name, text in self.keys.items()}
        writer.write(servers.http(json.dumps(keys | {"Expiration": f"{end:%Y-%m-%dT%H:%M:%SZ}"})))
        await writer.drain()


@pytest.fixture
async def container(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ContainerEndpoint]:
    endpoint = ContainerEndpoint()
    servers.forget_credentials(monkeypatch)
    monkeypatch.setattr("botocore.utils.ContainerMetadataFetcher.TIMEOUT_SECONDS", 20)
    async with servers.scripted_server(endpoint.serve) as port:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{port}/creds")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "let-me-in")
        yield endpoint


@pytest.mark.parametrize("expires", [True, False], ids=["expire", "are revoked"])
async def test_a_container_endpoint_is_asked_again_when_they(
    expires: bool, s3_store: OpenStore, container: ContainerEndpoint
) -> None:
    async with facing(Guarded("container0"), s3_store) as (guard, store):
        container.lifetime = timedelta(minutes=1) if expires else timedelta(hours=6)
        await read(store)
        container.number, guard.key = 1, "container1"
        assert await read(store) == len(OBJECT)
        refused = [] if expires else ["container0"]
        assert guard.asked_by == ["container0", *refused, "container1"]
        assert set(container.tokens) == {"let-me-in"}
        assert expires or len(container.tokens) == 2


async def test_requests_do_not_wait_for_a_renewal_that_is_not_due(
    s3_store: OpenStore, container: ContainerEndpoint
) -> None:
    """Twelve minutes before their end botocore looks for others, and the endpoint is silent."""
    async with facing(Guarded("container0"), s3_store) as (guard, store):
        container.lifetime = timedelta(minutes=12)
        await read(store)
        container.open.clear()
        asked = len(container.tokens)
        for _ in range(3):
            assert await read(store) == len(OBJECT)
        assert len(container.tokens) <= asked + 1, "botocore has not given up yet"
        container.number, container.lifetime = 1, timedelta(hours=6)
        container.open.set()
        guard.key = "container1"
        assert await read(store) == len(OBJECT)
        assert guard.asked_by[-1] == "container1"


@pytest.mark.parametrize("minutes", [12, 5])
async def test_credentials_are_used_while_their_source_fails(minutes: int) -> None:
    """And not every request asks it again, which would keep a source that throttles busy."""
    asked: list[int] = []

    def renew() -> None:
        asked.append(1)
        raise OSError("it is down")

    now = datetime.now(timezone.utc)
    source = RefreshableCredentials("k", "x", "t", now + timedelta(hours=6), renew, "test")
    known = credentials.Credentials(lambda: source)
    await known.frozen()
    source._expiry_time = now + timedelta(minutes=minutes)
    for _ in range(5):
        assert (await known.frozen()).access_key == "k"
        await asyncio.wait([known._looking])
    assert len(asked) == 1


async def test_a_request_that_is_cancelled_leaves_the_search_to_the_others(
    s3_store: OpenStore, container: ContainerEndpoint
) -> None:
    async with facing(Guarded("container0"), s3_store) as (_, store):
        container.open.clear()
        requests = [asyncio.ensure_future(read(store)) for _ in range(5)]
        await container.asked.wait()
        requests[0].cancel()
        await asyncio.wait(requests[:1])
        container.open.set()
        assert await asyncio.gather(*requests[1:]) == [len(OBJECT)] * 4
        assert len(container.tokens) == 1


async def test_a_source_that_hangs_is_an_outage_until_it_answers(
    s3_store: OpenStore, container: ContainerEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with facing(Guarded("container0"), s3_store) as (_, store):
        container.open.clear()
        monkeypatch.setattr(credentials, "_LOOK_S", 0.01)
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="credentials could not be fetched"):
                await read(store)
        await container.asked.wait()
        monkeypatch.setattr(credentials, "_LOOK_S", 60.0)
        container.open.set()
        assert await read(store) == len(OBJECT)
        assert len(container.tokens) == 1, "the search went on"


async def test_requests_do_not_wait_one_after_another_for_a_source_that_hangs(
    s3_store: OpenStore, container: ContainerEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = list[float]()
    async with facing(Guarded("container0"), s3_store) as (guard, store):
        await read(store)
        guard.key = "another"
        container.open.clear()
        wait_for = asyncio.wait_for
        monkeypatch.setattr(credentials, "_LOOK_AGAIN_S", 0.5)
        monkeypatch.setattr(asyncio, "wait_for", lambda it, s: waits.append(s) or wait_for(it, 0.6))
        ends = await asyncio.gather(*(read(store) for _ in range(8)), return_exceptions=True)
        assert {type(end) for end in ends} == {StoreDenied, StoreUnavailable}
        assert waits.count(credentials._LOOK_S) <= 2
        container.open.set()


async def test_others_use_the_credentials_that_one_request_is_refused_with(
    s3_store: OpenStore, container: ContainerEndpoint
) -> None:
    async with facing(Guarded("container0"), s3_store) as (guard, store):
        await read(store)
        container.open.clear()
        container.asked.clear()
        guard.key = "another"
        refused = asyncio.ensure_future(read(store))
        await container.asked.wait()
        guard.key = "container0"
        assert await read(store) == len(OBJECT)
        container.open.set()
        with pytest.raises(StoreDenied):
            await refused


async def test_a_container_endpoint_that_answers_without_a_key_is_an_outage(
    s3_store: OpenStore, container: ContainerEndpoint
) -> None:
    async with facing(Guarded("container0"), s3_store) as (_, store):
        keys, container.keys = container.keys, {"Code": "Failed", "Message": "later"}
        with pytest.raises(StoreUnavailable, match="credentials could not be fetched"):
            await read(store)
        container.keys = keys
        assert await read(store) == len(OBJECT)


KEYS = {"Version": 1, "AccessKeyId": "k", "SecretAccessKey": "x", "SessionToken": "t"}
WEB = f"role_arn = {ROLE}\nweb_identity_token_file = {__file__}"
BROKEN = {
    "no helper": "credential_process = /nonexistent/helper",
    "a helper that fails": "credential_process = /bin/false",
    "rubbish": "credential_process = /bin/echo rubbish",
    "bad date": f"credential_process = /bin/echo '{json.dumps(KEYS | {'Expiration': 'soon'})}'",
    "no token": f"role_arn = {ROLE}\nweb_identity_token_file = /nonexistent/token",
    "no sts": WEB,
    "sts throttles": f"{WEB}\nrole_session_name = throttled",
}


def sts(_: str, body: bytes) -> bytes:
    said = "<ErrorResponse><Error><Code>Throttling</Code></Error></ErrorResponse>"
    return servers.http(said, 400) if b"throttled" in body else servers.http("<html>\n")


@pytest.mark.parametrize("settings", BROKEN.values(), ids=BROKEN)
async def test_a_source_that_is_broken_is_an_outage(
    settings: str, s3_store: OpenStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Most of what botocore raises then is none of its own errors."""
    servers.forget_credentials(monkeypatch)
    (tmp_path / "config").write_text(f"[default]\nmax_attempts = 1\n{settings}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    guarded = facing(Guarded("any"), s3_store)
    async with guarded as (_, store), servers.canned(sts) as at:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", at.url)
        with pytest.raises(StoreUnavailable, match="credentials could not be fetched"):
            await read(store)
        directory = Config(bucket="b--usw2-az1--x-s3", region="us-west-2")
        with pytest.raises(StoreUnavailable, match="CreateSession"):
            await credentials.session_credentials(directory).frozen()
