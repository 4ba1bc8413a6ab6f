"""The errors s3kv raises, and the caller's reaction to each.

    S3KVError
    ├── ConfigError          a setting is wrong: stop and show the message, which names it
    ├── UnsupportedError     the model or engine set-up cannot be served: stop, show the reason
    ├── StoreError           an object-store call failed
    │   ├── StoreDenied      credentials or permissions: needs a person, retrying does not help
    │   ├── StoreMissing     the bucket itself does not exist: needs a person
    │   ├── StoreRefused     object too large or key too long: do not send it again
    │   ├── StoreUnranged    a range was not served as requested: read the whole object
    │   └── StoreUnavailable network, throttling, server error: may work later
    │       └── StoreThrottled   the store throttles requests (SlowDown): send fewer, then retry
    ├── IoProcessError       the I/O process could not be started, or has died
    ├── ClosedError          the store is closed: open another one
    └── CopyError            a device refused a copy to or from the caller's tensors

None of these reaches a running engine: a failed job ends with an `Outcome`, and a miss is always a
correct answer. They are raised at start-up, and to users of the library.
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

    code: the store's code, such as "AccessDenied"; if no store answered, one of s3kv's own, in
    lower case; empty without a code. region: the bucket's region, if the store reported it.
    """

    def __init__(self, message: str = "", *, code: str = "", region: str | None = None) -> None:
        super().__init__(message)
        self.code, self.region = code, region


class StoreDenied(StoreError):
    """Credentials or permissions refuse the call."""


class StoreMissing(StoreError):
    """The bucket does not exist. (A missing *object* is an answer, never an error.)"""


class StoreRefused(StoreError):
    """The store refuses the object: it is too large, or its key is too long."""


class StoreUnranged(StoreError):
    """An answer other than the requested range: the object ends before it, or it is not served."""


class StoreUnavailable(StoreError):
    """The store could not be reached or answered with a server error."""


class StoreThrottled(StoreUnavailable):
    """The store throttles requests (503 SlowDown, 429)."""


class IoProcessError(S3KVError):
    """The I/O process could not be started, or has died."""


class ClosedError(S3KVError):
    """A method of a store was called after `close`, or was waiting during `close`."""


class CopyError(S3KVError, RuntimeError):
    """A device refused a copy to or from the caller's tensors. The message is the device's."""
