"""Guard of the engine: errors of s3kv reach it at start, and none reaches it afterwards.

At start, a bucket that cannot be used may stop the engine (`wait_for_bucket`). After that, a
failing hook is a bug of s3kv, and must not kill the engine. So that side of the connector logs the
error once, stops caching for good, and then answers as if it held nothing (`guarded`). A worker's
side reports the failure to the scheduler's side, which then offers nothing.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

from s3kv.config import Config
from s3kv.errors import IoProcessError, StoreError
from s3kv.io.client import IoClient
from s3kv.io.tier import try_bucket

logger = logging.getLogger("s3kv")

Hook = TypeVar("Hook", bound=Callable[..., Any])


class Guarded:
    """Base of both sides of a connector. `broken` names the hook that failed first, if any did."""

    broken: str | None = None

    def on_broken(self) -> None:
        """React to the first failed hook. Called once."""


def guarded(default: Callable[[], Any]) -> Callable[[Hook], Hook]:
    """Decorate a hook: it returns `default()` once any guarded hook of its object has failed."""

    def wrap(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def safe(self: Guarded, *args: Any, **kwargs: Any) -> Any:
            if self.broken is not None:
                return default()
            try:
                return hook(self, *args, **kwargs)
            except Exception:
                self.broken = hook.__name__
                logger.exception(
                    "s3kv failed in %s: this engine runs without its cache until a restart. "
                    "This is a bug of s3kv: please report it with the traceback",
                    hook.__name__,
                )
                self.on_broken()
                return default()

        return cast(Hook, safe)

    return wrap


def wait_for_bucket(client: IoClient, config: Config) -> bool | None:
    """Wait until the I/O process has tried the bucket. Returns whether the namespace has objects;
    None if the bucket does not answer.
    Raises a `StoreError` if the bucket cannot be used and `on_unavailable` is "fail", and
    `IoProcessError` if the I/O process cannot be started or has died. The client is closed then."""
    try:
        return try_bucket(client)
    except (IoProcessError, StoreError) as error:
        said = f"s3kv: bucket {config.bucket!r} cannot be used: {error}"
        if isinstance(error, StoreError):
            said += (
                ". The engine does not start without it. With on_unavailable 'serve' it would "
                "start, and s3kv would keep trying"
            )
        told = type(error)(said)
        # Logged on a line of its own: vLLM repeats the error at the end of several tracebacks.
        logger.error("%s", told)
        raise told from error
