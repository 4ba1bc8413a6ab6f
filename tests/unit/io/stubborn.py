"""A server that lists an empty bucket, and otherwise begins an answer and stops."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer

from tests.servers import QuietHandler, in_a_thread

_LISTING = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"


class StubbornServer(ThreadingHTTPServer):
    """A GET is answered with its headers and the first half of `body`, a PUT not at all, until
    `go_on` is set. `begun` has their paths."""

    daemon_threads = True

    def __init__(self, body: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.body = body
        self.go_on = threading.Event()
        self.begun: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(QuietHandler):
    server: StubbornServer

    def do_GET(self) -> None:
        if "list-type=2" in self.path:
            self.answer(200, _LISTING)
        else:
            self._answer_slowly()

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.begun.append(self.path)
        self.server.go_on.wait()
        self.answer(200)

    def _answer_slowly(self) -> None:
        body = self.server.body
        half = len(body) // 2
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:half])
        self.server.begun.append(self.path)
        self.server.go_on.wait()
        self.wfile.write(body[half:])


@contextmanager
def stubborn_server(body: bytes) -> Iterator[StubbornServer]:
    server = StubbornServer(body)
    with in_a_thread(server):
        try:
            yield server
        finally:
            server.go_on.set()
