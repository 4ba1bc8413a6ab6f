"""What the network gives at most: blocking sockets in threads, straight into the slab."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

_HEAD_MAX_BYTES = 65536


class RawReaders:
    """Connections to a server without signatures. Ended by `close`."""

    def __init__(self, port: int, at_once: int) -> None:
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(at_once)]

    def read_all(self, targets: Sequence[str], places: Sequence[memoryview]) -> float:
        """Seconds to read every object, one after another on each connection. Raises `OSError`."""
        step = len(self._sockets)
        work = list(zip(targets, places, strict=True))

        def read(number: int) -> None:
            for target, place in work[number::step]:
                read_into(self._sockets[number], target, place)

        begin_s = perf_counter()
        with ThreadPoolExecutor(step) as threads:
            list(threads.map(read, range(step)))
        return perf_counter() - begin_s

    def close(self) -> None:
        for connection in self._sockets:
            connection.close()


def read_into(connection: socket.socket, target: str, place: memoryview) -> None:
    """One GET whose body fills `place`. Raises `OSError` for any other answer."""
    connection.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    held = bytearray()
    while (end := held.find(b"\r\n\r\n")) < 0:
        data = connection.recv(_HEAD_MAX_BYTES)
        if not data:
            raise ConnectionError("the server left within a head")
        held += data
    if not held.startswith(b"HTTP/1.1 200 "):
        raise OSError(f"{target}: {bytes(held[:end])!r}")
    body = held[end + 4 :]
    place[: len(body)] = body
    at = len(body)
    while at < len(place):
        received = connection.recv_into(place[at:])
        if not received:
            raise ConnectionError("the server left within a body")
        at += received
