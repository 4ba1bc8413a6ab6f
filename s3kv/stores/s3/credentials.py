"""Credentials that requests are signed with: a user's, and those of a directory bucket's session.

The user's come from botocore's chain, and are looked up again when the store refuses them. botocore
itself renews credentials that expire (roles, container and instance endpoints, processes,
sessions). It reads others only once, and would never see a rewritten shared credentials file. A
refusal is therefore taken as a hint that there may be new credentials now.

A directory bucket (S3 Express One Zone) accepts no requests signed with a user's own keys. The keys
are exchanged for those of a session, which lasts five minutes and may read, or read and write, as
its user may (https://docs.aws.amazon.com/AmazonS3/latest/API/API_CreateSession.html). botocore
requests it: the client for that call costs a thread some 30 ms, once in three minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import botocore.parsers
import botocore.session
from botocore import exceptions
from botocore.credentials import ReadOnlyCredentials, RefreshableCredentials

from s3kv.config import Config
from s3kv.errors import StoreDenied, StoreUnavailable
from s3kv.stores.s3.answers import THROTTLED, Refusal

T = TypeVar("T")

_RENEW_NOW_S = 60
"""Time before credentials expire at which requests wait for new ones: a request signed in time may
arrive late. botocore looks for new ones 14 minutes earlier, and for a session one minute; meanwhile
requests use the old ones, even if it finds no others."""
_RENEW_AGAIN_S = 10.0
"""Least time between two such lookups: a failing source is not queried for every request."""
_LOOK_AGAIN_S = 1.0
"""Least time between two searches for credentials. A bucket policy that refuses everything must not
make us search for every request."""
_LOOK_S = 10.0
"""Longest wait for a source of credentials. The search continues, for later requests."""
_NO_ANSWER = (
    exceptions.HTTPClientError,
    exceptions.ConnectionError,
    exceptions.CredentialRetrievalError,  # of a helper program, or an instance's or container's URL
    botocore.parsers.ResponseParserError,  # of STS, or of a server in its place
    asyncio.TimeoutError,  # of _LOOK_S
    OSError,  # a helper program, or the file of a token, that is gone
    ValueError,  # an answer of a helper that cannot be read
    KeyError,  # an answer of a container's URL that has no key
)


class Credentials:
    """Credentials from one source. Belongs to one asyncio loop.

    find: returns botocore's source, in a thread. what: their name, for messages. Methods raise
    `StoreDenied` if the source has no valid ones, and `StoreUnavailable` if it cannot be reached.
    """

    def __init__(self, find: Callable[[], Any], what: str = "credentials") -> None:
        self._find, self._what = find, what
        self._known: tuple[Any, ReadOnlyCredentials] | None = None
        """The source, and its last answer. Written by the thread that searches."""
        self._looking: asyncio.Future[ReadOnlyCredentials] | None = None
        self._lock = asyncio.Lock()
        self._look_again_s = self._renew_again_s = 0.0

    async def used(self, attempt: Callable[[ReadOnlyCredentials], Awaitable[T]]) -> T:
        """The result of `attempt`, which is repeated once if the store refuses these credentials
        and there are others."""
        frozen = await self.frozen()
        try:
            return await attempt(frozen)
        except Refusal as refusal:
            if not refusal.of_credentials or not await self._differ_from(frozen):
                raise
        return await attempt(await self.frozen())

    async def frozen(self) -> ReadOnlyCredentials:
        """Key, secret and token as they are now; two results are equal if all three are."""
        if self._known is not None:
            source, keys = self._known
            now_s = asyncio.get_running_loop().time()
            if now_s >= self._renew_again_s and _ends_within(source, None):
                self._renew_again_s = now_s + _RENEW_AGAIN_S
                self._look()
            if not _ends_within(source, _RENEW_NOW_S):
                return keys
        return await self._found()

    async def _found(self, *, anew: bool = False) -> ReadOnlyCredentials:
        try:
            # A waiter that is cancelled leaves the search to the others.
            return await asyncio.wait_for(asyncio.shield(self._look(anew)), _LOOK_S)
        except exceptions.ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = error.response.get("Error", {}).get("Code", "")
            if status >= 500 or status == 429 or code in THROTTLED:  # by STS with a 400
                raise self._unavailable(error) from error
            if error.operation_name != "CreateSession":  # STS's own
                code = "bad-credentials"
            raise StoreDenied(f"no valid {self._what} could be had: {error}", code=code) from error
        except _NO_ANSWER as error:
            raise self._unavailable(error) from error
        except (exceptions.BotoCoreError, RuntimeError) as error:  # RuntimeError: expired already
            said = f"no valid {self._what} could be had: {error}"
            raise StoreDenied(said, code="bad-credentials") from error

    def _unavailable(self, error: Exception) -> StoreUnavailable:
        return StoreUnavailable(f"{self._what} could not be fetched: {error!r}")

    def _look(self, anew: bool = False) -> asyncio.Future[ReadOnlyCredentials]:
        """The search in progress, or a new one: in the known source, unless `anew`. Do not cancel
        it."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(asyncio.to_thread(self._look_now, anew))
            # Retrieve the error: asyncio would log it if no request waits for it.
            self._looking.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return self._looking

    def _look_now(self, anew: bool) -> ReadOnlyCredentials:
        source = self._known[0] if self._known and not anew else self._find()
        keys: ReadOnlyCredentials = source.get_frozen_credentials()
        self._known = source, keys
        return keys

    async def _differ_from(self, refused: ReadOnlyCredentials) -> bool:
        """Whether there are other credentials than the refused ones. Looks for new ones if need be,
        at most once a second."""
        async with self._lock:
            now_s = asyncio.get_running_loop().time()
            if await self.frozen() == refused and now_s >= self._look_again_s:
                try:
                    await self._found(anew=True)  # others may use the known ones meanwhile
                finally:
                    self._look_again_s = asyncio.get_running_loop().time() + _LOOK_AGAIN_S
            return bool(await self.frozen() != refused)


def users_credentials() -> Credentials:
    """The user's credentials, from botocore's chain."""
    return Credentials(_find_users)


def session_credentials(config: Config) -> Credentials:
    """Credentials of sessions in the directory bucket of the settings."""
    what = f"credentials of s3express:CreateSession on {config.bucket}"
    return Credentials(partial(_open_session, config), what)


def _find_users() -> Any:
    source: Any = botocore.session.Session().get_credentials()
    if source is None:
        raise StoreDenied(
            "no credentials found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "AWS_PROFILE, or give this machine a role",
            code="no-credentials",
        )
    return source


def _open_session(config: Config) -> RefreshableCredentials:
    def create() -> dict[str, str]:
        verify = config.ca_bundle if config.verify_tls else False
        client: Any = botocore.session.Session().create_client(
            "s3", region_name=config.region, endpoint_url=config.endpoint_url, verify=verify
        )
        with contextlib.closing(client):
            told = client.create_session(Bucket=config.bucket)["Credentials"]
        return {
            "access_key": told["AccessKeyId"],
            "secret_key": told["SecretAccessKey"],
            "token": told["SessionToken"],
            "expiry_time": told["Expiration"].isoformat(),
        }

    limits = {"advisory_timeout": 2 * _RENEW_NOW_S, "mandatory_timeout": _RENEW_NOW_S}
    return RefreshableCredentials.create_from_metadata(create(), create, "s3express", **limits)


def _ends_within(source: Any, seconds: int | None) -> bool:
    """Whether its credentials expire within this time; None: botocore's time to renew them."""
    return isinstance(source, RefreshableCredentials) and source.refresh_needed(seconds)
