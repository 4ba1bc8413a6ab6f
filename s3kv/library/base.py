"""Base of the library's stores: how they are opened, how they check a hash, and how they end."""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import Coroutine, Generator, Mapping
from typing import Any, TypeVar

from s3kv.errors import ConfigError
from s3kv.library.host_tier import HostTier
from s3kv.objects.keys import canonical_json, checked_key, fingerprint_digest
from s3kv.types import ChunkKey, Location

S = TypeVar("S", bound="Store")

MAX_NAMESPACE_BYTES = 64 * 2**10
"""Longest namespace, as JSON. It travels to the I/O process in one frame, and into the manifest."""


class Store:
    """A store on a bucket, made by `open` and ended by `close`. All methods are for the loop that
    opened it.

    hosts: the host tiers of the store. The first is the one that `counters` and `where` speak of.
    """

    def __init__(self, group: int, *hosts: HostTier) -> None:
        self._group = group
        self._hosts = hosts

    async def __aenter__(self: S) -> S:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def counters(self) -> Mapping[str, int]:
        """Counts of events so far, by the names of the metrics. Can be read after `close`, too."""
        return self._hosts[0].counters

    async def close(self) -> None:
        """End all work under way and give everything back. Uploads get the time they need, up to
        `drain_timeout_s`; the log says how much did not get to the bucket.

        Fetches are cancelled, and calls that wait for one get a miss. Calls that wait for room or
        in `flush` raise `ClosedError`. Idempotent. A cancelled `close`, too, ends only when the
        store is closed.
        """
        await asyncio.gather(*(host.close() for host in self._hosts))

    def _key(self, content_hash: bytes) -> ChunkKey:
        self._check_open()
        return checked_key(self._group, content_hash)

    def _check_open(self) -> None:
        self._hosts[0].pump.check_open()

    def _location(self, key: ChunkKey, *, device: bool = False) -> Location:
        host = self._hosts[0]
        return Location(device=device, host=host.holds(key), bucket=host.in_bucket(key))


class Opening(Coroutine[Any, Any, S]):
    """A store about to be opened. Use it once, in one of two ways:

        store = await Store.open(...)            # and then: await store.close()
        async with Store.open(...) as store:     # which closes it

    It is a coroutine, so `asyncio.create_task` and similar functions accept it.
    """

    __slots__ = ("_opening", "_store")

    def __init__(self, opening: Coroutine[Any, Any, S]) -> None:
        self._opening = opening

    def __await__(self) -> Generator[Any, Any, S]:
        return self._opening.__await__()

    async def __aenter__(self) -> S:
        self._store = await self._opening
        return self._store

    async def __aexit__(self, *_: object) -> None:
        await self._store.close()

    def send(self, value: Any) -> Any:
        return self._opening.send(value)

    def throw(self, *error: Any) -> Any:
        return self._opening.throw(*error)

    def close(self) -> None:
        self._opening.close()


def plain_namespace(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The namespace as a plain dictionary. Raises `ConfigError` unless it consists of JSON values
    with text keys, or if it is longer than `MAX_NAMESPACE_BYTES`.
    """
    try:
        plain = dict(namespace)
        fingerprint_digest(plain)
        nbytes = len(canonical_json(plain))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"namespace is {reprlib.repr(namespace)}: allowed is a mapping of texts to numbers, "
            f"texts, booleans, None, and lists and mappings of these ({error})"
        ) from error
    if nbytes > MAX_NAMESPACE_BYTES:
        raise ConfigError(
            f"namespace has {nbytes} bytes as JSON: allowed are at most {MAX_NAMESPACE_BYTES}. "
            "A digest of a long description identifies it as well"
        )
    return plain
