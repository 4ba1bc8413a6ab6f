"""Pools on threads of their own. What a pool promises, test_pool.py tests on one of them, too."""

from __future__ import annotations

import asyncio
import ssl
import threading
from dataclasses import replace

import pytest

from s3kv.place import Place
from s3kv.stores.http.exchange import Request
from s3kv.stores.http.pool import Pool
from s3kv.stores.http.threads import ThreadedPool, threads_on
from tests import servers
from tests.unit.stores.http.test_pool import GET, Reader, Writer, ok, patience, silence
from tests.unit.stores.suite import Recorder


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "s3kv-network"]


def threaded(port: int, count: int, tls: ssl.SSLContext | None = None) -> ThreadedPool:
    where = {"tls": tls, "size": 2, "patience": patience()}
    return ThreadedPool([Pool("127.0.0.1", port, **where) for _ in range(count)])


@pytest.mark.parametrize(
    ("cores", "count"), [(1, 1), (4, 1), (7, 1), (8, 2), (15, 3), (16, 4), (192, 4)]
)
def test_a_thread_for_every_four_cores_and_at_most_four(cores: int, count: int) -> None:
    assert threads_on(cores) == count


async def test_requests_at_once_are_served_by_several_threads_which_end_with_the_pool() -> None:
    begun, progressed = set[int](), set[int]()

    async def handle(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ok(b"abc"))

    class Noting(Recorder):
        def begin(self, nbytes: int) -> Place | None:
            begun.add(threading.get_ident())
            return super().begin(nbytes)

        def arrived(self, nbytes: int) -> None:
            progressed.add(threading.get_ident())

    async with servers.scripted_server(handle) as port:
        pool = threaded(port, 3)
        assert len(names()) == 3
        into = [bytearray(3) for _ in range(3)]
        places = [Place.of(buffer) for buffer in into]
        asked = [replace(GET, into=place, receiver=Noting(place)) for place in places]
        answers = await asyncio.gather(*(pool.request(request) for request in asked))
        assert [answer.nbytes for answer in answers] == [3, 3, 3]
        assert into == [b"abc"] * 3
        assert begun == progressed
        assert len(begun | {threading.get_ident()}) == 4
        await pool.close()
    assert names() == []


@pytest.mark.parametrize("part", [b"", b"a"])
async def test_a_cancelled_request_has_ended_when_its_caller_goes_on(part: bytes) -> None:
    arrived, gone = asyncio.Event(), asyncio.Event()

    async def handle(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ok(b"abc")[:-3] + part)
        arrived.set()
        await reader.read()
        gone.set()
        writer.write(b"bc")

    buffer = bytearray(3)
    async with servers.scripted_server(handle) as port:
        pool = threaded(port, 2)
        request: Request = replace(GET, into=Place.of(buffer))
        asking = asyncio.create_task(pool.request(request))
        await arrived.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        buffer[:] = b"new"
        await gone.wait()
        await pool.close()
    assert buffer == b"new"


async def test_a_request_that_waits_for_a_connection_ends_with_the_pool() -> None:
    """The server never answers to TLS."""
    async with servers.scripted_server(silence) as port:
        pool = threaded(port, 1, ssl.create_default_context())
        asking = asyncio.create_task(pool.request(GET))
        await asyncio.sleep(0.05)
        await pool.close()
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert names() == []
