"""Both clients where the suite does not look: what goes wrong, and what is said then."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from s3kv.errors import StoreDenied, StoreError, StoreMissing, StoreUnavailable, StoreUnranged
from s3kv.place import Place
from s3kv.stores.s3.s3_store import DELETES_AT_ONCE
from s3kv.stores.store import ObjectInfo, ObjectStore
from tests import servers
from tests.unit.stores.s3.conftest import OpenStore
from tests.unit.stores.suite import Recorder

CALLS: list[tuple[str, Callable[[ObjectStore], Awaitable[Any]]]] = [
    ("s3:GetObject", lambda store: store.get_into("k", Place.of(bytearray(10)))),
    ("s3:PutObject", lambda store: store.put("k", Place.of(b"x"), if_absent=True)),
    ("s3:PutObject", lambda store: store.refresh("k", 1e9)),
    ("s3:DeleteObject", lambda store: store.delete("k")),
    ("s3:ListBucket", lambda store: anext(store.list("k"))),
    ("s3:ListBucket", lambda store: store.check()),
]


@pytest.mark.parametrize(
    "answer",
    [
        b"200 X\r\nContent-Length: 4\r\n\r\n",
        b"206 X\r\nContent-Length: 4\r\n\r\n",
        b"206 X\r\nContent-Length: 4\r\nContent-Range: bytes 0-3/9\r\n\r\n",
        b"206 X\r\nContent-Length: 4\r\nContent-Range: bytes 2-5/*\r\n\r\n",
        b"206 X\r\nContent-Length: 4\r\nContent-Range: bytes 2-4/5\r\n\r\n",
        b"206 X\r\nContent-Length: 4\r\nContent-Range: bytes 2-6/9\r\n\r\n",
    ],
)
async def test_an_answer_that_is_not_the_range(s3_store: OpenStore, answer: bytes) -> None:
    """Nothing of it is written."""
    place = Place.of(bytearray(4))
    receiver = Recorder(place)
    async with servers.canned(b"HTTP/1.1 " + answer + b"data") as at, s3_store(at.url) as store:
        with pytest.raises(StoreUnranged):
            await store.get_into("k", place, receiver, 2)
    assert "range: bytes=2-5" in at.heads[0].lower()
    assert (bytes(place), receiver.begun) == (bytes(4), [])


@pytest.mark.parametrize(("action", "call"), CALLS)
async def test_a_refusal_names_the_call_and_a_missing_bucket_is_no_missing_object(
    s3_store: OpenStore, action: str, call: Callable[[ObjectStore], Awaitable[Any]]
) -> None:
    denied = servers.refusal(403, "AccessDenied")
    async with servers.canned(denied) as at, s3_store(at.url) as store:
        with pytest.raises(StoreDenied, match=f"{action} on arn:aws:s3:::bkt.* at {at.url}"):
            await call(store)
    missing = servers.refusal(404, "NoSuchBucket")
    async with servers.canned(missing) as at, s3_store(at.url) as store:
        with pytest.raises(StoreMissing, match="bkt"):
            await call(store)


async def test_a_range_counts_as_its_own_bytes(s3_store: OpenStore) -> None:
    answer = servers.http("data", 206, "Content-Range: bytes 2-5/900\r\n")
    buffer = memoryview(bytearray(4))
    async with servers.canned(answer) as at, s3_store(at.url) as store:
        info = await store.get_into("k", Place.of(buffer), first=2)
    assert (info.nbytes, bytes(buffer)) == (900, b"data")
    assert store.traffic.received_bytes == 4


async def test_a_copy_onto_itself_asks_for_what_it_must(s3_store: OpenStore) -> None:
    answer = servers.http("<CopyObjectResult><ETag>x</ETag></CopyObjectResult>")
    async with servers.canned(answer) as at, s3_store(at.url) as store:
        assert await store.refresh("a/b +ü", 1e9) is True
    (head,) = at.heads
    assert head.startswith("PUT /bkt/a/b%20%2B%C3%BC HTTP")
    for line in (
        "x-amz-metadata-directive: REPLACE",
        "Content-Type: application/octet-stream",
        "x-amz-copy-source-if-unmodified-since: Sun, 09 Sep 2001 01:46:41 GMT",
    ):
        assert line.lower() in head.lower()
    assert re.search(r"x-amz-copy-source: /?bkt/a/b%20%2B%C3%BC\r\n", head, re.IGNORECASE)
    assert "if-match" not in head.lower()


@pytest.mark.parametrize(("status", "code"), [(412, "PreconditionFailed"), (404, "NoSuchKey")])
async def test_a_copy_of_what_has_changed_is_none(
    s3_store: OpenStore, status: int, code: str
) -> None:
    async with servers.canned(servers.refusal(status, code)) as at, s3_store(at.url) as store:
        assert await store.refresh("k", 1e9) is False


async def test_a_copy_that_fails_after_it_has_begun_to_answer_is_none(s3_store: OpenStore) -> None:
    failed = servers.refusal(200, "InternalError")
    async with servers.canned(failed) as at, s3_store(at.url) as store:
        with pytest.raises(StoreError, match="InternalError"):
            await store.refresh("k", 1e9)


WRITTEN = "Last-Modified: Sun, 09 Sep 2001 01:46:40 GMT\r\n"


@pytest.mark.parametrize(
    ("headers", "modified_s", "age_s"),
    [
        ("", 0.0, None),
        (WRITTEN, 1e9, None),
        (f"{WRITTEN}Date: Sun, 09 Sep 2001 01:56:40 GMT\r\n", 1e9, 600.0),
    ],
)
async def test_an_age_is_told_by_the_store_or_not_at_all(
    s3_store: OpenStore, headers: str, modified_s: float, age_s: float | None
) -> None:
    async with servers.canned(servers.http("x", 200, headers)) as at, s3_store(at.url) as store:
        info = await store.get_into("k", Place.of(bytearray(1)))
    assert (info.modified_s, info.age_s) == (modified_s, age_s)


OBJECTS = [ObjectInfo("a&b", 1, 0.0, '"1"'), ObjectInfo("c", 1, 0.0, '"2"')]


def deletion(*errors: tuple[str, str]) -> bytes:
    items = "".join(f"<Error><Key>{k}</Key><Code>{c}</Code></Error>" for k, c in errors)
    return servers.http(f"<DeleteResult>{items}</DeleteResult>")


async def test_deleting_many_asks_for_each_etag_and_tells_what_has_changed(
    s3_store: OpenStore,
) -> None:
    answer = deletion(("a&amp;b", "PreconditionFailed"), ("c", "NoSuchKey"))
    async with servers.canned(answer) as at, s3_store(at.url) as store:
        assert list(await store.delete_many(OBJECTS)) == ["a&b"]
    head, body = at.heads[0].lower(), at.bodies[0]
    md5 = base64.b64encode(hashlib.md5(body).digest()).decode().lower()
    assert re.match(r"post /bkt/?\?delete", head)
    assert f"content-md5: {md5}" in head or "x-amz-checksum-crc32:" in head
    assert b'<Key>a&amp;b</Key><ETag>"1"</ETag>' in body


@pytest.mark.parametrize(
    ("code", "raised"),
    [("AccessDenied", StoreDenied), ("SlowDown", StoreUnavailable), ("Strange", StoreError)],
)
async def test_what_cannot_be_deleted_among_many_is_said(
    s3_store: OpenStore, code: str, raised: type[Exception]
) -> None:
    """If none of them can be. One object that the store refuses to delete stops no others."""
    async with servers.canned(deletion(("c", code))) as at, s3_store(at.url) as store:
        assert list(await store.delete_many(OBJECTS)) == ["c"]
        with pytest.raises(raised, match=f"s3:DeleteObject on arn:aws:s3:::bkt/c .*{code}"):
            await store.delete_many(OBJECTS[-1:])


UNKNOWN = servers.refusal(501, "NotImplemented")


async def test_a_server_that_cannot_delete_many_is_asked_one_by_one(s3_store: OpenStore) -> None:
    def answer(head: str, _: bytes) -> bytes:
        return UNKNOWN if head.startswith("POST") else b"HTTP/1.1 204 X\r\n\r\n"

    async with servers.canned(answer) as at, s3_store(at.url) as store:
        assert list(await store.delete_many(OBJECTS)) == []
        assert list(await store.delete_many(OBJECTS[1:])) == []
    assert [head.split()[0] for head in at.heads] == ["POST", "DELETE", "DELETE", "DELETE"]


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
    async with servers.canned(UNKNOWN) as at, s3_store(at.url) as store:
        monkeypatch.setattr(store, "delete", delete)
        stayed = await store.delete_many(objects)
    assert sorted(stayed) == [f"changed{n}" for n in (0, 18, 27, 36, 45, 9)]
    assert most == DELETES_AT_ONCE


async def test_a_server_without_conditional_deletes_deletes(s3_store: OpenStore) -> None:
    def answer(head: str, _: bytes) -> bytes:
        return UNKNOWN if "if-match" in head.lower() else b"HTTP/1.1 204 X\r\n\r\n"

    async with servers.canned(answer) as at, s3_store(at.url) as store:
        assert await store.delete("k", if_etag='"e"') is True
    assert ['if-match: "e"' in head.lower() for head in at.heads] == [True, False]


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


@pytest.mark.parametrize(
    ("url", "profile", "error", "said"),
    [
        ("http://127.0.0.1:1", "nowhere", StoreError, "nowhere"),
        ("http://no-such-host.invalid", "", StoreUnavailable, r"such-host.*resolved.*endpoint_url"),
        ("http://127.0.0.1:1", "", StoreUnavailable, r"refused.*endpoint_url"),
    ],
    ids=["unknown profile", "no such host", "nobody listening"],
)
async def test_check_says_why_nobody_answers(
    s3_store: OpenStore,
    url: str,
    profile: str,
    error: type[StoreError],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if profile:
        monkeypatch.setenv("AWS_PROFILE", profile)
    async with s3_store(url) as store:
        with pytest.raises(error, match=said):
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


async def test_tls(s3_store: OpenStore, certificate: Path, server_tls: ssl.SSLContext) -> None:
    buffer = memoryview(bytearray(300_000))

    def answer(head: str, _: bytes) -> bytes:
        return servers.http() if head.startswith("PUT") else servers.http(b"x" * 300_000)

    async with servers.canned(answer, tls=server_tls) as at:
        async with s3_store(at.url, ca_bundle=f"{certificate}.crt") as store:
            for _ in range(2):
                buffer[:] = bytes(300_000)
                assert (await store.get_into("k", Place.of(buffer))).nbytes == 300_000
                assert buffer == b"x" * 300_000
            assert await store.put("k", Place.of(bytes(3_000_000)), if_absent=False)
        async with s3_store(at.url, verify_tls=False) as store:
            assert (await store.get_into("k", Place.of(buffer))).nbytes == 300_000
        async with s3_store(at.url) as store:
            with pytest.raises(StoreUnavailable, match=r"certificate.*ca_bundle"):
                await store.check()


def test_the_last_dot_of_a_name_is_not_in_a_certificate(
    s3_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On asyncio's own loop, which asks Python's resolver."""
    authority = servers.self_signed(tmp_path / "server.pem", "DNS:localhost")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(authority)
    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **o: resolve("127.0.0.1", *a, **o))

    async def head() -> ObjectInfo | None:
        async with servers.canned(servers.refusal(404, ""), tls=tls) as at:
            url = at.url.replace("127.0.0.1", "LocalHost.")
            async with s3_store(url, ca_bundle=f"{authority}.crt") as store:
                return await store.head("a b")

    assert asyncio.run(head()) is None


async def test_tls_to_a_plain_port(s3_store: OpenStore) -> None:
    async def answer_in_plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await reader.read()

    plain = servers.scripted_server(answer_in_plain)
    async with plain as port, s3_store(f"https://127.0.0.1:{port}") as store:
        with pytest.raises(StoreUnavailable, match="TLS failed"):
            await store.check()


async def test_request_on_the_wire(s3_store: OpenStore) -> None:
    async with servers.canned(servers.http()) as at, s3_store(at.url) as store:
        for if_absent in (True, False):
            assert await store.put("a b", Place.of(b"123456789"), if_absent=if_absent)
    first, second = (head.lower() for head in at.heads)
    assert first.startswith("put /bkt/a%20b http/1.1\r\n")
    assert "\r\nif-none-match: *\r\n" in first
    assert "\r\nx-amz-content-sha256: unsigned-payload\r\n" in first
    assert "expect:" not in first
    assert "if-none-match" not in second
    assert "checksum" not in first


@pytest.mark.parametrize("body", ["", "<ListBucketResult><Contents></Contents></ListBucketResult>"])
async def test_listing_that_is_no_listing(s3_store: OpenStore, body: str) -> None:
    async with servers.canned(servers.http(body)) as at, s3_store(at.url) as store:
        with pytest.raises(StoreUnavailable, match="listing cannot be read"):
            await store.check()
