"""Baseline for `s3kv bench`: the time plain blocking sockets take on the same server."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPException, HTTPResponse
from time import perf_counter

from s3kv.config import Config
from s3kv.errors import StoreUnavailable
from s3kv.objects.s3.address import find_address
from s3kv.objects.s3.fast_client import Endpoint, make_endpoint
from s3kv.objects.s3.s3_store import obstacle

_TIMEOUT_S = 60.0


async def floor_s(config: Config, keys: Sequence[str], requests: int, nbytes: int) -> float | None:
    """Seconds for that many GETs of `keys`, each key with a connection and a thread of its own.

    nbytes: length of each object. The time to open the first connections is not included. None if a
    plain socket does not get through: behind a proxy, and for an ARN. Raises `StoreUnavailable` if
    a socket fails.
    """
    address = find_address(config)
    if obstacle(config, address) is not None:
        return None
    endpoint, tls = make_endpoint(config, address)
    frozen = await endpoint.credentials.frozen()
    heads = [endpoint.sign(frozen, "GET", key).head() for key in keys]
    try:
        return await asyncio.to_thread(_read_all, endpoint, tls, heads, requests, nbytes)
    except (OSError, HTTPException) as error:
        raise StoreUnavailable(f"{endpoint.url}: a plain socket fails: {error}") from error


def _read_all(
    endpoint: Endpoint,
    tls: ssl.SSLContext | None,
    heads: Sequence[bytes],
    requests: int,
    nbytes: int,
) -> float:
    turns = iter(range(requests))
    buffers = [memoryview(bytearray(b"\x5a") * nbytes) for _ in heads]
    # Closed last, because a lane whose turn has not come when another one fails never runs.
    with ExitStack() as opened, ThreadPoolExecutor(len(heads)) as threads:
        connections = [opened.enter_context(_connect(endpoint, tls)) for _ in heads]

        def work(lane: int) -> None:
            connection = connections[lane]
            for _ in turns:
                if not _read(connection, heads[lane], buffers[lane]):
                    connection.close()
                    connection = opened.enter_context(_connect(endpoint, tls))

        begin_s = perf_counter()
        for _ in threads.map(work, range(len(heads))):
            pass
        return perf_counter() - begin_s


def _connect(endpoint: Endpoint, tls: ssl.SSLContext | None) -> socket.socket:
    plain = socket.create_connection((endpoint.host, endpoint.port), timeout=_TIMEOUT_S)
    name = endpoint.host.rstrip(".")
    return plain if tls is None else tls.wrap_socket(plain, server_hostname=name)


def _read(connection: socket.socket, head: bytes, buffer: memoryview) -> bool:
    """Read one answer with a body as long as `buffer`. Returns whether the connection can carry
    another one. Raises `OSError` and `HTTPException`."""
    connection.sendall(head)
    with HTTPResponse(connection) as answer:
        answer.begin()
        if answer.status != 200 or answer.length != len(buffer):
            raise ConnectionError(f"status {answer.status}, a body of {answer.length} bytes")
        if answer.readinto(buffer) != len(buffer):
            raise ConnectionError(f"the answer ended before its {len(buffer)} bytes")
        return not answer.will_close
