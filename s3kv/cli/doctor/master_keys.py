"""Check of the secrets of `integrity` and `encryption`, read as an engine reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from s3kv.cli.doctor.findings import Finding
from s3kv.config import Config, count
from s3kv.errors import ConfigError
from s3kv.io.server.keyring import open_keyring
from s3kv.objects.encryption import speeds
from s3kv.objects.integrity import Integrity

_REMEDY = "give this host the keys, or the secret, of the other engines: none starts without them"


def examine(config: Config, clock: Callable[[], float]) -> list[Finding]:
    """The finding on the keys, or on a missing secret. Lets KMS decrypt those that need it, which
    takes half a minute at most. clock: in seconds. Do not call it while an asyncio loop runs."""
    check = "integrity"
    try:
        Integrity.of(config)
        check = "encryption"
        keyring = asyncio.run(open_keyring(config))
    except ConfigError as error:
        return [Finding(check, "fault", str(error), _REMEDY)]
    if keyring is None:
        return []
    keys, (encrypting, decrypting) = keyring.keys, speeds(clock)
    told = (
        f"{count(len(keys), 'key')}; the first, {keys[0].id}, encrypts; one thread encrypts "
        f"{encrypting / 1e9:.1f} GB/s and decrypts {decrypting / 1e9:.1f} GB/s"
    )
    return [Finding("encryption", "ok", told)]
