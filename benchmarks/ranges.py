"""Large objects from a server with the shape of S3: `python -m benchmarks.ranges [--quick]`.

The server is `benchmarks.shaped`: 90 MB/s a connection, 1 GB/s in all, 30 ms to the first byte. One
object at a time is fetched, and the median time is compared with two others of the same round:

    ideal   the first byte's median and the object at the rate of the link
    plain   blocking sockets in threads, with as many ranges of the object as s3kv takes

The rows are s3kv's I/O service, verification included: "whole" with `range_bytes=0`, "ranges" as it
is by default. "plain whole" is one blocking socket. Rounds take turns. With `--tail` the first byte
is log-normal with a 99th percentile of ten times the median; with `--tls` all rows use TLS.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import socket
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any

import uvloop

from benchmarks.deadline import begin, ends, say
from benchmarks.objects import connected, read_head
from benchmarks.rig import Store, add_server, machine, publish, s3
from benchmarks.shaped import SIGMA, Shape
from s3kv.config import Config
from s3kv.host.slab import Slab
from s3kv.io import wire
from s3kv.io.server.service import Service
from s3kv.io.sources.ranges import cut
from s3kv.objects.keys import Namespace
from s3kv.stores.s3.s3_store import open_store
from s3kv.types import ChunkKey, TensorSpec

ROWS = ("plain whole", "plain ranges", "whole", "ranges")
NAMESPACE, SHARD = "0" * 32, "h0-7of8-l0-31of32"
GIVE_UP_S = 600.0


class Client:
    """An I/O service with one slot, on its own connections."""

    def __init__(self, store: Store, object_bytes: int, slab: Slab, **settings: Any) -> None:
        config = Config(**store.settings, **settings)
        tensors = (TensorSpec("kv", "U8", (object_bytes - 4096,)),)
        handshake = wire.Handshake(config, "benchmark", NAMESPACE, SHARD, {0: tensors})
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._service = Service(
            handshake,
            slab,
            open_store(config),
            self._messages.put_nowait,
            sys.exit,
            random.Random(0),
        )

    async def start(self) -> None:
        self._service.start()
        ready = await self._messages.get()
        assert ready.serving, ready

    async def move(self, message: wire.Fetch | wire.Upload) -> float:
        """Run one job; returns the seconds it took."""
        began_s = perf_counter()
        self._service.receive(message)
        end = await self._messages.get()
        assert end.outcome.is_success, end
        return perf_counter() - began_s

    async def finish(self) -> None:
        await self._service.finish()


class Plain:
    """Blocking sockets in threads, with a range of the object each."""

    def __init__(self, url: str, target: str, ranges: Sequence[range], buffer: memoryview) -> None:
        self._sockets = [connected(url, number) for number, _ in enumerate(ranges)]
        self._threads = ThreadPoolExecutor(len(ranges))
        self._target, self._ranges, self._buffer = target, ranges, buffer

    def fetch(self) -> float:
        began_s = perf_counter()
        list(self._threads.map(self._get, self._sockets, self._ranges))
        return perf_counter() - began_s

    def _get(self, connection: socket.socket, bounds: range) -> None:
        wanted = f"Range: bytes={bounds.start}-{bounds.stop - 1}\r\n"
        head = f"GET {self._target} HTTP/1.1\r\nHost: bench\r\n{wanted}\r\n"
        connection.sendall(head.encode())
        _, rest = read_head(connection, b"206")
        place = self._buffer[bounds.start : bounds.stop]
        place[: len(rest)] = rest
        filled = len(rest)
        while filled < len(place):
            received = connection.recv_into(place[filled:])
            if not received:
                raise ConnectionError(f"the server sent {filled} of {len(place)} bytes")
            filled += received

    def close(self) -> None:
        self._threads.shutdown()
        for connection in self._sockets:
            connection.close()


async def measure(store: Store, shape: Shape, object_bytes: int, rounds: int) -> dict[str, Any]:
    """Times of objects of one size."""
    url = store.url or ""
    count = max(1, object_bytes // Config(bucket=store.bucket).range_bytes)
    key = ChunkKey(0, hashlib.sha256(b"%d" % object_bytes).digest())
    target = f"/{store.bucket}/" + Namespace("benchmark", NAMESPACE).chunk(key, SHARD)
    taken: dict[str, list[float]] = {name: [] for name in ROWS}
    with closing(Slab.create(object_bytes)) as slab:
        clients = {
            "whole": Client(store, object_bytes, slab, range_bytes=0),
            "ranges": Client(store, object_bytes, slab),
        }
        for client in clients.values():
            await client.start()
        await clients["whole"].move(wire.Upload(1, 0, key.block_hash, 0))
        plain = {
            "plain whole": Plain(url, target, cut(object_bytes, 1), slab.view),
            "plain ranges": Plain(url, target, cut(object_bytes, count), slab.view),
        }
        for number in range(rounds + 1):
            for name in ROWS:
                if name in plain:
                    seconds = await asyncio.to_thread(plain[name].fetch)
                else:
                    seconds = await clients[name].move(wire.Fetch(1, 0, key.block_hash, 0))
                if number:  # the first opens connections
                    taken[name].append(seconds)
            say(f"{object_bytes >> 20} MiB, round {number} of {rounds}")
        for sockets in plain.values():
            sockets.close()
        for client in clients.values():
            await client.finish()
    ideal_ms = shape.first_byte_ms + object_bytes / shape.host_mb_s / 1e3
    return {"requests": count, "ideal_ms": round(ideal_ms, 1)} | {
        name: {
            "ms": round(1e3 * statistics.median(seconds), 1),
            "of_ideal": round(1e3 * statistics.median(seconds) / ideal_ms, 2),
            "of_plain_ranges": round(
                statistics.median(
                    one / plain for one, plain in zip(seconds, taken["plain ranges"], strict=True)
                ),
                2,
            ),
        }
        for name, seconds in taken.items()
    }


@ends(600)
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, nargs="+", default=[8, 32, 80])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="8 and 32 MiB, three rounds")
    parser.add_argument("--tail", action="store_true", help="first bytes are late at random")
    parser.add_argument("--json", type=Path)
    add_server(parser)
    parser.set_defaults(shaped=True, sigma=0.0)
    options = parser.parse_args(arguments)
    if options.quick:
        options.mib, options.rounds = [8, 32], 3
    if options.tail:
        options.sigma = SIGMA
    with s3(options) as store:
        begin(store.name, GIVE_UP_S)
        assert store.shape is not None
        sizes = {
            f"{mib} MiB": uvloop.run(measure(store, store.shape, mib * 2**20, options.rounds))
            for mib in options.mib
        }
        result = {
            "benchmark": "ranges",
            **store.told(),
            "machine": machine(),
            "rounds": options.rounds,
            "objects": sizes,
        }
    publish(result, options.json)


if __name__ == "__main__":
    main()
