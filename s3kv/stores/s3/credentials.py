"""Credentials that requests are signed with: a user's, and those of a directory bucket's session.

The user's come from botocore's chain, and are looked up again when the store refuses them. botocore
renews credentials that have an expiry by itself (roles, container and instance endpoints,
processes). It reads the others once, so that a rewritten shared credentials file would never be
read again. A refusal is therefore taken as a hint that there may be new credentials now.

A directory bucket (S3 Express One Zone) accepts no requests signed with a user's own keys. The keys
are exchanged for those of a session, which lasts five minutes and may read, or read and write, as
its user may (https://docs.aws.amazon.com/AmazonS3/latest/API/API_CreateSession.html). botocore
requests it: a client for one call takes the loop some 30 ms, once in four minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Generic, TypeVar

import botocore.exceptions
import botocore.parsers
import botocore.session
from botocore.credentials import ReadOnlyCredentials, RefreshableCredentials

from s3kv.config import Config
from s3kv.errors import StoreDenied, StoreUnavailable

T = TypeVar("T")

_RENEW_NOW_S = 600
"""Time before the end of credentials at which requests wait for new ones. botocore looks for them
five minutes earlier; requests use the old ones meanwhile."""
_LOOK_AGAIN_S = 1.0
"""Least time between two searches for credentials, or two sessions. A bucket policy that refuses
everything must not make us search for every request."""
_LOOK_S = 10.0
"""Longest wait for a source of credentials. The search goes on, for later requests."""
_NO_ANSWER = (asyncio.TimeoutError, OSError, ValueError)
"""Raised by `_LOOK_S`, by a helper program or the file of a token that is gone, and by an answer of
a helper that cannot be read."""
_RENEW_S = 60.0
"""Time before its end at which a session is replaced: a request signed in time may arrive late."""


class _InThread(Generic[T]):
    """A blocking call of botocore's, made in a thread, once at a time. Belongs to one asyncio loop.

    A waiter that is cancelled leaves the call to the others.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._running: asyncio.Future[T] | None = None

    def begin(self) -> asyncio.Future[T]:
        """The call that is under way, or begins now. Do not cancel it."""
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(asyncio.to_thread(self._call))
            # An error that nobody waits for is not asyncio's to report.
            self._running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return self._running

    async def result(self) -> T:
        return await asyncio.shield(self.begin())


class Credentials:
    """Credentials from botocore's chain. Belongs to one asyncio loop. Methods raise `StoreDenied`
    if there are no valid ones, and `StoreUnavailable` if their source cannot be reached."""

    def __init__(self) -> None:
        self._known: tuple[Any, ReadOnlyCredentials] | None = None
        """The source, and what it gave last. Written by the thread that looks."""
        self._look = _InThread(self._look_now)
        self._lock = asyncio.Lock()
        self._look_again_s = 0.0

    async def frozen(self) -> ReadOnlyCredentials:
        """Key, secret and token as they are now; two results are equal if all three are."""
        if self._known is not None:
            source, keys = self._known
            if not _ends_within(source, None):
                return keys
            self._look.begin()
            if not _ends_within(source, _RENEW_NOW_S):
                return keys
        try:
            return await asyncio.wait_for(self._look.result(), _LOOK_S)
        except (
            botocore.exceptions.HTTPClientError,
            botocore.parsers.ResponseParserError,  # STS, or what answers in its place
        ) as error:
            raise StoreUnavailable(f"credentials could not be fetched: {error}") from error
        except (
            botocore.exceptions.BotoCoreError,
            botocore.exceptions.ClientError,  # from STS
            RuntimeError,  # botocore's, when what it fetched has expired already
        ) as error:
            raise StoreDenied(
                f"no valid credentials could be had: {error}", code="bad-credentials"
            ) from error
        except _NO_ANSWER as error:
            raise StoreUnavailable(f"credentials could not be fetched: {error!r}") from error

    def _look_now(self) -> ReadOnlyCredentials:
        source: Any = (
            self._known[0] if self._known else botocore.session.Session().get_credentials()
        )
        if source is None:
            raise StoreDenied(
                "no credentials found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "AWS_PROFILE, or give this machine a role",
                code="no-credentials",
            )
        keys: ReadOnlyCredentials = source.get_frozen_credentials()
        self._known = source, keys
        return keys

    async def differ_from(self, refused: Any) -> bool:
        """Whether there are other credentials than the refused ones. Looks for new ones if need be,
        at most once a second."""
        async with self._lock:
            if await self.frozen() == refused and _now_s() >= self._look_again_s:
                self._look_again_s = _now_s() + _LOOK_AGAIN_S
                self._known = None
            return bool(await self.frozen() != refused)


@dataclass(frozen=True, slots=True)
class _Session:
    keys: ReadOnlyCredentials
    renew_s: float
    """On the loop's clock."""


class SessionCredentials:
    """Key, secret and token of a session, like `Credentials`. Belongs to one loop.

    Methods raise `StoreDenied` if there are no credentials or they may not have a session, and
    `StoreUnavailable` if the store does not answer.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._create = _InThread(self._create_now)
        self._lock = asyncio.Lock()
        self._session: _Session | None = None
        self._opened_s = -_LOOK_AGAIN_S

    async def frozen(self) -> ReadOnlyCredentials:
        """Key, secret and token of a session that does not end within `_RENEW_S`."""
        async with self._lock:
            if self._session is None or _now_s() >= self._session.renew_s:
                self._session = await self._open()
            return self._session.keys

    async def differ_from(self, refused: Any) -> bool:
        """Whether there is another session than the refused one. Opens one if need be, at most once
        a second."""
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
            told = await asyncio.wait_for(self._create.result(), _LOOK_S)
        except (botocore.exceptions.HTTPClientError, botocore.exceptions.ConnectionError) as error:
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
        except _NO_ANSWER as error:
            raise StoreUnavailable(f"{what}: {error!r}") from error
        keys = ReadOnlyCredentials(
            told["AccessKeyId"], told["SecretAccessKey"], told["SessionToken"]
        )
        lasts_s = (told["Expiration"] - datetime.now(timezone.utc)).total_seconds()
        return _Session(keys, _now_s() + lasts_s - _RENEW_S)

    def _create_now(self) -> Any:
        client: Any = botocore.session.Session().create_client(
            "s3", region_name=self._config.region, endpoint_url=self._config.endpoint_url
        )
        with contextlib.closing(client):
            return client.create_session(Bucket=self._config.bucket)["Credentials"]


def _ends_within(source: Any, seconds: int | None) -> bool:
    """Whether its credentials end so soon. None: so soon that botocore would renew them."""
    return isinstance(source, RefreshableCredentials) and source.refresh_needed(seconds)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
