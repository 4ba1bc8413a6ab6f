"""A server with the shape of S3, in memory: `python -m benchmarks.shaped [--tls FILE]`.

A rate per connection and one for all of them, a first byte that is late at random (log-normal), and
503 SlowDown above a number of requests a second. It is for figures that a fast local server cannot
give: there one connection is as good as eight. Bodies go from memory files to sockets within the
kernel (`sendfile`), except with TLS; Python reads the heads and keeps the time. nginx would not do:
its `limit_rate` lets the first second's bytes pass at once, which are all bytes of an object.

It answers GET (with ranges), PUT, HEAD and DELETE of objects, and a listing without objects. It
verifies no signature. It prints its URL as a line, and ends with its stdin.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import random
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

PIECE_BYTES = 128 * 2**10
LAG_S = 0.005
"""Time that a link makes up for at most: a sleep that took too long, but no idle time."""
SIGMA = math.log(10) / 2.326
"""Of a log-normal time whose 99th percentile is ten times its median."""
_LISTING = b"<ListBucketResult><Name>bkt</Name><KeyCount>0</KeyCount></ListBucketResult>"
_SLOW_DOWN = b"<Error><Code>SlowDown</Code></Error>"
_NO_KEY = b"<Error><Code>NoSuchKey</Code></Error>"


@dataclass(frozen=True, slots=True)
class Shape:
    """connection_mb_s, host_mb_s: rates; 0: no limit. first_byte_ms: the median of the time to the
    first byte; sigma: of its logarithm, 0 for always the same. requests_per_s: those above it are
    answered 503; 0: none is."""

    connection_mb_s: float = 90.0
    host_mb_s: float = 1000.0
    first_byte_ms: float = 30.0
    sigma: float = SIGMA
    requests_per_s: float = 0.0


class Link:
    """A rate, shared by whoever asks."""

    def __init__(self, mb_per_s: float) -> None:
        self._bytes_per_s = mb_per_s * 1e6
        self._lock = threading.Lock()
        self._free_s = 0.0

    def take(self, nbytes: int) -> float:
        """The time at which so many bytes have passed, if they begin as soon as the link is free
        (on the clock of `time.perf_counter`)."""
        if not self._bytes_per_s:
            return 0.0
        with self._lock:
            begin_s = max(self._free_s, time.perf_counter() - LAG_S)
            self._free_s = begin_s + nbytes / self._bytes_per_s
            return self._free_s


class Server:
    """The objects, the links and the limit."""

    def __init__(self, shape: Shape, tls: ssl.SSLContext | None) -> None:
        self._shape, self._tls = shape, tls
        self._host = Link(shape.host_mb_s)
        self._requests = Link(shape.requests_per_s / 1e6)
        self._objects: dict[str, tuple[int, int, str]] = {}
        """Path to memory file, length and ETag."""
        self._rng = random.Random(0)

    def run(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls:
                connection = self._tls.wrap_socket(connection, server_side=True)
            link = Link(self._shape.connection_mb_s)
            rest = b""
            while True:
                while b"\r\n\r\n" not in rest:
                    data = connection.recv(2**16)
                    if not data:
                        return
                    rest += data
                head, _, rest = rest.partition(b"\r\n\r\n")
                rest = self._answer(connection, link, head.decode("latin-1"), rest)

    def _answer(self, connection: socket.socket, link: Link, head: str, rest: bytes) -> bytes:
        """Answer a request; returns what came after its body."""
        method, target, _ = head.split("\r\n", 1)[0].split(" ")
        path = target.partition("?")[0]
        slow = self._requests.take(1) > time.perf_counter() + 1.0
        if method == "PUT":
            length = re.search(r"(?i)content-length: *(\d+)", head)
            rest = self._store(connection, link, path, int(length[1]) if length else 0, rest)
        if not slow:
            median_s = self._shape.first_byte_ms / 1e3
            time.sleep(median_s * math.exp(self._rng.gauss(0.0, self._shape.sigma)))
        found = self._objects.get(path)
        if slow:
            _say(connection, "503 Slow Down", _SLOW_DOWN)
        elif method == "GET" and "list-type=2" in target:
            _say(connection, "200 OK", _LISTING)
        elif method == "PUT":
            _say(connection, "200 OK", b"")
        elif method == "DELETE":
            self._objects.pop(path, None)
            _say(connection, "204 No Content", b"")
        elif found is None:
            _say(connection, "404 Not Found", b"" if method == "HEAD" else _NO_KEY)
        else:
            wanted = re.search(r"(?i)\r\nrange: *bytes=(\d+)-(\d+)", head)
            bounds = range(int(wanted[1]), int(wanted[2]) + 1) if wanted else None
            self._send(connection, link, method, found, bounds)
        return rest

    def _send(
        self,
        connection: socket.socket,
        link: Link,
        method: str,
        found: tuple[int, int, str],
        bounds: range | None,
    ) -> None:
        file, nbytes, etag = found
        first, stop = 0, nbytes
        said = "200 OK"
        if bounds is not None:
            if bounds.start >= nbytes:
                return _say(connection, "416 Range Not Satisfiable", b"")
            first, stop = bounds.start, min(bounds.stop, nbytes)
            said = f"206 Partial Content\r\nContent-Range: bytes {first}-{stop - 1}/{nbytes}"
        head = f"HTTP/1.1 {said}\r\nETag: {etag}\r\nContent-Length: {stop - first}\r\n\r\n"
        connection.sendall(head.encode())
        while method == "GET" and first < stop:
            piece = min(PIECE_BYTES, stop - first)
            self._pass(link, piece)
            if self._tls:
                connection.sendall(os.pread(file, piece, first))
            else:
                piece = os.sendfile(connection.fileno(), file, first, piece)
            first += piece

    def _store(
        self, connection: socket.socket, link: Link, path: str, nbytes: int, rest: bytes
    ) -> bytes:
        file = os.memfd_create("object")
        digest = hashlib.md5(usedforsecurity=False)
        body, rest = rest[:nbytes], rest[nbytes:]
        left = nbytes
        while left:
            body = body or connection.recv(min(PIECE_BYTES, left))
            if not body:
                raise ConnectionError("the client has gone")
            self._pass(link, len(body))
            os.write(file, body)
            digest.update(body)
            left -= len(body)
            body = b""
        self._objects[path] = (file, nbytes, f'"{digest.hexdigest()}"')
        return rest

    def _pass(self, link: Link, nbytes: int) -> None:
        """Wait until both links have passed so many bytes."""
        due_s = max(link.take(nbytes), self._host.take(nbytes))
        if (wait_s := due_s - time.perf_counter()) > 0:
            time.sleep(wait_s)


def _say(connection: socket.socket, status: str, body: bytes) -> None:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)


@contextmanager
def shaped(shape: Shape, tls: str = "") -> Iterator[str]:
    """The URL of such a server in a process of its own, for as long as the block lasts. tls: file
    of its certificate and key; empty: plain HTTP."""
    command = [sys.executable, "-m", "benchmarks.shaped", "--tls", tls]
    for name in Shape.__slots__:
        command += [f"--{name.replace('_', '-')}", str(getattr(shape, name))]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in Shape.__slots__:
        default = getattr(Shape(), name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=default)
    parser.add_argument("--tls", default="", help="file of a certificate and its key")
    options = vars(parser.parse_args())
    tls = None
    if path := options.pop("tls"):
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(path)
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    server = Server(Shape(**options), tls)
    threading.Thread(target=server.run, args=(listener,), daemon=True).start()
    port = listener.getsockname()[1]
    print(f"http{'s' if tls else ''}://127.0.0.1:{port}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
