"""One HTTP/1.1 connection that receives bodies straight into the caller's memory.

Knows when to give a peer up; `http.Pool` knows which connection to use. Belongs to one asyncio (or
uvloop) loop.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from s3kv.objects.exchange import BadAnswer, Exchange, Request, Response
from s3kv.objects.store import Claim

SCRATCH_BYTES = 16 * 2**10
"""Receives heads; what of a body comes along with its head is copied from here."""
PIECE_BYTES = 256 * 2**10
"""Bodies are handed to the transport in pieces of this size, the next when the last has gone:
the loop copies at most what the socket did not take of one piece, and each is a sign of life."""
ASLEEP_S = 0.1
"""A timer that is later than this says that this loop did not run (a stopped machine, or one
without a core to spare), and not that the peer is silent: it may not have run, either. It gets as
much time again as was slept, once per wait and no more than the wait."""


_QUICKACK: int | None = getattr(socket, "TCP_QUICKACK", None)
"""Linux alone has it."""


class Lost(Exception):
    """The connection ended before the answer did."""


class Stale(Lost):
    """It had served before, and ended before any byte of this answer: the peer had closed it."""


class Stalled(Exception):
    """Too little has moved for too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a request is waited for.

    connect_ms: for a connection, TLS included. first_byte_ms: for the answer to begin, once the
    request has been sent. progress_ms: for the next byte, in either direction.
    min_bytes_per_s: a body that comes more slowly than this hangs, too, although it moves: every
    byte buys only so much more time, and never more than `progress_ms`.
    """

    connect_ms: int
    first_byte_ms: int
    progress_ms: int
    min_bytes_per_s: int


class Connection(asyncio.BufferedProtocol):
    """One connection, one exchange at a time."""

    def __init__(self, patience: Patience) -> None:
        self._loop = asyncio.get_running_loop()
        self._patience = patience
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._answer: asyncio.Future[Response] | None = None
        self._writable = asyncio.Event()
        self._give_up_s = 0.0
        self._unsent_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._waits_for_answer = False
        self._overslept = False
        self._served = 0
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self.idle_since_s = 0.0

    # What the loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Paused by any unsent byte. Not 0: TLS transports then stay paused with nothing to send.
        self._transport.set_write_buffer_limits(high=1, low=0)
        self._writable.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        place = self._exchange.place() if self._exchange is not None else None
        return self._scratch if place is None else place

    def buffer_updated(self, nbytes: int) -> None:
        exchange = self._exchange
        begins = exchange is not None and not exchange.begun
        if begins:
            self._wait_anew(self._patience.progress_ms)
            self._waits_for_answer = False
        else:
            self._moved(nbytes)
        if exchange is None:
            self.abort()  # Nobody asked: the peer and we no longer agree on where answers end.
        elif exchange.place() is None:
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
        kind = Stale if self._served and not begun else Lost
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

    async def run(
        self, request: Request, head: bytes, into: memoryview | None, claim: Claim | None
    ) -> Response:
        """Send the request, return its answer. Ends with the connection idle, or ended.

        Raises `Lost`, `Stalled` or `BadAnswer`. However it ends, `into` is not written to and
        the request's body is not read from afterwards.
        """
        if not self.is_open:
            raise Stale("the peer closed the connection")
        exchange = self._exchange = Exchange(request.method, into, claim)
        answer: asyncio.Future[Response] = self._loop.create_future()
        self._answer = answer
        self._waits_for_answer = False
        self._wait_anew(self._patience.progress_ms)
        all_sent = False
        try:
            all_sent = await self._send(head, request.body, answer)
            if not exchange.begun:
                self._waits_for_answer = True
                self._wait_anew(self._patience.first_byte_ms)
            return await answer
        finally:
            self._stop_watching()
            self._exchange = self._answer = None
            self._served += 1
            self.idle_since_s = self._loop.time()
            if not (all_sent and exchange.reusable):
                self.abort()

    def abort(self) -> None:
        """End the connection. From here on, not one byte more is sent or received.

        `Transport.abort` alone promises less: uvloop closes the socket a turn of the loop later,
        and may before that send more of a body whose owner believes it is free again.
        """
        if self._transport is None:
            return
        raw = self._transport.get_extra_info("socket")
        with suppress(OSError, ValueError):  # closed already
            same = socket.socket(fileno=raw.fileno())
            try:
                same.shutdown(socket.SHUT_RDWR)
            finally:
                same.detach()
        self._transport.abort()

    # Inside.

    def _acknowledge(self) -> None:
        """At once what has come, of which more is to come. A server that writes head and body apart
        and has Nagle's algorithm on (Ceph's gateway, as it is installed) keeps the body back until
        then, and the kernel likes to wait with it for 40 ms.
        """
        if _QUICKACK is not None and self._transport is not None:
            raw = self._transport.get_extra_info("socket")
            with suppress(OSError):  # the peer is gone, or this is no TCP
                raw.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 1)

    def _step(self, advance: Callable[[], None]) -> None:
        """Let the exchange take what came, and wake `run` when that was the end."""
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

    async def _send(self, head: bytes, body: memoryview, answer: asyncio.Future[Response]) -> bool:
        """Write the request; False when its answer came, or the connection went, before its end."""
        pieces = (body[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES))
        for piece in (memoryview(head), *pieces):
            if self._transport is None or answer.done():
                return False
            self._transport.write(piece)
            self._unsent_bytes = self._unsent()
            await self._writable.wait()
            self._moved(len(piece))
        return not answer.done()

    def _unsent(self) -> int:
        """Bytes the kernel has taken and the peer's has not acknowledged: megabytes, on a link that
        is slow, which take longer than any answer should."""
        if self._transport is None:
            return 0
        count = bytearray(4)
        fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, count)
        return int.from_bytes(count, sys.byteorder)

    def _is_draining(self) -> bool:
        """Whether the peer has taken enough of the request since this was last asked."""
        if self._exchange is None or self._exchange.begun:
            return False
        before, self._unsent_bytes = self._unsent_bytes, self._unsent()
        taken = before - self._unsent_bytes
        enough = self._patience.min_bytes_per_s * self._wait_ms / 1e3
        return taken > 0 and (taken >= enough or self._unsent_bytes == 0)

    @property
    def _wait_ms(self) -> int:
        patience = self._patience
        return patience.first_byte_ms if self._waits_for_answer else patience.progress_ms

    def _watch(self) -> None:
        left_s = self._give_up_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._watch)
        elif -left_s > ASLEEP_S and not self._overslept:
            self._overslept = True
            self._timer = self._loop.call_later(min(-left_s, self._wait_ms / 1e3), self._watch)
        elif self._is_draining():
            self._wait_anew(self._wait_ms)
        else:
            self._fail(Stalled(self._why_given_up()))

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait_anew(self, wait_ms: int) -> None:
        """Give up after so long, whether that is sooner or later than before."""
        self._give_up_s = self._loop.time() + wait_ms / 1e3
        self._overslept = False
        self._stop_watching()
        self._watch()

    def _moved(self, nbytes: int) -> None:
        at_most_s = self._loop.time() + self._patience.progress_ms / 1e3
        self._give_up_s += nbytes / self._patience.min_bytes_per_s
        self._give_up_s = min(self._give_up_s, at_most_s)

    def _why_given_up(self) -> str:
        if self._waits_for_answer:
            return f"got no answer within {self._patience.first_byte_ms} ms (first_byte_timeout_ms)"
        return (
            f"moved fewer than {self._patience.min_bytes_per_s} bytes a second (min_bytes_per_s) "
            f"for {self._patience.progress_ms} ms (request_timeout_ms)"
        )
