"""The keyring of the settings: from a file and the environment, plain and by moto's KMS."""

from __future__ import annotations

import base64
import logging
from pathlib import Path
from typing import Any

import pytest

from s3kv.config import KEYS_VARIABLE, Config
from s3kv.errors import ConfigError
from s3kv.io.server import keyring as module
from s3kv.io.server.keyring import open_keyring
from s3kv.objects import encryption
from s3kv.objects.encryption import Keyring, MasterKey
from tests import servers

SECRETS = [bytes([n]) * 32 for n in range(1, 5)]
KEYS = [secret.hex() for secret in SECRETS]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    servers.set_credentials(monkeypatch)
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    caplog.set_level(logging.INFO)


async def opened(**settings: Any) -> Keyring | None:
    return await open_keyring(Config(bucket="bkt", encryption="aes-gcm", **settings))


async def refused(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        await opened(**settings)
    return str(caught.value)


def told(data_key: bytes) -> str:
    return f"kms:{base64.b64encode(data_key).decode()}"


async def test_without_encryption_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, "no key")
    assert await open_keyring(Config(bucket="bkt", encryption_keys_file="/missing")) is None


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("count", [1, 4])
async def test_the_first_key_encrypts(
    count: int, in_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "\n".join(KEYS[:count]).upper()
    settings = {}
    if in_file:
        (tmp_path / "keys").write_text(f"{text}\n")
        settings = {"encryption_keys_file": str(tmp_path / "keys")}
    else:
        monkeypatch.setenv(KEYS_VARIABLE, text)
    ring = await opened(**settings)
    assert ring.keys == tuple(map(MasterKey, SECRETS[:count]))


async def test_keys_of_kms_keep_their_order_among_others(
    moto_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", moto_url)
    first, second = told(servers.data_key(moto_url)), told(servers.data_key(moto_url))
    rings = []
    for keys in ([first, KEYS[0], second], [second, first], [first]):
        monkeypatch.setenv(KEYS_VARIABLE, "\n".join(keys))
        ring = await opened()
        rings.append([key.secret for key in ring.keys])
    (one, plain, two), *others = rings
    assert plain == SECRETS[0]
    assert others == [[two, one], [one]]


async def test_a_key_that_kms_refuses_is_named_and_not_repeated(
    moto_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", moto_url)
    good, bad = servers.data_key(moto_url), b"another account's data key"
    (tmp_path / "keys").write_text(f"{told(good)}\n{KEYS[0]}\n{told(bad)}\n")
    said = await refused(encryption_keys_file=str(tmp_path / "keys"))
    assert said.startswith(
        f"key 3 in encryption_keys_file '{tmp_path}/keys': KMS does not decrypt it: "
    )
    assert "InvalidCiphertextException" in said
    for part in (told(good)[4:20], told(bad)[4:20], KEYS[0][:8]):
        assert part not in said + caplog.text


@pytest.mark.parametrize(
    ("how", "nbytes"), [({"KeySpec": "AES_128"}, 16), ({"NumberOfBytes": 64}, 64)]
)
async def test_a_data_key_of_another_length(
    how: dict[str, Any], nbytes: int, moto_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", moto_url)
    monkeypatch.setenv(KEYS_VARIABLE, told(servers.data_key(moto_url, **how)))
    said = await refused()
    assert f"the keys in the environment variable {KEYS_VARIABLE} cannot be used" in said
    assert f"{nbytes} bytes: a master key has 32" in said


@pytest.mark.parametrize("twice", [KEYS[3], KEYS[3].upper()])
async def test_a_key_given_twice(twice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, f"{KEYS[3]} {twice}")
    said = await refused()
    assert "differ" in said
    assert KEYS[3][:8] not in said


async def test_kms_is_asked_for_all_keys_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the longest wait is that for one."""
    begun: list[bytes] = []
    all_begun = module.asyncio.Event()

    async def decrypted(config: Config, data_key: bytes) -> bytes:
        begun.append(data_key)
        if len(begun) == len(SECRETS):
            all_begun.set()
        await all_begun.wait()
        return data_key

    monkeypatch.setattr(module, "decrypted", decrypted)
    monkeypatch.setenv(KEYS_VARIABLE, "\n".join(map(told, SECRETS)))
    ring = await opened()
    assert [key.secret for key in ring.keys] == begun == SECRETS


async def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ConfigError(f"needs cryptography: {encryption.REMEDY}")

    monkeypatch.setattr(encryption, "_cryptography", missing)
    monkeypatch.setenv(KEYS_VARIABLE, KEYS[0])
    assert encryption.REMEDY in await refused()
