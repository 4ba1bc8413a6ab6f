"""The proxy's process: `python -m lab.proxying URL ADDRESS CERTIFICATE WRONG-CERTIFICATE`.

Takes commands on stdin, one JSON object a line, answers each with one line, and ends with its
stdin, so that it cannot outlive who started it. See `lab.proxy`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
import sys
from collections import Counter
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import uvloop

from lab.faults import Fault
from lab.service import free_ports
from lab.traffic import PIECE_BYTES, TICK_S, Head, Link, Valve, body_of, read_head

_SOCKET_BYTES = 256 * 2**10
"""Receive buffer of a client's connection: a rate that is limited has to be felt at the other end,
and not to vanish in megabytes of the kernel's own buffers."""


class Broken(Exception):
    """A fault ended this connection. reset: by a TCP reset, not by an orderly end."""

    def __init__(self, *, reset: bool) -> None:
        super().__init__()
        self.reset = reset


class Exchange:
    """One request and its answer, on their way through the proxy, under at most one fault."""

    def __init__(
        self, server: Server, client: asyncio.StreamWriter, head: Head, fault: Fault | None
    ) -> None:
        self._server, self._client, self._head, self._fault = server, client, head, fault
        self._has_body = head.length != 0

    async def run(self, reader: asyncio.StreamReader, upstream: Upstream) -> bool:
        """Returns whether the connection can carry another one."""
        kind = self._fault.kind if self._fault else None
        if kind in ("black_hole", "reset_before_head", "answer"):
            return await self._without_server(reader)
        to_server = await upstream.connection()
        struck = self._fault if self._has_body else None
        sending = asyncio.ensure_future(
            self._pass(self._head, reader, to_server[1], self._server.up, struck)
        )
        try:
            answering = asyncio.ensure_future(read_head(to_server[0]))
            await asyncio.wait([sending, answering], return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            answer = await answering
            while answer.first[1].startswith("1"):
                answer = await read_head(to_server[0])
            all_sent = sending.done()
            await self._relay(answer, to_server[0])
            return all_sent and "close" not in answer.headers.get("connection", "")
        finally:
            sending.cancel()
            answering.cancel()
            await asyncio.gather(sending, answering, return_exceptions=True)

    async def _without_server(self, reader: asyncio.StreamReader) -> bool:
        fault = self._fault
        assert fault is not None
        async for _ in body_of(self._head, reader, PIECE_BYTES):
            pass
        if fault.kind == "black_hole":
            await reader.read()
            raise Broken(reset=False)
        if fault.kind == "reset_before_head":
            raise Broken(reset=True)
        body = b"" if self._head.verb == "HEAD" else fault.body.encode("latin-1")
        headers = {**fault.headers, "Content-Length": str(len(body))}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._client.write(f"HTTP/1.1 {fault.status} Said\r\n{lines}\r\n".encode() + body)
        await self._client.drain()
        return True

    async def _relay(self, answer: Head, reader: asyncio.StreamReader) -> None:
        fault = self._fault
        kind = fault.kind if fault else None
        if self._head.verb == "HEAD" or answer.first[1] in ("204", "304"):
            answer = Head(answer.raw, answer.first, {})
        if kind == "lose_answer":
            async for _ in body_of(answer, reader, PIECE_BYTES):
                pass
            raise Broken(reset=True)
        if kind == "delay" and fault is not None:
            await asyncio.sleep(fault.seconds)
        if kind == "reset_inside_head":
            await self._break(answer.raw[: len(answer.raw) // 2])
        if kind == "reset_after_head":
            await self._break(answer.raw)
        if kind == "flip_head":
            answer = Head(bytes([answer.raw[0] ^ 1]) + answer.raw[1:], answer.first, answer.headers)
        struck = None if self._has_body else fault
        await self._pass(answer, reader, self._client, self._server.down, struck)

    async def _break(self, said: bytes) -> None:
        self._client.write(said)
        await self._client.drain()
        await asyncio.sleep(TICK_S)  # a reset overtakes what the peer has not read yet
        raise Broken(reset=True)

    async def _pass(
        self,
        head: Head,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        link: Link,
        fault: Fault | None,
    ) -> None:
        """Pass a message on. What `fault` does to bodies is done to this one."""
        kind = fault.kind if fault else None
        at = _position(fault, head.length) if fault else 0
        pieces = body_of(head, reader, link.piece_bytes)
        if kind == "trickle" and fault is not None:
            pieces = body_of(head, reader, fault.nbytes)
        await link.valve.take(len(head.raw))
        writer.write(head.with_length(at) if kind == "shorten" else head.raw)
        passed = 0
        async for piece in pieces:
            last = passed <= at < passed + len(piece)
            if last and kind == "flip_body":
                piece = _flipped(piece, at - passed)
            if last and kind in ("reset_mid_body", "truncate", "shorten"):
                piece = piece[: at - passed]
            passed += len(piece)
            await link.take(len(piece))
            writer.write(piece)
            await writer.drain()
            if last and kind in ("reset_mid_body", "truncate"):
                await asyncio.sleep(TICK_S)
                raise Broken(reset=kind == "reset_mid_body")
            if last and kind == "shorten":
                raise Broken(reset=False)
            if kind == "trickle" and fault is not None:
                await asyncio.sleep(fault.seconds)
        await writer.drain()


def _position(fault: Fault, length: int | None) -> int:
    nbytes = length or 0
    if fault.at is None:
        return nbytes // 2
    return min(nbytes, fault.at) if fault.at >= 0 else max(0, nbytes + fault.at)


def _flipped(piece: bytes, at: int) -> bytes:
    return piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]


class Upstream:
    """The connection to the server that belongs to one of a client's."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None or self._streams[0].at_eof():
            self.close()
            self._streams = await asyncio.open_connection(*self._address, limit=2**20)
        return self._streams

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


class Server:
    """The proxy: its listener, its connections, its one fault, its counters."""

    def __init__(
        self,
        upstream_url: str,
        address: str,
        tls: ssl.SSLContext | None,
        wrong_tls: ssl.SSLContext | None,
    ) -> None:
        parts = urlsplit(upstream_url)
        self._upstream = (parts.hostname or "", parts.port or 80)
        self._tls, self._wrong_tls = tls, wrong_tls
        (self._port,) = free_ports(1, address)  # it stays its own while nobody listens
        self._address = address
        self._listener: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._fault: Fault | None = None
        self._times: int | None = None
        self._requests: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._connections = 0
        self._changes = 0
        """Faults that came or went with the open connections."""
        self._valve = Valve()
        self.up, self.down = Link(self._valve), Link(self._valve)

    async def listen(self, tls: ssl.SSLContext | None) -> int:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
        sock.bind((self._address, self._port))
        sock.listen(128)
        serve = partial(self._serve, self._changes)
        self._listener = await asyncio.start_server(serve, sock=sock, ssl=tls, limit=2**20)
        return self._port

    async def command(self, op: str, **given: Any) -> Any:
        if op == "listen":
            return await self.listen(self._tls)
        if op == "limit":
            self.up.bytes_per_s = self.down.bytes_per_s = given["bytes_per_s"]
        elif op == "cut":
            self._cut()
        elif op == "shut":
            self._valve.shut_after(given["nbytes"])
        elif op == "is_shut":
            return self._valve.is_shut
        elif op == "fault":
            await self._set(Fault(**given["fault"]) if given["fault"] else None)
        elif op == "statistics":
            return {
                "requests": self._requests,
                "faults": self._faults,
                "bytes_up": self.up.passed_bytes,
                "bytes_down": self.down.passed_bytes,
                "connections": self._connections,
                "open_connections": len(self._open),
            }
        return None

    async def _set(self, fault: Fault | None) -> None:
        before, self._fault = self._fault, fault
        self._times = fault.times if fault else None
        if not any(f and f.needs_new_connections for f in (before, fault)):
            return
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._changes += 1
        self._cut()
        if fault is not None and fault.needs_new_connections:
            self._faults[fault.kind] += 1
        if fault is None or fault.kind != "refuse":
            wrong = fault is not None and fault.kind == "certificate"
            await self.listen(self._wrong_tls if wrong else self._tls)

    def _cut(self) -> None:
        for writer in tuple(self._open):
            _reset(writer)

    def _take_fault(self, head: Head) -> Fault | None:
        """The fault that strikes this request."""
        fault = self._fault
        if fault is None or fault.needs_new_connections or self._times == 0:
            return None
        if fault.verbs and head.verb not in fault.verbs:
            return None
        name, _, value = fault.lacks.partition(": ")
        if name and head.headers.get(name) == value:
            return None
        if self._times is not None:
            self._times -= 1
        self._faults[fault.kind] += 1
        return fault

    async def _serve(
        self, changes: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if changes != self._changes:  # its handshake began before
            _reset(writer)
            return
        self._connections += 1
        self._open.add(writer)
        upstream = Upstream(*self._upstream)
        gone = (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
        try:
            with contextlib.suppress(*gone):
                await self._converse(reader, writer, upstream)
        finally:
            self._open.discard(writer)
            upstream.close()
            writer.close()

    async def _converse(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, upstream: Upstream
    ) -> None:
        again = True
        while again:
            head = await read_head(reader)
            self._requests[head.verb] += 1
            exchange = Exchange(self, writer, head, self._take_fault(head))
            try:
                again = await exchange.run(reader, upstream)
            except Broken as broken:
                if broken.reset:
                    _reset(writer)
                return


def _reset(writer: asyncio.StreamWriter) -> None:
    raw = writer.get_extra_info("socket")
    if raw is None:  # closed already
        return
    with contextlib.suppress(OSError, ValueError):  # as well
        same = socket.socket(fileno=raw.fileno())
        try:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        finally:
            same.detach()
    writer.transport.abort()


def _tls(path: str) -> ssl.SSLContext | None:
    if not path:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context


async def main(upstream_url: str, address: str, certificate: str, wrong_certificate: str) -> None:
    server = Server(upstream_url, address, _tls(certificate), _tls(wrong_certificate))
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        print(json.dumps(await server.command(**json.loads(line))), flush=True)


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
