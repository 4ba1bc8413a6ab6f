"""The errors s3kv raises, and the caller's reaction to each.

In flight none of these reaches the engine: a failed job ends with an `Outcome`, and a miss is
always a right answer. They are for start-up and for users of the library.
"""

from __future__ import annotations


class S3KVError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(S3KVError, ValueError):
    """A setting is wrong: stop and show the message, which names the setting, its value and what is
    allowed."""


class UnsupportedError(S3KVError):
    """This model or engine configuration cannot be served: stop and show the reason."""


class StoreError(S3KVError):
    """An object-store call failed.

    code: the store's code, such as "AccessDenied"; if no store has answered, one of ours, in lower
    case; empty without a code. region: the bucket's region, if the store told it.
    """

    def __init__(self, message: str = "", *, code: str = "", region: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.region = region


class StoreDenied(StoreError):
    """Credentials or permissions refuse the call: notify a person; retries do not help."""


class StoreMissing(StoreError):
    """The bucket does not exist: notify a person. (A missing *object* is an answer, no error.)"""


class StoreRefused(StoreError):
    """The store refuses the object, as too large or for too long a key: do not send it again."""


class StoreUnranged(StoreError):
    """The answer to a ranged read is not that range, because the object is shorter or the store
    serves no ranges: read the whole object."""


class StoreUnavailable(StoreError):
    """The store could not be reached or answered with a server error. It may work later."""


class StoreThrottled(StoreUnavailable):
    """The store asks for fewer requests (503 SlowDown, 429): send fewer, then again."""


class IoProcessError(S3KVError):
    """The I/O process could not be started, or has died."""


class ClosedError(S3KVError):
    """A method of a store was called after `close`, or was waiting for room when it was called.
    Open another store."""


class CopyError(S3KVError, RuntimeError):
    """A device refused a copy to or from the caller's tensors. The message is the device's."""
