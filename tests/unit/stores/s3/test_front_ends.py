"""Before a front end that normalises `Host`, and then verifies the signature, as many do."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from s3kv.errors import StoreDenied
from tests import servers
from tests.unit.stores.s3.conftest import opened


def normalised(host: str) -> str:
    name, port = re.fullmatch(r"(\[.*\]|[^:]*)(:\d+)?", host.lower()).groups()
    return name.rstrip(".") + ("" if port in (None, ":80", ":443") else port)


def is_signed(head: str) -> bool:
    """Whether the signature is right for the normalised `Host`, as botocore computes it."""
    first, *lines = head.rstrip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    headers["host"] = normalised(headers["host"])
    scope, names, signature = re.fullmatch(
        r"AWS4-HMAC-SHA256 Credential=[^/]+/(\S+), SignedHeaders=(\S+), Signature=(\w+)",
        headers["authorization"],
    ).groups()
    _, region, service, _ = scope.split("/")
    signed = {name: headers[name] for name in names.split(";")}
    request = AWSRequest(method, f"http://{headers['host']}{target}", headers=signed)
    request.context["timestamp"] = headers["x-amz-date"]
    signer = S3SigV4Auth(Credentials(*servers.KEYS.values()), service, region)
    text = signer.string_to_sign(request, signer.canonical_request(request))
    return bool(signer.signature(text, request) == signature)


@pytest.fixture(autouse=True)
def ground(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver that knows "localhost." everywhere."""
    resolve = socket.getaddrinfo

    def without_dot(host: Any, *arguments: Any, **options: Any) -> Any:
        return resolve(str(host).rstrip("."), *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", without_dot)


def head_through_a_front_end(
    name: str, client: str, tls: ssl.SSLContext | None = None, **settings: Any
) -> Any:
    """On asyncio's own loop, which asks Python's resolver."""

    def answer(head: str, _: bytes) -> bytes:
        return servers.refusal(404 if is_signed(head) else 403, "")

    async def head() -> Any:
        async with servers.canned(answer, tls=tls) as at:
            url = at.url.replace("127.0.0.1", name)
            async with opened(url, client=client, **settings) as store:
                return await store.head("a b")

    return asyncio.run(head())


@pytest.mark.parametrize("client", ["fast", "aiobotocore"])
@pytest.mark.parametrize("name", ["localhost", "LocalHost", "localhost.", "127.0.0.1"])
def test_names_of_a_front_end(name: str, client: str) -> None:
    assert head_through_a_front_end(name, client) is None


@pytest.mark.parametrize("client", ["fast", "aiobotocore"])
def test_the_last_dot_of_a_name_is_not_in_a_certificate(client: str, tmp_path: Path) -> None:
    authority = servers.self_signed(tmp_path / "server.pem", "DNS:localhost")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(authority)
    found = head_through_a_front_end("localhost.", client, tls, ca_bundle=f"{authority}.crt")
    assert found is None


def test_a_wrong_secret_is_refused_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is, the front end of these tests looks."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "guessed")
    with pytest.raises(StoreDenied):
        head_through_a_front_end("localhost", "fast")
