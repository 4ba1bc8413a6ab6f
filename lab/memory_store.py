"""Reference store: an `ObjectStore` that is a dictionary, for tests and benchmarks."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from s3kv.errors import StoreUnranged
from s3kv.place import Place
from s3kv.stores.store import ObjectInfo, Receiver, landing
from s3kv.stores.traffic import Traffic


class MemoryStore:
    """A bucket in a dictionary, for tests and as the definition of what `ObjectStore` means.

    clock: seconds since the epoch, asked once per write and per reading; an object's age is wall
    time.

    Every method yields to the loop once before it acts (`begin`) and not afterwards, so it acts
    atomically, as a real store does. asked: calls by verb, the name of the method. errors: by verb,
    what its next calls raise.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.time,  # noqa: TID251
        errors: Mapping[str, Sequence[Exception]] | None = None,
    ) -> None:
        self.traffic = Traffic()
        """Stays empty: nothing is sent."""
        self._clock = clock
        self._objects: dict[str, tuple[bytes, float]] = {}
        self.asked: Counter[str] = Counter()
        self.errors = {verb: list(raised) for verb, raised in (errors or {}).items()}

    async def begin(self, verb: str, key: str) -> None:
        """Called first by every method, with its key or prefix. Subclasses wait or raise here."""
        self.asked[verb] += 1
        await asyncio.sleep(0)
        if self.errors.get(verb):
            raise self.errors[verb].pop(0)

    def hold(self, key: str, data: bytes) -> None:
        """Write an object at once."""
        self._objects[key] = (data, self._clock())

    async def get_into(
        self, key: str, place: Place, receiver: Receiver | None = None, first: int | None = None
    ) -> ObjectInfo | None:
        await self.begin("get_into", key)
        found = self._objects.get(key)
        if found is None:
            return None
        data, info = found[0], self._told(key)
        if first is not None:
            data = data[first : first + place.nbytes]
            if first >= info.nbytes:
                raise StoreUnranged(f"{key} has {info.nbytes} bytes")
        _deliver(data, info, place, receiver)
        return info

    async def put(self, key: str, place: Place, *, if_absent: bool) -> bool:
        await self.begin("put", key)
        if if_absent and key in self._objects:
            return False
        self._objects[key] = (bytes(place), self._clock())
        return True

    async def refresh(self, key: str, modified_s: float) -> bool:
        await self.begin("refresh", key)
        if key not in self._objects or self._objects[key][1] > modified_s:
            return False
        self._objects[key] = (self._objects[key][0], self._clock())
        return True

    async def head(self, key: str) -> ObjectInfo | None:
        await self.begin("head", key)
        return self._told(key) if key in self._objects else None

    async def delete(self, key: str, *, if_etag: str | None = None) -> bool:
        await self.begin("delete", key)
        if key in self._objects and if_etag not in (None, self._info(key).etag):
            return False
        self._objects.pop(key, None)
        return True

    async def delete_many(self, objects: Sequence[ObjectInfo]) -> Sequence[str]:
        gone = [await self.delete(info.key, if_etag=info.etag or None) for info in objects]
        return [info.key for info, went in zip(objects, gone, strict=True) if not went]

    async def erase(self, key: str) -> bool:
        return await self.delete(key)

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[ObjectInfo]:
        await self.begin("list", prefix)
        # S3 sorts keys by their UTF-8 bytes.
        for key in sorted(self._objects, key=lambda k: k.encode()):
            if key.encode() <= after.encode():
                continue
            if key.startswith(prefix) and key in self._objects:
                yield self._info(key)

    async def folders(self, prefix: str, limit: int) -> Sequence[str]:
        await self.begin("folders", prefix)
        tails = (key[len(prefix) :] for key in self._objects if key.startswith(prefix))
        names = {tail.partition("/")[0] for tail in tails if "/" in tail}
        return sorted(names, key=lambda n: n.encode())[:limit]

    async def check(self, prefix: str | None = None) -> bool:
        await self.begin("check", prefix or "")
        return any(key.startswith(prefix or "") for key in self._objects)

    async def close(self) -> None:
        await self.begin("close", "")

    def _told(self, key: str) -> ObjectInfo:
        info = self._info(key)
        return dataclasses.replace(info, age_s=self._clock() - info.modified_s)

    def _info(self, key: str) -> ObjectInfo:
        data, modified_s = self._objects[key]
        return ObjectInfo(key, len(data), modified_s, f'"{hashlib.sha256(data).hexdigest()}"')


def _deliver(data: bytes, info: ObjectInfo, place: Place, receiver: Receiver | None) -> None:
    """Write the requested bytes of an object in two parts."""
    memory = landing(place, receiver, len(data), info.nbytes)
    if memory is None:
        return
    half = len(data) // 2
    for part in (range(half), range(half, len(data))):
        memory.write(data[part.start : part.stop], part.start)
        if receiver is not None and part:
            receiver.arrived(part.stop)


class Refusing(MemoryStore):
    """A bucket that refuses every call of one verb whose key contains `part`."""

    def __init__(self, verb: str, error: Exception, part: str = "") -> None:
        super().__init__(clock=lambda: 0.0)
        self._verb, self.error, self._part = verb, error, part

    async def begin(self, verb: str, key: str) -> None:
        await super().begin(verb, key)
        if verb == self._verb and self._part in key:
            raise self.error
