"""The first hit of an engine, and the first after a pause: `python -m benchmarks.first --tls`.

The server is `benchmarks.shaped`: 90 MB/s a connection, 1 GB/s in all, 30 ms to the first byte, and
5 ms for its part of a TLS handshake. A hit is so many chunks at once through s3kv's I/O service,
verification included. Rows are the first hit a second after the start, the next one, the first
after `--idle-s` seconds without a request, and the next one:

    asked     connections are opened when a request needs one
    ready     connections are kept ready, as in the I/O process

Both idle at the same time and take turns otherwise. `cpu_ms` is this process's processor time. Both
client and server pay for a handshake, and here they share a machine.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import statistics
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import uvloop

from benchmarks.deadline import begin, ends, say
from benchmarks.rig import Store, add_server, machine, publish, s3
from s3kv.config import Config
from s3kv.host.slab import Slab
from s3kv.io import wire
from s3kv.io.server.service import Service
from s3kv.stores.s3.s3_store import open_store
from s3kv.types import TensorSpec

ROWS = ("first", "next", "first after a pause", "next after a pause")
CLIENTS = {"asked": False, "ready": True}
ROUND_S = 120.0


class Client:
    """An I/O service and the chunks of one hit."""

    def __init__(self, store: Store, chunks: int, chunk_bytes: int, slab: Slab, *, ready: bool):
        self._store, self._slab, self._ready = store, slab, ready
        self._hashes = [hashlib.sha256(b"%d" % number).digest() for number in range(chunks)]
        self._chunk_bytes = chunk_bytes

    async def start(self) -> None:
        config = Config(**self._store.settings)
        tensors = (TensorSpec("kv", "U8", (self._chunk_bytes - 4096,)),)
        handshake = wire.Handshake(config, "benchmark", "0" * 32, "h0-7of8-l0-31of32", {0: tensors})
        store = open_store(config, keeps_ready=self._ready)
        self._ends: asyncio.Queue[Any] = asyncio.Queue()
        self._service = Service(
            handshake, self._slab, store, self._ends.put_nowait, sys.exit, random.Random(0)
        )
        self._service.start()
        ready = await self._ends.get()
        assert ready.serving, ready

    async def move(self, job: type[wire.Fetch] | type[wire.Upload]) -> dict[str, float]:
        """Run a job for every chunk at once."""
        began_s, cpu_s = perf_counter(), process_time()
        for number, block_hash in enumerate(self._hashes):
            self._service.receive(job(number, 0, block_hash, number * self._chunk_bytes))
        for _ in self._hashes:
            end = await self._ends.get()
            assert end.outcome.is_success, end
        return {"ms": 1e3 * (perf_counter() - began_s), "cpu_ms": 1e3 * (process_time() - cpu_s)}

    async def finish(self) -> None:
        await self._service.finish()


async def measure(
    store: Store, chunks: int, chunk_bytes: int, rounds: int, idle_s: float
) -> dict[str, dict[str, dict[str, float]]]:
    """Medians, by client and row."""
    taken: dict[str, dict[str, list[dict[str, float]]]] = {
        client: {row: [] for row in ROWS} for client in CLIENTS
    }
    with closing(Slab.create(chunks * chunk_bytes)) as slab:
        clients = {
            name: Client(store, chunks, chunk_bytes, slab, ready=ready)
            for name, ready in CLIENTS.items()
        }
        writer = clients["asked"]
        await writer.start()
        await writer.move(wire.Upload)
        await writer.finish()
        for number in range(rounds):
            order = [*clients.items()][:: -1 if number % 2 else 1]
            for _, client in order:
                await client.start()
            for pause_s, rows in ((1.0, ROWS[:2]), (idle_s, ROWS[2:])):
                await asyncio.sleep(pause_s)
                for name, client in order:
                    for row in rows:
                        taken[name][row].append(await client.move(wire.Fetch))
            for _, client in order:
                await client.finish()
            say(f"round {number + 1} of {rounds}")
    return {
        client: {
            row: {
                figure: round(statistics.median(one[figure] for one in hits), 1)
                for figure in ("ms", "cpu_ms")
            }
            for row, hits in rows.items()
        }
        for client, rows in taken.items()
    }


@ends(600)
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunks", type=int, default=32)
    parser.add_argument("--mib", type=int, default=1, help="of a chunk")
    parser.add_argument("--idle-s", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", type=Path)
    add_server(parser)
    parser.set_defaults(shaped=True, sigma=0.0, handshake_ms=5.0)
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds = 1
    with s3(options) as store:
        begin(store.name, ROUND_S * (options.rounds + 1))
        rows = uvloop.run(
            measure(store, options.chunks, options.mib * 2**20, options.rounds, options.idle_s)
        )
        result = {
            "benchmark": "first",
            **store.told(),
            "machine": machine(),
            "rounds": options.rounds,
            "chunks": f"{options.chunks} of {options.mib} MiB",
            "idle_s": options.idle_s,
            "clients": rows,
        }
    publish(result, options.json)


if __name__ == "__main__":
    main()
