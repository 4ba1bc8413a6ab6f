"""A server with the shape of S3, in memory: `python -m benchmarks.shaped [--tls FILE]`.

A rate per connection and for all of them, a first byte that is late at random
(log-normal), and 503 SlowDown above a number of requests a second. It is for figures that a fast
local server cannot give: there one connection is as good as eight. Bodies go from memory files to
sockets within the kernel (`sendfile`), except with TLS; Python reads the heads and keeps the time.
nginx would not do: its `limit_rate` lets the first second's bytes pass at once, which are all bytes
of an object.

It answers GET (with ranges), PUT (with If-None-Match), HEAD and DELETE of objects, a copy of an
object onto itself, and a listing without common prefixes. It verifies no signature, and there is
one bucket, `bench`, whose name may be in the path or in the host name. It prints its port as a
line, and ends with its stdin.
"""

from __future__ import annotations

import argparse
import io
import itertools
import math
import os
import random
import re
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import parse_qs, quote, unquote
from xml.sax.saxutils import escape

from lab.service import first_line, started

PIECE_BYTES = 128 * 2**10
LAG_S = 0.005
"""Time that a link makes up for at most: a sleep that took too long, but no idle time."""
SIGMA = math.log(10) / 2.326
"""Of a log-normal time whose 99th percentile is ten times its median."""
BUCKET = "bench"
HOST = "127.0.0.2"
_SLOW_DOWN = b"<Error><Code>SlowDown</Code></Error>"
_NO_KEY = b"<Error><Code>NoSuchKey</Code></Error>"
_COPIED = b"<CopyObjectResult/>"
_NUMBERS = itertools.count()


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


FAST = Shape(connection_mb_s=0, host_mb_s=0, first_byte_ms=0, sigma=0)
"""As fast as the kernel moves files."""


class Link:
    """A rate, shared by whoever asks."""

    def __init__(self, mb_per_s: float) -> None:
        self._bytes_per_s = mb_per_s * 1e6
        self._lock = threading.Lock()
        self._free_s = 0.0

    @property
    def piece_bytes(self) -> int:
        """Most bytes to pass at once, so that links share their rates."""
        return PIECE_BYTES if self._bytes_per_s else 2**30

    def take(self, nbytes: int) -> float:
        """The time at which so many bytes have passed, if they begin as soon as the link is free
        (on the clock of `time.perf_counter`)."""
        if not self._bytes_per_s:
            return 0.0
        with self._lock:
            begin_s = max(self._free_s, time.perf_counter() - LAG_S)
            self._free_s = begin_s + nbytes / self._bytes_per_s
            return self._free_s


@dataclass(frozen=True, slots=True)
class Object:
    """file: in memory."""

    file: io.FileIO
    nbytes: int
    etag: str


@dataclass(slots=True)
class Message:
    """A request's head, and what has arrived of its body."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    rest: bytes

    @classmethod
    def of(cls, data: bytes) -> Message:
        head, _, rest = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        path, _, query = target.partition("?")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        path = unquote(path).lstrip("/")
        if not headers.get("host", "").startswith(f"{BUCKET}."):
            path = path.partition("/")[2]  # the first part is the bucket
        return cls(method, path, parse_qs(query, keep_blank_values=True), headers, rest)


class Server:
    """The objects, the links and the limit."""

    def __init__(self, shape: Shape, tls: ssl.SSLContext | None) -> None:
        self._shape, self._tls = shape, tls
        self._host = Link(shape.host_mb_s)
        self._requests = Link(shape.requests_per_s / 1e6)
        self._objects: dict[str, Object] = {}
        self._writing = threading.Lock()
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
            links = (Link(self._shape.connection_mb_s), self._host)
            rest = b""
            while True:
                while b"\r\n\r\n" not in rest:
                    data = connection.recv(2**16)
                    if not data:
                        return
                    rest += data
                message = Message.of(rest)
                self._answer(connection, links, message)
                rest = message.rest

    def _answer(self, connection: socket.socket, links: Sequence[Link], message: Message) -> None:
        method, path, headers = message.method, message.path, message.headers
        slow = self._requests.take(1) > time.perf_counter() + 1.0
        body = None
        if method in ("PUT", "POST"):
            body = _receive(connection, links, message)
        if not slow:
            median_s = self._shape.first_byte_ms / 1e3
            time.sleep(median_s * math.exp(self._rng.gauss(0.0, self._shape.sigma)))
        found = self._objects.get(path)
        if slow:
            _say(connection, "503 Slow Down", _SLOW_DOWN)
        elif method == "GET" and "list-type" in message.query:
            _say(connection, "200 OK", self._listing(message.query))
        elif method == "PUT" and "x-amz-copy-source" in headers:
            _say(connection, "200 OK" if found else "404 Not Found", _COPIED if found else _NO_KEY)
        elif method == "PUT" and body is not None:
            with self._writing:
                new = path not in self._objects or "if-none-match" not in headers
                if new:
                    self._objects[path] = body
            etag = f"\r\nETag: {body.etag}"
            _say(connection, f"200 OK{etag}" if new else "412 Precondition Failed", b"")
        elif method == "DELETE":
            self._objects.pop(path, None)
            _say(connection, "204 No Content", b"")
        elif found is None or method == "POST":
            _say(connection, "404 Not Found", b"" if method == "HEAD" else _NO_KEY)
        else:
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", headers.get("range", ""))
            bounds = range(int(wanted[1]), int(wanted[2]) + 1) if wanted else None
            self._send(connection, links, method, found, bounds)

    def _listing(self, query: dict[str, list[str]]) -> bytes:
        def asked(name: str) -> str:
            return query.get(name, [""])[0]

        prefix, after = asked("prefix"), max(asked("start-after"), asked("continuation-token"))
        keys = sorted(k for k in list(self._objects) if k.startswith(prefix) and k > after)
        page = keys[: int(asked("max-keys") or 1000)]
        encoding = asked("encoding-type")
        told = quote if encoding == "url" else escape
        items = "".join(
            f"<Contents><Key>{told(key)}</Key><LastModified>2026-01-01T00:00:00Z</LastModified>"
            f"<ETag>{found.etag}</ETag><Size>{found.nbytes}</Size></Contents>"
            for key in page
            if (found := self._objects.get(key))
        )
        more = len(keys) > len(page) > 0
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        return (
            f"<ListBucketResult><Name>{BUCKET}</Name><KeyCount>{len(page)}</KeyCount>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}"
            f"<EncodingType>{encoding}</EncodingType>{items}</ListBucketResult>"
        ).encode()

    def _send(
        self,
        connection: socket.socket,
        links: Sequence[Link],
        method: str,
        found: Object,
        bounds: range | None,
    ) -> None:
        nbytes, first, stop = found.nbytes, 0, found.nbytes
        said = "200 OK"
        if bounds is not None:
            if bounds.start >= nbytes:
                return _say(connection, "416 Range Not Satisfiable", b"")
            first, stop = bounds.start, min(bounds.stop, nbytes)
            said = f"206 Partial Content\r\nContent-Range: bytes {first}-{stop - 1}/{nbytes}"
        head = f"HTTP/1.1 {said}\r\nETag: {found.etag}\r\nContent-Length: {stop - first}\r\n\r\n"
        connection.sendall(head.encode())
        while method == "GET" and first < stop:
            piece = min(stop - first, *(link.piece_bytes for link in links))
            _pass(links, piece)
            if self._tls:
                connection.sendall(os.pread(found.file.fileno(), piece, first))
            else:
                piece = os.sendfile(connection.fileno(), found.file.fileno(), first, piece)
            first += piece


def _receive(connection: socket.socket, links: Sequence[Link], message: Message) -> Object:
    """The body of a request."""
    nbytes = left = int(message.headers.get("content-length", 0))
    if message.headers.get("expect") == "100-continue":
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    file = io.FileIO(os.memfd_create("object"), "r+")
    buffer = memoryview(bytearray(min(PIECE_BYTES, nbytes)))
    body, message.rest = memoryview(message.rest[:left]), message.rest[left:]
    while left:
        body = body or buffer[: connection.recv_into(buffer[:left])]
        if not body:
            raise ConnectionError("the client has gone")
        _pass(links, len(body))
        file.write(body)
        left -= len(body)
        body = buffer[:0]
    # A number is no digest of the bytes, which would cost more than all the rest.
    return Object(file, nbytes, f'"{next(_NUMBERS):032x}"')


def _pass(links: Sequence[Link], nbytes: int) -> None:
    """Wait until all links have passed so many bytes."""
    due_s = max(link.take(nbytes) for link in links)
    if (wait_s := due_s - time.perf_counter()) > 0:
        time.sleep(wait_s)


def _say(connection: socket.socket, status: str, body: bytes) -> None:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)


@dataclass(frozen=True, slots=True)
class Running:
    """A server in a process of its own."""

    url: str
    process: subprocess.Popen[str]


@contextmanager
def shaped(shape: Shape, tls: str = "") -> Iterator[Running]:
    """Such a server, for as long as the block lasts. tls: file of its certificate and key; empty:
    plain HTTP. Where the machine has more than two cores, a quarter of them is the server's alone,
    and the others are those of this process and its children."""
    options = ["--tls", tls]
    for name in Shape.__slots__:
        options += [f"--{name.replace('_', '-')}", str(getattr(shape, name))]
    cores = sorted(os.sched_getaffinity(0))
    kept = cores[-(len(cores) // 4) :] if len(cores) > 2 else []
    with started("benchmarks.shaped", *options) as process:
        try:
            port = int(first_line(process))
            if kept:
                for task in os.listdir(f"/proc/{process.pid}/task"):
                    os.sched_setaffinity(int(task), kept)
                os.sched_setaffinity(0, set(cores) - set(kept))
            yield Running(f"http{'s' if tls else ''}://{HOST}:{port}", process)
        finally:
            os.sched_setaffinity(0, cores)


def add_options(parser: argparse.ArgumentParser) -> None:
    """An option for each figure of a `Shape`."""
    group = parser.add_argument_group("the shape of S3")
    for name in Shape.__slots__:
        default = getattr(Shape(), name)
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=type(default), default=default, help="%(default).4g")


def shape_of(options: argparse.Namespace) -> Shape:
    """The shape that the options ask for."""
    return Shape(**{name: getattr(options, name) for name in Shape.__slots__})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--tls", default="", help="file of a certificate and its key")
    options = parser.parse_args()
    tls = None
    if options.tls:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(options.tls)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # an object is an open file
    server = Server(shape_of(options), tls)
    listener = socket.create_server((HOST, 0), backlog=256)
    threading.Thread(target=server.run, args=(listener,), daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
