"""What plain blocking sockets get from the same server: the floor of what a client can take."""

from __future__ import annotations

import asyncio
import queue
import socket
import ssl
import threading
from collections.abc import Sequence
from time import perf_counter

from s3kv.config import Config
from s3kv.errors import StoreUnavailable
from s3kv.objects.endpoint import Endpoint, find_endpoint

_TIMEOUT_S = 60.0
_HEAD_BYTES = 2**16


async def floor_s(config: Config, keys: Sequence[str], requests: int, nbytes: int) -> float:
    """Seconds for so many GETs of `keys` in turn, each with a connection and a thread of its own.

    nbytes: of each object. The first connections are not in it. Raises `StoreUnavailable`.
    """
    endpoint, tls = await find_endpoint(config)
    frozen = await endpoint.credentials.frozen()
    heads = [endpoint.sign(frozen, "GET", key).head() for key in keys]
    return await asyncio.to_thread(_read_all, endpoint, tls, heads, requests, nbytes)


def _read_all(
    endpoint: Endpoint,
    tls: ssl.SSLContext | None,
    heads: Sequence[bytes],
    requests: int,
    nbytes: int,
) -> float:
    turns: queue.SimpleQueue[None] = queue.SimpleQueue()
    for _ in range(requests):
        turns.put(None)
    failures: list[Exception] = []

    def work(connection: socket.socket, head: bytes) -> None:
        buffer = memoryview(bytearray(b"\x5a") * nbytes)
        try:
            while True:
                turns.get_nowait()
                if not _read(connection, head, buffer):
                    connection.close()
                    connection = _connect(endpoint, tls)
        except queue.Empty:
            return
        except OSError as error:
            failures.append(error)
        finally:
            connection.close()

    try:
        connections = [_connect(endpoint, tls) for _ in heads]
    except OSError as error:
        raise StoreUnavailable(f"{endpoint.url}: a plain socket fails: {error}") from error
    threads = [
        threading.Thread(target=work, args=(connection, head))
        for connection, head in zip(connections, heads, strict=True)
    ]
    begin_s = perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise StoreUnavailable(f"{endpoint.url}: a plain socket fails: {failures[0]}")
    return perf_counter() - begin_s


def _connect(endpoint: Endpoint, tls: ssl.SSLContext | None) -> socket.socket:
    plain = socket.create_connection((endpoint.host, endpoint.port), timeout=_TIMEOUT_S)
    return plain if tls is None else tls.wrap_socket(plain, server_hostname=endpoint.host)


def _read(connection: socket.socket, head: bytes, buffer: memoryview) -> bool:
    """One answer with a body as long as `buffer`; whether another may follow. Raises `OSError`."""
    connection.sendall(head)
    data = b""
    while b"\r\n\r\n" not in data:
        received = connection.recv(_HEAD_BYTES)
        if not received:
            raise ConnectionError("the server closed the connection")
        data += received
    answer, _, rest = data.partition(b"\r\n\r\n")
    if answer.split(b" ")[1] != b"200" or len(rest) > len(buffer):
        raise ConnectionError(f"unexpected answer {answer[:100]!r}")
    buffer[: len(rest)] = rest
    filled = len(rest)
    while filled < len(buffer):
        received_bytes = connection.recv_into(buffer[filled:])
        if not received_bytes:
            raise ConnectionError(f"the answer ended after {filled} of {len(buffer)} bytes")
        filled += received_bytes
    return answer.startswith(b"HTTP/1.1") and b"connection: close" not in answer.lower()
