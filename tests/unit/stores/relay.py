"""A proxy of a test: forwards plain requests, tunnels CONNECT, and says what it was asked for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

from tests import servers


class Relay:
    """asked: the request lines it got, "GET http://…" or "CONNECT host:port", without version."""

    def __init__(self, refusal: bytes = b"") -> None:
        self.asked: list[str] = []
        self.url = ""
        self._refusal = refusal
        """What it answers every request with, if anything."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            method, target, _ = head.split(b"\r\n")[0].decode().split(" ")
            self.asked.append(f"{method} {target}")
            if self._refusal:
                writer.write(self._refusal)
                return
            if method == "CONNECT":
                host, _, port = target.rpartition(":")
                await self._tunnel(host, int(port), reader, writer)
                return
            await self._forward(head, target, reader, writer)

    async def _forward(
        self, head: bytes, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """One exchange; the connection to the server is ended by it."""
        parts = urlsplit(target)
        path = target.removeprefix(f"{parts.scheme}://{parts.netloc}")
        head = head.replace(target.encode(), path.encode(), 1)
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        body = await reader.readexactly(int(length[1])) if length else b""
        upstream, sink = await asyncio.open_connection(parts.hostname, parts.port)
        sink.write(head + body)
        answer = await upstream.readuntil(b"\r\n\r\n")
        writer.write(answer)
        length = re.search(rb"content-length: (\d+)", answer, re.IGNORECASE)
        if length and not head.startswith(b"HEAD"):
            writer.write(await upstream.readexactly(int(length[1])))
        await writer.drain()
        sink.close()

    async def _tunnel(
        self, host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        upstream, sink = await asyncio.open_connection(host, port)
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        ways = [asyncio.create_task(_pump(*way)) for way in ((reader, sink), (upstream, writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        sink.close()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await source.read(2**16):
            sink.write(data)
            await sink.drain()


@asynccontextmanager
async def relay(refusal: bytes = b"") -> AsyncIterator[Relay]:
    it = Relay(refusal)
    async with servers.scripted_server(it.serve) as port:
        it.url = f"http://127.0.0.1:{port}"
        yield it
