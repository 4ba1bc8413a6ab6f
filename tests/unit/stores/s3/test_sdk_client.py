"""The fast client and aiobotocore's own, asked the same: the same results, and the same errors."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any
from unittest import mock

import pytest

from lab.s3 import S3Server
from s3kv.config import Config
from s3kv.errors import StoreError, StoreUnavailable
from s3kv.place import Place
from s3kv.stores.s3 import fast_client, s3_store, sdk_client
from s3kv.stores.s3.address import find_address
from s3kv.stores.s3.fast_client import FastClient
from s3kv.stores.s3.s3_store import S3Store
from s3kv.stores.s3.sdk_client import SdkClient
from s3kv.stores.store import ObjectInfo, ObjectStore
from tests import servers
from tests.servers import REAL_SERVERS
from tests.unit.stores.http.test_pool import patience
from tests.unit.stores.suite import ODD_NAMES, Recorder, apart, pattern

SEED = int(os.environ.get("S3KV_SEED", "20261122"))
STEPS = 150
NAMES = [*ODD_NAMES, "a/1", "a/2", "b/1/2", "c"]


@asynccontextmanager
async def both(
    url: str, bucket: str = "bkt", **settings: Any
) -> AsyncIterator[tuple[ObjectStore, ObjectStore]]:
    config = Config(bucket=bucket, endpoint_url=url, **settings)
    address = find_address(config)
    fast = S3Store(config, FastClient(config, address))
    reference = S3Store(config, SdkClient(config, address))
    try:
        yield fast, reference
    finally:
        await fast.close()
        await reference.close()


class Script:
    """A sequence of operations, the same for each store that plays it, below a root of its own."""

    def __init__(self, seed: int, store: ObjectStore, root: str) -> None:
        self._rng = random.Random(seed)
        self._store = store
        self._root = root

    async def step(self) -> Any:
        """One operation. What it returned, without what differs from one root or second to another,
        or the error it raised."""
        reads = (self._get, self._range, self._hedge, self._head, self._list, self._folders)
        writes = (self._put, self._put, self._refresh, self._delete, self._delete_many)
        operation = self._rng.choice((*reads, *writes))
        try:
            return operation.__name__, self._plain(await operation())
        except StoreError as error:
            return operation.__name__, type(error), str(error).replace(self._root, "ROOT/")

    def _plain(self, told: Any) -> Any:
        match told:
            case ObjectInfo():
                aged = None if told.age_s is None else "aged"
                return told.key.removeprefix(self._root), told.nbytes, told.etag, aged
            case str():
                return told.removeprefix(self._root)
            case list() | tuple():
                return [self._plain(item) for item in told]
        return told

    def _key(self) -> str:
        return self._root + self._rng.choice(NAMES)

    async def _put(self) -> Any:
        data = pattern(self._rng.choice([0, 1, 1000, 70_000, 600_000]), self._rng.randrange(3))
        return await self._store.put(
            self._key(), Place.of(data), if_absent=self._rng.random() < 0.5
        )

    async def _get(self) -> Any:
        memory = bytearray(b"\xee" * 600_010)
        room = self._rng.choice([0, 999, 70_000, 600_000])
        info = await self._store.get_into(self._key(), Place.of(memoryview(memory)[:room]))
        fits = info is not None and info.nbytes <= room
        assert memory[room:] == b"\xee" * (len(memory) - room), "written behind the buffer"
        return [info, bytes(memory[: info.nbytes]) if fits and info else None]

    async def _hedge(self) -> Any:
        """A read whose place another one has."""
        place, other = apart(600_000), Recorder(None)
        await self._store.get_into(self._key(), place, other)
        assert bytes(place) == b"\xee" * place.nbytes
        return other.begun, other.seen

    async def _range(self) -> Any:
        """A read of a part, to the end of a larger place."""
        first, nbytes = self._rng.choice([0, 1, 999, 69_000]), self._rng.choice([1, 1000, 300_000])
        place = apart(nbytes + 5000)
        receiver = Recorder(place.cut(5000, place.nbytes))
        info = await self._store.get_into(self._key(), place.cut(0, nbytes), receiver, first)
        return info, receiver.begun, bytes(place)

    async def _head(self) -> Any:
        return await self._store.head(self._key())

    async def _delete(self) -> Any:
        etag = '"0123456789abcdef0123456789abcdef"' if self._rng.random() < 0.3 else None
        return await self._store.delete(self._key(), if_etag=etag)

    async def _delete_many(self) -> Any:
        listed = [info async for info in self._store.list(self._root)]
        chosen = self._rng.sample(listed, min(3, len(listed)))
        return list(await self._store.delete_many(chosen)) if chosen else []

    async def _list(self) -> Any:
        after = self._key() if self._rng.random() < 0.3 else ""
        prefix = self._root + self._rng.choice(["", "", "a/", "none"])
        return [info async for info in self._store.list(prefix, after)]

    async def _folders(self) -> Any:
        return list(await self._store.folders(self._root, self._rng.choice([1, 2, 100])))

    async def _refresh(self) -> Any:
        return await self._store.refresh(self._key(), self._rng.choice([1e9, 2e9]))


async def play(url: str, bucket: str) -> None:
    print(f"S3KV_SEED={SEED} replays this")
    with mock.patch.object(s3_store, "PAGE_KEYS", 7):
        async with both(url, bucket) as stores:
            scripts = [
                Script(SEED, store, f"same/{name}/")
                for store, name in zip(stores, ("1", "2"), strict=True)
            ]
            for number in range(STEPS):
                fast, reference = [await script.step() for script in scripts]
                assert fast == reference, f"step {number}"
            counted = [{k: n for k, n in store.traffic.requests.items() if n} for store in stores]
            assert counted[0] == counted[1]
            assert stores[0].traffic.received_bytes == stores[1].traffic.received_bytes


async def test_random_operations_on_moto(moto_url: str) -> None:
    await play(moto_url, servers.BUCKET)


@pytest.mark.parametrize("name", REAL_SERVERS)
async def test_random_operations_on_a_real_server(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    server: S3Server = request.getfixturevalue(name)
    servers.set_credentials(monkeypatch, server.env)
    boto = servers.boto_client(server.url, server.env)
    with suppress(boto.exceptions.BucketAlreadyOwnedByYou):  # on the other kind of loop
        boto.create_bucket(Bucket="same")
    await play(server.url, "same")


CALLS: Sequence[Callable[[ObjectStore], Awaitable[Any]]] = [
    lambda store: store.get_into("k", Place.of(bytearray(10))),
    lambda store: store.put("k", Place.of(b"x"), if_absent=True),
    lambda store: store.refresh("k", 1e9),
    lambda store: store.head("k"),
    lambda store: store.delete("k"),
    lambda store: store.delete("k", if_etag='"e"'),
    lambda store: store.folders("k", 10),
    lambda store: store.check(),
]
ANSWERS = [
    (400, "ExpiredToken", ""),
    (400, "AuthorizationHeaderMalformed", "<Region>eu-west-2</Region>"),
    (400, "InvalidArgument", "<Message>what</Message>"),
    (301, "PermanentRedirect", ""),
    (403, "AccessDenied", "<Message>no</Message>"),
    (403, "InvalidAccessKeyId", ""),
    (403, "RequestTimeTooSkewed", ""),
    (403, "", ""),
    (404, "NoSuchKey", ""),
    (404, "NoSuchBucket", ""),
    (409, "ConditionalRequestConflict", ""),
    (412, "PreconditionFailed", ""),
    (429, "TooManyRequests", ""),
    (500, "InternalError", ""),
    (501, "NotImplemented", ""),
    (503, "SlowDown", ""),
    (503, "", ""),
]


@pytest.mark.parametrize(("status", "code", "more"), ANSWERS)
async def test_errors_are_told_alike(status: int, code: str, more: str) -> None:
    region = "x-amz-bucket-region: eu-west-1\r\n" if status == 301 else ""
    answer = servers.refusal(status, code, more, region)
    async with servers.canned(answer) as at, both(at.url) as stores:
        for number, call in enumerate(CALLS):
            fast, reference = [await outcome(call, store) for store in stores]
            if status == 301 and number == 1:  # aiohttp cannot send a body to another place
                assert reference[0] is StoreUnavailable
                continue
            assert fast == reference, f"call {number}"


BROKEN = {
    "closed at once": b"",
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "cut head": b"HTTP/1.1 200 OK\r\nContent-Le",
    "cut body": b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
    "no length": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
}


def scripted(
    answer: bytes, *, pieces: bytes = b"", silent: bool = False
) -> AbstractAsyncContextManager[int]:
    """A server that answers one request of a connection. pieces: come after that, ten in a second.
    silent: it leaves the connection open."""

    async def serve(reader: Any, writer: Any) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        for piece in pieces:
            await asyncio.sleep(0.1)
            if writer.is_closing():
                return
            writer.write(bytes([piece]))
        if silent:
            await reader.read()  # until the peer goes

    return servers.scripted_server(serve)


@pytest.mark.parametrize("answer", BROKEN.values(), ids=BROKEN)
async def test_broken_answers_are_the_same_kind_of_error(answer: bytes) -> None:
    async with scripted(answer) as port, both(f"http://127.0.0.1:{port}") as stores:
        fast, reference = [await outcome(CALLS[0], store) for store in stores]
        assert fast[0] is reference[0]
        assert [store.traffic.requests for store in stores] == [{"GET|none": 1}] * 2


@pytest.mark.parametrize("framing", ["Transfer-Encoding: chunked", "Connection: close"])
async def test_an_object_whose_length_is_not_told_has_one_all_the_same(framing: str) -> None:
    """HTTP lets an answer to HEAD leave it out, as proxies do that compress."""
    told = f"HTTP/1.1 200 X\r\n{framing}\r\nLast-Modified: Sun, 09 Sep 2001 01:46:40 GMT\r\n\r\n"
    async with scripted(told.encode()) as port, both(f"http://127.0.0.1:{port}") as stores:
        found = [await store.head("k") for store in stores]
        assert found == [ObjectInfo("k", 0, 1e9)] * 2


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"
SILENT = {
    "no answer": (b"", b""),
    "head and silence": (HEAD, b""),
    "part and silence": (HEAD + b"abc", b""),
    "a trickle": (HEAD, b"x" * 99),
}


@pytest.mark.parametrize(("answer", "pieces"), SILENT.values(), ids=SILENT)
async def test_silence_is_told_alike(
    answer: bytes, pieces: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_byte_ms = 300 if not answer else 60_000  # what comes before the silence may be late
    waits = patience(connect_ms=2_000, first_byte_ms=first_byte_ms, progress_ms=600)
    for client in (fast_client, sdk_client):
        monkeypatch.setattr(client, "patience_of", lambda config: waits)
    server = scripted(answer, pieces=pieces, silent=True)
    async with server as port, both(f"http://127.0.0.1:{port}") as stores:
        asked = [asyncio.wait_for(outcome(CALLS[0], store), 100) for store in stores]
        fast, reference = [await told for told in asked]
        assert fast == reference


async def outcome(call: Callable[[ObjectStore], Awaitable[Any]], store: ObjectStore) -> Any:
    try:
        return await call(store)
    except StoreError as error:
        return type(error), str(error), error.code, error.region
