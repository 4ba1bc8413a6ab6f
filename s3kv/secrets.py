"""Secrets of the settings `integrity` and `encryption`, read from the places that they name.

No error message contains any part of a secret.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from pathlib import Path

from s3kv.config import KEYS_VARIABLE, SECRET_VARIABLE, Config, count
from s3kv.errors import ConfigError

_warn_once = functools.cache(logging.getLogger("s3kv").warning)
_SECRET_MIN_BYTES = 16
_MOST_MASTER_KEYS = 4
"""Each key after the first costs one request per absent chunk."""
_BASE64 = "[0-9a-zA-Z+/]"
_MASTER_KEY = re.compile(
    rf"[0-9a-fA-F]{{64}}|kms:({_BASE64}{{4}})*{_BASE64}{{2}}(==|{_BASE64}=|{_BASE64}{{2}})"
)


def integrity_secret(config: Config) -> bytes:
    """The secret of integrity "blake3-keyed", without white space at its ends. Raises
    `ConfigError`, which names the place of the secret."""
    where, secret = _read("integrity_secret_file", config.integrity_secret_file, SECRET_VARIABLE)
    secret = secret.strip()
    if len(secret) < _SECRET_MIN_BYTES:
        raise ConfigError(
            f"integrity is 'blake3-keyed', and {where} holds {len(secret)} bytes: allowed are "
            f"{_SECRET_MIN_BYTES} random bytes or more, such as `openssl rand -hex 32` prints"
        )
    return secret


def encryption_keys(config: Config) -> tuple[str, list[str]]:
    """The place, in words, of the master keys of encryption "aes-gcm", and the keys, starting with
    the one that encrypts: each 64 hex digits, or "kms:" and base64. Raises `ConfigError`, which
    names the place."""
    where, text = _read("encryption_keys_file", config.encryption_keys_file, KEYS_VARIABLE)
    keys = text.decode("ascii", "replace").split()
    bad = [number for number, key in enumerate(keys, 1) if not _MASTER_KEY.fullmatch(key)]
    if bad or not 1 <= len(keys) <= _MOST_MASTER_KEYS:
        told = f"{where} holds {count(len(keys), 'word')}"
        told += f", and word {bad[0]} is not a key" if bad else ""
        raise ConfigError(
            f"encryption is 'aes-gcm', and {told}: allowed are 1 to {_MOST_MASTER_KEYS} keys, one "
            "per line, of 64 hex digits, such as `openssl rand -hex 32` prints, or kms: and the "
            "base64 of a data key"
        )
    return where, keys


def _read(setting: str, path: str | None, variable: str) -> tuple[str, bytes]:
    """The place of a secret, in words, and its content: the file that the setting names, or without
    one the environment variable. Raises `ConfigError`."""
    if path is None:
        return f"the environment variable {variable}", os.fsencode(os.environ.get(variable, ""))
    where = f"{setting} {path!r}"
    try:
        if os.stat(path).st_mode & 0o004:
            _warn_once("s3kv: every user of this host may read %s. Run `chmod o-r` on it", where)
        return where, Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from error
