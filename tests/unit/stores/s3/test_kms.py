"""Data keys decrypted by moto's KMS, and by servers that refuse, are silent or lie."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import ssl
import threading
from pathlib import Path

import pytest

from s3kv.config import Config
from s3kv.errors import ConfigError
from s3kv.stores.s3 import kms
from s3kv.stores.s3.kms import decrypted
from tests import servers

CONFIG = Config(bucket="bkt", region=servers.REGION)
ENDPOINT = "AWS_ENDPOINT_URL_KMS"
PLAIN = bytes(range(32))


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    servers.set_credentials(monkeypatch)
    monkeypatch.setenv("NO_PROXY", "*")
    caplog.set_level(logging.INFO)


async def refusal(data_key: bytes = b"a data key", config: Config = CONFIG) -> str:
    with pytest.raises(ConfigError) as caught:
        await decrypted(config, data_key)
    told = str(caught.value)
    assert told.startswith("KMS does not decrypt it: ")
    for form in (data_key, base64.b64encode(data_key), data_key.hex().encode()):
        assert form.decode("latin-1") not in told
        assert repr(form) not in told
    return told


def refusing(code: str, message: str = "", status: int = 400) -> bytes:
    """KMS's answer with an error."""
    body = json.dumps({"__type": code, "message": message})
    return servers.http(body, status, "Content-Type: application/x-amz-json-1.1\r\n")


def answering(plain: bytes) -> bytes:
    body = {"KeyId": "arn", "Plaintext": base64.b64encode(plain).decode()}
    return servers.http(json.dumps(body), headers="Content-Type: application/x-amz-json-1.1\r\n")


async def test_a_data_key_is_decrypted(
    moto_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ENDPOINT, moto_url)
    first, second = servers.data_key(moto_url), servers.data_key(moto_url)
    plain = await decrypted(CONFIG, first)
    assert len(plain) == 32
    assert plain == await decrypted(CONFIG, first)
    assert plain != await decrypted(CONFIG, second)
    for form in (repr(plain), plain.hex(), base64.b64encode(plain).decode()):
        assert form not in caplog.text


async def test_the_request_is_signed_for_the_region_of_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-token")
    async with servers.canned(answering(PLAIN)) as server:
        monkeypatch.setenv(ENDPOINT, server.url)
        assert await decrypted(Config(bucket="bkt", region="eu-west-3"), b"data") == PLAIN
    (head,), (body,) = server.heads, server.bodies
    assert "Credential=testing/" in head
    assert "/eu-west-3/kms/aws4_request" in head
    assert "X-Amz-Security-Token: a-token" in head
    assert "X-Amz-Target: TrentService.Decrypt" in head
    assert json.loads(body) == {"CiphertextBlob": base64.b64encode(b"data").decode()}


@pytest.mark.parametrize("damage", ["something else", "cut", "changed"])
async def test_other_data_is_no_data_key(
    damage: str, moto_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENDPOINT, moto_url)
    whole = servers.data_key(moto_url)
    changed = whole[:-1] + bytes([whole[-1] ^ 1])
    bad = {"something else": bytes(20), "cut": whole[:-1], "changed": changed}
    told = await refusal(bad[damage])
    assert "InvalidCiphertextException" in told
    assert "To do: check that the data key is whole, and that region is" in told


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            refusing("AccessDeniedException", "User: arn:aws:sts::1:x/me@corp is not authorized"),
            ["me@corp is not authorized", "To do: allow kms:Decrypt on the KMS key"],
        ),
        (refusing("DisabledException", "arn:aws:kms:… is disabled"), ["is disabled"]),
        (refusing("KMSInvalidStateException", "is pending deletion"), ["is pending deletion"]),
        (refusing("UnrecognizedClientException", "The security token is invalid"), ["token is"]),
        (refusing("ThrottlingException", "Rate exceeded"), ["Rate exceeded"]),
        (refusing("KMSInternalException", "sorry", 500), ["sorry"]),
        (servers.http("<html>Sign in</html>"), ["the answer has no key", "a proxy"]),
        (servers.http("{}"), ["the answer has no key"]),
        (servers.http('{"Plaintext": "abc"}'), []),
        (servers.http("", 503), ["503"]),
        (b"SSH-2.0-OpenSSH_9.9\r\n\r\n", ["check the way to KMS"]),
    ],
)
async def test_kms_that_refuses_or_is_something_else(
    answer: bytes, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with servers.canned(answer) as server:
        monkeypatch.setenv(ENDPOINT, server.url)
        told = await refusal()
    assert all(words in told for words in said), told
    assert 1 <= len(server.heads) <= 2


@pytest.mark.parametrize("status", [400, 403, 405])
async def test_the_endpoint_of_a_bucket_is_no_kms(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = servers.http("<Error><Code>MethodNotAllowed</Code></Error>", status)
    async with servers.canned(answer) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        told = await refusal()
    assert "MethodNotAllowed" in told
    assert "named by AWS_ENDPOINT_URL_KMS, without which AWS_ENDPOINT_URL counts" in told


async def test_kms_that_throttles_once_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([refusing("ThrottlingException", "Rate exceeded"), answering(PLAIN)])
    async with servers.canned(lambda head, body: next(answers)) as server:
        monkeypatch.setenv(ENDPOINT, server.url)
        assert await decrypted(CONFIG, b"data") == PLAIN


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://kms.invalid"])
async def test_kms_that_is_not_there(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT, url)
    told = await refusal()
    assert url in told
    assert "To do: check the way to KMS" in told
    assert "AWS_ENDPOINT_URL_KMS" in told


async def test_kms_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kms, "_READ_S", 0.05)

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with servers.scripted_server(wait) as port:
        monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{port}")
        assert "Read timeout" in await refusal()


async def test_everything_together_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that resolve slowly and sources of credentials have timeouts of their own, or none."""
    over = threading.Event()
    monkeypatch.setattr(kms, "ANSWER_S", 0.05)
    monkeypatch.setattr(kms, "_ask", lambda *_: over.wait(60))
    told = await refusal()
    over.set()
    assert "no answer within 0.05 s. To do: check the way to KMS" in told


def test_the_parts_fit_into_the_deadline() -> None:
    backoff_s = 1.0  # botocore's longest before a second attempt
    assert kms._ATTEMPTS * (kms._CONNECT_S + kms._READ_S) + backoff_s < kms.ANSWER_S


async def test_no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    told = await refusal(config=Config(bucket="bkt"))
    assert "To do: set region to the region of the KMS key" in told


async def test_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    servers.forget_credentials(monkeypatch)
    assert "no credentials found: set AWS_ACCESS_KEY_ID" in await refusal()


async def test_a_password_in_the_endpoint_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT, "http://me:hidden@127.0.0.1:1")
    assert "hidden" not in await refusal()


async def test_an_endpoint_that_is_no_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT, "kms:443")
    assert "kms:443" in await refusal()


async def test_its_certificate_is_always_verified(
    monkeypatch: pytest.MonkeyPatch, certificate: Path, server_tls: ssl.SSLContext
) -> None:
    async with servers.canned(answering(PLAIN), tls=server_tls) as server:
        monkeypatch.setenv(ENDPOINT, server.url)
        told = await refusal(config=Config(bucket="bkt", verify_tls=False))
        assert "SSL validation failed" in told
        trusting = Config(bucket="bkt", verify_tls=False, ca_bundle=str(certificate))
        assert await decrypted(trusting, b"data") == PLAIN
