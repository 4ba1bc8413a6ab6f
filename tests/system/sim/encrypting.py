"""Encryption in a fleet: the master keys of its engines, and the objects behind encrypted ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from s3kv.messages import JobKind
from s3kv.objects.encryption import EncryptedForm, Keyring
from tests.system.encrypted_form import decrypted, encrypted, encrypted_key

Secrets = tuple[bytes, ...]
"""The master keys of an engine; none: it does not encrypt."""
OLD, NEW, OTHER = (bytes([number]) * 32 for number in range(1, 4))
MIXTURES: tuple[tuple[Secrets, ...], ...] = (
    *[((),)] * 5,
    ((NEW,),),
    ((NEW,), (NEW, OLD), (OLD,)),
    ((NEW, OLD), (OLD,)),
    ((NEW,), (OTHER,)),
    ((NEW,), (NEW, OLD), ()),
)
"""Of the engines of a fleet. Half of all fleets do not encrypt."""
SEGMENTS_BYTES = (64, 256, 1024)

CheckSlot = Callable[[memoryview, JobKind], None]
"""Sees the memory that a job of this kind is about to use."""


class Names:
    """The objects behind the keys of encrypted ones. segment_bytes: of a fleet."""

    def __init__(self, segment_bytes: int, accuse: Callable[[str], None]) -> None:
        self._segment_bytes, self._accuse = segment_bytes, accuse
        self._known: dict[str, tuple[str, bytes]] = {}

    def of(self, key: str, secrets: Secrets) -> list[str]:
        """The keys that an object has in the bucket, that of a new one first."""
        if not secrets or not key.endswith(".safetensors"):
            return [key]
        names = [encrypted_key(key, secret) for secret in secrets]
        self._known |= {name: (key, secret) for name, secret in zip(names, secrets, strict=True)}
        return names

    def object_of(self, key: str) -> str:
        """The key of the object inside of an encrypted one; of any other this key."""
        return self._known[key][0] if key in self._known else key

    def is_last(self, key: str, secrets: Secrets) -> bool:
        """Whether an engine with these keys looks no further than here."""
        return not secrets or self.object_of(key) == key or self._known[key][1] == secrets[-1]

    def opened(self, key: str, data: bytes) -> bytes | None:
        """The object inside of an encrypted one (None: damaged); any other as it is."""
        if key not in self._known:
            return None if ".encrypted." in key else data
        plain_key, secret = self._known[key]
        return decrypted(plain_key, secret, data, self._segment_bytes)

    def stored(self, key: str, data: bytes, secret: bytes) -> tuple[str, bytes]:
        """The key and the bytes of the encrypted object."""
        (name,) = self.of(key, (secret,))
        return name, encrypted(key, secret, data, self._segment_bytes)


class WatchedKeyring(Keyring):
    def __init__(self, secrets: Secrets, names: Names, check_slot: CheckSlot) -> None:
        super().__init__(secrets)
        self._secrets, self._names, self._check_slot = secrets, names, check_slot

    def _forms(self, key: str) -> tuple[EncryptedForm, ...]:
        forms = super()._forms(key)
        expected = self._names.of(key, self._secrets) if forms else []
        if [form.key for form in forms] != expected:
            self._names._accuse(f"the names of {key} are those of another object")
        for form in forms:
            form._cipher = _WatchedCipher(form._cipher, self._check_slot)
        return forms


class _WatchedCipher:
    def __init__(self, cipher: Any, check_slot: CheckSlot) -> None:
        self._cipher, self._check_slot = cipher, check_slot

    def encrypt_into(self, nonce: bytes, data: Any, said: bytes, target: Any) -> None:
        if isinstance(data, memoryview):
            self._check_slot(data, JobKind.UPLOAD)
        self._cipher.encrypt_into(nonce, data, said, target)

    def decrypt_into(self, nonce: bytes, data: Any, said: bytes, target: Any) -> None:
        self._check_slot(memoryview(target), JobKind.FETCH)
        self._cipher.decrypt_into(nonce, data, said, target)
