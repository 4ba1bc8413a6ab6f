"""Integrity modes (the setting `integrity`): an object's digest and its protection from forgery.

    xxh3          XXH3-128 of each segment. Finds accidents: a flipped bit, a lost tail. Anyone can
                  compute it, so anyone with write access to the bucket can forge a valid object.
    blake3-keyed  BLAKE3 with a secret key over the header, the segment's number and the segment.
                  Without the secret, no object that passes can be made, not even from other such
                  objects: the header names its chunk, rank and namespace.
    none          No digest. Length and header are compared, the payload is not verified.

The namespace depends on the mode and on a fingerprint of the key. Engines with different modes or
secrets therefore never see each other's objects, and a new secret starts with an empty namespace
instead of objects that fail. Pure; digests are computed without the GIL.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any, Literal

import xxhash

from s3kv.config import Config
from s3kv.errors import ConfigError
from s3kv.secrets import integrity_secret

Mode = Literal["xxh3", "blake3-keyed", "none"]

_KEY_CONTEXT = "s3kv 2026-11 chunk integrity key"
_KEY_ID_MESSAGE = b"s3kv key id"
_DIGEST_CHARS: dict[Mode, int] = {"xxh3": 32, "blake3-keyed": 64, "none": 0}


@dataclass(frozen=True, slots=True)
class Integrity:
    """A mode and, for "blake3-keyed", its 32-byte key, which is derived from the secret. Plain
    data; its repr hides the key. `of` makes one from the settings."""

    mode: Mode = "xxh3"
    key: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, config: Config) -> Integrity:
        """The mode and key that the settings name. Reads the secret. Raises `ConfigError` if the
        mode needs a secret or a package that is missing."""
        mode: Mode = config.integrity
        if mode != "blake3-keyed":
            return cls(mode)
        secret = integrity_secret(config)
        return cls(mode, _blake3()(secret, derive_key_context=_KEY_CONTEXT).digest())

    @property
    def algorithm(self) -> str:
        """Name of the algorithm in an object's header."""
        return "xxh3-128" if self.mode == "xxh3" else self.mode

    @property
    def digest_chars(self) -> int:
        """Length of one segment's digest."""
        return _DIGEST_CHARS[self.mode]

    def digest(self, header: bytes, number: int, segment: memoryview) -> str:
        """The digest of one segment, in lower-case hex; empty for the mode "none". header: the
        whole header, without digests. number: the segment's place in the object."""
        if self.mode == "xxh3":
            return xxhash.xxh3_128_hexdigest(segment)
        if self.mode == "none":
            return ""
        keyed = _blake3()(header, key=self.key).update(number.to_bytes(8, "little"))
        return str(keyed.update(segment).hexdigest())

    def identity(self) -> dict[str, Any]:
        """The part of a fingerprint that names the mode and, by a digest, the key. Keys are
        told apart without being revealed."""
        identity: dict[str, Any] = {"mode": self.mode}
        if self.mode == "blake3-keyed":
            identity["key_id"] = _blake3()(_KEY_ID_MESSAGE, key=self.key).hexdigest(length=8)
        return identity


XXH3 = Integrity()


def _blake3() -> Any:
    try:
        return importlib.import_module("blake3").blake3
    except ImportError as error:
        raise ConfigError(
            "integrity is 'blake3-keyed', which needs the package blake3: pip install "
            "'vllm-s3kv[integrity]', or set integrity to 'xxh3'"
        ) from error
