"""What `lab.proxying` passes on: links with a rate, and HTTP/1.1 messages as they are."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

PIECE_BYTES = 64 * 2**10
TICK_S = 0.01


class Valve:
    """Lets all bytes through, or so many more, and then none until it is opened."""

    def __init__(self) -> None:
        self._left: int | None = None
        self._opened = asyncio.Event()
        self._opened.set()

    @property
    def is_shut(self) -> bool:
        """Whether somebody has come to it who has to wait."""
        return self._left is not None and self._left < 0

    def shut_after(self, nbytes: int | None) -> None:
        """None: open it."""
        self._left = nbytes
        self._opened.set() if nbytes is None else self._opened.clear()

    async def take(self, nbytes: int) -> None:
        if self._left is not None:
            self._left -= nbytes
            if self._left < 0:
                await self._opened.wait()


class Link:
    """One direction of a network with a limited rate, shared by whoever asks, in turn. valve:
    stands in its way, and perhaps in that of others."""

    def __init__(self, valve: Valve) -> None:
        self.valve = valve
        self.bytes_per_s: float | None = None
        self.passed_bytes = 0
        self._free_s = 0.0

    @property
    def piece_bytes(self) -> int:
        """What to ask for at once, so that nobody holds the link for long."""
        if self.bytes_per_s is None:
            return PIECE_BYTES
        return max(1, min(PIECE_BYTES, int(self.bytes_per_s * TICK_S)))

    async def take(self, nbytes: int) -> None:
        self.passed_bytes += nbytes
        await self.valve.take(nbytes)
        if self.bytes_per_s is None:
            return
        now_s = asyncio.get_running_loop().time()
        # A sleep that took too long is made up for, by a tick or two.
        self._free_s = max(self._free_s, now_s - 2 * TICK_S) + nbytes / self.bytes_per_s
        if self._free_s > now_s:
            await asyncio.sleep(self._free_s - now_s)


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a request or an answer, as received; header names in lower case."""

    raw: bytes
    first: tuple[str, str]
    headers: dict[str, str]

    @property
    def length(self) -> int | None:
        """Of the body: 0 when nothing announces one, None when only its end tells."""
        if "transfer-encoding" in self.headers:
            return None
        return int(self.headers.get("content-length", 0))

    @property
    def verb(self) -> str:
        method, target = self.first
        return "LIST" if method == "GET" and "list-type=2" in target else method

    def with_length(self, nbytes: int) -> bytes:
        return re.sub(rb"(?i)(content-length:\s*)\d+", rb"\g<1>%d" % nbytes, self.raw)


async def read_head(reader: asyncio.StreamReader) -> Head:
    raw = await reader.readuntil(b"\r\n\r\n")
    start, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    words = start.split(" ")
    return Head(raw, (words[0], words[1]), {n.strip().lower(): v.strip() for n, _, v in pairs})


async def body_of(
    head: Head, reader: asyncio.StreamReader, piece_bytes: int
) -> AsyncIterator[bytes]:
    """The pieces of a message's body, with its chunk framing if it has one."""
    if head.length is None:
        while True:
            line = await reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            yield line + await reader.readexactly(size + 2)
            if size == 0:
                return
    left = head.length or 0
    while left:
        piece = await reader.read(min(left, piece_bytes))
        if not piece:
            raise asyncio.IncompleteReadError(b"", left)
        left -= len(piece)
        yield piece
