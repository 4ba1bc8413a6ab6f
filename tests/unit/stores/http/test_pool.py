"""The pool against servers that misbehave in every way a server can."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace

import pytest
import uvloop

from s3kv.errors import StoreError, StoreUnavailable
from s3kv.place import Place
from s3kv.stores.http.connection import Connection
from s3kv.stores.http.exchange import Request, Response
from s3kv.stores.http.pool import Pool
from s3kv.stores.http.threads import ThreadedPool
from s3kv.stores.http.watch import Patience
from tests import servers
from tests.waiting import until

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
GET = Request("GET", "/k", {"Host": "test"})


def get(buffer: bytearray | memoryview) -> Request:
    return replace(GET, into=Place.of(buffer))


def put(body: bytes | memoryview) -> Request:
    return Request("PUT", "/k", {"Host": "test"}, Place.of(body))


def patience(**changed: int) -> Patience:
    usual = dict.fromkeys(("connect_ms", "first_byte_ms", "progress_ms"), 5000)
    return Patience(**{**usual, "min_bytes_per_s": 1000, **changed})


@pytest.fixture(params=[False, True], ids=["here", "in a thread"], autouse=True)
def in_a_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whether a thread of its own serves the connections."""
    global IN_A_THREAD
    IN_A_THREAD = request.param
    yield
    IN_A_THREAD = False


IN_A_THREAD = False


@asynccontextmanager
async def pool_on(
    *handlers: servers.Handler, size: int = 4, **waiting: int
) -> AsyncIterator[Pool | ThreadedPool]:
    """A pool on a server whose n-th connection is served by the n-th handler (then the last)."""
    async with servers.scripted_server(*handlers) as port:
        alone = Pool("127.0.0.1", port, tls=None, size=size, patience=patience(**waiting))
        pool = ThreadedPool([alone]) if IN_A_THREAD else alone
        try:
            yield pool
        finally:
            await pool.close()


def say(*answers: bytes, pause: bool = False) -> servers.Handler:
    """Answer each request (without a body) with the next of `answers`, then close."""

    async def handle(reader: Reader, writer: Writer) -> None:
        for answer in answers:
            await reader.readuntil(b"\r\n\r\n")
            for part in (answer[:70], answer[70:]) if pause else (answer,):
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.01 if pause else 0)

    return handle


def ok(body: bytes, extra: str = "") -> bytes:
    return f"HTTP/1.1 200 OK\r\n{extra}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def test_interim_answers_are_passed_over() -> None:
    answer = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n" + ok(b"abc")
    async with pool_on(say(answer)) as pool:
        assert (await pool.request(get(bytearray(3)))).nbytes == 3


async def test_a_request_cancelled_as_its_answer_ends_leaves_no_connection_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    advance = Connection._step

    def step(connection: Connection, arrived: Callable[[], None]) -> None:
        advance(connection, arrived)
        if tasks and connection._answer is not None and connection._answer.done():
            tasks.pop().cancel()

    monkeypatch.setattr(Connection, "_step", step)
    async with servers.scripted_server(say(ok(b"abc"), ok(b"abc"))) as port:
        pool = Pool("127.0.0.1", port, tls=None, size=4, patience=patience())
        request = asyncio.ensure_future(pool.request(GET))
        tasks = [request]
        with pytest.raises(asyncio.CancelledError):
            await request
        await asyncio.sleep(0.01)
        left = len(pool._open)
        await pool.close()
    assert left == 0


async def test_body_that_ends_with_the_connection() -> None:
    answer = b"HTTP/1.0 500 Oops\r\n\r\nall of it"
    async with pool_on(say(answer), say(ok(b"fresh"))) as pool:
        assert (await pool.request(GET)).body == b"all of it"
        assert (await pool.request(GET)).body == b"fresh"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ok(bytes(1000))[:-1], "ended after 999 of 1000 bytes"),
        (ok(bytes(1000))[:20], "closed connection"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "Content-Length"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "illegal"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", "bad Content-Length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", "conflicting"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000, "too big|too long"),
    ],
    ids=["truncated", "head only", "no length", "not http", "negative", "two lengths", "big head"],
)
async def test_bad_answers(answer: bytes, message: str) -> None:
    async with pool_on(say(answer)) as pool:
        with pytest.raises(StoreUnavailable, match=message):
            await pool.request(get(bytearray(1000)))


async def close(reader: Reader, writer: Writer) -> None:
    await reader.readuntil(b"\r\n\r\n")


async def first_then_close(reader: Reader, writer: Writer) -> None:
    await say(ok(b"first"))(reader, writer)
    await close(reader, writer)


async def test_closed_idle_connection_is_replaced_once() -> None:
    async with pool_on(first_then_close, say(ok(b"second"), ok(b"third")), close) as pool:
        for body in (b"first", b"second", b"third"):
            assert (await pool.request(GET)).body == body


@pytest.mark.parametrize(
    ("handler", "answers"), [(close, 0), (say(ok(b"first"), b"HTTP/1.1 2"), 1)]
)
async def test_no_second_try_on_a_new_connection_or_after_a_byte(
    handler: servers.Handler, answers: int
) -> None:
    async with pool_on(handler, say(ok(b"never asked"))) as pool:
        for _ in range(answers):
            await pool.request(GET)
        with pytest.raises(StoreUnavailable, match="closed"):
            await pool.request(GET)


async def test_a_new_connection_that_is_closed_at_once_is_an_outage() -> None:
    """So does a load balancer without a server. uvloop may see it before the request is sent."""
    async with pool_on(say()) as pool:
        for _ in range(20):
            with pytest.raises(StoreUnavailable):
                await pool.request(GET)


@pytest.mark.parametrize(
    "first", [ok(b"1", "Connection: close\r\n"), ok(b"1") + b"more", b"HTTP/1.0 " + ok(b"1")[9:]]
)
async def test_connection_is_not_kept(first: bytes) -> None:
    async with pool_on(say(first, ok(b"same")), say(ok(b"fresh"))) as pool:
        await pool.request(get(bytearray(1)))
        assert (await pool.request(GET)).body == b"fresh"


async def test_requests_wait_for_a_connection() -> None:
    async with pool_on(say(*[ok(b"x")] * 10), say(ok(b"second connection")), size=1) as pool:
        responses = await asyncio.gather(*(pool.request(GET) for _ in range(10)))
        assert {r.body for r in responses} == {b"x"}


async def silence(reader: Reader, writer: Writer) -> None:
    await reader.read()


@pytest.mark.parametrize("in_a_thread", [False], indirect=True)
@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="Linux alone tells")
async def test_a_head_without_its_body_is_acknowledged_at_once() -> None:
    """Or a server with Nagle's algorithm on would keep the body back for 40 ms: of a connection on
    which requests and answers take turns, the kernel is in no hurry to acknowledge anything."""
    body = asyncio.Event()

    async def handle(reader: Reader, writer: Writer) -> None:
        for _ in range(3):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(ok(b"abc")[:-3])
            await body.wait()
            writer.write(b"abc")

    async with pool_on(handle, size=1) as pool:
        for _ in range(3):
            body.clear()
            asking = asyncio.create_task(pool.request(GET))
            await until(lambda: any(c._exchange and c._exchange.begun for c in pool._open))
            (connection,) = pool._open
            raw = connection._transport.get_extra_info("socket")
            assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK) == 1
            body.set()
            assert (await asking).body == b"abc"


async def test_no_answer_is_given_up() -> None:
    async with pool_on(silence, first_byte_ms=50) as pool:
        with pytest.raises(StoreUnavailable, match=r"within 50 ms.*half of request_timeout_ms"):
            await pool.request(GET)
        with pytest.raises(StoreUnavailable, match="half of request_timeout_ms"):
            await pool.request(put(b"x"))


@pytest.mark.parametrize("in_a_thread", [False], indirect=True)
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_time_in_which_nothing_ran_is_not_taken_for_silence(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """The machine had stopped, say, and the server with it."""
    arrived, may_answer = threading.Event(), threading.Event()

    def answer_afterwards() -> None:
        connection, _ = server.accept()
        with closing(connection):
            connection.recv(1024)
            arrived.set()
            may_answer.wait()
            connection.sendall(ok(b"here"))
            connection.recv(1024)

    with closing(socket.create_server(("127.0.0.1", 0))) as server, closing(new_loop()) as loop:
        threading.Thread(target=answer_afterwards, daemon=True).start()
        port = server.getsockname()[1]

        async def fetch() -> Response:
            waiting = patience(first_byte_ms=1_000, progress_ms=1_000)
            pool = Pool("127.0.0.1", port, tls=None, size=1, patience=waiting)
            answer = asyncio.ensure_future(pool.request(GET))
            await until(arrived.is_set)
            time.sleep(2.0)  # noqa: ASYNC251
            await until(lambda: any(c._watch._overslept for c in pool._open) or answer.done())
            may_answer.set()
            try:
                return await answer
            finally:
                await pool.close()

        assert loop.run_until_complete(fetch()).status == 200


async def test_a_body_nobody_reads_is_given_up() -> None:
    async def never_read(reader: Reader, writer: Writer) -> None:
        await asyncio.Event().wait()

    async with pool_on(never_read, progress_ms=50) as pool:
        with pytest.raises(StoreUnavailable, match="request_timeout_ms"):
            await pool.request(put(bytes(2**25)))


@pytest.mark.parametrize("in_a_thread", [False], indirect=True)
async def test_a_body_that_is_read_slowly_is_not_given_up() -> None:
    """What the kernel has taken of it is on its way for longer than the answer may take."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    nbytes = 2**22

    def read_slowly() -> None:
        connection, _ = listener.accept()
        with connection:
            data = connection.recv(2**16)
            left = nbytes - (len(data) - data.index(b"\r\n\r\n") - 4)
            while left:
                left -= len(connection.recv(2**16))
                time.sleep(0.02)
            connection.sendall(ok(b"kept"))

    reader = threading.Thread(target=read_slowly)
    reader.start()
    slow = patience(first_byte_ms=600, progress_ms=600)
    pool = Pool(*listener.getsockname(), tls=None, size=1, patience=slow)
    assert (await pool.request(put(bytes(nbytes)))).body == b"kept"
    await asyncio.to_thread(reader.join)
    await pool.close()
    listener.close()


def drip(data: bytes, piece_bytes: int, pause_s: float) -> servers.Handler:
    async def handle(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for at in range(0, len(data), piece_bytes):
            writer.write(data[at : at + piece_bytes])
            await writer.drain()
            await asyncio.sleep(pause_s)

    return handle


async def test_a_body_that_is_slow_is_not_given_up_and_one_that_trickles_is() -> None:
    """A trickle never stops moving, so a limit on silence alone would wait until its end."""
    buffer = memoryview(bytearray(10_000))
    slow = drip(ok(b"0123456789" * 100), 100, 0.12)
    async with pool_on(slow, progress_ms=1_000, min_bytes_per_s=10) as pool:
        await pool.request(get(buffer[:1000]))
        assert bytes(buffer[:1000]) == b"0123456789" * 100
    trickle = drip(ok(bytes(10_000)), 40, 0.01)
    async with pool_on(trickle, progress_ms=200, min_bytes_per_s=2**20) as pool:
        with pytest.raises(StoreUnavailable, match="bytes a second"):
            await pool.request(get(buffer))


async def test_cancelled_get_writes_no_more() -> None:
    half, cancelled, more = 100_000, asyncio.Event(), asyncio.Event()

    async def stutter(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ok(bytes(2 * half))[:-half])
        await cancelled.wait()
        writer.write(bytes(half))
        more.set()
        await reader.read()

    async with pool_on(stutter) as pool:
        buffer = memoryview(bytearray(b"\xee" * 2 * half))
        task = asyncio.create_task(pool.request(get(buffer)))
        await until(lambda: buffer[half - 1000] != 0xEE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        buffer[:] = b"\xdd" * 2 * half
        cancelled.set()
        await more.wait()
        await asyncio.sleep(0.02)
        assert buffer == b"\xdd" * 2 * half


async def test_cancelled_put_sends_no_more() -> None:
    """Memory given back by a cancelled PUT is not read again, however ready the peer is for it."""
    listener = socket.create_server(("127.0.0.1", 0))
    read_now = threading.Event()
    data = bytearray()

    def read_late() -> None:
        connection, _ = listener.accept()
        with connection:
            read_now.wait()
            while piece := connection.recv(2**20):
                data.extend(piece)

    reader = threading.Thread(target=read_late)
    reader.start()
    pool = Pool(*listener.getsockname(), tls=None, size=1, patience=patience())
    body = memoryview(bytearray(b"\x11" * 2**25))

    async def put_and_reuse() -> None:
        try:
            await pool.request(put(body))
        finally:
            body[:] = b"\x22" * len(body)
            # Hold the loop until the reader has made room, so that it could send at once.
            time.sleep(0.1)  # noqa: ASYNC251

    task = asyncio.create_task(put_and_reuse())
    await until(lambda: any(not c._writable.is_set() for c in pool._open))
    await asyncio.sleep(0.1)  # until the socket takes no more
    read_now.set()
    task.cancel()
    await asyncio.wait([task])
    await asyncio.to_thread(reader.join)
    await pool.close()
    listener.close()
    sent = data[data.index(b"\r\n\r\n") + 4 :]
    assert 0 < len(sent) < len(body)
    assert sent.count(0x11) == len(sent)


@pytest.mark.parametrize("ending", ["\n", "\u201d"])
async def test_a_header_that_cannot_be_sent_is_refused_and_not_shown(ending: str) -> None:
    """Credentials that end in a line break were written with `echo`, say. Errors end up in logs."""
    headers = {"Host": "test", "X-Amz-Security-Token": f"what-nobody-may-see{ending}"}
    request = Request("GET", "/k", headers)
    async with pool_on(say(ok(b"never asked"))) as pool:
        with pytest.raises(StoreError, match="line break") as caught:
            await pool.request(request)
    assert "what-nobody-may-see" not in "".join(traceback.format_exception(caught.value))


async def test_answer_before_the_end_of_the_body() -> None:
    async def refuse(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 3\r\n\r\nno!")
        await reader.read()

    async with pool_on(refuse, say(ok(b"fresh"))) as pool:
        response = await pool.request(put(bytes(2**25)))
        assert (response.status, response.body) == (503, b"no!")
        assert (await pool.request(GET)).body == b"fresh"


async def test_close_ends_requests_and_refuses_new_ones() -> None:
    arrived = asyncio.Event()

    async def listen(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        arrived.set()
        await reader.read()

    async with pool_on(listen) as pool:
        task = asyncio.create_task(pool.request(GET))
        await arrived.wait()
        await pool.close()
        with pytest.raises(StoreUnavailable):
            await task
        with pytest.raises(StoreError, match="closed"):
            await pool.request(GET)
