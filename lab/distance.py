"""A server that is farther away: `with distant(url, delay_ms=30) as far_url: …`.

What a client sends reaches the server so much later, in the same order and at the same rate; so
every request takes that much longer, and many at once take no longer than one. Answers are passed
on as they come, by splice(2), which takes 30 ms of a processor for 100 MB; to read and write them
takes six times that. Connections are made at once. A process of its own.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from urllib.parse import urlsplit

from lab.service import first_line, started

_PIECE_BYTES = 2**18
_PIPE_BYTES = 2**20


@contextmanager
def distant(url: str, delay_ms: float) -> Iterator[str]:
    """The address to use instead of `url`, an http one, until the block ends."""
    with started("lab.distance", url, str(delay_ms)) as process:
        yield f"http://127.0.0.1:{int(first_line(process))}"


def _there(client: socket.socket, server: socket.socket, delay_s: float) -> None:
    """What the client sends, later."""
    on_the_way: SimpleQueue[tuple[float, bytes]] = SimpleQueue()

    def arrive() -> None:
        with suppress(OSError):  # the server has hung up
            while True:
                due_s, data = on_the_way.get()
                time.sleep(max(0.0, due_s - time.monotonic()))
                if not data:
                    server.shutdown(socket.SHUT_WR)
                    return
                server.sendall(data)

    threading.Thread(target=arrive, daemon=True).start()
    data = b"-"
    while data:
        try:
            data = client.recv(_PIECE_BYTES)
        except OSError:  # the client has hung up
            data = b""
        on_the_way.put((time.monotonic() + delay_s, data))


def _back(server: socket.socket, client: socket.socket) -> None:
    """What the server answers, at once."""
    out, into = os.pipe()
    fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    try:
        with suppress(OSError):  # one of them has hung up
            while nbytes := os.splice(server.fileno(), into, _PIPE_BYTES):
                while nbytes:
                    nbytes -= os.splice(out, client.fileno(), nbytes)
        with suppress(OSError):
            client.shutdown(socket.SHUT_WR)
    finally:
        os.close(out)
        os.close(into)


def _pass_on(client: socket.socket, address: tuple[str, int], delay_s: float) -> None:
    with client, socket.create_connection(address) as server:
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        there = threading.Thread(target=_there, args=(client, server, delay_s), daemon=True)
        there.start()
        _back(server, client)
        with suppress(OSError):
            client.shutdown(socket.SHUT_RD)
        there.join()


def main() -> None:
    parts = urlsplit(sys.argv[1])
    address, delay_s = (parts.hostname or "", parts.port or 80), float(sys.argv[2]) / 1e3
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        print(listening.getsockname()[1], flush=True)

        def accept() -> None:
            while True:
                client, _ = listening.accept()
                arguments = (client, address, delay_s)
                threading.Thread(target=_pass_on, args=arguments, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        sys.stdin.read()  # whoever started us is gone


if __name__ == "__main__":
    main()
