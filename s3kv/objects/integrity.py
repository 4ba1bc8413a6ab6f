"""What an object's digest is made of, and who could forge it. The setting `integrity`.

    xxh3          XXH3-128 of the payload. Finds accidents: a flipped bit, a lost tail. Anyone can
                  compute it, so anyone who may write to the bucket can make an object that passes.
    blake3-keyed  BLAKE3 with a secret key over the header and the payload. Without the secret
                  nobody makes an object that passes, not even out of others that do: the header
                  says which chunk of which rank in which namespace it is.
    none          No digest. Length and header are compared, the payload is believed.

The mode is part of the namespace, and so is a fingerprint of the key: engines with different modes
or secrets never see each other's objects, and a new secret begins with an empty namespace instead
of a bucket full of objects that fail. Pure; digests are computed without the GIL.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import xxhash

from s3kv.config import Config
from s3kv.errors import ConfigError

Mode = Literal["xxh3", "blake3-keyed", "none"]

_KEY_CONTEXT = "s3kv 2026-11 chunk integrity key"
_KEY_ID_MESSAGE = b"s3kv key id"
_ALGORITHMS: dict[Mode, str] = {"xxh3": "xxh3-128", "blake3-keyed": "blake3-keyed", "none": "none"}
_DIGEST_CHARS: dict[Mode, int] = {"xxh3": 32, "blake3-keyed": 64, "none": 0}


@dataclass(frozen=True, slots=True)
class Integrity:
    """A mode and, for "blake3-keyed", its 32-byte key. Plain data; its repr hides the key.

    Made from settings by `of`. Holds the key derived from the secret, never the secret.
    """

    mode: Mode = "xxh3"
    key: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, config: Config) -> Integrity:
        """Raises `ConfigError` when the mode needs a secret or a package that is not there."""
        mode = cast(Mode, config.integrity)  # Config has checked it
        if mode != "blake3-keyed":
            return cls(mode)
        secret = config.read_integrity_secret()
        return cls(mode, _blake3()(secret, derive_key_context=_KEY_CONTEXT).digest())

    @property
    def algorithm(self) -> str:
        """As it stands in an object's header."""
        return _ALGORITHMS[self.mode]

    @property
    def digest_chars(self) -> int:
        return _DIGEST_CHARS[self.mode]

    def digest(self, header: bytes, payload: memoryview) -> str:
        """What the header is to say of itself and the payload, in lower-case hex.

        header: the whole of it, with nothing where the digest will be.
        """
        if self.mode == "xxh3":
            return xxhash.xxh3_128_hexdigest(payload)
        if self.mode == "none":
            return ""
        return str(_blake3()(header, key=self.key).update(payload).hexdigest())

    def identity(self) -> dict[str, Any]:
        """Its part of a fingerprint. Tells keys apart without giving anything of them away."""
        if self.mode != "blake3-keyed":
            return {"mode": self.mode}
        return {
            "mode": self.mode,
            "key_id": _blake3()(_KEY_ID_MESSAGE, key=self.key).hexdigest(length=8),
        }


XXH3 = Integrity()


def _blake3() -> Any:
    try:
        return importlib.import_module("blake3").blake3
    except ImportError as error:
        raise ConfigError(
            "integrity is 'blake3-keyed', which needs the package blake3: pip install "
            "'s3kv[integrity]', or set integrity to 'xxh3'"
        ) from error
