"""`ObjectStore`: the interface s3kv needs of an object store.

An object store is not a file system: an object appears whole or not at all, and s3kv never changes
one in place. The verbs below are everything the cache uses. A missing object is an answer (`None`,
`False`), not an error; every other failure raises a `StoreError` that says what the caller can do.
No method retries a request that the store failed to serve: the caller knows the deadline, and
decides how often and how long to try. A request is sent a second time only on a fresh connection
(an idle one was closed), with new credentials, or without a condition the server does not know.

All methods are coroutines of one asyncio loop and may run concurrently without limit; the caller
bounds them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from s3kv.place import Place
from s3kv.stores.traffic import Traffic


class Receiver(Protocol):
    """Recipient of the bytes of one read. Its methods are called in the thread that receives, and
    never after the read has ended. They must not block or raise."""

    def begin(self, nbytes: int) -> Place | None:
        """Called once, when the object is about to arrive, before its first byte is written.

        nbytes: length of the whole object, which may be more than the caller accepts. Returns the
        memory for the requested bytes, in order; longer memory is filled from its front.
        None: another read fills that memory, so this one must not write, and its result or error is
        meaningless.
        """

    def arrived(self, nbytes: int) -> None:
        """Note that the first `nbytes` of the requested bytes have been written. Called any number
        of times while they arrive; not necessarily for the last ones."""


def landing(place: Place, receiver: Receiver | None, nbytes: int, whole_bytes: int) -> Place | None:
    """The memory for a read of `nbytes` of an object of `whole_bytes`, from its receiver if it has
    one. None if the bytes are to stay unread: another read fills that memory, or `place` or that
    memory is too small for them."""
    memory = place if receiver is None else receiver.begin(whole_bytes)
    if memory is None or nbytes > min(place.nbytes, memory.nbytes):
        return None
    return memory.cut(0, nbytes)


UNREADABLE = -1
"""Length of an encrypted object that does not decrypt: it was moved, damaged or forged."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Metadata of an object from a read, a HEAD or a listing. nbytes: length, or `UNREADABLE`."""

    key: str
    nbytes: int
    modified_s: float
    """Last write, seconds since the epoch, by the store's clock; 0.0 if the answer has none."""
    etag: str = ""
    """The store's name for this content, quotes included; changes when the object does."""
    age_s: float | None = field(default=None, compare=False)
    """Time since the last write, also by the store's clock; None if the answer has none, as in
    a listing."""
    version: str = field(default="", compare=False)
    """Version ID in a bucket that keeps or kept versions; empty if the answer has none, as in a
    listing."""

    @property
    def is_version(self) -> bool:
        """Whether the bucket kept versions when the object was written."""
        return self.version not in ("", "null")


MAX_BATCH = 250
"""Most objects in one deletion: a quarter of S3's limit, because slow stores delete one by one."""


class Inventory(Protocol):
    """The part of a store that counting and deleting its objects need."""

    async def get_into(
        self, key: str, place: Place, receiver: Receiver | None = None
    ) -> ObjectInfo | None:
        """Read the whole object into the front of `place`; with a receiver into the memory that
        `receiver.begin` returns.

        Returns the object's metadata, or None if there is no such object. If the object is longer
        than `place` or that memory, it is left unread: the metadata has its true length, and the
        content of the memory is undefined. Raises `StoreUnavailable` if the body ends before its
        announced length.

        Nothing writes to the memory after the coroutine has ended (returned, raised or been
        cancelled), so that the caller can reuse it.
        """

    async def head(self, key: str) -> ObjectInfo | None:
        """The object's metadata, or None if there is no such object."""

    async def delete_many(self, objects: Sequence[ObjectInfo]) -> Sequence[str]:
        """Remove at most `MAX_BATCH` objects, each like `delete` with its ETag.

        Returns the keys of the objects left: they had changed, or the store refused to delete them
        but deleted others. After an error some objects may be gone.
        """

    def list(self, prefix: str, after: str = "") -> AsyncIterator[ObjectInfo]:
        """List every object whose key starts with `prefix`, in key order if the store has one (a
        directory bucket of AWS has none, and lists only prefixes that end with a slash).

        after: list only keys after this one; only for stores with a key order.
        """

    async def folders(self, prefix: str, limit: int) -> Sequence[str]:
        """List the folders directly under `prefix`, in order: the part of a key between it and the
        next slash. Keys without a further slash are left out. limit: most names; no more pages are
        listed than that many keys take."""


class ObjectStore(Inventory, Protocol):
    """A bucket. Keys are relative to the bucket and are used as given."""

    @property
    def traffic(self) -> Traffic:
        """Counters of all requests so far, of every method."""

    async def get_into(
        self, key: str, place: Place, receiver: Receiver | None = None, first: int | None = None
    ) -> ObjectInfo | None:
        """Read as `Inventory` does; with `first`, the bytes from this offset on that fill `place`.
        If the object ends within that range, only the bytes up to its end are written.

        Returns the metadata of the whole object: the caller compares its length. Ranges belong
        together if their ETags are equal. Raises `StoreUnranged`, with the content of the memory
        undefined, if the object ends at or before `first`, or the store serves no ranges.
        """

    async def put(self, key: str, place: Place, *, if_absent: bool) -> bool:
        """Write the object in `place`. Returns False if `if_absent` and it was already there.

        The caller leaves `place` unchanged until the coroutine has ended. After an error the object
        may or may not have been written, but never in part.
        """

    async def refresh(self, key: str, modified_s: float) -> bool:
        """Rewrite the object unchanged, within the store: its age starts again from zero.

        modified_s: its last write as the store reported it. Returns False, having done nothing, if
        the object has been written since or is gone. A server that does not know this condition
        rewrites whatever is there.
        """

    async def delete(self, key: str, *, if_etag: str | None = None) -> bool:
        """Remove the object; a missing object is no error.

        Returns False, having done nothing, if the object has another ETag than `if_etag`. A server
        without conditional deletes removes whatever is there.
        """

    async def erase(self, key: str) -> bool:
        """Remove the object, and all its versions if the bucket keeps them. For objects that no
        other process writes. Returns False if versions stay that the credentials may not delete."""

    async def check(self, prefix: str | None = None) -> bool:
        """Check that the bucket can be used: it exists, and the credentials may list it.

        Returns whether there is an object under `prefix`; None: the configured one.
        Raises `StoreMissing`, `StoreDenied` or `StoreUnavailable` with a message that a person can
        act on: it names the bucket, the endpoint and the setting to look at.
        """

    async def close(self) -> None:
        """Close all connections. Idempotent."""


async def read_small(
    store: Inventory, key: str, most_bytes: int
) -> tuple[ObjectInfo, bytes] | None:
    """Read an object into memory of its own. Returns its metadata and content, which is empty if
    longer than `most_bytes`; None if there is no such object."""
    place = Place.of(bytearray(most_bytes))
    info = await store.get_into(key, place)
    if info is None:
        return None
    return info, bytes(place.payload[: info.nbytes]) if info.nbytes <= most_bytes else b""
