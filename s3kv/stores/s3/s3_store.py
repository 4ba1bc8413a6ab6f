"""`ObjectStore` on S3 and everything that speaks its protocol.

It sends GET, PUT, HEAD and DELETE of an object, copies of an object onto itself, ListObjectsV2, and
DeleteObjects for tools. An IAM policy needs s3:GetObject, s3:PutObject, s3:DeleteObject and
s3:ListBucket, and for `erase` in a bucket with versions s3:DeleteObjectVersion. A directory bucket
needs a session first (`credentials`), and s3express:CreateSession instead. Objects are written with
one PUT, so the largest has 5 GiB; a chunk is thousands of times smaller.

This layer does not verify content: chunks carry a digest (`codec`). A PUT carries no
checksum for the server, because many refuse it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import TypeVar

from s3kv.config import Config
from s3kv.errors import StoreDenied, StoreError, StoreUnranged
from s3kv.place import Place
from s3kv.stores.lanes import in_lanes, in_turn
from s3kv.stores.s3.address import find_address
from s3kv.stores.s3.answers import ListingPage, Refusal
from s3kv.stores.s3.s3_client import S3Client
from s3kv.stores.store import Claim, ObjectInfo, ObjectStore
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


class S3Store:
    """A bucket on an S3 server, through `client`. Belongs to one asyncio loop.

    Methods raise `StoreThrottled`, `StoreUnavailable`, `StoreDenied`, `StoreMissing`,
    `StoreRefused`, or `StoreError` for an answer no S3 server should give. A PUT with `if_absent`
    that was sent twice because the server closed an idle connection may find its own first copy,
    and returns False then.

    Some servers do not know `If-None-Match`. Those that ignore it create the object again. Those
    that refuse it (501, or 400 for no other reason) get plain PUTs from then on. With either kind,
    `put` with `if_absent` always returns True: what it writes must not depend on who was first.
    """

    def __init__(self, config: Config, client: S3Client) -> None:
        self.client = client
        self._config = config
        self._conditional_puts: bool | None = None
        """Whether the server knows them; None: not known yet."""
        self._knows_batches = True
        self._keeps_versions = self._warned_of_versions = False

    @property
    def traffic(self) -> Traffic:
        return self.client.traffic

    def __repr__(self) -> str:
        return f"S3Store({self._config.bucket!r} at {self._config.endpoint_url or 'AWS'})"

    async def get_into(
        self, key: str, place: Place, claim: Claim | None = None
    ) -> ObjectInfo | None:
        return self._seen(await _answer(self.client.get(key, place, claim), _GONE))

    async def get_range(
        self, key: str, first: int, place: Place, claim: Claim | None = None
    ) -> ObjectInfo | None:
        try:
            return await self.client.get(key, place, claim, first)
        except Refusal as refusal:
            if refusal.no_such_key:
                return None
            if refusal.status == 416:  # the object ends before the range begins
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
        while version and version not in erased:  # it names one again if it does not delete it
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
            if not page.token:
                return
            page = await self._list_page(prefix, PAGE_KEYS, token=page.token)

    async def folders(self, prefix: str, limit: int) -> Sequence[str]:
        page = await self._list_page(prefix, limit, delimiter="/")
        return [name[len(prefix) :].rstrip("/") for name in page.folders]

    async def check(self, prefix: str | None = None) -> bool:
        # A listing rather than a HEAD of the bucket: its errors have a body with a code.
        page = await self._list_page(prefix or f"{self._config.prefix}/", 1)
        return bool(page.objects)

    async def close(self) -> None:
        await self.client.close()

    async def _list_page(self, prefix: str, keys: int, **where: str) -> ListingPage:
        page = await _answer(self.client.list_page(prefix, keys, **where))
        assert page is not None
        return page


async def _answer(
    request: Awaitable[T], is_none: Callable[[Refusal], bool] = lambda _: False
) -> T | None:
    """The result of a request. A refusal is None if `is_none` holds, and otherwise its error."""
    try:
        return await request
    except Refusal as refusal:
        if is_none(refusal):
            return None
        raise refusal.error from refusal


def open_store(config: Config, *, keeps_ready: bool = False) -> ObjectStore:
    """The bucket of the settings. Sends nothing yet. Raises `ConfigError` as `find_address` does.

    keeps_ready: of TLS connections as many are kept open as fetches may run at once: for a process
    whose requests come in bursts.
    """
    ready = config.max_inflight_requests if keeps_ready else 0
    address = None
    # The store raises it again at first use, like every other trouble.
    with suppress(StoreError):
        address = find_address(config)
    return S3Store(config, S3Client(config, address, ready=ready))
