"""Blocking sockets that speak HTTP, and nothing else: what a server and the network give."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

DEADLINE_S = 60.0
"""Longest silence of a server. After it a benchmark ends with `TimeoutError`."""

Exchange = Callable[[socket.socket, bytes, memoryview], bool]
"""Sends a head and moves a body. Returns whether the server keeps the connection."""


class RawConnection:
    """A blocking connection to a server. It is opened anew after an answer that closes it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._socket = connected(url)

    def do(self, exchange: Exchange, head: bytes, buffer: memoryview) -> None:
        if not exchange(self._socket, head, buffer):
            self._socket.close()
            self._socket = connected(self._url)

    def close(self) -> None:
        self._socket.close()


def connected(url: str) -> socket.socket:
    """A blocking connection to the server, for which its certificate need not be known."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    plain = socket.create_connection((parts.hostname or "", port), DEADLINE_S)
    if parts.scheme == "http":
        return plain
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(plain)


def head(client: Any, method: str, bucket: str, key: str, nbytes: int = 0) -> bytes:
    """A request that boto3's `client` has signed. nbytes: length of its body."""
    verb, params = f"{method.lower()}_object", {"Bucket": bucket, "Key": key}
    parts = urlsplit(client.generate_presigned_url(verb, Params=params))
    return (
        f"{method} {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Content-Length: {nbytes}\r\n\r\n"
    ).encode()


def raw_get(connection: socket.socket, head: bytes, buffer: memoryview) -> bool:
    connection.sendall(head)
    answer, rest = read_head(connection)
    # As our own client does, or a server with Nagle's algorithm on keeps the body back for 40 ms.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
    buffer[: len(rest)] = rest
    filled = len(rest)
    while filled < len(buffer):
        received = connection.recv_into(buffer[filled:])
        if not received:
            raise ConnectionError(f"the server sent {filled} of {len(buffer)} bytes")
        filled += received
    return keeps_alive(answer)


def raw_put(connection: socket.socket, head: bytes, buffer: memoryview) -> bool:
    connection.sendall(head)
    connection.sendall(buffer)
    return keeps_alive(read_head(connection)[0])


def read_head(connection: socket.socket, status: bytes = b"200") -> tuple[bytes, bytes]:
    """Reads the head of an answer with this status; returns it, and what of the body came with
    it."""
    data = b""
    while b"\r\n\r\n" not in data:
        received = connection.recv(2**16)
        if not received:
            raise ConnectionError("the server closed the connection before it answered")
        data += received
    assert data.startswith(b"HTTP/1.1 " + status), data
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def keeps_alive(head: bytes) -> bool:
    return b"connection: close" not in head.lower()


def exchange_all(
    exchange: Exchange,
    connections: Sequence[RawConnection],
    heads: Sequence[bytes],
    buffers: Sequence[memoryview],
) -> float:
    """Seconds to move all bodies, one after another on each connection."""
    count = len(connections)

    def work(number: int) -> None:
        for head, buffer in list(zip(heads, buffers, strict=True))[number::count]:
            connections[number].do(exchange, head, buffer)

    start_s = perf_counter()
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))
    return perf_counter() - start_s
