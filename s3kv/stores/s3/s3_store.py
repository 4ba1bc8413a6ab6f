"""`ObjectStore` for S3 and every server that implements its protocol.

It sends GET, PUT, HEAD and DELETE of an object, copies of an object onto itself, ListObjectsV2, and
DeleteObjects for tools. An IAM policy needs s3:GetObject, s3:PutObject, s3:DeleteObject and
s3:ListBucket, and for `erase` in a bucket with versions s3:DeleteObjectVersion. A directory bucket
needs a session first (`credentials`), and s3express:CreateSession instead. Objects are written with
one PUT, so they have at most 5 GiB; a chunk is thousands of times smaller.

Two clients can send the requests: the fast one, and AWS's SDK, which also serves what the fast one
cannot. A test compares the two (`test_sdk_client.py`); see decision 14.

This layer does not verify content: chunks carry a digest (`codec`). A PUT carries no
checksum for the server, because many refuse it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from operator import attrgetter
from typing import Protocol, TypeVar

from s3kv.config import Config
from s3kv.errors import ConfigError, StoreDenied, StoreError, StoreUnranged
from s3kv.place import Place
from s3kv.stores.http.threads import NETWORK_THREADS
from s3kv.stores.lanes import in_lanes, in_turn
from s3kv.stores.s3.address import Address, find_address
from s3kv.stores.s3.answers import ListingPage, Refusal
from s3kv.stores.s3.fast_client import SCHEMES, FastClient
from s3kv.stores.store import ObjectInfo, ObjectStore, Receiver
from s3kv.stores.traffic import Traffic

_log = logging.getLogger("s3kv.io")
T = TypeVar("T")

PAGE_KEYS = 1000
"""Keys per page of a listing; S3's maximum."""
DELETES_AT_ONCE = 8
"""Requests at a time where the server deletes one object per request. A cleaner shares the pool of
connections with fetches."""
MAX_PUT_BYTES = 5 * 2**30
VERSIONS_COST = "objects that are deleted, expire or are refreshed stay as versions that are billed"
VERSIONS_REMEDY = (
    "Suspend versioning, or delete versions by a lifecycle rule with NoncurrentVersionExpiration "
    "(NoncurrentDays 1)"
)
_GONE = attrgetter("no_such_key")
COST = "its requests take two to three times the processor time of the fast client's"


class S3Client(Protocol):
    """Sender of S3's requests for one bucket. Belongs to one asyncio loop; opens itself at first
    use.

    Each method makes one attempt, on a new connection if an idle one proves to be closed. If the
    store refuses our credentials and there are new ones (a file was rewritten), the request is sent
    once more with those. Methods raise `Refusal` for an answer that is an error, and a `StoreError`
    if there is no answer, or none that can be read.
    """

    traffic: Traffic

    async def get(
        self, key: str, place: Place, receiver: Receiver | None, first: int | None = None
    ) -> ObjectInfo:
        """Read as `ObjectStore.get_into` does."""

    async def put(self, key: str, place: Place, *, if_absent: bool) -> None:
        """Write an object; if_absent: with `If-None-Match`."""

    async def copy(self, key: str, modified_s: float) -> bool:
        """Rewrite an object as `ObjectStore.refresh` does. Returns True."""

    async def head(self, key: str) -> ObjectInfo: ...

    async def delete(self, key: str, if_etag: str | None, version: str = "") -> str:
        """Delete an object, or permanently this version of it. Returns the version of the delete
        marker that a versioned bucket puts in its place; otherwise an empty text or `version`."""

    async def delete_batch(self, objects: Sequence[ObjectInfo]) -> Sequence[str]:
        """Delete objects, each only if its ETag is unchanged. Returns the keys of those left."""

    async def list_page(
        self, prefix: str, keys: int, *, token: str = "", after: str = "", delimiter: str = ""
    ) -> ListingPage: ...

    async def close(self) -> None:
        """End all connections. Requests on those in use raise. Idempotent."""


class S3Store:
    """A bucket on an S3 server, through `client`. Belongs to one asyncio loop.

    Methods raise `StoreThrottled`, `StoreUnavailable`, `StoreDenied`, `StoreMissing`,
    `StoreRefused`, or `StoreError` for an answer no S3 server should give. A PUT with `if_absent`
    that was sent twice because the server closed an idle connection may find its own first copy,
    and returns False then.

    Some servers do not support `If-None-Match`. Those that ignore it write the object again. Those
    that refuse it (501, or 400 for no other reason) get plain PUTs afterwards. With either kind,
    `put` with `if_absent` always returns True: what it writes must not depend on who was first.
    """

    def __init__(self, config: Config, client: S3Client) -> None:
        self.client, self.traffic, self._config = client, client.traffic, config
        self._conditional_puts: bool | None = None
        """Whether the server supports them; None: not known yet."""
        self._knows_batches = True
        self._keeps_versions = self._warned_of_versions = False

    def __repr__(self) -> str:
        return f"S3Store({self._config.bucket!r} at {self._config.endpoint_url or 'AWS'})"

    async def get_into(
        self, key: str, place: Place, receiver: Receiver | None = None, first: int | None = None
    ) -> ObjectInfo | None:
        try:
            return self._seen(await self.client.get(key, place, receiver, first))
        except Refusal as refusal:
            if refusal.no_such_key:
                return None
            if first is not None and refusal.status == 416:  # the object ends before the range
                raise StoreUnranged(str(refusal)) from refusal
            raise refusal.error from refusal

    async def put(self, key: str, place: Place, *, if_absent: bool) -> bool:
        """Write the object; see `ObjectStore.put`. Raises `ValueError` for more than 5 GiB."""
        if place.nbytes > MAX_PUT_BYTES:
            raise ValueError(f"{place.nbytes} bytes do not fit into one PUT ({MAX_PUT_BYTES})")
        if not if_absent or self._conditional_puts is False:
            await _answer(self.client.put(key, place, if_absent=False))
            return True
        try:
            await self.client.put(key, place, if_absent=True)
        except Refusal as refusal:
            if refusal.status == 412:
                self._conditional_puts = True
                return False
            unknown = refusal.status in (400, 501) and type(refusal.error) is StoreError
            if not unknown or self._conditional_puts is not None:
                raise refusal.error from refusal
            await _answer(self.client.put(key, place, if_absent=False))
            self._conditional_puts = False
            _log.warning("%s. Plain PUTs are sent now", refusal.error)
        return True

    async def refresh(self, key: str, modified_s: float) -> bool:
        copied = await _answer(
            self.client.copy(key, modified_s), lambda r: r.status == 412 or r.no_such_key
        )
        return copied is not None

    async def head(self, key: str) -> ObjectInfo | None:
        # A HEAD's answer has no body, so a missing bucket looks the same.
        return self._seen(await _answer(self.client.head(key), _GONE))

    def _seen(self, info: ObjectInfo | None) -> ObjectInfo | None:
        self._keeps_versions |= info is not None and info.is_version
        return info

    def _warn_of_versions(self) -> None:
        if self._keeps_versions and not self._warned_of_versions:
            self._warned_of_versions = True
            _log.warning("%r keeps versions: %s. %s", self, VERSIONS_COST, VERSIONS_REMEDY)

    async def erase(self, key: str) -> bool:
        version = await _answer(self.client.delete(key, None), _GONE)
        erased = set[str]()
        while version and version not in erased:  # a server that deletes nothing repeats it
            erased.add(version)
            try:
                await _answer(self.client.delete(key, None, version), _GONE)
                newest = await self.head(key)
            except StoreDenied:
                return False
            version = "" if newest is None else newest.version
        return True

    async def delete(self, key: str, *, if_etag: str | None = None) -> bool:
        self._warn_of_versions()
        try:
            await self.client.delete(key, if_etag)
        except Refusal as refusal:
            if if_etag and refusal.status == 501:
                return await self.delete(key)
            if if_etag and refusal.status == 412:
                return False
            if not refusal.no_such_key:
                raise refusal.error from refusal
        return True

    async def delete_many(self, objects: Sequence[ObjectInfo]) -> Sequence[str]:
        self._warn_of_versions()
        if self._knows_batches:
            try:
                return await self.client.delete_batch(objects)
            except Refusal as refusal:
                if type(refusal.error) is not StoreError:
                    raise refusal.error from refusal
                self._knows_batches = False
                _log.warning("%s. Objects are deleted one by one now", refusal.error)
        stayed: list[str] = []

        async def delete(_: int, info: ObjectInfo) -> None:
            if not await self.delete(info.key, if_etag=info.etag):
                stayed.append(info.key)

        await in_lanes(DELETES_AT_ONCE, in_turn(objects), delete)
        return stayed

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[ObjectInfo]:
        page = await self._list_page(prefix, PAGE_KEYS, after=after)
        while True:
            for info in page.objects:
                yield info
            if page.token == "":
                return
            page = await self._list_page(prefix, PAGE_KEYS, token=page.token)

    async def folders(self, prefix: str, limit: int) -> Sequence[str]:
        found: list[str] = []
        token: str | None = ""
        for _ in range(0, limit, PAGE_KEYS):
            page = await self._list_page(prefix, min(limit, PAGE_KEYS), delimiter="/", token=token)
            found += [name[len(prefix) :].rstrip("/") for name in page.folders]
            if (token := page.token) == "":
                break
        return found[:limit]

    async def check(self, prefix: str | None = None) -> bool:
        # A listing rather than a HEAD of the bucket: its errors have a body with a code.
        return bool((await self._list_page(prefix or f"{self._config.prefix}/", 1)).objects)

    async def close(self) -> None:
        await self.client.close()

    async def _list_page(
        self, prefix: str, keys: int, *, token: str | None = "", **where: str
    ) -> ListingPage:
        if token is None:
            raise StoreError(f"{self!r} lists only {keys:,} keys: it lacks ListObjectsV2")
        page = await _answer(self.client.list_page(prefix, keys, token=token, **where))
        assert page is not None
        return page


async def _answer(
    request: Awaitable[T], is_none: Callable[[Refusal], bool] = lambda _: False
) -> T | None:
    """The result of a request; None for a refusal that `is_none` accepts. Raises other refusals."""
    try:
        return await request
    except Refusal as refusal:
        if is_none(refusal):
            return None
        raise refusal.error from refusal


def open_store(config: Config, *, keeps_ready: bool = False) -> ObjectStore:
    """The bucket, through the client that `config.client` and the environment ask for.

    keeps_ready: for a process whose requests come in bursts. Our own client then keeps as many TLS
    connections open as fetches may run at once.

    Sends nothing yet. Logs a warning if the client is aiobotocore's. Raises `ConfigError` if
    `client` is "fast" and cannot serve the bucket, or if a package that it needs is missing.
    """
    try:
        address = find_address(config)
    except StoreError:
        # The store raises it again at first use, like every other failure.
        return S3Store(config, FastClient(config))
    client, why = choose(config, address)
    if client == "fast":
        ready = config.max_inflight_requests if keeps_ready else 0
        threads = NETWORK_THREADS if keeps_ready else 1
        return S3Store(config, FastClient(config, address, ready=ready, threads=threads))
    from s3kv.stores.s3.sdk_client import SdkClient  # slow to import, and rarely needed

    _log.warning("aiobotocore's client is used, because %s: %s", why, COST)
    return S3Store(config, SdkClient(config, address))


def choose(config: Config, address: Address) -> tuple[str, str]:
    """Choose the client for the bucket at that address: "fast" or "aiobotocore", and the reason, a
    clause about the settings or the environment. Pure. Raises `ConfigError` if `client` is "fast"
    and that cannot serve."""
    hindered = ""
    if config.bucket.startswith("arn:"):
        hindered = "bucket is an ARN"
    elif address.proxy_url:
        hindered = f"the environment names the proxy {address.proxy} for {address.origin}"
    elif address.scheme not in SCHEMES:
        hindered = f"requests there are signed with {address.scheme!r}"
    if config.client == "aiobotocore":
        return "aiobotocore", "client is 'aiobotocore'"
    if not hindered:
        return "fast", "no setting needs another"
    if config.client == "fast":
        raise ConfigError(
            f"client is 'fast', and {hindered}, which it cannot serve: allowed there is 'auto' or "
            "'aiobotocore'"
        )
    return "aiobotocore", hindered
