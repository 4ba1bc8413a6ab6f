"""`EncryptedDirectory`: a directory that holds objects encrypted, as `EncryptedStore` does."""

from __future__ import annotations

import os
from pathlib import Path

from s3kv.io.sources.encrypted_store import Decryption, encrypting
from s3kv.objects.encryption import Keyring, encrypted_bytes
from s3kv.place import Place
from s3kv.stores.disk import NO_LOCK, Directory, IsOver, Lock, Written
from s3kv.stores.store import ObjectInfo


class EncryptedDirectory(Directory):
    """The files of `directory`, encrypted with the keys of `keyring`."""

    def __init__(self, directory: Directory, keyring: Keyring) -> None:
        super().__init__(directory.path, directory.prefix, directory.most_bytes)
        self._forms = keyring.forms

    def file_of(self, key: str) -> Path:
        """The file that `read` reads; if there is none, the one that `write` writes."""
        files = [*map(super().file_of, [form.key for form in self._forms(key)] or [key])]
        return next(filter(os.path.exists, files), files[0])

    def file_bytes(self, nbytes: int) -> int:
        return encrypted_bytes(nbytes)

    def read(self, key: str, place: Place, is_over: IsOver, lock: Lock = NO_LOCK) -> int | None:
        """Read an object as `Directory.read` does; `UNREADABLE` bytes if it does not decrypt."""
        buffer = memoryview(bytearray(encrypted_bytes(place.nbytes)))
        for form in self._forms(key):
            if (nbytes := super().read(form.key, Place.of(buffer), is_over)) is not None:
                break
        else:
            return None
        with lock:
            if is_over():
                return None
            decryption = Decryption(form, None, place, buffer)
            decryption.begin(nbytes)
            return decryption.end(ObjectInfo(key, nbytes, 0.0)).nbytes

    def write(self, key: str, place: Place, is_over: IsOver) -> Written:
        form = self._forms(key)[0]
        buffer = memoryview(bytearray(encrypted_bytes(place.nbytes)))
        for _ in encrypting(form, place, buffer):
            if is_over():
                return "over"
        return super().write(form.key, Place.of(buffer), is_over)
