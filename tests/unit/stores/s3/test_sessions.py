"""Directory buckets (S3 Express One Zone): requests are signed for a session.

No server of ours knows sessions, so what goes out is compared with what botocore sends.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

import botocore.session
import pytest
from botocore.awsrequest import AWSResponse

from s3kv.config import Config
from s3kv.errors import StoreDenied, StoreUnavailable
from s3kv.place import Place
from s3kv.stores.s3.address import find_address, zone_of
from s3kv.stores.s3.fast_client import make_endpoint
from s3kv.stores.s3.s3_store import open_store
from s3kv.stores.store import BulkStore
from tests import servers

BUCKET = "cache--use1-az4--x-s3"


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    servers.set_credentials(monkeypatch, {**servers.KEYS, "AWS_SESSION_TOKEN": "of-the-role"})


class Zone:
    """Answers CreateSession with sessions that last `lasts_s`, and every GET with "chunk".

    `answers` go before that, one to each request for an object; `refusal` to every CreateSession.
    """

    def __init__(self, lasts_s: float = 300, refusal: bytes | None = None) -> None:
        self.lasts_s = lasts_s
        self.refusal = refusal
        self.answers: list[bytes] = []
        self.sessions = 0
        self.heads: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            writer.write(self._answer(head))
            await writer.drain()

    def _answer(self, head: str) -> bytes:
        if "?session" in head.split("\r\n")[0]:
            return self.refusal or self._session()
        if self.answers:
            return self.answers.pop(0)
        return b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nchunk"

    def _session(self) -> bytes:
        self.sessions += 1
        ends = datetime.now(timezone.utc) + timedelta(seconds=self.lasts_s)
        body = (
            "<CreateSessionResult><Credentials>"
            f"<SessionToken>token-{self.sessions}</SessionToken><SecretAccessKey>s</SecretAccessKey>"
            f"<AccessKeyId>session-{self.sessions}</AccessKeyId>"
            f"<Expiration>{ends:%Y-%m-%dT%H:%M:%SZ}</Expiration>"
            "</Credentials></CreateSessionResult>"
        )
        return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()

    def used(self) -> list[str]:
        """Which session signed each request for an object."""
        return re.findall(r"Credential=(session-\d)/\d+/us-east-1/s3express", "".join(self.heads))


def error(status: int, code: str) -> bytes:
    body = f"<Error><Code>{code}</Code></Error>".encode()
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@asynccontextmanager
async def store_in(zone: Zone) -> AsyncIterator[BulkStore]:
    async with servers.scripted_server(zone.serve) as port:
        store = open_store(Config(bucket=BUCKET, endpoint_url=f"http://127.0.0.1:{port}"))
        yield store
        await store.close()


async def get(store: BulkStore) -> int | None:
    info = await store.get_into("s3kv/key", Place.of(bytearray(10)))
    return None if info is None else info.nbytes


def test_the_zone_is_in_the_name() -> None:
    assert zone_of(BUCKET) == "use1-az4"
    assert zone_of("cache") is zone_of("cache--x-s3") is zone_of("--x-s3-cache") is None


async def test_one_session_signs_all_requests() -> None:
    zone = Zone()
    async with store_in(zone) as store:
        assert await asyncio.gather(*(get(store) for _ in range(3))) == [5, 5, 5]
    assert zone.used() == ["session-1"] * 3
    first = next(head for head in zone.heads if "?session" not in head).lower()
    assert "x-amz-s3session-token: token-1" in first
    assert "x-amz-security-token" not in first


async def test_a_session_is_replaced_before_it_ends() -> None:
    zone = Zone(lasts_s=30)
    async with store_in(zone) as store:
        await get(store)
        await get(store)
    assert zone.used() == ["session-1", "session-2"]


async def test_a_refused_session_is_replaced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("s3kv.stores.s3.credentials._LOOK_AGAIN_S", 0.0)
    zone = Zone()
    zone.answers = [error(400, "ExpiredToken")]
    async with store_in(zone) as store:
        assert await get(store) == 5
    assert zone.used() == ["session-1", "session-2"]


async def test_refusals_do_not_ask_for_session_after_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("s3kv.stores.s3.credentials._LOOK_AGAIN_S", 3_600.0)
    zone = Zone()
    zone.answers = [error(400, "ExpiredToken")] * 5
    async with store_in(zone) as store:
        for _ in range(5):
            with pytest.raises(StoreDenied):
                await get(store)
    assert zone.sessions == 1


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (error(403, "AccessDenied"), StoreDenied),
        (error(503, "SlowDown"), StoreUnavailable),
    ],
)
async def test_no_session_is_explained(
    refusal: bytes, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    async with store_in(Zone(refusal=refusal)) as store:
        with pytest.raises(expected, match=f"s3express:CreateSession on {BUCKET}"):
            await get(store)


@pytest.mark.parametrize("region", ["us-east-1", "eu-west-1"])
async def test_the_address_on_aws_is_botocores(region: str) -> None:
    config = Config(bucket=BUCKET, region=region)
    endpoint, _ = make_endpoint(config, find_address(config))
    assert f"{endpoint.url}{endpoint.path}key" == botocores_url(region)


def botocores_url(region: str) -> str:
    """Where botocore would send a GET of the key "key", found out without sending it."""
    client = botocore.session.Session().create_client("s3", region_name=region)
    sent: list[str] = []

    def answer(request: Any, **_: Any) -> AWSResponse:
        sent.append(request.url)
        status, _, body = Zone()._session().partition(b"\r\n\r\n")
        assert status
        return Answer(request.url, 200, {}, body)

    client.meta.events.register("before-send.s3", answer)
    client.get_object(Bucket=BUCKET, Key="key")
    return sent[-1]


class Answer(AWSResponse):
    def __init__(self, url: str, status: int, headers: dict[str, str], body: bytes) -> None:
        super().__init__(url, status, headers, None)
        self._content = body
