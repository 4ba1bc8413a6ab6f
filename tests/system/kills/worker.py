"""A worker process: the real rank, slab, client and I/O process, and device memory of bytes."""

from __future__ import annotations

import contextlib
import random
import time
from multiprocessing.connection import Connection

from s3kv.config import Config
from s3kv.host.slab import Slab
from s3kv.io.client import IoClient
from tests.system.sim.meaning import Shard
from tests.system.sim.rank import ByteRank, handshake_for
from tests.unit.planning.setup import Setup

PADDING_BYTES = 100_000
"""Makes a chunk large enough to be killed in the middle of."""

SETUP = Setup(
    world_size=2, slots=10, blocks=64, probe_chunks=2, max_wait_s=2.0, max_saves_inflight=8
)


def shard(rank: int) -> Shard:
    return Shard.of(0, SETUP.world_size, rank)


def padded(*args: int) -> Slab:
    """A slab whose padding can be compressed: Blosc2 has no data for zeros."""
    slab = Slab.create(*args)
    text = b"Bytes that nobody looks at. "
    slab.view[:] = (text * (slab.nbytes // len(text) + 1))[: slab.nbytes]
    return slab


def serve(pipe: Connection, rank: int, config: Config, seed: int) -> None:
    """Carry out what the engine says, until it is gone."""
    handshake = handshake_for(shard(rank), SETUP, config, PADDING_BYTES)
    client: IoClient | None = None

    def open_client(slab: Slab) -> IoClient:
        nonlocal client
        client = IoClient(handshake, slab)
        client.start()
        return client

    byte_rank = ByteRank(
        shard(rank),
        SETUP,
        make_slab=padded,
        make_client=open_client,
        rng=random.Random(seed),
        clock=time.monotonic,
        padding_bytes=PADDING_BYTES,
    )
    client.wait_ready(120.0)
    pipe.send(client.pid)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while (command := pipe.recv())[0] != "stop":
            pipe.send(answer(byte_rank, client, *command))
        byte_rank.worker.shutdown(5.0)
        pipe.send(None)


def answer(rank: ByteRank, client: IoClient, what: str, *args: object) -> object:
    if what == "run":
        rank.run(*args)  # type: ignore[arg-type]
        report, loaded, rank.loaded = rank.take_report(), rank.loaded, {}
        return report, loaded, rank.orders, client.pid, rank.seen
    assert what == "block"
    return rank.blocks[args[0]]  # type: ignore[index]
