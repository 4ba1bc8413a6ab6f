"""What s3kv needs of an object store.

An object store is not a file system: an object appears whole or not at all, and is never changed
in place by s3kv. The verbs below are everything the cache uses. A missing object is an
answer (`None`, `False`), not an error; every other failure raises a `StoreError` that says what
the caller can do. No method retries more than the transport's one fresh-connection retry: how
often to try, and for how long, is decided by the caller, who knows the deadline.

All methods are coroutines of one asyncio loop and may run concurrently without limit; the caller
bounds them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from s3kv.objects.traffic import Traffic

Claim = Callable[[], bool]
"""Called once by a read whose object is about to arrive, before its first byte is written to the
buffer. False: another read has the buffer now; this one must not write, and what it returns or
raises means nothing."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a read, a HEAD or a listing tells of an object."""

    key: str
    nbytes: int
    modified_s: float
    """Last write, seconds since the epoch, by the store's clock; 0.0 when a read was not told."""
    etag: str = ""
    """What the store calls this content, quotes included; changes when the object does."""
    age_s: float | None = field(default=None, compare=False)
    """Time since the last write, also by the store's clock; None where it did not tell, as in a
    listing."""


class ObjectStore(Protocol):
    """A bucket. Keys are relative to the bucket and are used as given."""

    @property
    def traffic(self) -> Traffic:
        """What it has been asked for so far, every request of every method."""
        ...

    async def get_into(
        self, key: str, buffer: memoryview, claim: Claim | None = None
    ) -> ObjectInfo | None:
        """Read the whole object into the front of `buffer`, if `claim` allows it.

        Returns what has been read, or None when there is no such object. When the object is longer
        than `buffer`, its length is told as it is, and what `buffer` holds is undefined.
        An answer whose body ends before its announced length raises `StoreUnavailable`.

        The caller owns `buffer`. Once the coroutine has ended (returned, raised or been
        cancelled) nothing writes to it any more: that promise is what lets a slot be reused.
        """
        ...

    async def put(self, key: str, data: memoryview, *, if_absent: bool) -> bool:
        """Write the object. Returns False when `if_absent` and the object was already there.

        The caller leaves `data` unchanged until the coroutine has ended. After any error the
        object may or may not have been written; it is never there in part.
        """
        ...

    async def refresh(self, key: str, modified_s: float) -> bool:
        """Write the object anew as it is, within the store: its age begins again.

        modified_s: its last write, as the store has told. Returns False, having done nothing, when
        it has been written since or is gone. A server that does not know this condition writes
        whatever is there.
        """
        ...

    async def head(self, key: str) -> ObjectInfo | None:
        """The object's length and age, or None when there is no such object."""
        ...

    async def delete(self, key: str, *, if_etag: str | None = None) -> bool:
        """Remove the object; one that is not there is no error.

        Returns False, having done nothing, when the object is not the one with `if_etag`. A
        server that knows no conditional deletes removes whatever is there.
        """
        ...

    def list(self, prefix: str, after: str = "") -> AsyncIterator[ObjectInfo]:
        """Every object whose key starts with `prefix`, in key order where the store has one (a
        directory bucket of AWS has none, and lists only prefixes that end with a slash).

        after: only keys behind this one in that order; not where there is none.
        """
        ...

    async def folders(self, prefix: str, limit: int) -> Sequence[str]:
        """The names that keys continue `prefix` with before their next slash, at most `limit`, in
        order. Without keys that have no further slash. limit: 1 to 1000.
        """
        ...

    async def check(self) -> None:
        """Make sure the bucket can be used: it exists and the credentials may list it.

        Raises `StoreMissing`, `StoreDenied` or `StoreUnavailable` with a message a person can act
        on: it names the bucket, the endpoint and the setting to look at.
        """
        ...

    async def close(self) -> None:
        """Give back connections. Idempotent."""
        ...


MAX_BATCH = 1000
"""Objects in one request of S3's for deleting many."""


class BulkStore(ObjectStore, Protocol):
    """What tools need beside."""

    async def delete_many(self, objects: Sequence[ObjectInfo]) -> Sequence[str]:
        """Remove objects, `MAX_BATCH` at most, each as `delete` with its ETag.

        Returns the keys of those it left because they had changed. After any error some may be
        gone.
        """
        ...
