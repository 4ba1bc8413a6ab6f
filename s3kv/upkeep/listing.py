"""Walk over s3kv's objects in a bucket, with retries.

Requests are retried while the store is unavailable: a listing of millions of objects takes
thousands of requests, and one of them will fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

from s3kv.errors import StoreError, StoreUnavailable
from s3kv.objects import keys
from s3kv.stores.store import Inventory, ObjectInfo

PAUSES_S = (0.2, 1.0, 5.0)
"""Pause before each retry. Tools send requests one at a time, so they need no jitter."""
Checkpoint = Callable[[], Awaitable[None]]
_CHECKPOINT_EVERY = 1000
_T = TypeVar("_T")


async def tried(
    call: Callable[[], Awaitable[_T]],
    pauses_s: Iterable[float] | None = None,
    may_pause: Callable[[float], bool] = lambda pause_s: True,
) -> _T:
    """The result of `call()`, repeated after each pause (None: `PAUSES_S`) while the store is
    unavailable and `may_pause` allows the pause. Raises the last `StoreError`."""
    for pause_s in PAUSES_S if pauses_s is None else pauses_s:
        try:
            return await call()
        except StoreUnavailable:
            if not may_pause(pause_s):
                raise
        await asyncio.sleep(pause_s)
    return await call()


async def listed(store: Inventory, prefix: str) -> AsyncIterator[ObjectInfo]:
    """The objects of `store.list(prefix)`, each once, also if the store is unavailable meanwhile.
    Raises `StoreError`, also if a listing without key order breaks off, as it cannot be resumed."""
    last, failures = "", 0
    while True:
        resumed = last
        try:
            async for info in store.list(prefix, resumed):
                if resumed and info.key.encode() <= resumed.encode():
                    raise StoreError(f"the listing of {prefix} broke off and cannot be resumed")
                last, failures = info.key, 0
                yield info
            return
        except StoreUnavailable:
            if failures == len(PAUSES_S):
                raise
        await asyncio.sleep(PAUSES_S[failures])
        failures += 1


async def owned(
    store: Inventory, prefix: str, under: str | None = None, checkpoint: Checkpoint | None = None
) -> AsyncIterator[tuple[keys.Namespace, keys.ChunkAddress | None, ObjectInfo]]:
    """Every object of the namespaces under `prefix`, and no foreign object. The address is that of
    a chunk or item; None for a manifest or shape. under: list only keys that start with this.
    checkpoint: awaited after every 1,000 keys that are listed, foreign ones included."""
    seen = 0
    async for info in listed(store, under or keys.all_namespaces(prefix)):
        seen += 1
        if checkpoint is not None and seen % _CHECKPOINT_EVERY == 0:
            await checkpoint()
        address = keys.parse(info.key)
        namespace = address.namespace if address else keys.parse_sign(info.key)
        if namespace is not None and namespace.prefix == prefix:
            yield namespace, address, info


async def chunks(
    store: Inventory, prefix: str, under: str | None = None, checkpoint: Checkpoint | None = None
) -> AsyncIterator[tuple[keys.ChunkAddress, ObjectInfo]]:
    """Every chunk and item of the namespaces under `prefix`. The arguments are those of `owned`."""
    async for _, address, info in owned(store, prefix, under, checkpoint):
        if address is not None:
            yield address, info
