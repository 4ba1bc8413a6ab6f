"""Whether this host can use this bucket: every call the cache makes, made once.

The calls go through the store the cache itself uses, on a key of their own outside every namespace,
which is deleted at the end. Each finding says what to do about it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeVar

from s3kv.config import Config
from s3kv.errors import StoreDenied, StoreError, StoreMissing, StoreUnavailable
from s3kv.objects.store import ObjectStore

Status = Literal["ok", "warning", "fault", "skipped"]
"""warning: the cache works, with less. fault: it does not. skipped: could not be asked, because of
another finding or because it was not wanted."""

LATENCY_ROUNDS = 8
MAX_SKEW_S = 60.0
"""A quarter of an hour is where S3 refuses requests; drift is worth a word before that."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. remedy: what to do, empty when there is nothing to do."""

    check: str
    status: Status
    detail: str
    remedy: str = ""


def is_healthy(findings: Iterable[Finding]) -> bool:
    """Whether there is no fault; warnings do not count."""
    return all(finding.status != "fault" for finding in findings)


def probe_key(config: Config, token: str) -> str:
    """Where the examination writes: under the prefix, so that the policies that hold for the cache
    hold for it, and beside the namespaces, so that no engine ever looks there."""
    return f"{config.prefix}/doctor/{token}"


class BucketExamination:
    """One examination of one bucket. Belongs to one asyncio loop.

    store: stays open; the caller closes it. key: what no other examination uses (`probe_key`).
    clock_s: a monotonic clock, for latencies. wall_s: the time since the epoch as this host has it.
    """

    def __init__(
        self,
        store: ObjectStore,
        config: Config,
        key: str,
        *,
        clock_s: Callable[[], float],
        wall_s: Callable[[], float],
    ) -> None:
        self._store = store
        self._config = config
        self._key = key
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
        if not await self._list():
            self._skip("get", "put", "conditional put", "clock", "latency", "delete")
            return self._findings
        if read_only:
            await self._get(written=False)
            self._skip("put", "conditional put", "clock", "delete", why="--read-only")
            return self._findings
        written = await self._put()
        if written:
            await self._put_again()
        else:
            self._skip("conditional put", "clock", "latency")
        readable = await self._get(written=written)
        if written and readable:
            await self._clock()
            await self._latency()
        elif written:
            self._skip("clock", "latency")
        await self._delete(written=written)
        return self._findings

    async def _list(self) -> bool:
        """False when nothing else is worth asking: the bucket is not there, or nobody knows us."""
        error, _ = await _attempt(self._store.check())
        if error is None:
            self._note(
                "list", "ok", f"the bucket {self._config.bucket!r} is there and can be listed"
            )
            return True
        self._fail("list", error, "s3:ListBucket", on_bucket=True)
        return isinstance(error, StoreDenied) and _is_permission(error)

    async def _put(self) -> bool:
        data = memoryview(self._content)
        begin_s = self._wall_s()
        # As the cache does it: a bucket's policy may ask for the condition.
        error, _ = await _attempt(self._store.put(self._key, data, if_absent=True))
        self._written_s = (begin_s, self._wall_s())
        if error is not None:
            self._fail("put", error, "s3:PutObject")
            return False
        self._note("put", "ok", "an object was written")
        return True

    async def _put_again(self) -> None:
        data = memoryview(self._content)
        error, created = await _attempt(self._store.put(self._key, data, if_absent=True))
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
        error, nbytes = await _attempt(self._store.get_into(self._key, memoryview(buffer)))
        if error is not None:
            self._fail("get", error, "s3:GetObject")
            return False
        if not written:
            self._note("get", "ok", "a missing object is answered as one")
            return True
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
            error, _nbytes = await _attempt(self._store.get_into(self._key, buffer))
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

    async def _delete(self, *, written: bool) -> None:
        error, _ = await _attempt(self._store.delete(self._key))
        if error is None:
            self._note("delete", "ok", "an object can be deleted")
            return
        left = f"; {self._key} is left behind" if written else ""
        if isinstance(error, StoreDenied) and _is_permission(error):
            self._note(
                "delete",
                "warning",
                f"{error}{left}",
                f"allow s3:DeleteObject on {self._resource()}, if damaged objects are to be "
                "replaced (on_corrupt: delete); otherwise leave it",
            )
            return
        self._note("delete", "fault", f"{error}{left}", remedy_for(error, "", ""))

    def _resource(self, *, on_bucket: bool = False) -> str:
        arn = f"arn:aws:s3:::{self._config.bucket}"
        return arn if on_bucket else f"{arn}/{self._config.prefix}/*"

    def _fail(self, check: str, error: StoreError, action: str, *, on_bucket: bool = False) -> None:
        remedy = remedy_for(error, action, self._resource(on_bucket=on_bucket))
        self._note(check, "fault", str(error), remedy)

    def _note(self, check: str, status: Status, detail: str, remedy: str = "") -> None:
        self._findings.append(Finding(check, status, detail, remedy))

    def _skip(self, *checks: str, why: str = "because of the finding above") -> None:
        for check in checks:
            self._note(check, "skipped", f"not asked: {why}")


def remedy_for(error: StoreError, action: str, resource: str) -> str:
    """What to do about an error of the store, by its kind.

    action, resource: what the refused call needs, in the terms of an IAM policy.
    """
    if isinstance(error, StoreDenied) and _is_permission(error):
        return f"allow {action} on {resource} for these credentials"
    if isinstance(error, StoreDenied | StoreMissing):
        # What the store's answer means ends with what to do (`s3kv.objects.answers`).
        return str(error).rpartition(": ")[2]
    if isinstance(error, StoreUnavailable):
        return (
            "look at endpoint_url and at what is between here and the store (DNS, firewall, proxy, "
            "ca_bundle), or try later"
        )
    return "look at endpoint_url: it should name an S3 server"


def _is_permission(error: StoreDenied) -> bool:
    """Whether it is this call that is refused, rather than whoever makes it. A bare 403 may be
    either, and the calls that follow tell."""
    return "AccessDenied" in str(error) or "403 (no code)" in str(error)


async def _attempt(call: Awaitable[_T]) -> tuple[StoreError | None, _T | None]:
    try:
        return None, await call
    except StoreError as error:
        return error, None


def examine_host(
    config: Config, available_bytes: int, environment: Mapping[str, str]
) -> list[Finding]:
    """What of this host matters to an engine here. Pure.

    available_bytes: memory a process could still get.
    """
    return [_memory(config, available_bytes), _hash_seed(environment.get("PYTHONHASHSEED"))]


def _memory(config: Config, available_bytes: int) -> Finding:
    told = f"host_bytes is {config.host_bytes:,} per worker, {available_bytes:,} are available"
    if config.host_bytes <= available_bytes:
        return Finding("memory", "ok", told)
    remedy = "set host_bytes lower, or give the container more memory"
    return Finding("memory", "fault", told, remedy)


def _hash_seed(seed: str | None) -> Finding:
    if seed is None:
        told = "PYTHONHASHSEED is not set, as the sha256 algorithms allow"
        remedy = "with prefix_caching_hash_algo xxhash, set it to the same number on all instances"
        return Finding("hash seed", "ok", told, remedy)
    if seed == "random":
        return Finding(
            "hash seed",
            "warning",
            "PYTHONHASHSEED is 'random'",
            "set it to the same number on all instances, or unset it",
        )
    told = f"PYTHONHASHSEED is {seed!r}: instances with another do not share the cache"
    return Finding("hash seed", "ok", told)
