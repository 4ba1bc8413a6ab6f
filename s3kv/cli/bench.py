"""`s3kv bench`: speed of this bucket on this host, through the client of the cache.

It makes as many requests at once as one worker makes, for objects of one size, under a prefix of
their own outside the namespaces. The objects are deleted however the measurement ends.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from uuid import uuid4

import click

from s3kv.cli import show
from s3kv.cli.configure import chunk_tokens
from s3kv.cli.invocation import (
    EPILOG,
    FiniteRange,
    OwnObjects,
    check_object_size,
    on_bucket,
    print_json,
    size_above_0,
    with_settings,
)
from s3kv.config import Config, count
from s3kv.errors import StoreError
from s3kv.place import Place
from s3kv.planning.pace import PREFILL_TOKENS_PER_S
from s3kv.planning.requests import PROBE_CHUNKS
from s3kv.stores.lanes import in_lanes, in_turn
from s3kv.stores.store import ObjectStore

_SMALL_REQUESTS = 32
_CLEANING_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Speed:
    """Measurement of one direction. seconds: from the first request to the last answer."""

    requests: int
    nbytes: int
    seconds: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    bytes_per_s: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes_per_s", self.nbytes / self.seconds)


@dataclass(frozen=True, slots=True)
class Speeds:
    """Results of a measurement. object_bytes: length of each object. at_once: requests at once.
    small_get: GETs of 1 KiB one after another."""

    object_bytes: int
    at_once: int
    put: Speed
    get: Speed
    small_get: Speed


@dataclass(frozen=True, slots=True)
class Expectation:
    """Expected times for a prompt whose chunks are all in the bucket. known_ms: if the cache knows
    that they are; unknown_ms: if it asks for a few first. computed_ms: without the cache."""

    chunks: int
    known_ms: float
    unknown_ms: float
    computed_ms: float


@click.command(epilog=EPILOG)
@click.option(
    "--bytes-per-token",
    type=size_above_0,
    metavar="SIZE",
    default="128KiB",
    show_default=True,
    help="KV bytes of a token on one worker; the default is Llama-3-8B's.",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1),
    default=8192,
    show_default=True,
    help="Length of the prompt whose chunks are fetched.",
)
@click.option(
    "--prefill-tokens-per-s",
    type=FiniteRange(0, min_open=True),
    default=PREFILL_TOKENS_PER_S,
    show_default=True,
    help="Prompt tokens the engine computes in a second, for comparison.",
)
@with_settings
def bench(
    config: Config,
    bytes_per_token: int,
    prompt_tokens: int,
    prefill_tokens_per_s: float,
    as_json: bool,
) -> None:
    """Measure how long this host takes to read a prompt from this bucket.

    Sends as many PUTs, and then as many GETs, of a chunk's size as the prompt has chunks, with as
    many at once as one worker has (at most 1 GiB), through the client of the cache.
    Its objects are under PREFIX/bench/ID and are deleted at the end, also on Ctrl-C. Requests and
    bytes are billed like any others. The copy to the GPU is not included.
    """
    object_bytes = bytes_per_token * chunk_tokens(config)
    check_object_size("--bytes-per-token", object_bytes)
    chunks = max(1, prompt_tokens // chunk_tokens(config))
    speeds = on_bucket(config, partial(_measure, config, object_bytes, chunks))
    expected = expect(speeds, chunks, prompt_tokens / prefill_tokens_per_s)
    if as_json:
        print_json(asdict(speeds) | {"prompt": asdict(expected)})
    else:
        _show(speeds, expected, prompt_tokens)


async def _measure(config: Config, object_bytes: int, chunks: int, store: ObjectStore) -> Speeds:
    with show.bars() as on_progress:
        measurement = Measurement(
            store,
            f"{config.prefix}/bench/{uuid4().hex}",
            object_bytes,
            config.fetches_at_once(object_bytes),
            clock_s=time.perf_counter,
            on_progress=on_progress,
        )
        return await measurement.run(chunks, _SMALL_REQUESTS)


@dataclass(slots=True)
class Measurement:
    """One measurement. Belongs to one asyncio loop.

    prefix: prefix of all keys, which no other measurement uses. at_once: the most requests at once.
    clock_s: a monotonic clock.
    """

    store: ObjectStore
    prefix: str
    object_bytes: int
    at_once: int
    clock_s: Callable[[], float]
    on_progress: show.Report
    _own: OwnObjects = field(default_factory=OwnObjects, init=False)

    async def run(self, requests: int, small_requests: int) -> Speeds:
        """Run the measurement, and delete its objects. requests: of each direction. Raises
        `StoreError`; objects that cannot be deleted are named on stderr."""
        try:
            return await self._run(requests, small_requests)
        finally:
            try:
                # Also when it is cancelled, as by Ctrl-C: requests that have begun are waited for.
                await asyncio.shield(asyncio.wait_for(self._clean(), _CLEANING_TIMEOUT_S))
            except (StoreError, asyncio.TimeoutError) as error:
                told = str(error) or "deleting takes too long"
                click.echo(f"s3kv: {told}; {self.prefix}/ is left behind", err=True)

    async def _run(self, requests: int, small_requests: int) -> Speeds:
        # One buffer for each request under way, filled, so that its pages exist beforehand.
        at_once, nbytes = min(self.at_once, requests), self.object_bytes
        keys = [f"{self.prefix}/{lane}" for lane in range(at_once)]
        places = [Place.of(bytearray(b"\x5a") * nbytes) for _ in keys]
        few = Place.of(bytearray(1024))
        small_key = f"{self.prefix}/small"
        put = partial(self._own.put, self.store)

        written = await self._timed(
            "PUT", lambda lane: put(keys[lane], places[lane]), requests, at_once, nbytes
        )
        read = await self._timed(
            "GET", lambda lane: self._get(keys[lane], places[lane]), requests, at_once, nbytes
        )
        await put(small_key, few)
        small = await self._timed(
            "small GET", lambda _: self._get(small_key, few), small_requests, 1, few.nbytes
        )
        return Speeds(nbytes, at_once, written, read, small)

    async def _get(self, key: str, place: Place) -> None:
        info = await self.store.get_into(key, place)
        nbytes = None if info is None else info.nbytes
        if nbytes != place.nbytes:
            raise StoreError(
                f"{key} was written with {place.nbytes} bytes, and {nbytes} bytes came back"
            )

    async def _timed(
        self,
        what: str,
        call: Callable[[int], Awaitable[object]],
        requests: int,
        at_once: int,
        nbytes: int,
    ) -> Speed:
        took_s: list[float] = []

        async def timed(lane: int, _: int) -> None:
            begin_s = self.clock_s()
            await call(lane)
            took_s.append(self.clock_s() - begin_s)
            self.on_progress(what, len(took_s), requests)

        begin_s = self.clock_s()
        await in_lanes(at_once, in_turn(range(requests)), timed)
        seconds = max(self.clock_s() - begin_s, 1e-9)
        p50, p95, p99, most = (1e3 * percentile(took_s, p) for p in (50, 95, 99, 100))
        return Speed(requests, requests * nbytes, seconds, p50, p95, p99, most)

    async def _clean(self) -> None:
        for key in sorted(self._own.puts):
            await self._own.delete(self.store, key)


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile by the nearest rank."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def expect(speeds: Speeds, chunks: int, computed_s: float) -> Expectation:
    """Expected times for a prompt of that many chunks at these speeds. Pure. computed_s: the time
    to compute it.

    The cache asks for `PROBE_CHUNKS` of an unknown prefix first, and for twice as many after every
    answer. Every doubling waits for one first byte, until all requests are in use.
    """
    asked = min(chunks, speeds.at_once)
    doublings = max(0, math.ceil(math.log2(asked / min(asked, PROBE_CHUNKS))))
    known_ms = speeds.get.seconds * 1e3
    return Expectation(
        chunks=chunks,
        known_ms=known_ms,
        unknown_ms=known_ms + doublings * speeds.small_get.p50_ms,
        computed_ms=computed_s * 1e3,
    )


def _show(speeds: Speeds, expected: Expectation, prompt_tokens: int) -> None:
    what = f"{show.size(speeds.object_bytes)}, {speeds.at_once} at once"
    rows = (
        _row(f"PUT of {what}", speeds.put),
        _row(f"GET of {what}", speeds.get),
        _row("GET of 1 KiB, one after another", speeds.small_get)[:-1],
    )
    show.print_table(["", *show.numbers("p50", "p95", "p99", "max", "throughput")], rows)
    click.echo(
        f"A prompt of {count(prompt_tokens, 'token')}, {count(expected.chunks, 'chunk')}, is in "
        "host memory after\n"
        f"  {expected.known_ms:,.0f} ms when the cache knows that the bucket has it\n"
        f"  {expected.unknown_ms:,.0f} ms when it has to find out\n"
        f"  {expected.computed_ms:,.0f} ms computed instead (--prefill-tokens-per-s)"
    )


def _row(name: str, speed: Speed) -> tuple[str, ...]:
    times = (speed.p50_ms, speed.p95_ms, speed.p99_ms, speed.max_ms)
    return (name, *(f"{ms:,.1f} ms" for ms in times), f"{speed.bytes_per_s / 1e6:,.0f} MB/s")
