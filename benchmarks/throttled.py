"""What a limit on requests does to s3kv's client, and to the model of it: `python -m
benchmarks.throttled [--seconds 30] [--json FILE]`.

The I/O service asks for chunks that are not there, 64 at a time, of one partition: as fast as its
request window lets it. "client" is the service with its own S3 client and `benchmarks.shaped`, on
sockets and the machine's clock. "model" is the same service in simulated time on
`simulation/s3.py`, as in `benchmarks.replicas`. Both refuse requests above the limit, and refused
ones count. The limits are far below S3's, so that the machine's speed does not matter.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.deadline import begin, ends, say
from benchmarks.rig import machine, publish
from benchmarks.shaped import BUCKET, Shape, shaped
from benchmarks.simulation.replicas import NAMESPACE
from benchmarks.simulation.s3 import Limits, Partitions
from benchmarks.simulation.service import HostStore, LoopTimeline, SharedBucket, clock, small
from benchmarks.simulation.wire import Network
from s3kv.config import Config
from s3kv.host.slab import Slab
from s3kv.io import wire
from s3kv.io.server.service import Service
from s3kv.messages import JobEnd
from s3kv.stores.s3.s3_store import open_store
from s3kv.stores.store import BulkStore
from tests.system.sim.loop import VirtualLoop

SHARD = "h0-7of8-l0-31of32"
LAYOUT = small(2**26, NAMESPACE.digest, SHARD)
AT_ONCE = 64
PER_S = (50.0, 100.0, 200.0, 400.0)
GIVE_UP_S = 600.0


class Asker:
    """A service that always has jobs."""

    def __init__(self, store: BulkStore, config: Config, slab: Slab, seed: int) -> None:
        self.ends: Counter[str] = Counter()
        self._asked = 0
        self._slab = slab
        handshake = wire.Handshake(
            config, NAMESPACE.prefix, NAMESPACE.digest, SHARD, {0: LAYOUT.tensors}
        )
        self._service = Service(
            handshake, slab, store, self._heard, sys.exit, random.Random(f"{seed} service")
        )

    async def run(self, seconds: float) -> dict[str, float]:
        self._service.start()
        for _ in range(AT_ONCE):
            self._ask()
        await asyncio.sleep(seconds)
        counters = self._service._statistics().counters
        answered, refused = self.ends["missing"], counters["io_throttled"]
        await self._service.finish()
        assert not counters["io_defects"]
        return {
            "answered_per_s": round(answered / seconds, 1),
            "slow_down_percent": round(100 * refused / (answered + refused), 2),
            "failed_percent": round(100 * self.ends["failed"] / self.ends.total(), 2),
            "window_cuts": counters["io_window_cuts"],
        }

    def _ask(self) -> None:
        self._asked += 1
        block_hash = hashlib.sha256(self._asked.to_bytes(8, "little")).digest()
        offset = self._asked % AT_ONCE * LAYOUT.object_bytes
        self._service.receive(wire.Fetch(self._asked, 0, block_hash, offset))

    def _heard(self, message: Any) -> None:
        if isinstance(message, JobEnd) and message.outcome.name != "CANCELLED":
            self.ends[message.outcome.name.lower()] += 1
            asyncio.get_running_loop().call_soon(self._ask)


def slab() -> Slab:
    return Slab.create(AT_ONCE * LAYOUT.object_bytes)


def modelled(shape: Shape, seconds: float, seed: int) -> dict[str, float]:
    """What the model says."""
    loop, rate = VirtualLoop(), shape.requests_per_s
    limits = Limits(put_per_s=rate, get_per_s=rate, refused_share=1.0)
    bucket = SharedBucket(Partitions(limits, random.Random(seed)), LAYOUT, NAMESPACE)
    network = Network(
        shape.first_byte_ms / 1e3, shape.sigma, shape.host_mb_s * 1e6, shape.connection_mb_s * 1e6
    )
    rng = random.Random(f"{seed} network")
    with closing(slab()) as memory, clock(loop):
        store = HostStore(LoopTimeline(loop), bucket, network, LAYOUT.object_bytes, rng)

        async def ask() -> dict[str, float]:
            return await Asker(store, Config(bucket="modelled"), memory, seed).run(seconds)

        task: asyncio.Task[dict[str, float]] = loop.create_task(ask())
        loop.run_until(seconds + 30)
        return task.result()


def measured(shape: Shape, seconds: float, seed: int) -> dict[str, float]:
    """What the client says."""
    with shaped(shape) as server, closing(slab()) as memory:
        config = Config(bucket=BUCKET, endpoint_url=server.url)

        async def ask() -> dict[str, float]:
            return await Asker(open_store(config), config, memory, seed).run(seconds)

        return uvloop.run(ask())


@ends(GIVE_UP_S)
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of each row")
    parser.add_argument("--requests-per-s", type=float, nargs="+", default=list(PER_S))
    parser.add_argument("--quick", action="store_true", help="five seconds each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.quick:
        options.seconds = 5.0
    os.environ |= {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none"}
    os.environ |= {"AWS_DEFAULT_REGION": "us-east-1"}
    begin("benchmarks.shaped", GIVE_UP_S)
    rows = {}
    for per_s in options.requests_per_s:
        say(f"{per_s:g} requests a second")
        shape = Shape(requests_per_s=per_s)
        rows[f"{per_s:g}"] = {
            "client": measured(shape, options.seconds, options.seed),
            "model": modelled(shape, options.seconds, options.seed),
        }
    result = {
        "benchmark": "throttled",
        "machine": machine(),
        "seconds": options.seconds,
        "limits_per_s": rows,
    }
    publish(result, options.json)


if __name__ == "__main__":
    main()
