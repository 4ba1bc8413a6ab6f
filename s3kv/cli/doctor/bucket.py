"""Every call the cache makes on a bucket, made once, through the store the cache itself uses.

The objects are outside every namespace, and are deleted at the end.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Awaitable, Callable
from statistics import median
from typing import TypeVar

from s3kv.cli.doctor.findings import Finding, Status
from s3kv.cli.doctor.remedies import is_permission, remedy_for
from s3kv.config import Config
from s3kv.errors import StoreDenied, StoreError
from s3kv.objects.sessions import zone_of
from s3kv.objects.store import ObjectStore

LATENCY_ROUNDS = 8
MAX_SKEW_S = 60.0
"""A quarter of an hour is where S3 refuses requests; drift is worth a word before that."""
_AFTER_LIST = (
    "put",
    "checksum",
    "conditional put",
    "get",
    "clock",
    "latency",
    "delete",
    "bandwidth",
)
_T = TypeVar("_T")


def probe_key(config: Config, token: str) -> str:
    """Where the examination writes: under the prefix, so that the policies that hold for the cache
    hold for it, and beside the namespaces, so that no engine ever looks there."""
    return f"{config.prefix}/doctor/{token}"


class BucketExamination:
    """One examination of one bucket. Belongs to one asyncio loop.

    open_store: a store with these settings; what it opens is closed here. key: what no other
    examination uses (`probe_key`); a second object gets it with a suffix. bandwidth_bytes: what is
    sent and read to measure throughput; 0: nothing. clock_s: a monotonic clock, for latencies.
    wall_s: the time since the epoch as this host has it.
    """

    def __init__(
        self,
        open_store: Callable[[Config], ObjectStore],
        config: Config,
        key: str,
        *,
        bandwidth_bytes: int,
        clock_s: Callable[[], float],
        wall_s: Callable[[], float],
    ) -> None:
        self._open_store = open_store
        self._store = open_store(config)
        self._config = config
        self._key = key
        self._bandwidth_bytes = bandwidth_bytes
        self._clock_s = clock_s
        self._wall_s = wall_s
        self._content = bytes(range(256)) * 4
        self._findings: list[Finding] = []
        self._written_s = (0.0, 0.0)
        """This host's time before and after the object was written."""

    async def run(self, *, read_only: bool) -> list[Finding]:
        """All findings, in the order of the calls. Raises nothing the store does.

        read_only: neither write nor delete.
        """
        try:
            await self._run(read_only=read_only)
        finally:
            await self._store.close()
        return self._findings

    async def _run(self, *, read_only: bool) -> None:
        if not await self._list():
            self._skip(*_AFTER_LIST)
            return
        if read_only:
            await self._get(written=False)
            self._skip(*(check for check in _AFTER_LIST if check != "get"), why="--read-only")
            return
        written = await self._put()
        if written:
            await self._put_again()
        else:
            self._skip("conditional put")
        readable = await self._get(written=written)
        if written and readable:
            await self._clock()
            await self._latency()
            await self._refresh()
        else:
            self._skip("clock", "latency")
        gone = await self._delete(written=written)
        if self._bandwidth_bytes and written and readable and gone:
            await self._bandwidth()
        else:
            why = "because of a finding above" if self._bandwidth_bytes else "--bandwidth 0"
            self._skip("bandwidth", why=why)

    async def _list(self) -> bool:
        """False when nothing else is worth asking: the bucket is not there, or nobody knows us."""
        error, _ = await _attempt(self._store.check())
        if error is None:
            self._note(
                "list", "ok", f"the bucket {self._config.bucket!r} is there and can be listed"
            )
            return True
        if isinstance(error, StoreDenied):
            self._fail("list", error, "s3:ListBucket", on_bucket=True)
            return is_permission(error)
        other = await self._other_addressing()
        if other is None:
            self._fail("list", error, "s3:ListBucket", on_bucket=True)
            return False
        where = "in the path" if other == "path" else "in the host name"
        detail = f"{error}. With the bucket's name {where} it answers"
        self._note("list", "fault", detail, f"set addressing_style to {other!r}")
        return False

    async def _other_addressing(self) -> str | None:
        """The addressing style with which the bucket can be listed, if it is not the one in use."""
        for style in ("path", "virtual"):
            store = self._open_store(dataclasses.replace(self._config, addressing_style=style))
            try:
                error, _ = await _attempt(store.check())
            finally:
                await store.close()
            if error is None:
                return style
        return None

    async def _put(self) -> bool:
        begin_s = self._wall_s()
        # As the cache does it: a bucket's policy may ask for the condition.
        error, _ = await _attempt(self._write(self._store, if_absent=True))
        self._written_s = (begin_s, self._wall_s())
        if error is not None and await self._checksum_is_to_blame(error):
            self._note("put", "fault", str(error))
            self._note(
                "checksum",
                "fault",
                "the server refuses uploads that carry a checksum, and takes those without",
                "set checksum to 'when_required'",
            )
            return False
        if error is not None:
            self._fail("put", error, "s3:PutObject")
            self._skip("checksum")
            return False
        self._note("put", "ok", "an object was written")
        if self._config.checksum == "when_supported":
            self._note("checksum", "ok", "uploads carry a CRC-32, and the server takes them")
        else:
            detail = "uploads carry none for the server: every object holds a digest of its own"
            self._note("checksum", "ok", detail)
        return True

    async def _checksum_is_to_blame(self, error: StoreError) -> bool:
        if self._config.checksum != "when_supported" or type(error) is not StoreError:
            return False
        plain = self._open_store(dataclasses.replace(self._config, checksum="when_required"))
        try:
            refused, _ = await _attempt(self._write(plain, if_absent=True))
        finally:
            await plain.close()
        return refused is None

    async def _write(self, store: ObjectStore, *, if_absent: bool) -> bool:
        return await store.put(self._key, memoryview(self._content), if_absent=if_absent)

    async def _put_again(self) -> None:
        error, created = await _attempt(self._write(self._store, if_absent=True))
        if error is not None:
            self._fail("conditional put", error, "s3:PutObject")
        elif created:
            self._note(
                "conditional put",
                "warning",
                "the server does not heed If-None-Match: chunks that are there already are "
                "written again, which costs uploads and nothing else",
                "upgrade the server, if uploads matter",
            )
        else:
            self._note("conditional put", "ok", "an object that is there is not written again")

    async def _get(self, *, written: bool) -> bool:
        buffer = bytearray(len(self._content))
        error, info = await _attempt(self._store.get_into(self._key, memoryview(buffer)))
        if error is not None:
            self._fail("get", error, "s3:GetObject")
            return False
        if not written:
            self._note("get", "ok", "a missing object is answered as one")
            return True
        nbytes = 0 if info is None else info.nbytes
        if nbytes != len(self._content) or buffer != self._content:
            self._note(
                "get",
                "fault",
                f"{nbytes} bytes came back that are not the {len(self._content)} written",
                "look at what is between here and the store: a proxy that changes bodies, or a "
                "server that is not consistent",
            )
            return False
        self._note("get", "ok", "what was written came back")
        return True

    async def _clock(self) -> None:
        error, info = await _attempt(self._store.head(self._key))
        if error is not None or info is None:
            self._note("clock", "skipped", f"the object's age could not be read: {error}")
            return
        begin_s, end_s = self._written_s
        # Stores tell whole seconds, so an object written just now may look a second old.
        ahead_s = max(0.0, begin_s - 1.0 - info.modified_s) - max(0.0, info.modified_s - end_s)
        if abs(ahead_s) <= MAX_SKEW_S:
            self._note("clock", "ok", f"within {MAX_SKEW_S:.0f} s of the store's")
            return
        which = "ahead of" if ahead_s > 0 else "behind"
        self._note(
            "clock",
            "warning",
            f"this host's clock is {abs(ahead_s):.0f} s {which} the store's; S3 refuses requests "
            "from 900 s on",
            "synchronise the clock (chrony, systemd-timesyncd)",
        )

    async def _latency(self) -> None:
        buffer = memoryview(bytearray(len(self._content)))
        took_ms: list[float] = []
        for _ in range(LATENCY_ROUNDS):
            begin_s = self._clock_s()
            error, _ = await _attempt(self._store.get_into(self._key, buffer))
            if error is not None:
                self._fail("latency", error, "s3:GetObject")
                return
            took_ms.append((self._clock_s() - begin_s) * 1e3)
        self._note(
            "latency",
            "ok",
            f"a small GET takes {median(took_ms):.1f} ms (median of {len(took_ms)}, one after "
            f"another), {max(took_ms):.1f} ms at most",
        )

    async def _refresh(self) -> None:
        """The copy onto itself, for who has asked for it (`refresh_after_s`)."""
        if self._config.refresh_after_s == 0:
            return
        error, info = await _attempt(self._store.head(self._key))
        if error is None and info is not None:
            error, _ = await _attempt(self._store.refresh(self._key, info.modified_s))
        if error is None:
            self._note("refresh", "ok", "an object can be written anew in place")
            return
        if is_permission(error):
            remedy = f"allow s3:PutObject and s3:GetObject on {self._resource()}"
        else:
            remedy = "set refresh_after_s to 0, and let objects expire by the age of their write"
        self._note("refresh", "warning", str(error), remedy)

    async def _delete(self, *, written: bool) -> bool:
        error, _ = await _attempt(self._store.delete(self._key))
        if error is None:
            self._note("delete", "ok", "an object can be deleted")
            return True
        left = f"; {self._key} is left behind" if written else ""
        if is_permission(error):
            self._note(
                "delete",
                "warning",
                f"{error}{left}",
                f"allow s3:DeleteObject on {self._resource()}, if damaged objects are to be "
                "replaced (on_corrupt: delete); otherwise leave it",
            )
        else:
            self._note("delete", "fault", f"{error}{left}", remedy_for(error, "", ""))
        return False

    async def _bandwidth(self) -> None:
        key, content = f"{self._key}-large", memoryview(bytearray(self._bandwidth_bytes))
        try:
            times_s = [self._clock_s()]
            error, _ = await _attempt(self._store.put(key, content, if_absent=False))
            times_s.append(self._clock_s())
            if error is None:
                error, _ = await _attempt(self._store.get_into(key, content))
                times_s.append(self._clock_s())
        finally:
            left, _ = await _attempt(self._store.delete(key))
        if error is not None:
            self._fail("bandwidth", error, "s3:PutObject and s3:GetObject")
            return
        up, down = (
            self._bandwidth_bytes / 1e6 / max(end_s - begin_s, 1e-9)
            for begin_s, end_s in itertools.pairwise(times_s)
        )
        told = (
            f"one connection carries {up:,.0f} MB/s up, {down:,.0f} MB/s down "
            f"({self._bandwidth_bytes / 2**20:.0f} MiB); `s3kv bench` measures many"
        )
        if left is None:
            self._note("bandwidth", "ok", told)
        else:
            remedy = "delete it by hand"
            self._note("bandwidth", "warning", f"{told}. {left}; {key} is left behind", remedy)

    def _resource(self, *, on_bucket: bool = False) -> str:
        bucket = self._config.bucket
        if zone_of(bucket) is not None:
            return f"arn:aws:s3express:*:*:bucket/{bucket}"
        arn = f"arn:aws:s3:::{bucket}"
        return arn if on_bucket else f"{arn}/{self._config.prefix}/*"

    def _fail(self, check: str, error: StoreError, action: str, *, on_bucket: bool = False) -> None:
        if zone_of(self._config.bucket) is not None:
            action = "s3express:CreateSession"
        remedy = remedy_for(error, action, self._resource(on_bucket=on_bucket))
        self._note(check, "fault", str(error), remedy)

    def _note(self, check: str, status: Status, detail: str, remedy: str = "") -> None:
        self._findings.append(Finding(check, status, detail, remedy))

    def _skip(self, *checks: str, why: str = "because of the finding above") -> None:
        for check in checks:
            self._note(check, "skipped", f"not asked: {why}")


async def _attempt(call: Awaitable[_T]) -> tuple[StoreError | None, _T | None]:
    try:
        return None, await call
    except StoreError as error:
        return error, None
