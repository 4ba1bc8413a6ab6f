"""Gains of a first token before the last byte: `python -m benchmarks.overlap [--quick]`.

Times to the first token of one request whose prefix is in the bucket, in simulated time: as s3kv
does it, and in other ways. The rule of waiting and the budget of second requests are s3kv's own.
The network has 25 Gbit/s, a connection 90 MB/s, and the first byte takes 30 ms in the median and
300 ms in the 99th percentile. Gains are per cent of s3kv's median over `--rounds` draws:

    parts       each chunk is loaded as soon as it has arrived
    layers      a layer is computed while the next one is loaded
    wire        layers are computed while later ones are on the wire
    ends        the prefix is computed from the front and fetched from the back until both meet
    ends, half  the same, while other requests take half of the engine's computing
    two         two requests with one prefix: one computes, the other fetches from the back; both

What errs in favour of the other ways: parts, wire and ends are taken only where they are sooner,
and where computing and fetching meet is chosen, with hindsight; the engine notices everything at
once; a layer takes the same time as any other.

With `--trace` (of the form that `benchmarks/trace.py` says) a fleet is replayed as it is, and with
loads that take no time, which no way of overlapping loads can better.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.deadline import QUICK_REQUESTS, ends, say
from benchmarks.rig import publish
from benchmarks.shaped import SIGMA
from benchmarks.simulation.fleet import OURS, Setup, run
from benchmarks.simulation.wire import Link, Network, Timeline
from benchmarks.simulation.workload import identity, load
from s3kv.config import Config
from s3kv.io.sources.hedging import Lateness
from s3kv.planning.deadline import WaitFacts, decide
from s3kv.planning.pace import Pace
from s3kv.planning.wait import Wait

SETTINGS = Config(bucket="overlap")
AT_ONCE = SETTINGS.max_inflight_requests
NETWORK = Network(0.030, SIGMA, 25e9 / 8, 90e6)
CHUNK_TOKENS = 256
LAYERS = 32
GROUPS = 8
"""Parts of a chunk that are fetched one after another for "wire"."""
WARMING = 5
"""Requests before the first that counts, from which the rules know the network."""
NO_TIME = 1e9
"""GB/s of a load that takes none."""
WAYS = ("parts", "layers", "wire", "ends", "ends, half", "two")


@dataclass(frozen=True)
class Case:
    """A request whose first `hit_tokens` are in the bucket, and whose `more_tokens` are not.

    tokens_per_s: what the engine computes. share: of that, what this request can have.
    """

    kib_per_token: int
    hit_tokens: int
    more_tokens: int
    tokens_per_s: float
    load_gb_per_s: float
    share: float = 1.0

    @cached_property
    def chunks(self) -> int:
        return self.hit_tokens // CHUNK_TOKENS

    @cached_property
    def chunk_bytes(self) -> int:
        return self.kib_per_token * 1024 * CHUNK_TOKENS

    @cached_property
    def load_s(self) -> float:
        """Of a chunk, from host memory to the device."""
        return self.chunk_bytes / self.load_gb_per_s / 1e9

    @cached_property
    def compute_s(self) -> float:
        """Of a chunk."""
        return CHUNK_TOKENS / self.tokens_per_s / self.share

    @cached_property
    def more_s(self) -> float:
        return self.more_tokens / self.tokens_per_s / self.share

    @cached_property
    def computed_s(self) -> float:
        """Everything, without the bucket."""
        return self.chunks * self.compute_s + self.more_s


CASES = tuple(
    Case(*figures)
    for figures in product(
        (64, 128), (2_048, 8_192, 32_768), (128, 1_024), (8_000.0, 20_000.0), (20.0, 50.0)
    )
)


@dataclass(frozen=True, slots=True)
class Fetched:
    """A chunk's time on the network."""

    began_s: float
    arrived_s: float


class Wire:
    """The network of one worker, which knows when a read is late."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._lateness = Lateness(SETTINGS.hedge_percent)

    def fetch(self, sizes: Sequence[int]) -> list[Fetched]:
        """Pieces that are asked for at once, in this order."""
        timeline = Timeline()
        link = Link(
            timeline,
            bytes_per_s=NETWORK.bytes_per_s,
            connection_bytes_per_s=NETWORK.connection_bytes_per_s,
        )
        fetched: dict[int, Fetched] = {}
        left = iter(range(len(sizes)))

        def ask() -> None:
            number = next(left, None)
            if number is not None:
                began_s = timeline.now_s
                timeline.at(began_s + self._first_byte_s(), partial(carry, number, began_s))

        def carry(number: int, began_s: float) -> None:
            link.carry(sizes[number], partial(end, number, began_s))

        def end(number: int, began_s: float) -> None:
            fetched[number] = Fetched(began_s, timeline.now_s)
            ask()

        for _ in range(AT_ONCE):
            ask()
        timeline.run()
        return [fetched[number] for number in range(len(sizes))]

    def chunks(self, count: int, nbytes: int) -> list[Fetched]:
        """Chunks, in ranges as far as places are free."""
        ranges = max(1, min(AT_ONCE // count, nbytes // SETTINGS.range_bytes))
        parts = self.fetch([nbytes // ranges] * (count * ranges))
        wholes = [parts[at : at + ranges] for at in range(0, len(parts), ranges)]
        return [
            Fetched(min(p.began_s for p in whole), max(p.arrived_s for p in whole))
            for whole in wholes
        ]

    def groups(self, count: int, nbytes: int) -> list[float]:
        """The time at which each group of layers is there of all chunks."""
        parts = self.fetch([nbytes // GROUPS] * (count * GROUPS))
        arrived = [part.arrived_s for part in parts]
        return [max(arrived[: (number + 1) * count]) for number in range(GROUPS)]

    def _first_byte_s(self) -> float:
        late = self._lateness
        seconds = NETWORK.latency_s(self._rng)
        late.sent()
        late_s = late.late_s(AT_ONCE)
        if seconds > late_s and late.take():
            seconds = min(seconds, late_s + NETWORK.latency_s(self._rng))
        late.began(seconds)
        return seconds


@dataclass(frozen=True, slots=True)
class Offer:
    """What s3kv's rule of waiting comes to: chunks `ready` from the front, at a time."""

    at_s: float
    ready: int


def pace_of(case: Case) -> Pace:
    return Pace(
        prefill_tokens_per_s=case.tokens_per_s * case.share,
        fetches_at_once=SETTINGS.fetches_at_once(case.chunk_bytes),
    )


def offer(fetched: Sequence[Fetched], case: Case, pace: Pace) -> Offer:
    """Wait by the rule. What arrives later is measured, too."""
    wait, count = Wait(), len(fetched)
    wait.begin(0.0, count)
    wait.asked_s = 0.0
    arrived: set[int] = set()
    ready, now_s = 0, 0.0
    found: Offer | None = None
    for number in sorted(range(count), key=lambda n: fetched[n].arrived_s):
        left = count - len(arrived)
        deadline = decide(
            WaitFacts(
                now_s=now_s,
                started_s=wait.started_s,
                asked_s=wait.asked_s,
                arrived_s=wait.arrived_s,
                wanted=wait.wanted,
                missing=count - ready,
                unproven=0,
                compute_s=case.compute_s,
                forecast=pace.forecast(left, rounds=0),
                max_wait_s=SETTINGS.max_wait_ms / 1000,
                gate=True,
            )
        )
        chunk = fetched[number]
        if found is None and deadline.until_s < chunk.arrived_s:
            found = Offer(max(now_s, deadline.until_s), ready)
            if deadline.pays:
                pace.gave_up(found.at_s - wait.arrived_s, left)
        now_s = chunk.arrived_s
        arrived.add(number)
        wait.arrived(now_s)
        while ready in arrived:
            ready += 1
        pace.fetched(now_s - chunk.began_s, began_with=number + 1, ended_with=left)
    return found or Offer(now_s, ready)


def pipeline(ready_s: Sequence[float], *stages_s: float) -> float:
    """The end of the last of several parts that pass the stages one after another."""
    free_s = [0.0] * len(stages_s)
    end_s = 0.0
    for part_s in ready_s:
        end_s = part_s
        for number, stage_s in enumerate(stages_s):
            end_s = free_s[number] = max(end_s, free_s[number]) + stage_s
    return end_s


def rest_s(offered: Offer, case: Case) -> float:
    """To compute what is not offered."""
    return (case.chunks - offered.ready) * case.compute_s + case.more_s


def by_rule(offered: Offer, case: Case) -> float:
    return offered.at_s + offered.ready * case.load_s + rest_s(offered, case)


def in_parts(fetched: Sequence[Fetched], offered: Offer, case: Case) -> float:
    arrived = sorted(chunk.arrived_s for chunk in fetched[: offered.ready])
    return max(offered.at_s, pipeline(arrived, case.load_s)) + rest_s(offered, case)


def by_layer(offered: Offer, case: Case) -> float:
    load_s, compute_s = offered.ready * case.load_s, rest_s(offered, case)
    return pipeline([offered.at_s] * LAYERS, load_s / LAYERS, compute_s / LAYERS)


def over_the_wire(groups_s: Sequence[float], case: Case) -> float:
    return pipeline(groups_s, case.chunks * case.load_s / GROUPS, case.more_s / GROUPS)


def from_both_ends(fetched: Sequence[Fetched], case: Case) -> tuple[float, int]:
    """Also the number of chunks that are computed. fetched: the last chunk first."""
    best = (case.computed_s, case.chunks)
    arrived_s = 0.0
    for count, chunk in enumerate(fetched, 1):
        arrived_s = max(arrived_s, chunk.arrived_s)
        front = case.chunks - count
        met_s = max(arrived_s, front * case.compute_s)
        best = min(best, (met_s + count * case.load_s + case.more_s, front))
    return best


def gains(
    case: Case, draws: Sequence[list[Fetched]], groups: Sequence[list[float]]
) -> dict[str, Any]:
    """Of every way, in per cent."""
    half = replace(case, share=0.5)

    def offers(of: Case) -> list[Offer]:
        pace = pace_of(of)
        return [offer(fetched, of, pace) for fetched in draws][WARMING:]

    before: dict[str, list[float]] = {way: [] for way in WAYS}
    after: dict[str, list[float]] = {way: [] for way in WAYS}
    offered, offered_half = offers(case), offers(half)
    draws, groups = draws[WARMING:], groups[WARMING:]
    fronts = []
    for fetched, group_s, one, other in zip(draws, groups, offered, offered_half, strict=True):
        now_s, half_s = by_rule(one, case), by_rule(other, half)
        end_s, front = from_both_ends(fetched, case)
        fronts.append(front)
        # Two wait for the same chunks, and both rests are computed in one batch.
        was = dict.fromkeys(WAYS, now_s) | {"ends, half": half_s, "two": now_s + case.more_s}
        is_now = {
            "parts": in_parts(fetched, one, case),
            "layers": by_layer(one, case),
            "wire": min(now_s, over_the_wire(group_s, case)),
            "ends": min(now_s, end_s),
            "ends, half": min(half_s, from_both_ends(fetched, half)[0]),
            "two": (end_s + case.computed_s + case.more_s) / 2,
        }
        for way in WAYS:
            before[way].append(was[way])
            after[way].append(is_now[way])
    ready = sum(one.ready for one in offered) / len(offered)
    return {
        "kib_per_token": case.kib_per_token,
        "hit_tokens": case.hit_tokens,
        "more_tokens": case.more_tokens,
        "tokens_per_s": case.tokens_per_s,
        "load_gb_per_s": case.load_gb_per_s,
        "fetch_ms": _ms([max(chunk.arrived_s for chunk in fetched) for fetched in draws]),
        "load_ms": round(1e3 * case.chunks * case.load_s, 1),
        "computed_ms": round(1e3 * case.computed_s, 1),
        "ttft_ms": _ms(before["parts"]),
        "offered_percent": round(100 * ready / case.chunks),
        "ends_compute_percent": round(100 * median(fronts) / case.chunks),
        "gain_percent": {
            way: round(100 * (1 - median(after[way]) / median(before[way])), 1) + 0.0
            for way in WAYS
        },
    }


def _ms(seconds: Sequence[float]) -> float:
    return round(1e3 * median(seconds), 1)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median and the most of each gain, and the number of cases with 10 % or more: where s3kv
    offers most of the prefix, and elsewhere."""

    def of(chosen: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        found = [row["gain_percent"] for row in rows if chosen(row)]
        if not found:
            return {"cases": 0}
        return {"cases": len(found)} | {
            way: {
                "median": round(median(gain[way] for gain in found), 1),
                "most": max(gain[way] for gain in found),
                "ten_or_more": sum(gain[way] >= 10 for gain in found),
            }
            for way in WAYS
        }

    return {
        "offered": of(lambda row: row["offered_percent"] >= 50),
        "computed": of(lambda row: row["offered_percent"] < 50),
    }


def fleet(path: Path, requests: int | None) -> dict[str, Any]:
    arrived = load(path, requests)
    setup = Setup(first_byte_ms=1e3 * NETWORK.first_byte_s, first_byte_sigma=SIGMA)
    runs = {"as it is": setup, "loads in no time": replace(setup, load_gb_per_s=NO_TIME)}
    with ProcessPoolExecutor() as pool:
        found = pool.map(partial(run, arrived, policy=OURS), runs.values())
    told = ("ttft_ms", "wait_ms", "percent")
    rows = {name: {key: one[key] for key in told} for name, one in zip(runs, found, strict=True)}
    return {"trace": identity(path, len(arrived)), "host_gib": setup.host_gib, "runs": rows}


@ends(600)
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="ten rounds, 500 requests of a trace")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rounds = range(WARMING + (10 if options.quick else options.rounds))
    rows = []
    drawn: dict[tuple[int, int], tuple[list[list[Fetched]], list[list[float]]]] = {}
    for case in CASES:
        size = (case.chunks, case.chunk_bytes)
        if size not in drawn:
            say(f"{case.kib_per_token} KiB/token, {case.hit_tokens} tokens")
            rng = random.Random(0)
            whole, layered = Wire(rng), Wire(rng)
            drawn[size] = (
                [whole.chunks(*size) for _ in rounds],
                [layered.groups(*size) for _ in rounds],
            )
        rows.append(gains(case, *drawn[size]))
    result = {
        "benchmark": "overlap",
        "network": asdict(NETWORK),
        "rounds": len(rounds) - WARMING,
        "summary": summary(rows),
        "cases": rows,
    }
    if options.trace:
        result["fleet"] = fleet(options.trace, QUICK_REQUESTS if options.quick else None)
    publish(result, options.json)


if __name__ == "__main__":
    main()
