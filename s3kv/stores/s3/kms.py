"""Decryption of data keys by AWS KMS, through botocore.

Credentials and region are those of every request; the endpoint is the one in AWS_ENDPOINT_URL_KMS,
or else in AWS_ENDPOINT_URL, or AWS's. Its certificate is verified even without `verify_tls`: the
answer is a key.
https://docs.aws.amazon.com/kms/latest/APIReference/API_Decrypt.html
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import botocore.parsers
import botocore.session
from botocore import exceptions
from botocore.config import Config as BotocoreConfig
from botocore.credentials import ReadOnlyCredentials

from s3kv.config import Config, masked
from s3kv.errors import ConfigError, StoreError
from s3kv.stores.s3.credentials import users_credentials

ANSWER_S = 16.0
"""Longest wait for a data key, the search for credentials included."""
_CONNECT_S, _READ_S, _ATTEMPTS = 2, 5, 2
_BY_CODE: Mapping[str, str] = {
    "AccessDeniedException": "allow kms:Decrypt on the KMS key for these credentials",
    "InvalidCiphertextException": "check that the data key is whole, and that region is the region "
    "of its KMS key",
}
_WAY = (
    "check the way to KMS: a network without internet needs an endpoint for it (VPC, PrivateLink), "
    "and another server is named by AWS_ENDPOINT_URL_KMS, without which AWS_ENDPOINT_URL counts"
)
_BY_KIND: Mapping[type[Exception], str] = {
    exceptions.NoRegionError: "set region to the region of the KMS key",
    exceptions.HTTPClientError: _WAY,
    exceptions.ConnectionError: _WAY,
}


async def decrypted(config: Config, data_key: bytes) -> bytes:
    """The plain text of a data key that `GenerateDataKeyWithoutPlaintext` has made. Raises
    `ConfigError` if there are no credentials, or KMS refuses, or gives no answer within 16 s."""
    try:
        return await asyncio.wait_for(_asked(config, data_key), ANSWER_S)
    except asyncio.TimeoutError as error:
        raise ConfigError(_told(f"no answer within {ANSWER_S:g} s", _WAY)) from error
    except exceptions.ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        remedy = _BY_CODE.get(code, "" if code.isalpha() else _WAY)  # KMS names its errors
        raise ConfigError(_told(str(error), remedy)) from error
    except (exceptions.BotoCoreError, botocore.parsers.ResponseParserError, ValueError) as error:
        remedy = next((r for kind, r in _BY_KIND.items() if isinstance(error, kind)), "")
        raise ConfigError(_told(masked(str(error)), remedy)) from error
    except StoreError as error:  # of the credentials, with its remedy
        raise ConfigError(_told(str(error))) from error


def _told(why: str, remedy: str = "") -> str:
    return f"KMS does not decrypt it: {why}{remedy and f'. To do: {remedy}'}"


async def _asked(config: Config, data_key: bytes) -> bytes:
    answer = await asyncio.to_thread(_ask, config, await users_credentials().frozen(), data_key)
    plain: bytes | None = answer.get("Plaintext")
    if plain is None:
        raise ValueError("the answer has no key: is AWS_ENDPOINT_URL_KMS, or a proxy, in between?")
    return plain


def _ask(config: Config, keys: ReadOnlyCredentials, data_key: bytes) -> dict[str, Any]:
    client: Any = botocore.session.Session().create_client(
        "kms",
        region_name=config.region,
        verify=config.ca_bundle,
        aws_access_key_id=keys.access_key,
        aws_secret_access_key=keys.secret_key,
        aws_session_token=keys.token,
        config=BotocoreConfig(
            connect_timeout=_CONNECT_S,
            read_timeout=_READ_S,
            retries={"total_max_attempts": _ATTEMPTS, "mode": "standard"},
        ),
    )
    with closing(client):
        return dict(client.decrypt(CiphertextBlob=data_key))
