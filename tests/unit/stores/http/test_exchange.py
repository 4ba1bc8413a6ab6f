"""One exchange without a socket: where bytes go, and when it is over, however they are cut up."""

from __future__ import annotations

import pytest

from s3kv.place import Place
from s3kv.stores.http.exchange import TEXT_LIMIT_BYTES, BadAnswer, Exchange, Request, whole_of
from s3kv.stores.store import Receiver
from tests.unit.stores.suite import Recorder

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nETag: abc\r\n\r\n"
HINT = b"HTTP/1.1 103 -\r\n\r\n"


def reading(into: Place | None, receiver: Receiver | None = None, wanted: int = 200) -> Exchange:
    headers = {"Range": "bytes=1-5"} if wanted == 206 else {}
    return Exchange(Request("GET", "/", headers, into=into, receiver=receiver))


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
    feed(exchange, HINT * 10 + OK + b"hello", piece)
    assert (exchange.response.status, exchange.response.nbytes) == (200, 5)
    assert exchange.response.headers["etag"] == "abc"
    assert bytes(buffer) == b"helloched"
    assert exchange.reusable


RANGE = b"HTTP/1.1 206 -\r\nContent-Length: 5\r\nContent-Range: bytes 1-5/9\r\n\r\n"
SHORT = b"HTTP/1.1 206 -\r\nContent-Length: 3\r\nContent-Range: bytes 1-3/4\r\n\r\n"


@pytest.mark.parametrize("piece", [1, 3, 1000])
@pytest.mark.parametrize("seam", range(6))
@pytest.mark.parametrize(
    ("head", "body", "wanted", "whole"),
    [(OK, b"hello", 200, 5), (RANGE, b"hello", 206, 9), (SHORT, b"hel", 206, 4)],
    ids=["an object", "a range", "an object that ends within the range"],
)
def test_a_receiver_has_the_memory_and_follows_what_arrives(
    head: bytes, body: bytes, wanted: int, whole: int, seam: int, piece: int
) -> None:
    place, memory = Place.of(bytearray(b"untouched")), memoryview(bytearray(b"untouched"))
    receiver = Recorder(Place(memory[2 : 2 + seam], memory[2 + seam :]))
    exchange = reading(place, receiver, wanted)
    feed(exchange, head[:-1], 1000)
    assert receiver.begun == []
    feed(exchange, head[-1:] + body, piece)
    assert exchange.response.nbytes == len(body)
    assert receiver.begun == [whole]
    assert bytes(place) == b"untouched"
    assert bytes(memory) == b"un" + body + b"untouched"[2 + len(body) :]
    receiver.check(body)
    assert receiver.seen[-1] == body
    assert exchange.reusable


def test_a_receiver_follows_each_receipt() -> None:
    """The first one is of the bytes that came with the head."""
    receiver = Recorder(Place.of(bytearray(5)))
    exchange = reading(Place.of(bytearray(5)), receiver)
    feed(exchange, OK + b"he", 1000)
    feed(exchange, b"llo", 2)
    assert receiver.seen == [b"he", b"hell", b"hello"]


def test_a_receiver_of_an_empty_object() -> None:
    receiver = Recorder(Place.of(bytearray(5)))
    exchange = reading(Place.of(bytearray(5)), receiver)
    feed(exchange, OK.replace(b"5", b"0"), 1000)
    assert exchange.response is not None
    assert (receiver.begun, receiver.seen) == ([0], [])
    assert exchange.reusable


@pytest.mark.parametrize(
    ("head", "room", "memory", "wanted", "begun", "nbytes"),
    [
        (OK, 4, 9, 200, [5], 5),
        (OK, 9, 4, 200, [5], 5),
        (OK, 9, None, 200, [5], 5),
        (RANGE, 9, None, 206, [9], 5),
        (RANGE, 4, 9, 206, [9], 5),
        (OK, 9, 9, 206, [], 0),
        (RANGE, 9, 9, 200, [], 0),
        (RANGE.replace(b"1-5", b"2-6"), 9, 9, 206, [], 5),
        (RANGE.replace(b"/9", b"/*"), 9, 9, 206, [], 5),
    ],
    ids=[
        *("too long for the place", "too long for the memory"),
        *("of another read", "a range of another read", "a range too long for the place"),
        *("an object for a range", "a range for an object", "another range", "of unknown length"),
    ],
)
def test_a_body_that_is_not_wanted_is_left_unread(
    head: bytes, room: int, memory: int | None, wanted: int, begun: list[int], nbytes: int
) -> None:
    buffer, elsewhere = bytearray(b"untouched"[:room]), bytearray(memory or 0)
    receiver = Recorder(None if memory is None else Place.of(elsewhere))
    exchange = reading(Place.of(buffer), receiver, wanted)
    feed(exchange, head + b"hello", 1000)
    assert exchange.response.nbytes == nbytes
    assert (receiver.begun, receiver.seen) == (begun, [])
    assert bytes(buffer) == b"untouched"[:room]
    assert not any(elsewhere)
    assert not exchange.reusable


@pytest.mark.parametrize(
    ("bounds", "served", "received", "whole"),
    [
        ("bytes=2-5", "bytes 2-5/9", 4, 9),
        ("bytes=2-5", "bytes 2-5/6", 4, 6),
        ("bytes=2-5", "bytes 2-4/5", 3, 5),
        ("bytes=2-5", "bytes 2-2/3", 1, 3),
        ("bytes=2-5", "bytes 2-4/9", 3, None),
        ("bytes=2-5", "bytes 2-5/5", 4, None),
        ("bytes=2-5", "bytes 2-4/5", 4, None),
        ("bytes=2-5", "bytes 1-4/9", 4, None),
        ("bytes=2-5", "bytes 2-1/2", 0, None),
        ("bytes=2-5", "bytes 2-5/*", 4, None),
        ("bytes=2-5", "bytes */9", 0, None),
        ("bytes=2-5", "", 4, None),
        ("bytes=2-", "bytes 2-5/6", 4, None),
    ],
)
def test_the_length_of_an_object_of_which_a_part_comes(
    bounds: str, served: str, received: int, whole: int | None
) -> None:
    assert whole_of(bounds, {"content-range": served}, received) == whole


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_an_error_is_text_and_touches_no_buffer(piece: int) -> None:
    buffer = bytearray(b"untouched")
    exchange = reading(Place.of(buffer))
    answer = b"HTTP/1.1 404 -\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    feed(exchange, answer, piece)
    assert (exchange.response.status, exchange.response.body) == (404, b"abcde")
    assert bytes(buffer) == b"untouched"
    assert exchange.reusable


def test_an_endless_text_is_cut() -> None:
    exchange = reading(None)
    head = f"HTTP/1.1 500 -\r\nContent-Length: {2 * TEXT_LIMIT_BYTES}\r\n\r\n".encode()
    feed(exchange, head + b"x" * (TEXT_LIMIT_BYTES + 1), 2**20)
    assert len(exchange.response.body) == TEXT_LIMIT_BYTES
    assert not exchange.reusable


def test_a_peer_that_begins_no_answer_is_given_up() -> None:
    with pytest.raises(BadAnswer, match="1xx"):
        feed(reading(None), HINT * 11, 1000)


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
