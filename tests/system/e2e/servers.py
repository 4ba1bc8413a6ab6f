"""Object stores that misbehave on command."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_PIECE_BYTES = 16 * 1024


class Valve:
    """A TCP proxy that stops passing bytes in the middle of a transfer, until it is opened.

    Threads of the test's process; `with valve(port) as v:` ends them. address: what it listens on.
    """

    def __init__(self, upstream_port: int, address: str) -> None:
        self._upstream_port = upstream_port
        self._listener = socket.create_server((address, 0))
        self._lock = threading.Lock()
        self._left: int | None = None
        self._opened = threading.Event()
        self._opened.set()
        self._shut = threading.Event()
        self._ending = threading.Event()
        self.url = f"http://{address}:{self._listener.getsockname()[1]}"

    def shut_after(self, nbytes: int) -> None:
        """Let so many more bytes through, both directions and all connections together."""
        with self._lock:
            self._left = nbytes
            self._shut.clear()
            self._opened.clear()

    def wait_until_shut(self, timeout_s: float) -> None:
        """Raises AssertionError when fewer bytes came along than were let through."""
        assert self._shut.wait(timeout_s), "the valve was never reached"

    def open(self) -> None:
        with self._lock:
            self._left = None
            self._opened.set()

    def accept_until_closed(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def close(self) -> None:
        self._ending.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.open()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self._upstream_port))
        except OSError:
            client.close()
            return
        other = {client: server, server: client}
        with client, server:
            while not self._ending.is_set():
                ready, _, _ = select.select([client, server], [], [], 0.5)
                for source in ready:
                    try:
                        data = source.recv(_PIECE_BYTES)
                        self._wait_for_passage(len(data))
                        other[source].sendall(data)
                    except OSError:
                        return
                    if not data:
                        return

    def _wait_for_passage(self, nbytes: int) -> None:
        with self._lock:
            if self._left is not None:
                self._left -= nbytes
            if self._left is None or self._left >= 0:
                return
            self._shut.set()
        self._opened.wait()


@contextmanager
def valve(upstream_port: int, address: str = "127.0.0.1") -> Iterator[Valve]:
    it = Valve(upstream_port, address)
    accepting = threading.Thread(target=it.accept_until_closed, daemon=True)
    accepting.start()
    try:
        yield it
    finally:
        it.close()
        accepting.join()


class _Denying(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _deny(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = (
            b'<?xml version="1.0" encoding="UTF-8"?>'
            b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        )
        self.send_response(403)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _deny

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def denying_server() -> Iterator[str]:
    """The URL of an S3 that knows us and allows us nothing."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Denying)
    server.daemon_threads = True
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        serving.join()
