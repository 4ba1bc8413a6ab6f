"""A fleet of any size on one bucket with S3's limits: one run, and what came of it."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.simulation.admission import Admission
from benchmarks.simulation.engine import Engine
from benchmarks.simulation.fleet import Setup, make_planner, percentiles_ms
from benchmarks.simulation.gpu import PagePool
from benchmarks.simulation.s3 import Limits, Partitions
from benchmarks.simulation.scaled import Load, Routing, scaled
from benchmarks.simulation.service import (
    HostStore,
    LoopTimeline,
    ServiceTransport,
    SharedBucket,
    clock,
    settings,
    small,
)
from benchmarks.simulation.workload import Arrival
from s3kv import prices
from s3kv.config import Config
from s3kv.io import wire
from s3kv.objects.keys import Namespace, fingerprint_digest
from tests.system.sim.loop import VirtualLoop

NAMESPACE = Namespace("s3kv", fingerprint_digest({"model": "simulated"}))
_PRICES = prices.TABLE["us-east-1/standard"]
_DAY_S, _MONTH_S = 86_400.0, 365 / 12 * 86_400
_STEP_S = 10.0
_LONGEST_S = 4 * 3600.0
_DRAIN_S = 60.0
"""Time after the last answer in which uploads end."""


SETUP = Setup(first_byte_ms=30.0, first_byte_sigma=math.log(10) / 2.326, bucket_gib=0.0)
"""The bucket has a tail, as in `benchmarks.shaped`, and no budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """replicas: of the fleet. sampled: of them that are simulated; equal: all. partitions: that the
    bucket begins with. full: the bucket has what the conversations left there before `from_s`, and
    the replicas have nothing. spread_s: time over which they start. smooth_s: of `Partition`."""

    replicas: int
    sampled: int
    routing: Routing = "round-robin"
    limits: Limits = field(default_factory=Limits)
    partitions: int = 1
    from_s: float = 0.0
    until_s: float = 1200.0
    full: bool = False
    waiting_s: float = 0.0
    """Requests of so much time have gathered before the start."""
    spread_s: float = 0.0
    smooth_s: float = 10.0
    config: dict[str, Any] = field(default_factory=dict)
    setup: Setup = SETUP
    seed: int = 0

    @property
    def weight(self) -> float:
        return self.replicas / self.sampled


class Fleet:
    """The sampled replicas on their bucket."""

    def __init__(self, loop: VirtualLoop, scenario: Scenario, load: Load) -> None:
        self._loop = loop
        self._scenario = scenario
        self._timeline = LoopTimeline(loop)
        seed, setup = scenario.seed, scenario.setup
        limits = Partitions(
            scenario.limits,
            random.Random(f"{seed} partitions"),
            first=_evenly(scenario.partitions),
            weight=scenario.weight,
            smooth_s=scenario.smooth_s,
        )
        layout = small(setup.layout.payload_bytes, NAMESPACE.digest, setup.layout.shard)
        self.bucket = SharedBucket(limits, layout, NAMESPACE)
        self.stats: list[wire.Stats] = []
        self.answered = 0
        self.engines: list[Engine] = []
        self.transports: list[ServiceTransport] = []
        self._rng = random.Random(f"{seed} others")
        starts = random.Random(f"{seed} starts")
        self.starts_s = [starts.uniform(0.0, scenario.spread_s) for _ in range(scenario.sampled)]
        for place, start_s in enumerate(self.starts_s):
            self._add(place)
            self._timeline.at(start_s, self.transports[place].service.start)
        self._take(load)

    def _add(self, place: int) -> None:
        scenario, setup = self._scenario, self._scenario.setup
        planner = make_planner(Config(bucket="simulated", **scenario.config), setup, "lru")
        pool = PagePool(setup.pages, keeps=True)
        engine = Engine(
            self._timeline,
            planner,
            pool,
            setup.speed,
            setup.layout.object_bytes,
            Admission("all"),
        )
        store = HostStore(
            self._timeline,
            self.bucket,
            setup.network,
            setup.layout.object_bytes,
            random.Random(f"{scenario.seed} {place} network"),
        )
        engine.io = transport = ServiceTransport(
            settings(scenario.config),
            self.bucket,
            store,
            setup.slots,
            random.Random(f"{scenario.seed} {place} service"),
            engine.job_ended,
        )
        self.engines.append(engine)
        self.transports.append(transport)

    def _take(self, load: Load) -> None:
        scenario = self._scenario
        self.requests = 0
        self.prompt_tokens = 0
        for place, arrival in load.own:
            time_s = arrival.time_s - scenario.from_s
            if time_s < -scenario.waiting_s:
                if scenario.full:
                    self.bucket.chunks.update(arrival.hashes)
            elif arrival.time_s < scenario.until_s:
                start_s = max(time_s, self.starts_s[place])
                moved = dataclasses.replace(arrival, time_s=start_s)
                self._timeline.at(start_s, partial(self.engines[place].arrive, moved))
                self.requests += 1
                self.prompt_tokens += arrival.prompt_tokens
        for arrival in load.others:
            time_s = arrival.time_s - scenario.from_s
            if time_s < -scenario.waiting_s:
                if scenario.full:
                    self.bucket.chunks.update(arrival.hashes)
            elif arrival.time_s < scenario.until_s:
                begun_s = max(0.0, time_s)
                self._timeline.at(begun_s, partial(self._compute_elsewhere, arrival))

    def _compute_elsewhere(self, arrival: Arrival) -> None:
        """Another replica answers a request as fast as those of the sample do, then uploads its
        chunks, or drops them, as often as they drop theirs."""
        taken_s = [seconds for engine in self.engines for seconds in engine.seen.ttft_s[-8:]]
        done_s = self._timeline.now_s + (sum(taken_s) / len(taken_s) if taken_s else 1.0)
        saved = sum(engine.planner.counters["saves"] for engine in self.engines)
        dropped = sum(engine.planner.counters["saves_dropped"] for engine in self.engines)
        share = saved / (saved + dropped) if saved else 1.0
        if self._rng.random() < share:
            self._timeline.at(done_s, partial(self.bucket.chunks.update, arrival.hashes))

    def run(self) -> None:
        loop = self._loop
        while sum(len(engine.seen.ttft_s) for engine in self.engines) < self.requests:
            loop.run_until(loop.time() + _STEP_S)
            if loop.time() > _LONGEST_S:
                raise RuntimeError("requests still wait")
        loop.run_until(loop.time() + _DRAIN_S)
        for engine in self.engines:
            engine.planner.check()
        if loop.failures:
            raise RuntimeError(loop.failures[0])

    def service_counters(self) -> Counter[str]:
        counters: Counter[str] = Counter()
        for transport in self.transports:
            counters.update(transport.service._statistics().counters)
        return counters

    def close(self) -> None:
        self._loop.give_up()
        for transport in self.transports:
            transport.close()


def run(arrivals: Sequence[Arrival], scenario: Scenario) -> dict[str, Any]:
    """Figures of one run, the same for the same arguments."""
    known = [arrival for arrival in arrivals if arrival.time_s < scenario.until_s]
    load = scaled(known, scenario.replicas, scenario.sampled, scenario.routing, scenario.seed)
    loop = VirtualLoop()
    with clock(loop):
        fleet = Fleet(loop, scenario, load)
        try:
            fleet.run()
            return _figures(scenario, fleet)
        finally:
            fleet.close()


def _evenly(partitions: int) -> list[str]:
    """First keys of partitions that divide the namespace evenly, but for the first."""
    return [f"{NAMESPACE.root}{256 * n // partitions:02x}/" for n in range(1, partitions)]


def _figures(scenario: Scenario, fleet: Fleet) -> dict[str, Any]:
    planned: Counter[str] = Counter()
    for engine in fleet.engines:
        planned.update(engine.planner.counters)
    served, bucket = fleet.service_counters(), fleet.bucket
    tokens = {
        "gpu": sum(engine.seen.gpu_tokens for engine in fleet.engines),
        "host": planned["hit_tokens_host"],
        "bucket": planned["hit_tokens_bucket"],
        "computed": sum(engine.seen.computed_tokens for engine in fleet.engines),
    }
    verbs = ("get", "put", "list")
    asked = sum(bucket.requests[verb] for verb in verbs)
    minutes = {minute for minute, _ in bucket.by_minute}
    worst = max(_share(bucket.by_minute, minute) for minute in minutes)
    partitions = bucket.partitions
    ranges: Counter[str] = Counter()
    for key, count in bucket.by_key.items():
        ranges[key[len(NAMESPACE.root)]] += count
    hottest = max(bucket.by_key.values())
    return {
        "replicas": scenario.replicas,
        "sampled": scenario.sampled,
        "routing": scenario.routing,
        "requests": fleet.requests,
        "percent": {
            tier: round(100 * count / fleet.prompt_tokens, 2) for tier, count in tokens.items()
        },
        "bucket_percent_of_first": {
            str(count): _bucket_percent(fleet.engines[:count])
            for count in (2, 5)
            if count <= scenario.sampled
        },
        "ttft_ms": percentiles_ms([s for e in fleet.engines for s in e.seen.ttft_s], 50, 95, 99),
        "s3_requests": {
            name: bucket.requests[name]
            for name in (*verbs, "get_404", "put_new", "put_exists", "bytes_down")
        },
        "slow_down_percent": round(100 * bucket.slow_downs.total() / asked, 3),
        "slow_downs": {verb: bucket.slow_downs[verb] for verb in verbs},
        "slow_down_percent_worst_minute": round(100 * worst, 2),
        "partitions": len(partitions.all),
        "splits_s": [round(split_s, 1) for split_s in partitions.splits_s],
        "hottest_of_16_ranges": round(16 * max(ranges.values()) / asked, 3),
        "hottest_key_percent": round(100 * hottest / asked, 3),
        "fetches": {
            name.removeprefix("fetch_"): count
            for name, count in sorted(planned.items())
            if name.startswith("fetch_")
        },
        "planner": {
            name: planned[name]
            for name in (
                "fetches_refused_by_breaker",
                "deadline_cuts",
                "saves",
                "saves_dropped",
                "uploads_again",
                "uploads_given_up",
            )
        },
        "service": {
            name: served[name]
            for name in ("io_retries", "io_throttled", "io_window_cuts", "io_hedges", "io_defects")
        },
        "usd_per_hour": _bill(scenario, fleet, tokens["bucket"]),
    }


def _bucket_percent(engines: Sequence[Engine]) -> float:
    """Of the prompt tokens of some replicas, the share from the bucket."""
    found = sum(engine.planner.counters["hit_tokens_bucket"] for engine in engines)
    others = sum(
        engine.planner.counters["hit_tokens_host"]
        + engine.seen.gpu_tokens
        + engine.seen.computed_tokens
        for engine in engines
    )
    return round(100 * found / (found + others), 2)


def _share(by_minute: Counter[tuple[int, bool]], minute: int) -> float:
    refused = by_minute[minute, True]
    return refused / (refused + by_minute[minute, False])


def _bill(scenario: Scenario, fleet: Fleet, bucket_tokens: int) -> dict[str, float]:
    """Of the whole fleet, an hour of such traffic. Refused requests are billed, which flatters
    nobody, and objects stay a day."""
    setup, requests = scenario.setup, fleet.bucket.requests
    seconds = scenario.until_s - scenario.from_s + scenario.waiting_s
    hours = scenario.weight * 3600 / seconds
    stored_gib = requests["put_new"] * setup.layout.object_bytes / 2**30
    bill = {
        "puts": (requests["put"] + requests["list"]) * _PRICES.put / 1000,
        "gets": requests["get"] * _PRICES.get / 1000,
        "storage": stored_gib * _PRICES.storage * _DAY_S / _MONTH_S,
        "spared": bucket_tokens / setup.prefill_tokens_per_s / 3600 * setup.engine_dollars_per_hour,
    }
    return {name: round(dollars * hours, 4) for name, dollars in bill.items()}
