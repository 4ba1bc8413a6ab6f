"""One exchange without a socket: where bytes go, and when it is over, however they are cut up."""

from __future__ import annotations

import pytest

from s3kv.place import Place
from s3kv.stores.http.exchange import TEXT_LIMIT_BYTES, BadAnswer, Exchange, Request
from s3kv.stores.store import Claim

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nETag: abc\r\n\r\n"


def reading(into: Place | None, claim: Claim | None = None, wanted: int = 200) -> Exchange:
    headers = {"Range": "bytes=1-5"} if wanted == 206 else {}
    return Exchange(Request("GET", "/", headers, into=into, claim=claim))


def feed(exchange: Exchange, data: bytes, piece: int) -> None:
    """Give the exchange what arrives, `piece` bytes at most at a time, as a connection does."""
    while data:
        buffer = exchange.buffer()
        now, data = data[:piece], data[piece:]
        if buffer is None:
            exchange.arrived_elsewhere(memoryview(now))
        else:
            now, data = now[: len(buffer)], now[len(buffer) :] + data
            buffer[: len(now)] = now
            exchange.arrived(len(now))


@pytest.mark.parametrize("piece", [1, 3, 1000])
@pytest.mark.parametrize("seam", range(9))
def test_a_body_is_received_in_place(piece: int, seam: int) -> None:
    buffer = bytearray(b"untouched")
    view = memoryview(buffer)
    exchange = reading(Place(view[:seam], view[seam:]))
    feed(exchange, OK + b"hello", piece)
    assert exchange.response is not None
    assert (exchange.response.status, exchange.response.nbytes) == (200, 5)
    assert exchange.response.headers["etag"] == "abc"
    assert bytes(buffer) == b"helloched"
    assert exchange.reusable


RANGE = b"HTTP/1.1 206 -\r\nContent-Length: 5\r\nContent-Range: bytes 1-5/9\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "room", "claim", "wanted", "nbytes"),
    [
        (OK, 4, None, 200, 5),
        (OK, 9, lambda: False, 200, 5),
        (OK, 9, pytest.fail, 206, 0),
        (RANGE, 9, pytest.fail, 200, 0),
    ],
    ids=["too long", "nobody's", "an object for a range", "a range for an object"],
)
def test_a_body_that_is_not_wanted_is_left_unread(
    head: bytes, room: int, claim: Claim | None, wanted: int, nbytes: int
) -> None:
    buffer = bytearray(b"untouched"[:room])
    exchange = reading(Place.of(buffer), claim, wanted)
    feed(exchange, head + b"hello", 1000)
    assert exchange.response is not None
    assert exchange.response.nbytes == nbytes
    assert bytes(buffer) == b"untouched"[:room]
    assert not exchange.reusable


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_an_error_is_text_and_touches_no_buffer(piece: int) -> None:
    buffer = bytearray(b"untouched")
    exchange = reading(Place.of(buffer))
    answer = b"HTTP/1.1 404 -\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    feed(exchange, answer, piece)
    assert exchange.response is not None
    assert (exchange.response.status, exchange.response.body) == (404, b"abcde")
    assert bytes(buffer) == b"untouched"
    assert exchange.reusable


def test_an_endless_text_is_cut() -> None:
    exchange = reading(None)
    head = f"HTTP/1.1 500 -\r\nContent-Length: {2 * TEXT_LIMIT_BYTES}\r\n\r\n".encode()
    feed(exchange, head + b"x" * (TEXT_LIMIT_BYTES + 1), 2**20)
    assert exchange.response is not None
    assert len(exchange.response.body) == TEXT_LIMIT_BYTES
    assert not exchange.reusable


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("GET", b"HTTP/1.1 404 -\r\nContent-Length: 3\r\n\r\nno!" + OK + b"hello"),
        ("HEAD", OK + b"hello"),
        ("DELETE", b"HTTP/1.1 204 -\r\n\r\n" + OK + b"hello"),
    ],
    ids=["an error", "no body", "nothing"],
)
def test_bytes_after_an_answer_make_the_connection_useless(method: str, answer: bytes) -> None:
    """They would be taken for the answer to the next request."""
    exchange = Exchange(Request(method, "/", {}))
    feed(exchange, answer, 1000)
    assert exchange.response is not None
    assert not exchange.reusable


def test_an_object_in_chunks_is_refused_whatever_length_it_has_besides() -> None:
    """Or the chunks' own sizes would be received as a part of the object."""
    buffer = bytearray(b"untouched")
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    with pytest.raises(BadAnswer, match="Content-Length"):
        feed(reading(Place.of(buffer)), head + b"5\r\nhello\r\n0\r\n\r\n", 1000)
    assert bytes(buffer) == b"untouched"


def test_the_head_of_a_request_announces_its_body() -> None:
    put = Request("PUT", "/k", {"Host": "h"}, Place.of(b"12345")).head()
    assert put.startswith(b"PUT /k HTTP/1.1\r\n")
    assert b"content-length: 5\r\n" in put.lower()
    assert b"content-length" not in Request("GET", "/k", {"Host": "h"}).head().lower()
