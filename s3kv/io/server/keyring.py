"""The master keys of `encryption`, read at the start of an I/O process.

They stay in its memory: KMS is not called again before the next start. If KMS cannot be reached,
the start of an engine fails. A process that replaces another one later is itself replaced, with
growing pauses, until KMS answers; all chunks are misses meanwhile.
"""

from __future__ import annotations

import asyncio
import base64

from s3kv.config import Config
from s3kv.errors import ConfigError
from s3kv.objects.encryption import Keyring
from s3kv.secrets import encryption_keys
from s3kv.stores.s3.kms import decrypted


async def open_keyring(config: Config) -> Keyring | None:
    """The keys that the settings name; None without encryption. Takes 16 s at most. Raises
    `ConfigError` if they cannot be read, are not keys, or KMS does not decrypt them, or if the
    package cryptography is missing. No message contains any part of a key."""
    if config.encryption == "off":
        return None
    where, keys = encryption_keys(config)
    secrets = await asyncio.gather(
        *(_secret(config, key, f"key {n} in {where}") for n, key in enumerate(keys, 1))
    )
    try:
        return Keyring(secrets)
    except ValueError as error:
        raise ConfigError(f"the keys in {where} cannot be used: {error}") from error


async def _secret(config: Config, key: str, name: str) -> bytes:
    kind, _, text = key.rpartition(":")
    if not kind:
        return bytes.fromhex(text)
    try:
        return await decrypted(config, base64.b64decode(text))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
