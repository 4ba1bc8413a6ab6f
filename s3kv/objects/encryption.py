"""Encrypted objects: objects of either form under AES-GCM, with names that reveal nothing.

An encrypted object is a valid safetensors file with one tensor of bytes. After a header of fixed
length come the segments of the inner object, each as nonce, ciphertext and tag of AES-256-GCM (NIST
SP 800-38D):

    | header | nonce | segment 0 | tag | nonce | segment 1 | tag | …

HKDF-SHA256 (RFC 5869) derives from a master key an id, which the header contains, a key of names,
and a key for each object:

    name    HMAC-SHA256 of namespace and block hash with the key of names; replaces the hash
    key     HKDF over namespace, coverage, shard and block hash

Neither reveals the block hash. vLLM computes it from the prompt up to the block, and from the
request's `cache_salt`. So the master key alone decrypts nothing: it takes prompt and salt as well.

The associated data of a segment is its number and the object's length. With the key, they bind a
segment to its place: after a move, a cut or a swap it does not decrypt. Nonces are random. A key
encrypts the segments of one object, some thousands if it is written repeatedly, so fewer than one
in 10^20 objects uses a nonce twice. Pure except for the nonces.
"""

from __future__ import annotations

import hmac
import importlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from s3kv.errors import ConfigError
from s3kv.objects import keys
from s3kv.objects.keys import ChunkAddress
from s3kv.types import fastest_s

MASTER_KEY_BYTES = 32
SEGMENT_BYTES = 2**20
"""Length of every segment except the last."""
HEADER_BYTES = 256
"""Length of the header, enough for S3's largest object."""
REMEDY = "pip install 'vllm-s3kv[encryption]'"
_NONCE_BYTES, _TAG_BYTES = 12, 16
_EXTRA_BYTES = _NONCE_BYTES + _TAG_BYTES
_ID_CONTEXT, _NAMES_CONTEXT, _OBJECT_CONTEXT = (
    f"s3kv 2026-11 {use}".encode() for use in ("id of a master key", "names", "object ")
)


def encrypted_bytes(nbytes: int) -> int:
    """Length of the encrypted form of an object of `nbytes`, at least 1."""
    return HEADER_BYTES + nbytes + _EXTRA_BYTES * -(-nbytes // SEGMENT_BYTES)


def decrypted_bytes(nbytes: int) -> int | None:
    """Inverse of `encrypted_bytes`; None for a length that it never returns."""
    segments = -(-(nbytes - HEADER_BYTES) // (SEGMENT_BYTES + _EXTRA_BYTES))
    plain = nbytes - HEADER_BYTES - _EXTRA_BYTES * segments
    return plain if plain > 0 and encrypted_bytes(plain) == nbytes else None


def encrypted_range(bounds: range) -> range:
    """The bytes of an encrypted object that hold `bounds` of the inner object, and the header if
    these begin at 0. `bounds` starts at a segment, and ends before one or with the object."""
    assert bounds.start % SEGMENT_BYTES == 0, bounds
    return range(encrypted_bytes(bounds.start) if bounds.start else 0, encrypted_bytes(bounds.stop))


class EncryptedForm:
    """The encrypted form of one object, under one master key. Its methods may be called in any
    thread, and hold the GIL for microseconds. key: of the encrypted object, in the bucket."""

    def __init__(self, key: str, master_id: str, cipher: Any) -> None:
        self.key = key
        self._id, self._cipher = master_id, cipher

    def header(self, nbytes: int) -> bytes:
        """The header of the encrypted form of an object of `nbytes`."""
        stored = encrypted_bytes(nbytes) - HEADER_BYTES
        metadata = {"s3kv.encrypted": "aes-256-gcm", "s3kv.key": self._id}
        tensor = {"dtype": "U8", "shape": [stored], "data_offsets": [0, stored]}
        text = json.dumps({"__metadata__": metadata, "encrypted": tensor}, separators=(",", ":"))
        return (HEADER_BYTES - 8).to_bytes(8, "little") + text.encode().ljust(HEADER_BYTES - 8)

    def encrypt(
        self,
        data: bytes | memoryview,
        target: memoryview,
        number: int,
        object_bytes: int,
        nonce: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """Encrypt segment `number` of an object of `object_bytes` into all of `target`."""
        target[:_NONCE_BYTES] = drawn = nonce(_NONCE_BYTES)
        said = _associated(number, object_bytes)
        self._cipher.encrypt_into(drawn, data, said, target[_NONCE_BYTES:])

    def decrypt(
        self, stored: memoryview, target: memoryview | bytearray, number: int, object_bytes: int
    ) -> bool:
        """Decrypt segment `number`, as `encrypt` made it, into all of `target`. False if it is not
        that segment of this object; the content of `target` is then undefined."""
        nonce, said = bytes(stored[:_NONCE_BYTES]), _associated(number, object_bytes)
        try:
            self._cipher.decrypt_into(nonce, stored[_NONCE_BYTES:], said, target)
        except _cryptography().InvalidTag:
            return False
        return True


def _associated(number: int, object_bytes: int) -> bytes:
    return number.to_bytes(8, "little") + object_bytes.to_bytes(8, "little")


def segments_in(bounds: range) -> Iterator[tuple[int, range, range]]:
    """The segments within `bounds`, as for `encrypted_range`: for each its number, its bytes
    relative to `bounds`, and its stored bytes relative to `encrypted_range`."""
    begin = encrypted_range(bounds).start
    for at in range(bounds.start, bounds.stop, SEGMENT_BYTES):
        end = min(at + SEGMENT_BYTES, bounds.stop)
        stored = range(encrypted_bytes(at) if at else HEADER_BYTES, encrypted_bytes(end))
        inside = range(at - bounds.start, end - bounds.start)
        yield at // SEGMENT_BYTES, inside, range(stored.start - begin, stored.stop - begin)


@dataclass(frozen=True, slots=True)
class MasterKey:
    """One master key. Its repr hides it. id: identifies the key without revealing it."""

    secret: bytes = field(repr=False)
    id: str = field(init=False)
    _names: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != MASTER_KEY_BYTES:
            raise ValueError(f"{len(self.secret)} bytes: a master key has {MASTER_KEY_BYTES}")
        object.__setattr__(self, "id", _derived(self.secret, _ID_CONTEXT)[:4].hex())
        object.__setattr__(self, "_names", _derived(self.secret, _NAMES_CONTEXT))

    def form_of(self, address: ChunkAddress) -> EncryptedForm:
        """The encrypted form of the object with this address."""
        namespace, (coverage, block_hash) = address.namespace, address.key
        said = f"{namespace.digest} ".encode() + block_hash
        name = address.key._replace(block_hash=hmac.digest(self._names, said, "sha256"))
        key = namespace.chunk(name, address.shard, is_encrypted=True)
        identity = f"{namespace.digest} {coverage} {address.shard} ".encode() + block_hash
        secret = _derived(self.secret, _OBJECT_CONTEXT + identity)
        return EncryptedForm(key, self.id, _cryptography().AESGCM(secret))


class Keyring:
    """The master keys of an engine: the first one encrypts, all decrypt. Raises `ValueError` for no
    keys, equal keys or keys of another length, and `ConfigError` if the package cryptography is
    missing."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        if not secrets or len(set(secrets)) < len(secrets):
            raise ValueError("a keyring needs one or more keys that differ from each other")
        _cryptography()
        self.keys = tuple(map(MasterKey, secrets))
        self.forms = lru_cache(maxsize=1024)(self._forms)
        """The encrypted forms of the object with this key, the one for new objects first; empty
        unless the key is that of a plain or compressed object."""

    def _forms(self, key: str) -> tuple[EncryptedForm, ...]:
        address = keys.parse(key)
        if address is None or address.is_encrypted:
            return ()
        return tuple(master.form_of(address) for master in self.keys)


def speeds(clock: Callable[[], float]) -> tuple[float, float]:
    """Bytes per second that one thread encrypts, and decrypts: the best of three segments. clock:
    in seconds. Raises `ConfigError` if the package cryptography is missing."""
    form = EncryptedForm("", "", _cryptography().AESGCM(bytes(MASTER_KEY_BYTES)))
    plain = memoryview(bytearray(SEGMENT_BYTES))
    stored = memoryview(bytearray(SEGMENT_BYTES + _EXTRA_BYTES))
    encrypting_s = fastest_s(lambda: form.encrypt(plain, stored, 0, SEGMENT_BYTES), clock)
    decrypting_s = fastest_s(lambda: form.decrypt(stored, plain, 0, SEGMENT_BYTES), clock)
    return SEGMENT_BYTES / encrypting_s, SEGMENT_BYTES / decrypting_s


def _derived(secret: bytes, info: bytes) -> bytes:
    """HKDF-SHA256 without a salt, 32 bytes."""
    package = _cryptography()
    return bytes(package.HKDF(package.SHA256(), 32, None, info).derive(secret))


class _Cryptography:
    """The names of the package cryptography that are in use."""

    def __init__(self) -> None:
        primitives = "cryptography.hazmat.primitives"
        self.InvalidTag = importlib.import_module("cryptography.exceptions").InvalidTag
        self.AESGCM = importlib.import_module(f"{primitives}.ciphers.aead").AESGCM
        self.HKDF = importlib.import_module(f"{primitives}.kdf.hkdf").HKDF
        self.SHA256 = importlib.import_module(f"{primitives}.hashes").SHA256
        if not hasattr(self.AESGCM, "decrypt_into"):
            raise ImportError("a version before 47")


@lru_cache(maxsize=1)
def _cryptography() -> _Cryptography:
    try:
        return _Cryptography()
    except ImportError as error:
        raise ConfigError(
            f"encryption is 'aes-gcm', which needs the package cryptography, 47 or later: {REMEDY},"
            " or set encryption to 'off'"
        ) from error
