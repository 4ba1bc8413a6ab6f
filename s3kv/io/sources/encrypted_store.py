"""`EncryptedStore`: an object store that encrypts and decrypts its objects.

Encrypted bytes pass through memory beside the place: segments are decrypted into the place while
others arrive. Callers use the keys and lengths of the objects inside. Only a listing returns those
of the encrypted objects, and they may be used like any others.

While there are several master keys, an object that is absent under the first key is also requested
under the others, at the cost of one request each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

from s3kv.io.sources.staging import StagingMemory
from s3kv.objects.encryption import (
    HEADER_BYTES,
    SEGMENT_BYTES,
    EncryptedForm,
    Keyring,
    decrypted_bytes,
    encrypted_bytes,
    encrypted_range,
    segments_in,
)
from s3kv.place import Place
from s3kv.stores.store import UNREADABLE, ObjectInfo, ObjectStore, Receiver

MOST_READ_BYTES = 256 * 2**20
"""Limit on memory for encrypted objects being read, per I/O process. Further reads wait."""
MOST_WRITTEN_BYTES = 128 * 2**20
"""The same for objects being written: no read waits for a write, which may be slow or hang."""


class EncryptedStore:
    """The objects of `store`, encrypted with the keys of `keyring`. Other objects, such as
    manifests, pass as they are. Belongs to one asyncio loop. An object that does not decrypt has
    the length `UNREADABLE`."""

    def __init__(self, store: ObjectStore, keyring: Keyring) -> None:
        self._store, self._forms = store, keyring.forms
        self._read, self._written = map(StagingMemory, (MOST_READ_BYTES, MOST_WRITTEN_BYTES))
        # These work on the encrypted objects, as a listing has them, or on the store itself.
        self.delete_many, self.list, self.folders = store.delete_many, store.list, store.folders
        self.traffic, self.check, self.close = store.traffic, store.check, store.close

    def _first(self, key: str) -> str:
        forms = self._forms(key)
        return forms[0].key if forms else key

    async def get_into(
        self, key: str, place: Place, receiver: Receiver | None = None, first: int | None = None
    ) -> ObjectInfo | None:
        forms = self._forms(key)
        if not forms:
            return await self._store.get_into(key, place, receiver, first)
        bounds = None if first is None else range(first, first + place.nbytes)
        stored = encrypted_range(bounds or range(place.nbytes))
        begin = None if first is None else stored.start
        async with self._read.lease([len(stored)]) as (buffer,):
            for form in forms:
                decryption = Decryption(form, bounds, place, buffer, receiver)
                info = await self._store.get_into(form.key, Place.of(buffer), decryption, begin)
                if info is not None:
                    return decryption.end(info)
        return None

    async def put(self, key: str, place: Place, *, if_absent: bool) -> bool:
        forms = self._forms(key)
        if not forms:
            return await self._store.put(key, place, if_absent=if_absent)
        async with self._written.lease([encrypted_bytes(place.nbytes)]) as (buffer,):
            for _ in encrypting(forms[0], place, buffer):
                await asyncio.sleep(0)  # let other jobs run
            return await self._store.put(forms[0].key, Place.of(buffer), if_absent=if_absent)

    async def head(self, key: str) -> ObjectInfo | None:
        forms = self._forms(key)
        if not forms:
            return await self._store.head(key)
        for form in forms:
            if (info := await self._store.head(form.key)) is not None:
                return replace(info, nbytes=decrypted_bytes(info.nbytes) or UNREADABLE)
        return None

    async def refresh(self, key: str, modified_s: float) -> bool:
        return await self._store.refresh(self._first(key), modified_s)

    async def delete(self, key: str, *, if_etag: str | None = None) -> bool:
        return await self._store.delete(self._first(key), if_etag=if_etag)

    async def erase(self, key: str) -> bool:
        return await self._store.erase(self._first(key))


def encrypting(form: EncryptedForm, place: Place, buffer: memoryview) -> Iterator[None]:
    """Encrypt the object in `place` into all of `buffer`; yields after each segment."""
    nbytes = place.nbytes
    buffer[:HEADER_BYTES] = form.header(nbytes)
    for number, inside, stored in segments_in(range(nbytes)):
        views = place.cut(inside.start, inside.stop).views
        data = views[0] if len(views) == 1 else b"".join(views)
        form.encrypt(data, buffer[stored.start : stored.stop], number, nbytes)
        yield


class Decryption:
    """Receiver of an encrypted object, or of a range of one, that decrypts it into the place of the
    object inside. Its calls are made in one thread at a time.

    bounds: the bytes of the object inside to read, as for `encrypted_range`; None: all, and an
    object longer than `place` is left unread. place: memory for these bytes. buffer: memory for the
    encrypted bytes. receiver: receiver of the bytes inside, if any.
    """

    def __init__(
        self,
        form: EncryptedForm,
        bounds: range | None,
        place: Place,
        buffer: memoryview,
        receiver: Receiver | None = None,
    ) -> None:
        self._form, self._place, self._is_whole = form, place, bounds is None
        self._bounds = bounds or range(place.nbytes)
        self._buffer, self._receiver = buffer, receiver
        self._nbytes = 0
        """Length of the object inside."""
        self._target: Place | None = None
        self._parts: list[tuple[int, range, range]] = []
        """The segments to decrypt, in reverse order."""
        self._is_bad = False

    def begin(self, nbytes: int) -> Place | None:
        self._nbytes = decrypted_bytes(nbytes) or 0
        if not self._nbytes:
            return None
        receiver = self._receiver
        memory = self._place if receiver is None else receiver.begin(self._nbytes)
        bounds = range(self._bounds.start, min(self._bounds.stop, self._nbytes))
        if memory is None or len(bounds) > memory.nbytes:
            return None
        if bounds.stop < self._nbytes and (self._is_whole or bounds.stop % SEGMENT_BYTES):
            return None  # it is longer than expected
        self._target = memory
        self._parts = [*segments_in(bounds)][::-1]
        return Place.of(self._buffer)

    def arrived(self, nbytes: int) -> None:
        right_to = self._decrypt(nbytes)
        if right_to and self._receiver is not None:
            self._receiver.arrived(right_to)

    def _decrypt(self, arrived_bytes: int) -> int:
        """Decrypt the segments within the first `arrived_bytes` of the buffer. Returns the number
        of correct bytes in the place; 0 if none were added."""
        right_to = 0
        while self._parts and self._parts[-1][2].stop <= arrived_bytes and not self._is_bad:
            number, inside, stored = self._parts.pop()
            self._is_bad = not self._decrypt_segment(number, inside, stored)
            right_to = 0 if self._is_bad else inside.stop
        return right_to

    def _decrypt_segment(self, number: int, inside: range, stored: range) -> bool:
        form, nbytes = self._form, self._nbytes
        assert self._target is not None
        if number == 0 and self._buffer[:HEADER_BYTES] != form.header(nbytes):
            return False
        target = self._target.cut(inside.start, inside.stop)
        data = self._buffer[stored.start : stored.stop]
        if len(target.views) == 1:
            return form.decrypt(data, target.views[0], number, nbytes)
        plain = bytearray(len(inside))
        is_right = form.decrypt(data, plain, number, nbytes)
        target.write(plain)
        return is_right

    def end(self, info: ObjectInfo) -> ObjectInfo:
        """The metadata of the object inside. Called after all bytes have arrived, unless `begin`
        returned no memory or was not called."""
        self._decrypt(len(self._buffer))
        nbytes = decrypted_bytes(info.nbytes)
        if nbytes is None or self._is_bad or self._parts:
            nbytes = UNREADABLE
        return replace(info, nbytes=nbytes)
