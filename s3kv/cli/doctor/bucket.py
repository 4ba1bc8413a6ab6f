"""Examination of a bucket: the calls the cache makes, through the store the cache uses.

Its objects are outside every namespace and are deleted at the end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from statistics import median

from s3kv.cli.doctor.findings import Finding, Status, is_permission, remedy_for
from s3kv.cli.invocation import now_s
from s3kv.config import Config
from s3kv.errors import StoreDenied, StoreError
from s3kv.place import Place
from s3kv.stores.lanes import in_lanes, in_turn
from s3kv.stores.s3.address import find_address, is_refreshable, zone_of
from s3kv.stores.s3.answers import arn_of, partition_of
from s3kv.stores.s3.s3_store import COST, VERSIONS_COST, VERSIONS_REMEDY, choose, open_store
from s3kv.stores.store import ObjectStore

LATENCY_ROUNDS = 8
_MOST_READING_S = 10.0
"""Most seconds of reading by several connections, if they together are as slow as one."""
MAX_SKEW_S = 60.0
"""Clock skew above which a warning is due. S3 refuses requests only above a quarter of an hour,
but drift deserves an earlier warning."""
_CONTENT = bytes(range(256)) * 4
_VERSIONS_LEFT = "deleting them needs s3:DeleteObjectVersion and s3:GetObject"
_HEADERS_REMEDY = (
    "If the bucket's policy demands headers, such as x-amz-server-side-encryption and "
    "x-amz-server-side-encryption-aws-kms-key-id, set them in put_headers"
)
_CHECKS = (
    *("list", "put", "conditional put", "get", "versions"),
    *("clock", "latency", "refresh", "delete", "bandwidth"),
)
"""Checks in the order of their calls."""


def examine_client(config: Config) -> Finding:
    """The finding on the client that the cache would use. Sends nothing. Raises `ConfigError` if
    the configured client cannot serve, or if a package that the bucket needs is missing."""
    try:
        address = find_address(config)
    except StoreError as error:
        return Finding("client", "skipped", f"not checked: {error}")
    client, why = choose(config, address)
    told = f"{client}, because {why}; requests go to {address.url}"
    if client == "fast":
        return Finding("client", "ok", told)
    told += f". {COST[0].upper()}{COST[1:]}"
    if config.client == "aiobotocore":
        return Finding("client", "ok", told)
    remedy = (
        "where the bucket can be reached directly, list its host in NO_PROXY; for an access point, "
        "give its alias as bucket; otherwise set client to 'aiobotocore'"
    )
    return Finding("client", "warning", told, remedy)


def examine(
    config: Config, token: str, *, bandwidth_bytes: int, read_only: bool = False
) -> list[Finding]:
    """The findings on the client and the bucket. token: unique to this examination.
    bandwidth_bytes, read_only: see `BucketExamination`. Raises `ConfigError` as `examine_client`
    does. Do not call it in a thread with a running asyncio loop."""
    client = examine_client(config)
    examination = BucketExamination(
        open_store(config),
        config,
        # Under the prefix, where the cache's policies apply, but outside the namespaces, where
        # engines never look.
        f"{config.prefix}/doctor/{token}",
        bandwidth_bytes=bandwidth_bytes,
        clock_s=time.perf_counter,
        wall_s=now_s,
    )
    return [client, *asyncio.run(examination.run(read_only=read_only))]


@dataclass(slots=True)
class BucketExamination:
    """One examination of one bucket. Belongs to one asyncio loop.

    store: for these settings; the examination closes it. key: unique to this examination; a second
    object's key has a suffix. bandwidth_bytes: bytes to send, and bytes to read per connection, to
    measure throughput; 0: none. clock_s: a monotonic clock, for latencies.
    wall_s: this host's time since the epoch, in seconds.
    """

    store: ObjectStore
    config: Config
    key: str
    bandwidth_bytes: int
    clock_s: Callable[[], float]
    wall_s: Callable[[], float]
    _findings: dict[str, Finding] = field(default_factory=dict, init=False)
    _puts: dict[str, asyncio.Future[bool]] = field(default_factory=dict, init=False)
    """The PUT of each object. A server may execute an interrupted PUT after a DELETE that was sent
    later. So a PUT continues when its caller is cancelled, as by Ctrl-C, and has ended before its
    object is deleted."""

    async def run(self, *, read_only: bool) -> list[Finding]:
        """Return all findings, in the order of the calls. Errors of the store become findings.
        read_only: neither write nor delete. Call it once: it closes the store."""
        try:
            await self._run(read_only=read_only)
        except asyncio.CancelledError:
            await _error_of(self._take_back(self.key))
            raise
        finally:
            await self.store.close()
        for check in _CHECKS:
            if check == "versions" or (check == "refresh" and not self._refreshes):
                continue
            why = "because of a finding above"
            if read_only and check != "get":
                why = "with --read-only"
            elif check == "bandwidth" and not self.bandwidth_bytes:
                why = "with --bandwidth 0"
            self._findings.setdefault(check, Finding(check, "skipped", f"not checked {why}"))
        return [self._findings[check] for check in _CHECKS if check in self._findings]

    async def _run(self, *, read_only: bool) -> None:
        if not await self._list():
            return
        begin_s = self.wall_s()
        written = not read_only and await self._put()
        end_s = self.wall_s()
        if written:
            await self._ask("conditional put", "s3:PutObject", self._put_again())
        readable = await self._ask("get", "s3:GetObject", self._get(written=written))
        if written and readable:
            await self._ask("clock", "s3:GetObject", self._clock(begin_s, end_s))
            await self._ask("latency", "s3:GetObject", self._latency())
            if self._refreshes:
                await self._refresh()
        gone = not read_only and await self._delete()
        if self.bandwidth_bytes and written and readable and gone:
            await self._ask("bandwidth", "s3:PutObject and s3:GetObject", self._bandwidth())

    async def _list(self) -> bool:
        """Try a listing. Returns False if no other call is worth trying: the bucket cannot be
        reached, or the credentials are not accepted."""
        error = await _error_of(self.store.check())
        if error is None:
            told = f"the bucket {self.config.bucket!r} is there and can be listed"
            self._note("list", "ok", told)
            return True
        self._fail("list", error, "s3:ListBucket", on_bucket=True)
        return is_permission(error)

    async def _put(self) -> bool:
        # With the condition, like the cache: a bucket's policy may require it.
        error = await _error_of(self._write(self.key, Place.of(_CONTENT), if_absent=True))
        if error is None:
            self._note("put", "ok", "an object was written")
            return True
        self._fail("put", error, "s3:PutObject")
        if is_permission(error) and zone_of(self.config.bucket) is None:
            remedy = f"{self._findings['put'].remedy}. {_HEADERS_REMEDY}"
            self._note("put", "fault", str(error), remedy)
        return False

    async def _put_again(self) -> None:
        if not await self._write(self.key, Place.of(_CONTENT), if_absent=True):
            told = "an object that is already there is not written again"
            return self._note("conditional put", "ok", told)
        told = (
            "the server ignores If-None-Match: chunks that are already there are written "
            "again, which costs uploads and nothing else"
        )
        self._note("conditional put", "warning", told, "upgrade the server, if uploads matter")

    async def _get(self, *, written: bool) -> None:
        buffer = bytearray(len(_CONTENT))
        info = await self.store.get_into(self.key, Place.of(buffer))
        if not written:
            return self._note("get", "ok", "a missing object is reported as missing")
        nbytes = 0 if info is None else info.nbytes
        if info is not None and info.is_version:
            told = f"the bucket keeps versions: {VERSIONS_COST}"
            self._note("versions", "warning", told, VERSIONS_REMEDY)
        if nbytes == len(_CONTENT) and buffer == _CONTENT:
            return self._note("get", "ok", "the object read is the one written")
        told = f"the {nbytes} bytes read are not the {len(_CONTENT)} written"
        remedy = "check for a proxy that changes bodies, or a server that is not consistent"
        self._note("get", "fault", told, remedy)

    async def _clock(self, begin_s: float, end_s: float) -> None:
        """Compare the object's age with this host's time before and after it was written."""
        info = await self.store.head(self.key)
        modified_s = begin_s if info is None else info.modified_s
        # Stores report whole seconds, so an object written just now may look a second old.
        ahead_s = max(0.0, begin_s - 1.0 - modified_s) - max(0.0, modified_s - end_s)
        if abs(ahead_s) <= MAX_SKEW_S:
            return self._note("clock", "ok", f"within {MAX_SKEW_S:.0f} s of the store's")
        which = "ahead of" if ahead_s > 0 else "behind"
        told = (
            f"this host's clock is {abs(ahead_s):.0f} s {which} the store's; S3 refuses requests "
            "from 900 s on"
        )
        self._note("clock", "warning", told, "synchronise the clock (chrony, systemd-timesyncd)")

    async def _latency(self) -> None:
        place = Place.of(bytearray(len(_CONTENT)))
        took_ms: list[float] = []
        for _ in range(LATENCY_ROUNDS):
            begin_s = self.clock_s()
            await self.store.get_into(self.key, place)
            took_ms.append((self.clock_s() - begin_s) * 1e3)
        told = (
            f"a small GET takes {median(took_ms):.1f} ms (median of {len(took_ms)}, one after "
            f"another), {max(took_ms):.1f} ms at most"
        )
        self._note("latency", "ok", told)

    @property
    def _refreshes(self) -> bool:
        config = self.config  # as in `RefreshRule.of`
        bound = config.refresh_after_s or config.bucket_bytes or config.bucket_idle_s
        return bound > 0 and is_refreshable(config.bucket)

    async def _refresh(self) -> None:
        """Try the copy of an object onto itself."""
        try:
            if (info := await self.store.head(self.key)) is not None:
                await self.store.refresh(self.key, info.modified_s)
            self._note("refresh", "ok", "an object can be rewritten in place")
        except StoreError as error:
            remedy = "set refresh_after_s to 0: objects expire by age, whether used or not"
            if is_permission(error):
                remedy = f"allow s3:PutObject and s3:GetObject on {self._resource()}"
            self._note("refresh", "warning", str(error), remedy)

    async def _delete(self) -> bool:
        config, put = self.config, self._puts.get(self.key)
        try:
            erased = await self.store.erase(self.key)
        except StoreError as caught:
            error = caught
        else:
            told = "" if erased else f"; versions of {self.key} are left behind: {_VERSIONS_LEFT}"
            self._note("delete", "ok", f"an object can be deleted{told}")
            return True
        left = f"; {self.key} is left behind" if put and put.exception() is None else ""
        told = f"{error}{left}"
        if not is_permission(error):
            self._note("delete", "fault", told, remedy_for(error, "", ""))
            return False
        allow = f"allow s3:DeleteObject on {self._resource()}"
        remedy = f"{allow}, for `s3kv gc` and `s3kv verify --delete`; otherwise leave it"
        bounds = [name for name in ("bucket_bytes", "bucket_idle_s") if getattr(config, name)]
        if bounds:
            told += f". This engine cannot enforce {' and '.join(bounds)}"
            remedy = f"{allow}, or make sure that another engine with the setting may delete"
        self._note("delete", "warning", told, remedy)
        return False

    async def _bandwidth(self) -> None:
        key, content = f"{self.key}-large", Place.of(bytearray(self.bandwidth_bytes))

        async def read(lane: int = 0, number: int = 0) -> None:
            await self.store.get_into(key, content)  # shared: all lanes read the same bytes

        try:
            begin_s = self.clock_s()
            await self._write(key, content)
            written_s = self.clock_s()
            await read()
            read_s = self.clock_s()
            fitting = int(_MOST_READING_S / max(read_s - written_s, 1e-9))
            at_once = max(1, min(self.config.fetches_at_once(self.bandwidth_bytes), fitting))
            await in_lanes(at_once, in_turn(range(at_once)), read)
            end_s = self.clock_s()
        finally:
            left = await _error_of(self._take_back(key))
        seconds = (written_s - begin_s, read_s - written_s, (end_s - read_s) / at_once)
        up, down, many = (self.bandwidth_bytes / 1e6 / max(s, 1e-9) for s in seconds)
        told = (
            f"one connection carries {up:,.0f} MB/s up, {down:,.0f} MB/s down, {at_once} at once "
            f"{many:,.0f} MB/s down ({self.bandwidth_bytes / 2**20:.0f} MiB each)"
        )
        if left is None:
            return self._note("bandwidth", "ok", told)
        told += f". {left}; {key} is left behind"
        self._note("bandwidth", "warning", told, "delete it by hand")

    async def _ask(self, check: str, action: str, call: Awaitable[None]) -> bool:
        """Make the calls of a check, which records its finding. Returns whether its status is "ok".
        action: the IAM permission that the calls need."""
        if (error := await _error_of(call)) is not None:
            self._fail(check, error, action)
        return self._findings[check].status == "ok"

    async def _write(self, key: str, place: Place, *, if_absent: bool = False) -> bool:
        writing = self.store.put(key, place, if_absent=if_absent)
        self._puts[key] = put = asyncio.ensure_future(writing)
        put.add_done_callback(lambda put: put.cancelled() or put.exception())  # or asyncio logs it
        return await asyncio.shield(put)

    async def _take_back(self, key: str) -> None:
        """Delete an object with its versions, if it was written."""
        if key in self._puts:
            await asyncio.wait([self._puts[key]])
            if not await self.store.erase(key):
                raise StoreDenied(f"the versions of {key} stay: {_VERSIONS_LEFT}")

    def _resource(self, *, on_bucket: bool = False) -> str:
        bucket, region = self.config.bucket, self.store.traffic.region
        if zone_of(bucket) is not None:
            return f"arn:{partition_of(region)}:s3express:*:*:bucket/{bucket}"
        return arn_of(region, bucket, None if on_bucket else f"{self.config.prefix}/*")

    def _fail(self, check: str, error: StoreError, action: str, *, on_bucket: bool = False) -> None:
        if zone_of(self.config.bucket) is not None:
            action = "s3express:CreateSession"
        remedy = remedy_for(error, action, self._resource(on_bucket=on_bucket))
        self._note(check, "fault", str(error), remedy)

    def _note(self, check: str, status: Status, detail: str, remedy: str = "") -> None:
        self._findings[check] = Finding(check, status, detail, remedy)


async def _error_of(call: Awaitable[object]) -> StoreError | None:
    try:
        await call
    except StoreError as error:
        return error
    return None
