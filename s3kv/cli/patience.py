"""How the tools ask a bucket: again, when it did not answer. A listing of millions of objects is
thousands of requests, of which one is always unlucky."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from s3kv.errors import StoreError, StoreUnavailable
from s3kv.objects import keys
from s3kv.objects.store import ObjectInfo, ObjectStore

_T = TypeVar("_T")

PAUSES_S = (0.2, 1.0, 5.0)
"""Before each further try. One tool asks at a time, so nothing has to be spread out."""


async def tried(call: Callable[[], Awaitable[_T]]) -> _T:
    """`call()`, again when the store is unavailable. Raises `StoreError`."""
    for pause_s in PAUSES_S:
        try:
            return await call()
        except StoreUnavailable:
            await asyncio.sleep(pause_s)
    return await call()


async def listed(store: ObjectStore, prefix: str) -> AsyncIterator[ObjectInfo]:
    """`store.list(prefix)`, taken up where it broke off when the store is unavailable.

    Each object comes once. Raises `StoreError`, also where a listing that broke off cannot be taken
    up, because the store has no order of keys.
    """
    last, failures = "", 0
    while True:
        resumed = last
        try:
            async for info in store.list(prefix, resumed):
                if resumed and info.key.encode() <= resumed.encode():
                    raise StoreError(f"the listing of {prefix} broke off and cannot be taken up")
                last, failures = info.key, 0
                yield info
            return
        except StoreUnavailable:
            if failures == len(PAUSES_S):
                raise
        await asyncio.sleep(PAUSES_S[failures])
        failures += 1


async def chunks(
    store: ObjectStore, prefix: str, under: str | None = None
) -> AsyncIterator[tuple[keys.ChunkAddress, ObjectInfo]]:
    """Every chunk and item of the namespaces under `prefix`, and nothing that is not ours.

    under: only keys that start with this.
    """
    async for info in listed(store, under or keys.all_namespaces(prefix)):
        address = keys.parse(info.key)
        if address is not None and address.namespace.prefix == prefix:
            yield address, info
