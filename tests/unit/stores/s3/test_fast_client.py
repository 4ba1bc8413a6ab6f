"""Both clients where the suite does not look: what goes wrong, and what is said then."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from s3kv.config import Config
from s3kv.errors import StoreDenied, StoreError, StoreMissing, StoreUnavailable, StoreUnranged
from s3kv.place import Place
from s3kv.stores.s3.address import find_address
from s3kv.stores.s3.fast_client import make_endpoint
from s3kv.stores.s3.s3_store import DELETES_AT_ONCE, open_store
from s3kv.stores.store import BulkStore, ObjectInfo
from tests import servers


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    servers.set_credentials(monkeypatch)


OpenStore = Callable[..., AbstractAsyncContextManager[BulkStore]]


@pytest.fixture(params=["fast", "aiobotocore"])
def s3_store(request: pytest.FixtureRequest) -> OpenStore:
    """Opens a store on the bucket "bkt" of the server at a URL, with further settings."""

    @asynccontextmanager
    async def opened(url: str | None, **settings: Any) -> AsyncIterator[BulkStore]:
        config = Config(bucket="bkt", endpoint_url=url, client=request.param, **settings)
        store = open_store(config)
        try:
            yield store
        finally:
            await store.close()

    return opened


@asynccontextmanager
async def canned(
    answer: bytes, heads: list[str] | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """The URL of a server that answers everything with `answer`, and notes the heads it saw."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if heads is not None:
                heads.append(head)
            if length := re.search(r"content-length: (\d+)", head, re.IGNORECASE):
                await reader.readexactly(int(length[1]))
            writer.write(answer)
            await writer.drain()

    async with servers.scripted_server(serve, tls=tls) as port:
        yield f"http{'s' if tls else ''}://127.0.0.1:{port}"


def error(status: int, code: str) -> bytes:
    body = f"<Error><Code>{code}</Code></Error>".encode()
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


CALLS: list[tuple[str, Callable[[BulkStore], Awaitable[Any]]]] = [
    ("s3:GetObject", lambda store: store.get_into("k", Place.of(bytearray(10)))),
    ("s3:PutObject", lambda store: store.put("k", Place.of(b"x"), if_absent=True)),
    ("s3:PutObject", lambda store: store.refresh("k", 1e9)),
    ("s3:DeleteObject", lambda store: store.delete("k")),
    ("s3:ListBucket", lambda store: anext(store.list("k"))),
    ("s3:ListBucket", lambda store: store.check()),
]


@pytest.mark.parametrize(("action", "call"), CALLS)
async def test_denied_names_the_action(
    s3_store: OpenStore, action: str, call: Callable[[BulkStore], Awaitable[Any]]
) -> None:
    async with canned(error(403, "AccessDenied")) as url, s3_store(url) as store:
        with pytest.raises(StoreDenied, match=f"{action} on arn:aws:s3:::bkt") as caught:
            await call(store)
        assert url in str(caught.value)


@pytest.mark.parametrize(
    "answer",
    [
        b"200 X\r\nContent-Length: 4\r\n\r\n",
        b"206 X\r\nContent-Length: 4\r\n\r\n",
        b"206 X\r\nContent-Length: 4\r\nContent-Range: bytes 0-3/9\r\n\r\n",
        b"206 X\r\nContent-Length: 4\r\nContent-Range: bytes 2-5/*\r\n\r\n",
        b"206 X\r\nContent-Length: 4\r\nContent-Range: bytes 2-4/5\r\n\r\n",
    ],
)
async def test_an_answer_that_is_not_the_range(s3_store: OpenStore, answer: bytes) -> None:
    heads: list[str] = []
    said = b"HTTP/1.1 " + answer + b"data"
    async with canned(said, heads) as url, s3_store(url) as store:
        with pytest.raises(StoreUnranged):
            await store.get_range("k", 2, Place.of(bytearray(4)))
    assert "range: bytes=2-5" in heads[0].lower()


async def test_a_range_counts_as_its_own_bytes(s3_store: OpenStore) -> None:
    head = b"206 X\r\nContent-Length: 4\r\nContent-Range: bytes 2-5/900\r\n\r\n"
    buffer = memoryview(bytearray(4))
    async with canned(b"HTTP/1.1 " + head + b"data") as url, s3_store(url) as store:
        info = await store.get_range("k", 2, Place.of(buffer))
    assert info is not None
    assert (info.nbytes, bytes(buffer)) == (900, b"data")
    assert store.traffic.received_bytes == 4


async def test_a_copy_onto_itself_asks_for_what_it_must(s3_store: OpenStore) -> None:
    heads: list[str] = []
    answer = b"<CopyObjectResult><ETag>x</ETag></CopyObjectResult>"
    written = f"HTTP/1.1 200 X\r\nContent-Length: {len(answer)}\r\n\r\n".encode() + answer
    async with canned(written, heads) as url, s3_store(url) as store:
        assert await store.refresh("a/b +ü", 1e9) is True
    assert heads[0].startswith("PUT /bkt/a/b%20%2B%C3%BC HTTP")
    for line in (
        "x-amz-metadata-directive: REPLACE",
        "Content-Type: application/octet-stream",
        "x-amz-copy-source-if-unmodified-since: Sun, 09 Sep 2001 01:46:41 GMT",
    ):
        assert line.lower() in heads[0].lower()
    assert re.search(r"x-amz-copy-source: /?bkt/a/b%20%2B%C3%BC\r\n", heads[0], re.IGNORECASE)
    assert "if-match" not in heads[0].lower()


@pytest.mark.parametrize(("status", "code"), [(412, "PreconditionFailed"), (404, "NoSuchKey")])
async def test_a_copy_of_what_has_changed_is_none(
    s3_store: OpenStore, status: int, code: str
) -> None:
    async with canned(error(status, code)) as url, s3_store(url) as store:
        assert await store.refresh("k", 1e9) is False


async def test_a_copy_that_fails_after_it_has_begun_to_answer_is_none(s3_store: OpenStore) -> None:
    body = b"<Error><Code>InternalError</Code></Error>"
    late = f"HTTP/1.1 200 X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    async with canned(late) as url, s3_store(url) as store:
        with pytest.raises(StoreError, match="InternalError"):
            await store.refresh("k", 1e9)


@pytest.mark.parametrize(
    ("headers", "modified_s", "age_s"),
    [
        ("", 0.0, None),
        ("Last-Modified: Sun, 09 Sep 2001 01:46:40 GMT", 1e9, None),
        (
            "Last-Modified: Sun, 09 Sep 2001 01:46:40 GMT\r\nDate: Sun, 09 Sep 2001 01:56:40 GMT",
            1e9,
            600.0,
        ),
    ],
)
async def test_an_age_is_told_by_the_store_or_not_at_all(
    s3_store: OpenStore, headers: str, modified_s: float, age_s: float | None
) -> None:
    lines = f"HTTP/1.1 200 X\r\nContent-Length: 1\r\n{headers}".rstrip() + "\r\n\r\nx"
    async with canned(lines.encode()) as url, s3_store(url) as store:
        info = await store.get_into("k", Place.of(bytearray(1)))
    assert info is not None
    assert (info.modified_s, info.age_s) == (modified_s, age_s)


@pytest.mark.parametrize("s3_store", ["fast"], indirect=True)  # botocore refuses the whole answer
async def test_dates_that_are_none_are_no_age(s3_store: OpenStore) -> None:
    dates = "Last-Modified: yesterday\r\nDate: today"
    answer = f"HTTP/1.1 200 X\r\nContent-Length: 1\r\n{dates}\r\n\r\nx".encode()
    async with canned(answer) as url, s3_store(url) as store:
        info = await store.get_into("k", Place.of(bytearray(1)))
    assert info is not None
    assert (info.modified_s, info.age_s) == (0.0, None)


OBJECTS = [ObjectInfo("a&b", 1, 0.0, '"1"'), ObjectInfo("c", 1, 0.0, '"2"')]


def deletion(*errors: tuple[str, str]) -> bytes:
    items = "".join(f"<Error><Key>{k}</Key><Code>{c}</Code></Error>" for k, c in errors)
    body = f"<DeleteResult>{items}</DeleteResult>".encode()
    return f"HTTP/1.1 200 X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def test_deleting_many_asks_for_each_etag_and_tells_what_has_changed(
    s3_store: OpenStore,
) -> None:
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = re.search(r"content-length: (\d+)", head)
        assert length
        body = await reader.readexactly(int(length[1]))
        asked.extend([head.encode(), body])
        writer.write(deletion(("a&amp;b", "PreconditionFailed"), ("c", "NoSuchKey")))

    async with (
        servers.scripted_server(serve) as port,
        s3_store(f"http://127.0.0.1:{port}") as store,
    ):
        assert list(await store.delete_many(OBJECTS)) == ["a&b"]
    head, body = asked
    md5 = base64.b64encode(hashlib.md5(body).digest()).decode().lower()
    assert re.match(rb"post /bkt/?\?delete", head)
    assert f"content-md5: {md5}".encode() in head or b"x-amz-checksum-crc32:" in head
    assert b'<Key>a&amp;b</Key><ETag>"1"</ETag>' in body


@pytest.mark.parametrize(
    ("code", "raised"),
    [("AccessDenied", StoreDenied), ("SlowDown", StoreUnavailable), ("Strange", StoreError)],
)
async def test_what_cannot_be_deleted_among_many_is_said(
    s3_store: OpenStore, code: str, raised: type[Exception]
) -> None:
    async with canned(deletion(("c", code))) as url, s3_store(url) as store:
        with pytest.raises(raised, match=f"s3:DeleteObject on arn:aws:s3:::bkt/c .*{code}"):
            await store.delete_many(OBJECTS)


async def test_a_server_that_cannot_delete_many_is_asked_one_by_one(s3_store: OpenStore) -> None:
    heads: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            heads.append(head.split(" http/")[0])
            if length := re.search(r"content-length: (\d+)", head):
                await reader.readexactly(int(length[1]))
            posted = head.startswith("post")
            writer.write(error(501, "NotImplemented") if posted else b"HTTP/1.1 204 X\r\n\r\n")

    async with (
        servers.scripted_server(serve) as port,
        s3_store(f"http://127.0.0.1:{port}") as store,
    ):
        assert list(await store.delete_many(OBJECTS)) == []
        assert list(await store.delete_many(OBJECTS[1:])) == []
    assert [head.split()[0] for head in heads] == ["post", "delete", "delete", "delete"]


async def test_what_is_deleted_one_by_one_leaves_connections_to_others(
    s3_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most = 0, 0

    async def delete(key: str, *, if_etag: str | None = None) -> bool:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(3):
            await asyncio.sleep(0)
        running -= 1
        return not key.startswith("changed")

    objects = [ObjectInfo(f"{'changed' if n % 9 == 0 else ''}{n}", 1, 0.0) for n in range(50)]
    async with canned(error(501, "NotImplemented")) as url, s3_store(url) as store:
        monkeypatch.setattr(store, "delete", delete)
        stayed = await store.delete_many(objects)
    assert sorted(stayed) == [f"changed{n}" for n in (0, 18, 27, 36, 45, 9)]
    assert most == DELETES_AT_ONCE


async def test_a_server_without_conditional_deletes_deletes(s3_store: OpenStore) -> None:
    heads: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
        writer.write(error(501, "NotImplemented"))
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
        writer.write(b"HTTP/1.1 204 X\r\n\r\n")

    async with (
        servers.scripted_server(serve) as port,
        s3_store(f"http://127.0.0.1:{port}") as store,
    ):
        assert await store.delete("k", if_etag='"e"') is True
    assert ['if-match: "e"' in head for head in heads] == [True, False]


@pytest.mark.parametrize(("action", "call"), CALLS)
async def test_missing_bucket_is_no_missing_object(
    s3_store: OpenStore, action: str, call: Callable[[BulkStore], Awaitable[Any]]
) -> None:
    async with canned(error(404, "NoSuchBucket")) as url, s3_store(url) as store:
        with pytest.raises(StoreMissing, match="bkt"):
            await call(store)


async def test_check_names_the_missing_bucket_of_a_real_server(s3_store: OpenStore) -> None:
    with servers.moto_server() as url:
        async with s3_store(url) as store:
            with pytest.raises(StoreMissing, match=r"bkt at .*NoSuchBucket"):
                await store.check()


async def test_check_without_credentials(
    s3_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.forget_credentials(monkeypatch)
    async with s3_store("http://127.0.0.1:1") as store:
        with pytest.raises(StoreDenied, match="AWS_ACCESS_KEY_ID"):
            await store.check()
        servers.set_credentials(monkeypatch)  # found later: used, without a restart
        with pytest.raises(StoreUnavailable, match="refused"):
            await store.check()


async def test_check_with_an_unknown_profile(
    s3_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nowhere")
    async with s3_store("http://127.0.0.1:1") as store:
        with pytest.raises(StoreError, match="nowhere"):
            await store.check()


async def test_check_with_a_host_that_does_not_exist(s3_store: OpenStore) -> None:
    async with s3_store("http://no-such-host.invalid") as store:
        with pytest.raises(StoreUnavailable, match=r"no-such-host.*resolved.*endpoint_url"):
            await store.check()


async def test_check_with_nobody_listening(s3_store: OpenStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    async with s3_store(f"http://127.0.0.1:{port}") as store:
        with pytest.raises(StoreUnavailable, match=r"refused.*endpoint_url"):
            await store.check()


async def test_check_with_a_host_that_does_not_answer(s3_store: OpenStore) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        async with s3_store(f"http://127.0.0.1:{address[1]}", request_timeout_ms=500) as store:
            with pytest.raises(StoreUnavailable, match=r"100 ms \(a fifth of request_timeout"):
                await store.check()
        for filler in fillers:
            filler.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1, with its key in the same file."""
    return servers.self_signed(tmp_path_factory.mktemp("tls") / "server.pem", "IP:127.0.0.1")


@pytest.fixture
def server_tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context


OBJECT = b"HTTP/1.1 200 OK\r\nContent-Length: 300000\r\n\r\n" + b"x" * 300_000


async def test_tls(s3_store: OpenStore, certificate: Path, server_tls: ssl.SSLContext) -> None:
    buffer = memoryview(bytearray(300_000))
    async with canned(OBJECT, tls=server_tls) as url:
        async with s3_store(url, ca_bundle=f"{certificate}.crt") as store:
            for _ in range(2):
                buffer[:] = bytes(300_000)
                assert (await store.get_into("k", Place.of(buffer))).nbytes == 300_000
                assert buffer == b"x" * 300_000
        async with s3_store(url, verify_tls=False) as store:
            assert (await store.get_into("k", Place.of(buffer))).nbytes == 300_000
    written = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    async with (
        canned(written, tls=server_tls) as url,
        s3_store(url, ca_bundle=f"{certificate}.crt") as store,
    ):
        assert await store.put("k", Place.of(bytes(3_000_000)), if_absent=False)


async def test_tls_with_an_unknown_authority(
    s3_store: OpenStore, server_tls: ssl.SSLContext
) -> None:
    async with canned(OBJECT, tls=server_tls) as url, s3_store(url) as store:
        with pytest.raises(StoreUnavailable, match=r"certificate.*ca_bundle"):
            await store.check()


async def test_tls_to_a_plain_port(s3_store: OpenStore) -> None:
    async def answer_in_plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await reader.read()

    async with (
        servers.scripted_server(answer_in_plain) as port,
        s3_store(f"https://127.0.0.1:{port}") as store,
    ):
        with pytest.raises(StoreUnavailable, match="TLS failed"):
            await store.check()


async def test_credentials_are_asked_for_again(
    s3_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A provider whose credentials end within the minute is asked before every request."""
    servers.forget_credentials(monkeypatch)
    provider = tmp_path / "provider.py"
    provider.write_text(
        "import json, datetime, pathlib\n"
        f"count = pathlib.Path({str(tmp_path / 'count')!r})\n"
        "n = int(count.read_text()) + 1 if count.exists() else 0\n"
        "count.write_text(str(n))\n"
        "end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(minutes=1)\n"
        "print(json.dumps({'Version': 1, 'AccessKeyId': f'key{n}', 'SecretAccessKey': 'x',\n"
        "                  'SessionToken': f'token{n}', 'Expiration': end.isoformat()}))\n"
    )
    settings = tmp_path / "config"
    settings.write_text(f"[default]\ncredential_process = {sys.executable} {provider}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(settings))
    heads: list[str] = []
    async with canned(OBJECT, heads) as url, s3_store(url) as store:
        for _ in range(3):
            await store.get_into("k", Place.of(bytearray(300_000)))
    keys = [re.findall(r"Credential=key(\d+)/", head)[0] for head in heads]
    tokens = [re.findall(r"token: token(\d+)", head, re.IGNORECASE)[0] for head in heads]
    assert keys == tokens
    assert len(set(keys)) == 3


async def test_request_on_the_wire(s3_store: OpenStore) -> None:
    heads: list[str] = []
    empty = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    async with canned(empty, heads) as url, s3_store(url) as store:
        for if_absent in (True, False):
            assert await store.put("a b", Place.of(b"123456789"), if_absent=if_absent)
    first, second = (head.lower() for head in heads)
    assert first.startswith("put /bkt/a%20b http/1.1\r\n")
    assert "\r\nif-none-match: *\r\n" in first
    assert "\r\nx-amz-content-sha256: unsigned-payload\r\n" in first
    assert "expect:" not in first
    assert "if-none-match" not in second
    assert "checksum" not in first


@pytest.mark.parametrize(
    ("settings", "environment", "url"),
    [
        ({}, {}, "https://bkt.s3.amazonaws.com:443/ us-east-1"),
        ({"region": "eu-west-1"}, {}, "https://bkt.s3.eu-west-1.amazonaws.com:443/ eu-west-1"),
        ({"addressing_style": "path"}, {}, "https://s3.amazonaws.com:443/bkt/ us-east-1"),
        ({"bucket": "b.k"}, {}, "https://s3.amazonaws.com:443/b.k/ us-east-1"),
        (
            {"region": "cn-north-1"},
            {},
            "https://bkt.s3.cn-north-1.amazonaws.com.cn:443/ cn-north-1",
        ),
        ({"endpoint_url": "http://h:9"}, {}, "http://h:9/bkt/ us-east-1"),
        ({"endpoint_url": "http://h/base/"}, {}, "http://h:80/base/bkt/ us-east-1"),
        (
            {"endpoint_url": "https://h", "addressing_style": "virtual", "region": "local"},
            {},
            "https://bkt.h:443/ local",
        ),
        ({}, {"AWS_ENDPOINT_URL_S3": "http://h:9"}, "http://h:9/bkt/ us-east-1"),
        (
            {},
            {"AWS_DEFAULT_REGION": "eu-north-1"},
            "https://bkt.s3.eu-north-1.amazonaws.com:443/ eu-north-1",
        ),
    ],
)
async def test_where_the_bucket_is(
    settings: dict[str, Any], environment: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = Config(**{"bucket": "bkt", **settings})
    endpoint, tls = make_endpoint(config, find_address(config))
    scheme = "https" if endpoint.tls else "http"
    found = f"{scheme}://{endpoint.host}:{endpoint.port}{endpoint.path} {endpoint.region}"
    assert found == url
    assert (tls is not None) == endpoint.tls


async def test_listing_that_is_no_listing(s3_store: OpenStore) -> None:
    for body in (b"", b"<ListBucketResult><Contents></Contents></ListBucketResult>"):
        answer = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        async with canned(answer) as url, s3_store(url) as store:
            with pytest.raises(StoreUnavailable, match="listing cannot be read"):
                await store.check()


def test_import_is_light() -> None:
    """The I/O process starts in well under a second: none of the heavy packages comes along."""
    script = (
        "import sys, json, s3kv.stores.s3.fast_client, s3kv.objects.codec;"
        "heavy = ('torch', 'vllm', 'numpy', 'boto3', 'aiobotocore');"
        "print(json.dumps([m for m in heavy if m in sys.modules]))"
    )
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout
    assert json.loads(out) == []
