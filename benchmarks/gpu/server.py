"""A bucket as fast as the kernel moves files: `python -m benchmarks.gpu.server FOLDER [PROCESSES]`.

As much of S3 as the I/O process uses, for clients that are trusted: no signatures, no listing. It
needs no package, prints its port, and ends with its stdin. Give it a folder in memory.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

_HEAD_MAX_BYTES = 65536
_PIECE_BYTES = 2**20
_EMPTY_LISTING = (
    b'<?xml version="1.0" encoding="UTF-8"?>'
    b'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    b"<KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"
)


@contextmanager
def running(processes: int, nbytes: int) -> Iterator[int]:
    """The port of an empty server, with as many processes, for as long as the block lasts.

    nbytes: what it has to hold, in memory where there is a file system for that with so much room.
    """
    with tempfile.TemporaryDirectory(dir=_in_memory(nbytes), prefix="s3kv-bucket-") as folder:
        server = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.server", folder, str(processes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.stdin.close()
            server.wait()
            server.stdout.close()


def _in_memory(nbytes: int) -> Path | None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or not os.access(memory, os.W_OK):
        return None
    found = os.statvfs(memory)
    return memory if found.f_bavail * found.f_frsize > nbytes else None


class Connection:
    """One client, answered in a thread."""

    def __init__(self, client: socket.socket, folder: Path) -> None:
        self._client = client
        self._folder = folder
        self._held = bytearray()
        """Received and not looked at yet."""

    def serve(self) -> None:
        with self._client:
            while (head := self._head()) is not None:
                method, target, *headers = head
                self._answer(method, target, dict(line.split(":", 1) for line in headers))

    def _head(self) -> list[str] | None:
        """Method, target and header lines, names lower-case; None when the client has gone."""
        while (end := self._held.find(b"\r\n\r\n")) < 0:
            data = self._client.recv(_HEAD_MAX_BYTES)
            if not data or len(self._held) > _HEAD_MAX_BYTES:
                return None
            self._held += data
        first, *lines = self._held[:end].decode("latin-1").split("\r\n")
        del self._held[: end + 4]
        method, target, _ = first.split(" ", 2)
        names = (line.partition(":") for line in lines)
        return [method, target, *(f"{name.lower()}:{value.strip()}" for name, _, value in names)]

    def _answer(self, method: str, target: str, headers: dict[str, str]) -> None:
        parts = urlsplit(target)
        path = self._folder / hashlib.sha256(parts.path.encode()).hexdigest()
        if method == "PUT":
            self._put(path, int(headers["content-length"]), headers.get("if-none-match") == "*")
        elif "list-type=2" in parts.query:
            self._send(HTTPStatus.OK, _EMPTY_LISTING)
        elif method == "GET":
            self._get(path)
        else:
            self._send(HTTPStatus.NOT_IMPLEMENTED, b"<Error><Code>NotImplemented</Code></Error>")

    def _get(self, path: Path) -> None:
        try:
            file = path.open("rb")
        except FileNotFoundError:
            self._send(HTTPStatus.NOT_FOUND, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        with file:
            found = os.fstat(file.fileno())
            self._client.sendall(_head_of(HTTPStatus.OK, found.st_size, found.st_mtime))
            at = 0
            while at < found.st_size:
                at += os.sendfile(self._client.fileno(), file.fileno(), at, found.st_size - at)

    def _put(self, path: Path, nbytes: int, if_absent: bool) -> None:
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            file.write(self._held[:nbytes])
            left = nbytes - min(nbytes, len(self._held))
            del self._held[:nbytes]
            room = memoryview(bytearray(min(left, _PIECE_BYTES)))
            while left:
                received = self._client.recv_into(room, min(left, _PIECE_BYTES))
                if not received:
                    raise ConnectionError("the client left within a body")
                file.write(room[:received])
                left -= received
        if if_absent and path.exists():
            os.unlink(file.name)
            self._send(
                HTTPStatus.PRECONDITION_FAILED, b"<Error><Code>PreconditionFailed</Code></Error>"
            )
            return
        os.replace(file.name, path)
        self._send(HTTPStatus.OK, b"")

    def _send(self, status: HTTPStatus, body: bytes) -> None:
        self._client.sendall(_head_of(status, len(body), None) + body)


def _head_of(status: HTTPStatus, nbytes: int, modified_s: float | None) -> bytes:
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Length: {nbytes}",
        f"Date: {formatdate(usegmt=True)}",
        'ETag: "0"',
    ]
    if modified_s is not None:
        lines.append(f"Last-Modified: {formatdate(modified_s, usegmt=True)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _accept(listening: socket.socket, folder: Path) -> None:
    while True:
        client, _ = listening.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=Connection(client, folder).serve, daemon=True).start()


def serve(folder: Path, processes: int) -> None:
    listening = socket.create_server(("127.0.0.1", 0), backlog=256)
    children = []
    for _ in range(processes):
        child = os.fork()
        if not child:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            _accept(listening, folder)
        children.append(child)
    print(listening.getsockname()[1], flush=True)
    sys.stdin.read()
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4)
