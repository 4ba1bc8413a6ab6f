"""Connections that are kept ready, in virtual time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from s3kv.errors import StoreUnavailable
from s3kv.stores.http.exchange import Request
from s3kv.stores.http.pool import IDLE_LIMIT_S, LOOK_S, READY_S, Pool
from s3kv.stores.http.watch import Patience
from tests.system.sim.loop import VirtualLoop

GET = Request("GET", "/k", {"Host": "test"})
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
PATIENCE = Patience(connect_ms=2000, first_byte_ms=5000, progress_ms=5000, min_bytes_per_s=1)
HANDSHAKE_S, ANSWER_S = 0.01, 0.03
READY, SIZE = 8, 12


class Peer(asyncio.Transport):
    """The server's end of a connection."""

    def __init__(self, wire: Wire, protocol: asyncio.BufferedProtocol) -> None:
        super().__init__()
        self._wire, self._protocol = wire, protocol
        self._closing = False
        self.requests = 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._wire.socket

    def is_closing(self) -> bool:
        return self._closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.requests += 1
        if self._wire.hangs_up:
            self.close()
        else:
            self._wire.call_later(ANSWER_S, self._answer)

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._wire.peers.remove(self)
            self._wire.call_soon(self._protocol.connection_lost, None)

    def _answer(self) -> None:
        if not self._closing:
            self._protocol.get_buffer(len(ANSWER))[: len(ANSWER)] = ANSWER
            self._protocol.buffer_updated(len(ANSWER))


class Wire(VirtualLoop):
    """A loop with a server. peers: connections that are open. refuses: it takes none. hangs_up: it
    closes one instead of answering. closes_unused: at once."""

    def __init__(self) -> None:
        super().__init__()
        self.socket = socket.socket()
        self.peers: list[Peer] = []
        self.opened = self.most = 0
        self.refuses = self.hangs_up = self.closes_unused = False

    async def create_connection(  # type: ignore[override]
        self, factory: Callable[[], asyncio.BufferedProtocol], *where: Any, **how: Any
    ) -> tuple[Peer, asyncio.BufferedProtocol]:
        await asyncio.sleep(HANDSHAKE_S)
        self.opened += 1
        if self.refuses:
            raise ConnectionRefusedError(111, "refused")
        protocol = factory()
        peer = Peer(self, protocol)
        self.peers.append(peer)
        self.most = max(self.most, len(self.peers))
        protocol.connection_made(peer)
        if self.closes_unused:
            self.call_soon(peer.close)
        return peer, protocol

    def run(self, work: Coroutine[Any, Any, Any], until_s: float) -> None:
        """Run `work`, which ends by then without an error, and let it be then."""
        task = self.create_task(work)
        self.run_until(until_s)
        assert task.done()
        task.result()


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.give_up()
    wire.socket.close()
    assert not wire.failures


@pytest.fixture
def pool(wire: Wire) -> Pool:
    return Pool("127.0.0.1", 443, tls=None, size=SIZE, patience=PATIENCE, ready=READY)


async def burst(pool: Pool, requests: int) -> None:
    await asyncio.gather(*(pool.request(GET) for _ in range(requests)))


def test_the_first_answer_opens_the_others(wire: Wire, pool: Pool) -> None:
    wire.run(burst(pool, 1), HANDSHAKE_S + ANSWER_S)
    assert wire.opened == 1
    wire.run_until(1.0)
    assert len(wire.peers) == wire.opened == READY
    wire.run(burst(pool, READY), 1.0 + ANSWER_S)  # no time for a hello
    assert wire.opened == READY


def test_they_are_ready_at_any_time_and_never_too_old(wire: Wire, pool: Pool) -> None:
    wire.run(burst(pool, 1), 1.0)
    for now_ms in range(1000, int(READY_S * 1000), 7):
        wire.run_until(now_ms / 1e3)
        assert READY - 1 <= len(wire.peers) <= READY
        fresh = [c for c in pool._idle if c.is_open and wire.time() - c.idle_since_s < IDLE_LIMIT_S]
        assert len(fresh) >= READY - 1
    looks = READY_S / LOOK_S
    assert wire.opened <= READY * (1 + looks * LOOK_S / (IDLE_LIMIT_S - LOOK_S))


def test_it_ends_when_nothing_is_asked_for_and_an_answer_prolongs_it(
    wire: Wire, pool: Pool
) -> None:
    for start_s in (0.0, 10_000.0):
        wire.run_until(start_s)
        wire.run(burst(pool, 1), start_s + READY_S - 1)
        wire.run(burst(pool, 1), start_s + READY_S + LOOK_S + 1)
        assert len(wire.peers) >= READY - 1
        wire.run_until(start_s + 2 * READY_S + LOOK_S + 1)
        assert wire.peers == []
        opened = wire.opened
        wire.run_until(start_s + 5_000.0)
        assert wire.opened == opened


def test_there_are_never_more_than_the_size(wire: Wire) -> None:
    pool = Pool("127.0.0.1", 443, tls=None, size=READY, patience=PATIENCE, ready=SIZE)
    wire.run(burst(pool, 1), HANDSHAKE_S + ANSWER_S + 0.001)  # it opens a second one
    wire.run(burst(pool, 2 * READY), 100.0)
    assert wire.most == READY


def test_connections_in_use_count_and_those_beyond_what_is_kept_are_ended(
    wire: Wire, pool: Pool
) -> None:
    wire.run(burst(pool, SIZE), 1.0)
    assert wire.opened == SIZE
    wire.run_until(3 * IDLE_LIMIT_S)
    assert len(wire.peers) == READY


def test_one_that_cannot_be_opened_ends_it(wire: Wire, pool: Pool) -> None:
    wire.run(burst(pool, 1), 1.0)
    wire.refuses = True
    for peer in [*wire.peers]:
        peer.close()
    wire.run_until(1_000.0)
    assert wire.opened == READY + 1
    wire.refuses = False
    wire.run(burst(pool, 1), 1_001.0)
    assert len(wire.peers) == READY


def test_a_server_that_closes_what_is_unused_is_asked_again_at_every_look(
    wire: Wire, pool: Pool
) -> None:
    wire.run(burst(pool, 1), HANDSHAKE_S + ANSWER_S)
    wire.closes_unused = True
    wire.run_until(10 * LOOK_S - 1)
    assert wire.opened <= 1 + 10 * READY


def test_a_request_on_one_that_the_server_closed_is_sent_again(wire: Wire, pool: Pool) -> None:
    wire.run(burst(pool, 1), 1.0)
    used = [peer for peer in wire.peers if peer.requests]
    for peer in used:
        peer.close()
    wire.hangs_up = True
    asking = wire.create_task(pool.request(GET))
    wire.run_until(1.0 + HANDSHAKE_S / 2)
    wire.hangs_up = False
    wire.run_until(2.0)
    assert asking.result().status == 200


def test_nothing_is_kept_unless_asked_for(wire: Wire) -> None:
    pool = Pool("127.0.0.1", 443, tls=None, size=SIZE, patience=PATIENCE)
    wire.run(burst(pool, 3), 2 * READY_S)
    assert len(wire.peers) == wire.opened == 3


@pytest.mark.parametrize("after_s", [HANDSHAKE_S / 2, 1.0, IDLE_LIMIT_S - LOOK_S + HANDSHAKE_S / 2])
def test_closing_ends_it(wire: Wire, pool: Pool, after_s: float) -> None:
    wire.run(burst(pool, 1), HANDSHAKE_S + ANSWER_S)
    wire.run_until(HANDSHAKE_S + ANSWER_S + after_s)
    wire.run(pool.close(), wire.time() + 1.0)
    assert wire.peers == []
    opened = wire.opened
    wire.run_until(READY_S)
    assert wire.opened == opened


def test_a_failed_request_begins_nothing(wire: Wire, pool: Pool) -> None:
    wire.refuses = True

    async def fail() -> None:
        with pytest.raises(StoreUnavailable):
            await pool.request(GET)

    wire.run(fail(), 100.0)
    assert wire.opened == 1
