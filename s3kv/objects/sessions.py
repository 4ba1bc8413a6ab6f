"""Who we are in a directory bucket (S3 Express One Zone): the holder of a session.

A directory bucket takes no requests signed with anybody's own keys. They are exchanged for those
of a session, which lasts five minutes and reads, or reads and writes, as the owner of the keys may
(https://docs.aws.amazon.com/AmazonS3/latest/API/API_CreateSession.html). botocore asks for it: a
client for one call costs the loop some 30 ms, once in four minutes.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import botocore.exceptions
from aiobotocore.session import AioSession
from botocore.credentials import ReadOnlyCredentials

from s3kv.config import Config
from s3kv.errors import StoreDenied, StoreUnavailable

_RENEW_S = 60.0
"""A session is replaced this long before its end: a request signed in time may arrive late."""
_LOOK_AGAIN_S = 1.0
"""Least time between two sessions, however many requests are refused."""


def zone_of(bucket: str) -> str | None:
    """The zone in the name of a directory bucket; None for any other bucket."""
    match = re.search(r"--([a-z0-9-]+)--x-s3$", bucket)
    return match[1] if match else None


@dataclass(frozen=True, slots=True)
class _Session:
    keys: ReadOnlyCredentials
    renew_s: float
    """On the loop's clock."""


class SessionCredentials:
    """Key, secret and token of a session, like `Credentials`. Belongs to one loop.

    Raises `StoreDenied` when there are no credentials or none that may have a session, and
    `StoreUnavailable` when the store does not answer.
    """

    def __init__(self, session: AioSession, config: Config) -> None:
        self._botocore = session
        self._config = config
        self._lock = asyncio.Lock()
        self._session: _Session | None = None
        self._opened_s = -_LOOK_AGAIN_S

    async def frozen(self) -> ReadOnlyCredentials:
        """Those of a session that goes on for a while."""
        async with self._lock:
            if self._session is None or _now_s() >= self._session.renew_s:
                self._session = await self._open()
            return self._session.keys

    async def differ_from(self, refused: Any) -> bool:
        """Whether there is another session than the one the store has refused; opens one if need
        be, once a second at most."""
        async with self._lock:
            session = self._session
            if session is None or session.keys == refused:
                if _now_s() < self._opened_s + _LOOK_AGAIN_S:
                    return False
                self._session = session = await self._open()
            return bool(session.keys != refused)

    async def _open(self) -> _Session:
        self._opened_s = _now_s()
        what = f"s3express:CreateSession on {self._config.bucket}"
        try:
            async with self._botocore.create_client(
                "s3", region_name=self._config.region, endpoint_url=self._config.endpoint_url
            ) as client:
                told = (await client.create_session(Bucket=self._config.bucket))["Credentials"]
        except (
            botocore.exceptions.HTTPClientError,
            botocore.exceptions.ConnectionError,
        ) as error:
            raise StoreUnavailable(f"{what}: {error}") from error
        except botocore.exceptions.ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            if status >= 500 or status == 429:
                raise StoreUnavailable(f"{what}: {error}") from error
            code = error.response.get("Error", {}).get("Code", "")
            raise StoreDenied(f"{what}: {error}: grant the action", code=code) from error
        except botocore.exceptions.BotoCoreError as error:
            why = f"{what}: no valid credentials could be had: {error}"
            raise StoreDenied(why, code="bad-credentials") from error
        keys = ReadOnlyCredentials(
            told["AccessKeyId"], told["SecretAccessKey"], told["SessionToken"]
        )
        lasts_s = (told["Expiration"] - datetime.now(timezone.utc)).total_seconds()
        return _Session(keys, _now_s() + lasts_s - _RENEW_S)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
