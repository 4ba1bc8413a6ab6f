"""Who we are, as botocore's chain finds it, and found again when the store refuses it.

botocore renews what has an expiry by itself (roles, container and instance endpoints, processes).
What has none it reads once: a shared credentials file that is rewritten would never be read again.
So a refusal is taken for a hint that there may be others now.
"""

from __future__ import annotations

import asyncio
from typing import Any

import botocore.exceptions
import botocore.parsers
from aiobotocore.session import AioSession

from s3kv.errors import StoreDenied, StoreUnavailable

_LOOK_AGAIN_S = 1.0
"""A bucket policy that refuses everything must not make us read files for every request."""


class Credentials:
    """Belongs to one loop. Raises `StoreDenied` when there are none, `StoreUnavailable` when their
    source cannot be reached."""

    def __init__(self, session: AioSession) -> None:
        self._session = session
        self._source: Any = None
        self._lock = asyncio.Lock()
        self._look_again_s = 0.0

    async def frozen(self) -> Any:
        """Key, secret and token as they are now; two of them are equal when all three are."""
        try:
            if self._source is None:
                self._source = await self._session.get_credentials()
            if self._source is None:
                raise StoreDenied(
                    "no credentials found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                    "AWS_PROFILE, or give this machine a role",
                    code="no-credentials",
                )
            return await self._source.get_frozen_credentials()
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

    async def differ_from(self, refused: Any) -> bool:
        """Whether there are others than those the store has refused; looks for them if need be,
        once a second at most."""
        async with self._lock:
            now_s = asyncio.get_running_loop().time()
            if await self.frozen() == refused and now_s >= self._look_again_s:
                self._look_again_s = now_s + _LOOK_AGAIN_S
                self._session, self._source = AioSession(), None
            return bool(await self.frozen() != refused)
