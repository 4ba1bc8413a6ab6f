"""The proxy that stands for a server far away changes when, and nothing else."""

from __future__ import annotations

import random
import socket
import threading
import time

from lab.distance import distant

DELAY_MS = 40.0


class Listener:
    """A server for one connection: reads to the end, then answers with the same, backwards."""

    def __init__(self) -> None:
        self.begun_s = 0.0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with connection:
            received = bytearray()
            while data := connection.recv(2**16):
                self.begun_s = self.begun_s or time.monotonic()
                received += data
            connection.sendall(bytes(reversed(received)))

    def close(self) -> None:
        self._thread.join()
        self._socket.close()


def exchange(url: str, sent: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as connection:
        writing = threading.Thread(target=lambda: _send(connection, sent))
        writing.start()
        received = bytearray()
        while data := connection.recv(2**16):
            received += data
        writing.join()
    return bytes(received)


def _send(connection: socket.socket, sent: bytes) -> None:
    connection.sendall(sent)
    connection.shutdown(socket.SHUT_WR)


def test_what_is_sent_arrives_later_and_as_it_was() -> None:
    server = Listener()
    sent = random.Random(5).randbytes(3 * 2**20 + 1)
    with distant(server.url, DELAY_MS) as far:
        begun_s = time.monotonic()
        assert exchange(far, sent) == bytes(reversed(sent))
    assert server.begun_s - begun_s >= DELAY_MS / 1e3
    server.close()


def test_a_client_that_is_gone_is_gone_for_the_server_too() -> None:
    server = Listener()
    with distant(server.url, DELAY_MS) as far:
        with socket.create_connection(("127.0.0.1", int(far.rsplit(":", 1)[1]))) as connection:
            connection.sendall(b"half of a request")
        server.close()  # its thread ends when it has read all there is
