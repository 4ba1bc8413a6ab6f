"""One connection in the turn of the loop in which it has been lost, and does not know it yet."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from s3kv.stores.http.connection import Connection
from s3kv.stores.http.exchange import Request
from s3kv.stores.http.pool import Pool
from s3kv.stores.http.watch import Patience
from tests import servers

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
GET = Request("GET", "/k", {"Host": "test"})
PATIENT = Patience(connect_ms=20_000, first_byte_ms=20_000, progress_ms=20_000, min_bytes_per_s=1)


@asynccontextmanager
async def lost_connection(
    certificate: Path, there: ssl.SSLContext
) -> AsyncIterator[tuple[Pool, Connection]]:
    """A pool with an idle TLS connection that the server has reset. The loop has seen that in the
    turn before this one, and tells the connection in this one."""
    reset = asyncio.Event()

    async def serve(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await reset.wait()
        reset.clear()
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async def answer(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        await reader.read()

    here = ssl.create_default_context(cafile=f"{certificate}.crt")
    async with servers.scripted_server(serve, answer, tls=there) as port:
        pool = Pool("127.0.0.1", port, tls=here, size=2, patience=PATIENT)
        assert (await pool.request(GET)).status == 200
        (connection,) = pool._idle
        reset.set()
        while connection.is_open:  # noqa: ASYNC110 - the loop announces it a turn too late
            await asyncio.sleep(0)
        try:
            yield pool, connection
        finally:
            await pool.close()


async def request_again(pool: Pool) -> None:
    assert (await pool.request(GET)).status == 204


async def close(pool: Pool) -> None:
    await pool.close()


async def end_it(pool: Pool) -> None:
    (connection,) = pool._idle
    connection.abort()
    connection.abort()
    await connection.closed


async def ask_what_is_unsent(pool: Pool) -> None:
    (connection,) = pool._idle
    assert connection._unsent() == 0
    await connection.closed


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("act", [request_again, close, end_it, ask_what_is_unsent])
def test_a_lost_connection_is_left_alone(
    act: Callable[[Pool], Coroutine[Any, Any, None]],
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    certificate: Path,
    server_tls: ssl.SSLContext,
) -> None:
    async def run() -> None:
        async with lost_connection(certificate, server_tls) as (pool, connection):
            assert connection._transport is not None, "it has been told"
            await act(pool)
            assert connection.closed.done()

    loop = new_loop()
    loop.run_until_complete(run())
    loop.close()
