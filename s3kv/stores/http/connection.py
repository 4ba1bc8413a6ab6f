"""One HTTP/1.1 connection that receives bodies straight into the caller's memory.

It decides when to give up on a peer; `http.pool.Pool` decides which connection to use. Belongs to
one asyncio (or uvloop) loop.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from s3kv.place import Place
from s3kv.stores.http.exchange import BadAnswer, Exchange, Request, Response
from s3kv.stores.http.watch import Patience, Watch

SCRATCH_BYTES = 16 * 2**10
"""Size of the buffer that receives heads. Body bytes that arrive with a head are copied from it."""
PIECE_BYTES = 256 * 2**10
"""Size of the pieces of a body; each is handed to the transport when the last one has been sent.
The loop copies at most the unsent rest of one piece, and each piece counts as progress."""
_QUICKACK: int | None = getattr(socket, "TCP_QUICKACK", None)
"""Option number; None except on Linux."""


class Stale(BadAnswer):
    """End of an idle connection before any byte of this answer: the peer had closed it."""


class Connection(asyncio.BufferedProtocol):
    """One connection; carries one exchange at a time. address: of the peer."""

    def __init__(self, patience: Patience, address: str = "") -> None:
        self.address = address
        self._loop = asyncio.get_running_loop()
        self._patience = patience
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._answer: asyncio.Future[Response] | None = None
        self._writable = asyncio.Event()
        self._watch = Watch(patience, self._fail, self._is_draining)
        self._unsent_bytes, self._rested = 0, False
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self.idle_since_s = 0.0

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Paused by any unsent byte. Not 0: TLS transports then stay paused with nothing to send.
        self._transport.set_write_buffer_limits(high=1, low=0)
        self._writable.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        buffer = self._exchange.buffer() if self._exchange is not None else None
        return self._scratch if buffer is None else buffer

    def buffer_updated(self, nbytes: int) -> None:
        exchange = self._exchange
        begins = exchange is not None and not exchange.begun
        if begins:
            self._watch.wait(self._patience.progress_ms)
        else:
            self._watch.moved(nbytes)
        if exchange is None:
            self.abort()  # Unrequested: we and the peer disagree on where answers end.
        elif exchange.buffer() is None:
            self._step(lambda: exchange.arrived_elsewhere(self._scratch[:nbytes]))
        else:
            self._step(lambda: exchange.arrived(nbytes))
        if begins and self._answer is not None and not self._answer.done():
            self._acknowledge()

    def eof_received(self) -> None:
        if self._exchange is not None and self._exchange.begun:
            self._step(self._exchange.ended)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        begun = self._exchange is not None and self._exchange.begun
        kind = Stale if self._rested and not begun else BadAnswer
        self._fail(kind(str(exc or "the peer closed the connection")))
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # What the pool calls.

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def rest(self) -> None:
        """Mark it as idle. The peer may close it at any moment."""
        self._rested = True
        self.idle_since_s = self._loop.time()

    async def run(self, request: Request, head: bytes) -> Response:
        """Send the request and return its answer. The connection is idle or ended afterwards.

        Raises `Stalled` or `BadAnswer`. However it ends, nothing writes to the request's
        `into` or reads its `body` afterwards.
        """
        if not self.is_open:
            raise (Stale if self._rested else BadAnswer)("the peer closed the connection")
        exchange = self._exchange = Exchange(request)
        answer: asyncio.Future[Response] = self._loop.create_future()
        self._answer = answer
        self._watch.wait(self._patience.progress_ms)
        reusable = False
        try:
            all_sent = await self._send(head, request.body, answer)
            if not exchange.begun:
                self._watch.wait(self._patience.first_byte_ms, for_answer=True)
            response = await answer
            reusable = all_sent and exchange.reusable
            return response
        finally:
            self._watch.stop()
            self._exchange = self._answer = None
            self.rest()
            if not reusable:
                self.abort()

    def abort(self) -> None:
        """End the connection. No byte is sent or received afterwards.

        `Transport.abort` alone does not ensure that: uvloop closes the socket one loop iteration
        later, and may first send more of a body whose memory its owner may already have reused.
        """
        if self._transport is None:
            return
        raw = self._transport.get_extra_info("socket")
        # Suppressed if closed already. Over TLS, `raw` is then None until `connection_lost`.
        with suppress(OSError, ValueError, AttributeError):
            same = socket.socket(fileno=raw.fileno())
            try:
                same.shutdown(socket.SHUT_RDWR)
            finally:
                same.detach()
        self._transport.abort()

    # Inside.

    def _acknowledge(self) -> None:
        """Acknowledge received bytes at once while more of the answer is due. A server that
        writes head and body separately with Nagle's algorithm on (Ceph's gateway by default) holds
        the body back until then, and the kernel may delay the acknowledgement by 40 ms."""
        if _QUICKACK is not None and self._transport is not None:
            raw = self._transport.get_extra_info("socket")
            with suppress(OSError):  # the peer is gone, or this is not TCP
                raw.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)

    def _step(self, advance: Callable[[], None]) -> None:
        """Pass received bytes to the exchange, and wake `run` if they complete the answer."""
        assert self._exchange is not None
        try:
            advance()
        except BadAnswer as error:
            self._fail(error)
            return
        response = self._exchange.response
        if response is not None and self._answer is not None and not self._answer.done():
            self._answer.set_result(response)
            self._writable.set()

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
        self._writable.set()

    async def _send(self, head: bytes, body: Place, answer: asyncio.Future[Response]) -> bool:
        """Write the request. False if its answer came, or the connection ended, before that."""
        for piece in (memoryview(head), *body.pieces(PIECE_BYTES)):
            if self._transport is None or answer.done():
                return False
            self._transport.write(piece)
            self._unsent_bytes = self._unsent()
            await self._writable.wait()
            self._watch.moved(len(piece))
        return not answer.done()

    def _unsent(self) -> int:
        """Bytes that the kernel has taken and the peer has not acknowledged. On a slow link these
        are megabytes, which take longer than any answer should."""
        if self._transport is None or self._transport.is_closing():
            return 0
        count = bytearray(4)
        fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, count)
        return int.from_bytes(count, sys.byteorder)

    def _is_draining(self, wait_ms: int) -> bool:
        """Whether the peer has taken enough of the request in the last `wait_ms`."""
        if self._exchange is None or self._exchange.begun:
            return False
        before, self._unsent_bytes = self._unsent_bytes, self._unsent()
        taken = before - self._unsent_bytes
        enough = self._patience.min_bytes_per_s * wait_ms / 1e3
        return taken > 0 and (taken >= enough or self._unsent_bytes == 0)
