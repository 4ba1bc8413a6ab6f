"""Nothing raises into the engine: a hook that fails is logged, counted, and answers "no cache".

A failure here is a bug of s3kv. The engine must not pay for it with a dead process, so the side
it happened on stops caching for good, keeps answering the engine as if it held nothing, and says
so once, loudly.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

logger = logging.getLogger("s3kv")

Hook = TypeVar("Hook", bound=Callable[..., Any])


class Guarded:
    """Base of both sides of a connector. `broken` is the hook that failed first, if any did."""

    broken: str | None = None

    def on_broken(self) -> None:
        """Called once, when the first hook has failed."""


def guarded(default: Callable[[], Any]) -> Callable[[Hook], Hook]:
    """The hook answers `default()` once any guarded hook of the same object has failed."""

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
                    "s3kv failed in %s and serves this engine without its cache from now on. "
                    "This is a bug; please report it with the traceback",
                    hook.__name__,
                )
                self.on_broken()
                return default()

        return cast(Hook, safe)

    return wrap
