"""Directory buckets (S3 Express One Zone): requests are signed for a session."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from s3kv.config import Config
from s3kv.errors import StoreDenied, StoreUnavailable
from s3kv.place import Place
from s3kv.stores.s3.address import find_address, zone_of
from s3kv.stores.store import ObjectStore
from tests import servers
from tests.unit.stores.s3.conftest import opened
from tests.waiting import until

BUCKET = "cache--use1-az4--x-s3"


@pytest.fixture(autouse=True)
def role(credentials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-the-role")


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

    def answer(self, head: str, _: bytes) -> bytes:
        if "?session" in head.split("\r\n")[0]:
            return self.refusal or self._session()
        self.heads.append(head)
        return self.answers.pop(0) if self.answers else servers.http("chunk")

    def _session(self) -> bytes:
        self.sessions += 1
        ends = datetime.now(timezone.utc) + timedelta(seconds=self.lasts_s)
        return servers.http(
            "<CreateSessionResult><Credentials>"
            f"<SessionToken>token-{self.sessions}</SessionToken><SecretAccessKey>s</SecretAccessKey>"
            f"<AccessKeyId>session-{self.sessions}</AccessKeyId>"
            f"<Expiration>{ends:%Y-%m-%dT%H:%M:%SZ}</Expiration>"
            "</Credentials></CreateSessionResult>"
        )

    def used(self) -> list[str]:
        """The session that signed each request for an object."""
        return re.findall(r"Credential=(session-\d)/\d+/us-east-1/s3express", "".join(self.heads))


@asynccontextmanager
async def store_in(zone: Zone) -> AsyncIterator[ObjectStore]:
    async with servers.canned(zone.answer) as at, opened(at.url, bucket=BUCKET) as store:
        yield store


async def get(store: ObjectStore) -> int | None:
    info = await store.get_into("s3kv/key", Place.of(bytearray(10)))
    return None if info is None else info.nbytes


def test_the_zone_is_in_the_name() -> None:
    assert zone_of(BUCKET) == "use1-az4"
    assert zone_of("cache") is zone_of("cache--x-s3") is zone_of("--x-s3-cache") is None
    for region in ("us-east-1", "eu-west-1"):
        url = f"https://{BUCKET}.s3express-use1-az4.{region}.amazonaws.com/"
        assert find_address(Config(bucket=BUCKET, region=region)).url == url


async def test_one_session_signs_all_requests() -> None:
    zone = Zone()
    async with store_in(zone) as store:
        assert await asyncio.gather(*(get(store) for _ in range(3))) == [5, 5, 5]
    assert zone.used() == ["session-1"] * 3
    assert "x-amz-s3session-token: token-1" in zone.heads[0].lower()
    assert "x-amz-security-token" not in zone.heads[0].lower()


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
async def test_a_session_is_opened_with_the_settings_of_tls(
    certificate: Path, server_tls: ssl.SSLContext
) -> None:
    async with servers.canned(Zone().answer, tls=server_tls) as at:
        for settings in {"ca_bundle": str(certificate)}, {"verify_tls": False}:
            async with opened(at.url, bucket=BUCKET, **settings) as store:
                assert await get(store) == 5


async def test_a_session_is_replaced_before_it_ends() -> None:
    zone = Zone(lasts_s=30)
    async with store_in(zone) as store:
        await get(store)
        await get(store)
    assert len(set(zone.used())) == 2


async def test_no_request_waits_for_a_session_while_another_is_good() -> None:
    zone = Zone(lasts_s=100)
    async with store_in(zone) as store:
        for _ in range(2):
            await get(store)
        assert len(set(zone.used())) == 1
        await until(lambda: zone.sessions == 3)


async def test_a_refused_session_is_replaced_once() -> None:
    zone = Zone()
    zone.answers = [servers.refusal(400, "ExpiredToken")]
    async with store_in(zone) as store:
        assert await get(store) == 5
        assert zone.used() == ["session-1", "session-2"]
        zone.answers = [servers.refusal(400, "ExpiredToken")] * 5
        for _ in range(5):
            with pytest.raises(StoreDenied):
                await get(store)
    assert zone.sessions == 2


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (servers.refusal(403, "AccessDenied"), StoreDenied),
        (servers.refusal(503, "SlowDown"), StoreUnavailable),
    ],
)
async def test_no_session_is_explained(
    refusal: bytes, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    async with store_in(Zone(refusal=refusal)) as store:
        with pytest.raises(expected, match=f"s3express:CreateSession on {BUCKET}"):
            await get(store)
