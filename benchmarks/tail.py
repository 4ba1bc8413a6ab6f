"""What hedging and the request window are worth at a bucket with a tail: `python -m benchmarks.tail
[--rounds 200] [--seed N] [--json FILE]`.

The I/O process's own service fetches prefixes of 8, 32 and 128 chunks from a simulated bucket, in
virtual time: the figures depend on the seed and the code alone, and not on the machine. The
variants take turns. A figure is the time until the last chunk of a prefix has arrived. A prefix
with a failed chunk never arrives (`whole_percent`); percentiles are over those that do. Beside a
client that has fetched before (`buckets`), every variant has one that is new for each prefix
(`new_clients`), as an engine's I/O process is after its start.

All variants see the same draws: the first byte of a chunk's n-th request in a round comes after the
same time for all. An object's body takes 60 ms after that, and a new connection 5 ms before.
Buckets:

    tail        first byte: log-normal, median 30 ms, 99th percentile 300 ms
    stragglers  first byte: 23 to 38 ms, and 15 times that for one request in fifty
    varying     first byte: 23 to 38 ms; all bodies share a pipe, in turn: 400 chunks a
                second for 3 s, 80 a second for the next 3 s
    throttled   first byte: 23 to 38 ms; more than 120 requests a second are answered SlowDown
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.deadline import ends, say
from benchmarks.rig import publish
from lab.memory_store import MemoryStore
from s3kv.config import Config
from s3kv.errors import StoreThrottled
from s3kv.host.slab import Slab
from s3kv.io import wire
from s3kv.io.server.service import Service
from s3kv.io.sources import pacing
from s3kv.io.sources.pacing import Window
from s3kv.place import Place
from s3kv.stores.store import Claim, ObjectInfo
from s3kv.types import TensorSpec
from tests.system.sim.loop import VirtualLoop

PREFIXES = (8, 32, 128)
TENSORS = (TensorSpec("kv", "U8", (64,)),)
SLOT_BYTES = 8 * 2**10
CONNECT_S, FIRST_S, BODY_S = 0.005, 0.03, 0.06
LOG_NORMAL_SIGMA = math.log(10) / 2.326
"""The 99th percentile is ten times the median."""
FAST_PER_S, SLOW_PER_S, PHASE_S = 400, 80, 3.0
LIMIT_PER_S, LIMIT_BURST = 120, 20


class TailStore(MemoryStore):
    """A bucket of one kind. `begin` starts a round, whose draws depend on nothing before it."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__(clock=lambda: 0.0)
        self.asked: Counter[str] = Counter()
        self._kind = kind
        self._seed = seed
        self._round = 0
        self._begun_s = self._pipe_free_s = self._tokens_s = 0.0
        self._tokens = 0.0
        self._idle_connections = 0

    def forget_connections(self) -> None:
        self._idle_connections = 0

    def begin(self, number: int) -> None:
        self.asked.clear()
        self._round = number
        self._begun_s = self._pipe_free_s = self._tokens_s = _now_s()
        self._tokens = LIMIT_BURST

    async def get_into(
        self, key: str, place: Place, claim: Claim | None = None
    ) -> ObjectInfo | None:
        self.asked[key] += 1
        draw = random.Random(f"{self._seed} {self._round} {key} {self.asked[key]}")
        if self._idle_connections:
            self._idle_connections -= 1
        else:
            await asyncio.sleep(CONNECT_S)
        if self._kind == "throttled" and not self._take_token():
            await asyncio.sleep(FIRST_S / 3)
            self._idle_connections += 1
            raise StoreThrottled("SlowDown")
        first_s, body_s = self._times(draw)
        await asyncio.sleep(first_s)
        if claim is not None and not claim():
            return None
        await asyncio.sleep(body_s)
        self._idle_connections += 1
        return await super().get_into(key, place)

    def _times(self, draw: random.Random) -> tuple[float, float]:
        """Time to first byte, and from there to the last."""
        if self._kind == "tail":
            return FIRST_S * math.exp(draw.gauss(0.0, LOG_NORMAL_SIGMA)), BODY_S
        first_s = FIRST_S * draw.uniform(0.75, 1.25)
        if self._kind == "stragglers" and draw.random() < 0.02:
            return 15 * first_s, BODY_S
        if self._kind == "varying":
            ready_s = _now_s() + first_s
            is_fast = int((ready_s - self._begun_s) / PHASE_S) % 2 == 0
            begins_s = max(ready_s, self._pipe_free_s)
            self._pipe_free_s = begins_s + 1 / (FAST_PER_S if is_fast else SLOW_PER_S)
            return begins_s - _now_s(), self._pipe_free_s - begins_s
        return first_s, BODY_S

    def _take_token(self) -> bool:
        refill = LIMIT_PER_S * (_now_s() - self._tokens_s)
        self._tokens = min(LIMIT_BURST, self._tokens + refill)
        self._tokens_s = _now_s()
        allowed = self._tokens >= 1
        self._tokens -= allowed
        return allowed


class FixedWindow(Window):
    """A window that nothing changes."""

    def throttled(self, sent_s: float, now_s: float) -> None: ...


HEDGE_PERCENT = Config(bucket="tail").hedge_percent
VARIANTS: dict[str, tuple[float, type[Window]]] = {
    "hedging, window": (HEDGE_PERCENT, Window),
    "window": (0.0, Window),
    "hedging": (HEDGE_PERCENT, FixedWindow),
    "neither": (0.0, FixedWindow),
}
"""Name to `hedge_percent` and the window."""


class Client:
    """One variant's I/O service, its bucket, and the prefixes it fetched."""

    def __init__(self, kind: str, variant: str, seed: int, slab: Slab) -> None:
        self.store = TailStore(kind, seed)
        self.taken_s: dict[int, list[float]] = {count: [] for count in PREFIXES}
        self.prefixes: Counter[int] = Counter()
        self.requests: Counter[int] = Counter()
        self._variant = variant
        self._seed = seed
        self._slab = slab
        self._job_id = 0

    async def start(self) -> None:
        """Fill the bucket, and fetch until hedging knows enough."""
        await self.begin_anew()
        self.store.begin(0)
        assert await self._move(wire.Upload, max(PREFIXES))
        for _ in range(8):
            await self._move(wire.Fetch, 8)

    async def begin_anew(self) -> None:
        """Start a service that knows nothing of the bucket, and has no connections."""
        hedge_percent, window = VARIANTS[self._variant]
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        handshake = wire.Handshake(
            Config(bucket="tail", hedge_percent=hedge_percent),
            *("tail", "0" * 32, "h0-7of8-l0-31of32"),
            {0: TENSORS},
        )
        say_ = self._messages.put_nowait
        with mock.patch.object(pacing, "Window", window):
            self._service = Service(
                handshake, self._slab, self.store, say_, _hung_up, random.Random(self._seed)
            )
        self.store.forget_connections()
        self._service.start()
        await self._messages.get()

    async def finish(self) -> None:
        await self._service.finish()

    async def _move(self, message: type[wire.Fetch | wire.Upload], count: int) -> bool:
        """Fetch or upload chunks. Returns whether all succeeded."""
        for number in range(count):
            self._job_id += 1
            block_hash = hashlib.sha256(bytes([number])).digest()
            self._service.receive(message(self._job_id, 0, block_hash, number * SLOT_BYTES))
        ends = [await self._messages.get() for _ in range(count)]
        return all(end.outcome.is_success for end in ends)

    async def fetch(self, count: int, number: int) -> None:
        """Fetch one prefix, as round `number`."""
        self.store.begin(number)
        begun_s = _now_s()
        if await self._move(wire.Fetch, count):
            self.taken_s[count].append(_now_s() - begun_s)
        self.prefixes[count] += 1
        self.requests[count] += self.store.asked.total()

    def figures(self, count: int) -> dict[str, float]:
        taken_ms = sorted(1e3 * taken_s for taken_s in self.taken_s[count])
        prefixes = self.prefixes[count]
        figures = {
            "whole_percent": round(100 * len(taken_ms) / prefixes, 1),
            "requests_per_chunk": round(self.requests[count] / (count * prefixes), 4),
        }
        if taken_ms:
            figures["median_ms"] = round(statistics.median(taken_ms), 1)
            figures["p95_ms"] = round(taken_ms[int(0.95 * len(taken_ms))], 1)
        return figures


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _hung_up() -> None:
    raise RuntimeError("the service does not serve")


async def measure(kind: str, seed: int, rounds: int, slab: Slab, anew: bool) -> dict[str, Any]:
    """A round: every variant fetches every prefix. anew: by a new client each."""
    clients = {variant: Client(kind, variant, seed, slab) for variant in VARIANTS}
    for client in clients.values():
        await client.start()
    number = 0
    for _ in range(rounds):
        for count in PREFIXES:
            number += 1
            for client in clients.values():
                if anew:
                    await client.finish()
                    await client.begin_anew()
                await client.fetch(count, number)
    for client in clients.values():
        await client.finish()
    return {
        str(count): {variant: client.figures(count) for variant, client in clients.items()}
        for count in PREFIXES
    }


def run(kind: str, seed: int, rounds: int, *, anew: bool) -> dict[str, Any]:
    say(f"bucket: {kind}" + (", new clients" if anew else ""))
    loop = VirtualLoop()
    with closing(Slab.create(max(PREFIXES) * SLOT_BYTES)) as slab:
        task: asyncio.Task[dict[str, Any]] = loop.create_task(
            measure(kind, seed, rounds, slab, anew)
        )
        while not task.done():
            loop.run_until(loop.time() + 3600)
        return task.result()


@ends(1800)
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = ("tail", "stragglers", "varying", "throttled")
    parser.add_argument("--bucket", choices=kinds, nargs="+", default=list(kinds))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="20 rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds = 20
    result: dict[str, Any] = {
        "benchmark": "tail",
        "seed": options.seed,
        "rounds": options.rounds,
    }
    for name, anew in (("buckets", False), ("new_clients", True)):
        result[name] = {
            kind: run(kind, options.seed, options.rounds, anew=anew) for kind in options.bucket
        }
    publish(result, options.json)


if __name__ == "__main__":
    main()
