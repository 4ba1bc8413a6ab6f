"""The proxy does what its faults are called, seen by a client that shares no code with s3kv."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from lab.faults import Fault, Kind, s3_error
from lab.proxy import Proxy, proxy
from tests.servers import QuietHandler, in_a_thread, self_signed

BODY = bytes(range(256)) * 400
ERRORS = (http.client.HTTPException, OSError)


class _Shelf(QuietHandler):
    """Gives `BODY` for any key, and keeps what is put."""

    server: Shelf

    def do_GET(self) -> None:
        self.answer(200, BODY)

    def do_PUT(self) -> None:
        length = int(self.headers["Content-Length"])
        body = self.rfile.read(length)
        if len(body) == length:
            self.server.kept[self.path] = body
        self.answer(200)


class Shelf(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Shelf)
        self.kept: dict[str, bytes] = {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture(scope="module")
def shelf() -> Iterator[Shelf]:
    server = Shelf()
    with in_a_thread(server):
        yield server


@pytest.fixture(scope="module")
def running(shelf: Shelf) -> Iterator[Proxy]:
    with proxy(shelf.url) as it:
        yield it


@pytest.fixture
def faulty(running: Proxy) -> Iterator[Proxy]:
    yield running
    running.lift()
    running.limit(None)


def ask(port: int, verb: str, key: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request(verb, key, body)
        answer = connection.getresponse()
        return answer.status, answer.read()


def get(port: int) -> tuple[int, bytes]:
    return ask(port, "GET", "/bkt/k")


def put(port: int, key: str, body: bytes) -> int:
    return ask(port, "PUT", key, body)[0]


def test_without_a_fault_bytes_are_passed_on(faulty: Proxy, shelf: Shelf) -> None:
    before = faulty.statistics()
    assert get(faulty.port) == (200, BODY)
    assert put(faulty.port, "/whole", BODY) == 200
    assert shelf.kept["/whole"] == BODY
    after = faulty.statistics()
    assert after.bytes_down - before.bytes_down == len(BODY) == after.bytes_up - before.bytes_up
    assert after.requests["GET"] - before.requests.get("GET", 0) == 1
    assert after.faults == before.faults


@pytest.mark.parametrize(
    "kind", ["refuse", "reset_before_head", "reset_inside_head", "lose_answer", "flip_head"]
)
def test_no_answer_arrives(faulty: Proxy, kind: Kind) -> None:
    faulty.fault(Fault(kind=kind))
    with pytest.raises(ERRORS):
        get(faulty.port)
    assert faulty.statistics().faults[kind] >= 1
    faulty.lift()
    assert get(faulty.port) == (200, BODY)


@pytest.mark.parametrize("kind", ["reset_after_head", "reset_mid_body", "truncate"])
def test_a_part_of_the_answer_arrives(faulty: Proxy, kind: Kind) -> None:
    faulty.fault(Fault(kind=kind))
    connection = http.client.HTTPConnection("127.0.0.1", faulty.port, timeout=10)
    connection.request("GET", "/bkt/k")
    answer = connection.getresponse()
    assert answer.headers["Content-Length"] == str(len(BODY))
    with pytest.raises(http.client.IncompleteRead if kind == "truncate" else ConnectionResetError):
        answer.read()
    connection.close()


def test_a_lost_answer_was_obeyed(faulty: Proxy, shelf: Shelf) -> None:
    faulty.fault(Fault(kind="lose_answer", verbs=("PUT",)))
    with pytest.raises(ERRORS):
        put(faulty.port, "/lost", BODY)
    assert shelf.kept["/lost"] == BODY


@pytest.mark.parametrize("kind", ["reset_mid_body", "truncate"])
def test_an_upload_is_cut(faulty: Proxy, shelf: Shelf, kind: Kind) -> None:
    faulty.fault(Fault(kind=kind, verbs=("PUT",)))
    with pytest.raises(ERRORS):
        put(faulty.port, f"/{kind}", BODY)
    assert f"/{kind}" not in shelf.kept


def test_bytes_are_changed(faulty: Proxy, shelf: Shelf) -> None:
    faulty.fault(Fault(kind="shorten", at=1000))
    assert get(faulty.port) == (200, BODY[:1000])
    faulty.fault(Fault(kind="flip_body", at=-1))
    assert get(faulty.port) == (200, BODY[:-1] + bytes([BODY[-1] ^ 1]))
    assert put(faulty.port, "/flipped", BODY) == 200
    assert shelf.kept["/flipped"] == BODY[:-1] + bytes([BODY[-1] ^ 1])


def test_answers_of_the_proxys_own(faulty: Proxy) -> None:
    faulty.fault(s3_error(503, "SlowDown", times=2))
    assert [get(faulty.port)[0] for _ in range(3)] == [503, 503, 200]
    faulty.fault(Fault(kind="answer", body="\xff\x00"))
    assert get(faulty.port) == (200, b"\xff\x00")


def test_only_the_verbs_it_is_for(faulty: Proxy) -> None:
    faulty.fault(s3_error(500, "InternalError", verbs=("PUT",)))
    assert get(faulty.port) == (200, BODY)
    assert put(faulty.port, "/k", b"x") == 500


def test_slow_answers(faulty: Proxy) -> None:
    """A sleep is never too short, so lower bounds on time are safe."""
    started_s = time.monotonic()
    faulty.fault(Fault(kind="delay", seconds=0.2, times=1))
    assert get(faulty.port) == (200, BODY)
    assert time.monotonic() - started_s >= 0.2
    started_s = time.monotonic()
    faulty.fault(Fault(kind="trickle", seconds=0.05, nbytes=len(BODY) // 4))
    assert get(faulty.port) == (200, BODY)
    assert time.monotonic() - started_s >= 3 * 0.05
    started_s = time.monotonic()
    faulty.lift()
    faulty.limit(4 * len(BODY))
    threads = [threading.Thread(target=get, args=(faulty.port,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started_s >= 0.5 - 0.1  # what it makes up for at most, and a piece


def test_nothing_passes_a_proxy_that_is_shut_until_it_is_opened(faulty: Proxy) -> None:
    faulty.shut_after(len(BODY) // 2)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(get, faulty.port)
        faulty.wait_until_shut(10.0)
        time.sleep(0.1)
        assert not answer.done()
        faulty.open()
        assert answer.result() == (200, BODY)


def test_a_black_hole_lasts_until_the_connection_ends(faulty: Proxy) -> None:
    faulty.fault(Fault(kind="black_hole"))
    connection = http.client.HTTPConnection("127.0.0.1", faulty.port, timeout=0.2)
    connection.request("GET", "/bkt/k")
    with pytest.raises(TimeoutError):
        connection.getresponse()
    connection.close()
    faulty.lift()
    assert get(faulty.port) == (200, BODY)


def test_open_connections_are_cut(faulty: Proxy) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", faulty.port, timeout=10)
    connection.request("GET", "/bkt/k")
    assert connection.getresponse().read() == BODY
    assert faulty.statistics().open_connections >= 1
    faulty.cut()

    def ask_again() -> None:
        connection.request("GET", "/bkt/k")
        connection.getresponse()

    with pytest.raises(ERRORS):
        ask_again()
    connection.close()


def test_a_wrong_certificate(shelf: Shelf, tmp_path: Path) -> None:
    good = self_signed(tmp_path / "good", "IP:127.0.0.1")
    bad = self_signed(tmp_path / "bad", "DNS:elsewhere.test")
    trusting = ssl.create_default_context(cafile=f"{good}.crt")
    trusting.load_verify_locations(cafile=f"{bad}.crt")
    with proxy(shelf.url, certificate=good, wrong_certificate=bad) as it:
        for wrong in (False, True, False):
            it.fault(Fault(kind="certificate")) if wrong else it.lift()
            connection = http.client.HTTPSConnection(
                "127.0.0.1", it.port, context=trusting, timeout=10
            )
            if wrong:
                with pytest.raises(ssl.SSLCertVerificationError):
                    connection.request("GET", "/bkt/k")
            else:
                connection.request("GET", "/bkt/k")
                assert connection.getresponse().read() == BODY
            connection.close()


def test_a_handshake_that_begins_before_the_fault_serves_nothing(
    shelf: Shelf, tmp_path: Path
) -> None:
    good = self_signed(tmp_path / "good", "IP:127.0.0.1")
    trusting = ssl.create_default_context(cafile=f"{good}.crt")
    with proxy(shelf.url, certificate=good, wrong_certificate=good) as it:
        # The second is accepted after the first, so when it speaks, the first has been accepted.
        early = socket.create_connection(("127.0.0.1", it.port), timeout=10)
        connection = http.client.HTTPSConnection("127.0.0.1", it.port, context=trusting, timeout=10)
        connection.request("GET", "/bkt/k")
        assert connection.getresponse().read() == BODY
        it.fault(Fault(kind="certificate"))
        answer = b""
        with (
            contextlib.suppress(OSError),
            early,
            trusting.wrap_socket(early, server_hostname="127.0.0.1") as spoken,
        ):
            spoken.sendall(b"GET /bkt/k HTTP/1.1\r\nHost: test\r\n\r\n")
            answer = spoken.recv(1000)
        assert answer == b""
        connection.close()


def test_it_ends_with_the_block(shelf: Shelf) -> None:
    with proxy(shelf.url) as it:
        port = it.port
    with pytest.raises(ConnectionRefusedError):
        get(port)
