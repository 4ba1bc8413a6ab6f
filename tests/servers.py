"""Servers the tests run against: moto in process, and whatever S3 the environment names."""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import boto3
import pytest
from botocore.config import Config as BotoConfig
from moto import backends
from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from lab.certificates import self_signed as self_signed

BUCKET = "s3kv-test"
REGION = "us-east-1"
REAL_SERVERS = (
    pytest.param("weed", marks=pytest.mark.long),
    pytest.param("rgw", marks=[pytest.mark.infra, pytest.mark.nightly]),
)
"""The fixtures of real S3 servers, as parameters: SeaweedFS, and at night Ceph."""
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing-secret"}


@contextmanager
def moto_server() -> Iterator[str]:
    """The URL of a fresh S3 with one empty bucket, `BUCKET`, for as long as the block lasts. A new
    server empties moto's buckets, which belong to the process and outlive their servers."""
    for account in backends.get_backend("s3").values():
        for backend in account.values():
            backend.reset()
    app = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    # Moto's own thread takes half a second to stop.
    with in_a_thread(server) as url:
        boto_client(url, KEYS).create_bucket(Bucket=BUCKET)
        yield url


def data_key(url: str, **how: Any) -> bytes:
    """A data key that a new key of the KMS at `url`, a server of moto, has encrypted. how: of
    GenerateDataKeyWithoutPlaintext; otherwise 32 bytes."""
    kms = boto_client(url, KEYS, "kms")
    made = kms.create_key()["KeyMetadata"]["KeyId"]
    how = how or {"KeySpec": "AES_256"}
    return kms.generate_data_key_without_plaintext(KeyId=made, **how)["CiphertextBlob"]


def boto_client(url: str, keys: dict[str, str], service: str = "s3") -> Any:
    """A second opinion: a client that shares no code with ours."""
    return boto3.client(
        service,
        endpoint_url=url,
        region_name=REGION,
        aws_access_key_id=keys["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=keys["AWS_SECRET_ACCESS_KEY"],
        config=BotoConfig(
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


@contextmanager
def fresh_bucket(
    server: str, bucket: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Any]]:
    """The URL of a server, "moto" or the fixture of a real one, and a client for it. Both have an
    empty bucket, and botocore finds the credentials."""
    with ExitStack() as stack:
        if server == "moto":
            url, keys = stack.enter_context(moto_server()), KEYS
        else:
            gateway = request.getfixturevalue(server)
            url, keys = gateway.url, gateway.env
        set_credentials(monkeypatch, keys)
        boto = boto_client(url, keys)
        boto.create_bucket(Bucket=bucket)
        yield url, boto
        remove_policy(boto, bucket)
        for kind in ("Versions", "DeleteMarkers"):
            for it in boto.list_object_versions(Bucket=bucket).get(kind, []):
                boto.delete_object(Bucket=bucket, Key=it["Key"], VersionId=it["VersionId"])
        boto.delete_bucket(Bucket=bucket)


def demanding(bucket: str, name: str, value: str) -> str:
    """A bucket policy that denies uploads without a header of this value."""
    whose = {"Effect": "Deny", "Principal": "*", "Action": "s3:PutObject"}
    where = {"Resource": f"arn:aws:s3:::{bucket}/*"}
    # Servers differ in whether the second holds for a header that is not there.
    conditions = ({"Null": {f"s3:{name}": "true"}}, {"StringNotEquals": {f"s3:{name}": value}})
    statements = [{**whose, **where, "Condition": condition} for condition in conditions]
    return json.dumps({"Version": "2012-10-17", "Statement": statements})


def remove_policy(boto: Any, bucket: str) -> None:
    with suppress(boto.exceptions.ClientError):  # some servers mind if there is none
        boto.delete_bucket_policy(Bucket=bucket)


def set_credentials(monkeypatch: pytest.MonkeyPatch, keys: dict[str, str] = KEYS) -> None:
    """Let botocore find `keys`, and nothing of the machine's own configuration."""
    forget_credentials(monkeypatch)
    for name, value in keys.items():
        monkeypatch.setenv(name, value)


def forget_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let botocore find no credentials, no profile, no endpoint and no metadata service."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)


def real_server() -> tuple[str, str, dict[str, str]] | None:
    """(endpoint URL, bucket, credentials) of a real S3 server, if the environment names one: in
    S3KV_TEST_ENDPOINT, S3KV_TEST_BUCKET, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."""
    url = os.environ.get("S3KV_TEST_ENDPOINT")
    if url is None:
        return None
    return url, os.environ["S3KV_TEST_BUCKET"], {name: os.environ[name] for name in KEYS}


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def scripted_server(
    *handlers: Handler, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """The port of a server whose n-th connection is served by the n-th handler, then the last.
    A connection is closed when its handler returns; handlers may run into its end."""
    serving: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handler = handlers[min(len(serving), len(handlers) - 1)]
        serving.append(asyncio.current_task())
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await handler(reader, writer)
        finally:
            writer.transport.abort() if stopping else writer.close()

    stopping = False
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        stopping = True
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving)
        await asyncio.sleep(0)  # transports close a turn of the loop later


class QuietHandler(BaseHTTPRequestHandler):
    """Writes no log, and bears with clients that are gone."""

    protocol_version = "HTTP/1.1"

    def answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@contextmanager
def in_a_thread(server: HTTPServer) -> Iterator[str]:
    """The URL of a server, for as long as the block lasts."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def http(body: bytes | str = b"", status: int = 200, headers: str = "") -> bytes:
    """An answer. headers: lines that end in CRLF."""
    content = body.encode() if isinstance(body, str) else body
    head = f"HTTP/1.1 {status} X\r\n{headers}Content-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def refusal(status: int, code: str, more: str = "", headers: str = "") -> bytes:
    """S3's answer with an error, without a document if there is no code."""
    document = f"<Error><Code>{code}</Code>{more}</Error>" if code else ""
    return http(document, status, headers)


@dataclass
class Canned:
    """A server with scripted answers. heads, bodies: of the requests so far."""

    url: str = ""
    heads: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)


@asynccontextmanager
async def canned(
    answer: bytes | Callable[[str, bytes], bytes | None], *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Canned]:
    """A server that answers with `answer`, or its result for a head and a body; None hangs up."""
    server = Canned()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"\ncontent-length: (\d+)", head, re.IGNORECASE)
            body = await reader.readexactly(int(length[1])) if length else b""
            server.heads.append(head)
            server.bodies.append(body)
            told = answer if isinstance(answer, bytes) else answer(head, body)
            if told is None:
                return
            end = told.index(b"\r\n\r\n") + 4 if head.startswith("HEAD") else None
            writer.write(told[:end])
            await writer.drain()

    async with scripted_server(serve, tls=tls) as port:
        server.url = f"http{'s' if tls else ''}://127.0.0.1:{port}"
        yield server
