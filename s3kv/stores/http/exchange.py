"""One HTTP/1.1 exchange without the socket: where to receive bytes, and when the answer ends.

h11 parses heads and framed bodies, but cannot receive a body in place. After the head of a wanted
answer, bytes therefore go straight into the caller's buffer, and h11 sees none of them. Pure: no
I/O, no asyncio, no clock.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import h11

from s3kv.place import Place
from s3kv.stores.store import Receiver, landing

TEXT_LIMIT_BYTES = 8 * 2**20
"""Longest body kept outside a caller's buffer: a page of 1,000 long keys, escaped, has 3.5 MB."""
_MOST_INTERIM_HEADS = 10
EMPTY = Place.of(b"")
_CONTENT_RANGE = r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})"
OBJECT = (200, 206)
"""Statuses of answers with an object, or with a range of one, as their body."""


class BadAnswer(Exception):
    """Violation of HTTP by the peer, or an answer that ended too early."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it is sent, and the memory for its answer.

    target: already escaped. headers: all but Content-Length, which follows from `body`. into,
    receiver: `place` and `receiver` of `ObjectStore.get_into`, for the body of an answer with the
    status `wanted`.
    """

    method: str
    target: str
    headers: Mapping[str, str]
    body: Place = EMPTY
    into: Place | None = None
    receiver: Receiver | None = None

    @property
    def wanted(self) -> int:
        """Status of an answer with the requested bytes: 206 if they are a range, else 200."""
        return 206 if "Range" in self.headers else 200

    def head(self) -> bytes:
        """Request line and headers. Raises `h11.LocalProtocolError` if HTTP forbids one."""
        headers = list(self.headers.items())
        if self.method in ("PUT", "POST"):
            headers.append(("Content-Length", str(self.body.nbytes)))
        request = h11.Request(method=self.method, target=self.target, headers=headers)
        return h11.Connection(h11.CLIENT).send(request) or b""


@dataclass(frozen=True, slots=True)
class Response:
    """An answer. Header names are lower-case. nbytes: announced length of a body that went, or
    would have gone, into the caller's buffer. body: any other body, cut at `TEXT_LIMIT_BYTES`."""

    status: int
    headers: Mapping[str, str]
    nbytes: int
    body: bytes


def whole_of(bounds: str | None, headers: Mapping[str, str], received: int) -> int | None:
    """Length of the whole object, from the headers of an answer with all or a range of it. bounds:
    the request's header `Range`, if it has one. received: length of the answer's body. None if the
    answer is not exactly that range, cut at the object's end. Pure."""
    if bounds is None:
        return received
    requested = re.fullmatch(r"bytes=(\d+)-(\d+)", bounds)
    served = re.fullmatch(_CONTENT_RANGE, headers.get("content-range", ""))
    if requested is None or served is None:
        return None
    first, last, whole = (int(number) for number in served.groups())
    expected = range(int(requested[1]), min(int(requested[2]) + 1, whole))
    is_expected = range(first, last + 1) == expected and received == len(expected) > 0
    return whole if is_expected else None


class Exchange:
    """Reader of the answer to one request.

    The owner receives into `buffer()`. It calls `arrived(n)` or `arrived_elsewhere(data)` after
    each receive, and `ended()` when the peer has closed. Those three raise `BadAnswer`. A range is
    left unread if the request is for the whole object; the whole object and any other range are
    left unread if it is for a range.
    """

    def __init__(self, request: Request) -> None:
        self.response: Response | None = None
        """Set once, when the answer is complete."""
        self.reusable = False
        """Whether the connection can carry another exchange. Meaningful after `response`."""
        self.begun = False
        """Whether any byte of an answer has arrived."""
        self._request = request
        self._filled = self._wanted = self._interim_heads = 0
        self._unfilled: list[memoryview] = []
        """The memory for the rest of the body, in order; none is empty."""
        self._text = bytearray()
        self._head: h11.Response | None = None
        self._parser = h11.Connection(h11.CLIENT)
        # h11 needs only the method to frame the answer; the rest of the request does not matter.
        self._parser.send(h11.Request(method=request.method, target="/", headers=[("Host", "-")]))
        self._parser.send(h11.EndOfMessage())

    def buffer(self) -> memoryview | None:
        """Memory for the next bytes; None: receive them elsewhere, for `arrived_elsewhere`."""
        return self._unfilled[0] if self._unfilled else None

    def arrived(self, nbytes: int) -> None:
        """Note that `nbytes` were received into the memory of `buffer()`."""
        self._note(nbytes)
        self._unfilled[0] = self._unfilled[0][nbytes:]
        if not self._unfilled[0]:
            del self._unfilled[0]
        if not self._unfilled:
            self._finish(self._keeps_alive())

    def arrived_elsewhere(self, data: memoryview) -> None:
        self.begun = True
        if self.response is not None:
            self.reusable = False  # bytes beyond the answer
            return
        self._parser.receive_data(bytes(data))
        self._advance()

    def ended(self) -> None:
        """Note that the peer sends no more."""
        if self._wanted:
            raise BadAnswer(f"the answer ended after {self._filled} of {self._wanted} bytes")
        self._parser.receive_data(b"")
        self._advance()

    def _advance(self) -> None:
        while self.response is None:
            try:
                event = self._parser.next_event()
            except h11.RemoteProtocolError as error:
                raise BadAnswer(str(error)) from error
            if isinstance(event, h11.Response):
                self._head = event
                if event.status_code in OBJECT and (into := self._request.into) is not None:
                    if event.status_code != self._request.wanted:
                        return self._finish(reusable=False)
                    return self._receive_in_place(into, event)
            elif isinstance(event, h11.InformationalResponse):
                self._interim_heads += 1
                if self._interim_heads > _MOST_INTERIM_HEADS:
                    raise BadAnswer(f"more than {_MOST_INTERIM_HEADS} heads with a status 1xx")
            elif isinstance(event, h11.Data):
                self._text += event.data
                if len(self._text) > TEXT_LIMIT_BYTES:
                    del self._text[TEXT_LIMIT_BYTES:]
                    self._finish(reusable=False)
            elif isinstance(event, h11.EndOfMessage):
                self._finish(self._keeps_alive() and not self._parser.trailing_data[0])
            elif event is h11.NEED_DATA or event is h11.PAUSED:
                return None

    def _receive_in_place(self, into: Place, head: h11.Response) -> None:
        headers = _readable(head)
        length = headers.get("content-length")
        if length is None or "transfer-encoding" in headers:  # which would take precedence
            raise BadAnswer("an object in chunks, or without Content-Length")
        self._wanted = int(length)
        whole = whole_of(self._request.headers.get("Range"), headers, self._wanted)
        receiver = self._request.receiver
        memory = None if whole is None else landing(into, receiver, self._wanted, whole)
        if memory is None:
            return self._finish(reusable=False)
        first, _ = self._parser.trailing_data
        taken = min(len(first), self._wanted)
        memory.write(first[:taken])
        self._unfilled += memory.cut(taken, self._wanted).views
        if taken:
            self._note(taken)
        if taken == self._wanted:
            self._finish(reusable=self._keeps_alive() and taken == len(first))

    def _note(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._request.receiver is not None:
            self._request.receiver.arrived(self._filled)

    def _keeps_alive(self) -> bool:
        assert self._head is not None
        tokens = b",".join(v for k, v in self._head.headers if k == b"connection").lower()
        return self._head.http_version == b"1.1" and b"close" not in tokens

    def _finish(self, reusable: bool) -> None:
        assert self._head is not None
        headers, text = _readable(self._head), bytes(self._text)
        self.reusable = reusable
        self.response = Response(self._head.status_code, headers, self._wanted, text)
        self._unfilled.clear()


def _readable(head: h11.Response) -> dict[str, str]:
    return {k.decode("ascii"): v.decode("latin-1") for k, v in head.headers}
