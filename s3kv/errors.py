"""The errors s3kv raises, and what the caller does with each.

    S3KVError
    ├── ConfigError          a setting is wrong: stop, show the message, it names the setting
    ├── UnsupportedError     the model or engine set-up cannot be served: stop, show the reason
    ├── StoreError           an object-store call failed
    │   ├── StoreDenied      credentials or permissions: tell a person, retrying does not help
    │   ├── StoreMissing     the bucket itself does not exist: tell a person
    │   └── StoreUnavailable network, throttling, server error: may work later
    │       └── StoreThrottled   the store asks for fewer requests: send fewer, then again
    └── IoProcessError       the I/O process could not be started, or has died

In flight nothing of this reaches the engine: a failed job ends with an `Outcome`, and a miss is
always a right answer. These are for start-up and for users of the library.
"""

from __future__ import annotations


class S3KVError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(S3KVError, ValueError):
    """A setting is wrong. The message names the setting, its value and what is allowed."""


class UnsupportedError(S3KVError):
    """This model or engine configuration cannot be served. The message says why."""


class StoreError(S3KVError):
    """An object-store call failed.

    code: the store's word for it, such as "AccessDenied"; where no store has answered, one of ours,
    in small letters; empty when there is none. region: where the bucket is, if the store told.
    """

    def __init__(self, message: str = "", *, code: str = "", region: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.region = region


class StoreDenied(StoreError):
    """Credentials or permissions refuse the call."""


class StoreMissing(StoreError):
    """The bucket does not exist (a missing *object* is an answer, never an error)."""


class StoreUnavailable(StoreError):
    """The store could not be reached or answered with a server error."""


class StoreThrottled(StoreUnavailable):
    """The store asks for fewer requests (503 SlowDown, 429)."""


class IoProcessError(S3KVError):
    """The I/O process could not be started, or has died."""
