"""One run: a trace and a fleet, with s3kv or without; and what came of it, as plain figures."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.simulation.disk import ADMISSIONS, Disk
from benchmarks.simulation.engine import BLOCK_TOKENS, Engine, EngineSpeed
from benchmarks.simulation.expiry import KeptBucket
from benchmarks.simulation.gpu import PagePool
from benchmarks.simulation.wire import Bucket, Form, IoProcess, Network, Timeline
from benchmarks.simulation.workload import CHUNK_TOKENS, Arrival
from lab.books import check
from s3kv import prices
from s3kv.config import MAX_INFLIGHT_BYTES, Config
from s3kv.host.room import EqualSlots
from s3kv.host.table import Table
from s3kv.io.server.jobs import JobQueue
from s3kv.objects.codec import ChunkFormat
from s3kv.planning.breaker import Breaker
from s3kv.planning.group_kinds import Coverage
from s3kv.planning.index import BucketIndex
from s3kv.planning.kv import KVPlanner, KVPlannerSettings
from s3kv.planning.ledger import Ledger
from s3kv.planning.pace import Pace
from s3kv.types import TensorSpec

_PRICES = prices.TABLE["us-east-1/standard"]
_INDEX_CHUNKS = 2_000_000
_BREAKER_FAILURES = 5


def option(default: Any, doc: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"doc": doc, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything but the trace and the policy: `OURS`, or one of `BASELINES`."""

    engines: int = option(8, "engines that share the bucket, one worker each")
    routing: str = option(
        "session", "which engine serves a request", choices=("session", "round-robin")
    )
    host_gib: float = option(32.0, "host memory per worker")
    gpu_gib: float = option(16.0, "device memory for KV per engine, its own prefix cache")
    kib_per_token: float = option(128.0, "KV per token and worker; Llama-3-8B in 16 bits")
    prefill_tokens_per_s: float = option(8_000.0, "prompt tokens computed per second and engine")
    batch_tokens: int = option(2_048, "prompt tokens in one step, at most")
    decode_ms: float = option(20.0, "per token of an answer")
    load_gb_per_s: float = option(20.0, "host memory to device")
    first_byte_ms: float = option(100.0, "median time to an answer's first byte")
    first_byte_sigma: float = option(0.3, "shape of its lognormal distribution; 0: always the same")
    network_gbit_per_s: float = option(25.0, "per worker and direction")
    connection_mb_per_s: float = option(90.0, "of one S3 connection, at most")
    recompute_gate: str = option("on", "whether computing ends a wait", choices=("on", "off"))
    engine_dollars_per_hour: float = option(3.0, "price of an engine, for what hits spare")
    bucket_gib: float = option(4096.0, "budget of the bucket (bucket_bytes); 0: none")
    stored_share: float = option(
        1.0, "share of its plain bytes that an object has in the bucket and on the wire"
    )
    engines_per_host: int = option(1, "engines that share a disk")
    disk_gib: float = option(0.0, "local disk of a host, before the bucket; 0: none")
    disk_admission: str = option("all", "what is written to it", choices=ADMISSIONS)
    disk_gb_per_s: float = option(3.0, "of a disk, reads and writes together")
    seed: int = option(0, "of the first-byte times")

    @property
    def layout(self) -> ChunkFormat:
        payload_bytes = int(self.kib_per_token * 1024) * CHUNK_TOKENS
        return ChunkFormat(
            "0" * 32, (TensorSpec("kv", "U8", (payload_bytes,)),), 0, "h0-7of8-l0-31of32"
        )

    @property
    def form(self) -> Form:
        return Form.of(self.layout, self.stored_share)

    @property
    def pages(self) -> int:
        return int(self.gpu_gib * 2**20 / self.kib_per_token) // CHUNK_TOKENS

    @property
    def slots(self) -> int:
        slot_bytes = -(-self.layout.object_bytes // 4096) * 4096
        return int(self.host_gib * 2**30) // slot_bytes

    @property
    def speed(self) -> EngineSpeed:
        return EngineSpeed(
            self.prefill_tokens_per_s,
            self.batch_tokens,
            self.decode_ms / 1e3,
            self.load_gb_per_s * 1e9,
        )

    @property
    def network(self) -> Network:
        return Network(
            self.first_byte_ms / 1e3,
            self.first_byte_sigma,
            self.network_gbit_per_s * 1e9 / 8,
            self.connection_mb_per_s * 1e6,
        )


OURS = "lru"
"""Run with s3kv, named after its eviction policy: recorded results also have others."""
BASELINES = ("no cache", "device only")
"""Runs without s3kv: with no prefix cache at all, and with the engine's own."""


VERBS = ("get_hit", "get_404", "get_cancelled", "put_new", "put_exists")
KEPT = ("refreshes", "refused", "heads", "lists", "lease_puts", "sweeps", "deleted")
"""Counts of a bucket with a budget."""
_MONTH_S = 365 / 12 * 86_400


def run(arrivals: Sequence[Arrival], setup: Setup, policy: str) -> dict[str, Any]:
    """Figures of one run, the same for the same arguments. policy: `OURS` or a baseline."""
    longest = max(a.prompt_tokens + a.output_tokens for a in arrivals)
    if longest > setup.pages * CHUNK_TOKENS:
        raise ValueError(f"gpu_gib is {setup.gpu_gib}: a request of {longest} tokens does not fit")
    kept = None
    if setup.bucket_gib and policy not in BASELINES:
        max_bytes, size = int(setup.bucket_gib * 2**30), setup.form.nbytes
        kept = KeptBucket(size, max_bytes, replicas=setup.engines, seed=setup.seed)
    timeline, bucket = Timeline(), Bucket(kept)
    engines = [
        make_engine(timeline, bucket, setup, policy, place) for place in range(setup.engines)
    ]
    disks = _add_disks(timeline, setup, engines) if policy not in BASELINES else []
    for arrival in arrivals:
        engine = engines[arrival.engine(setup.engines, setup.routing)]
        timeline.at(arrival.time_s, partial(engine.arrive, arrival))
    timeline.run()
    if kept is not None:
        kept.end(timeline.now_s)
    for engine in engines:
        check(engine.planner)
    answered = sum(len(engine.seen.ttft_s) for engine in engines)
    if answered != len(arrivals):
        raise RuntimeError(f"{len(arrivals) - answered} requests of {len(arrivals)} still wait")
    return _figures(arrivals, setup, policy, engines, bucket, disks)


def _add_disks(timeline: Timeline, setup: Setup, engines: Sequence[Engine]) -> list[Disk]:
    """The disks of the hosts, if they have any."""
    disks = []
    for first in range(0, setup.engines if setup.disk_gib else 0, setup.engines_per_host):
        sharing = engines[first : first + setup.engines_per_host]
        max_bytes, bytes_per_s = setup.disk_gib * 2**30, setup.disk_gb_per_s * 1e9
        object_bytes, admission = setup.layout.object_bytes, setup.disk_admission
        disk = Disk(timeline, object_bytes, max_bytes, bytes_per_s, admission, len(sharing))
        disks.append(disk)
        for engine in sharing:
            engine.io.disk = disk
    return disks


def make_engine(
    timeline: Timeline, bucket: Bucket, setup: Setup, policy: str, place: int
) -> Engine:
    config = Config(bucket="trace")
    planner = make_planner(config, setup, policy)
    pool = PagePool(setup.pages, keeps=policy != "no cache")
    chunk_bytes = setup.layout.object_bytes
    engine = Engine(timeline, planner, pool, setup.speed, chunk_bytes)
    engine.io = IoProcess(
        timeline,
        bucket,
        setup.network,
        JobQueue(config.max_inflight_requests, MAX_INFLIGHT_BYTES),
        setup.layout,
        setup.form,
        random.Random(f"{setup.seed}/{place}"),
        place,
        engine.job_ended,
    )
    return engine


def make_planner(config: Config, setup: Setup, policy: str) -> KVPlanner:
    """As `s3kv.connectors.kv_scheduler` makes it, with s3kv's defaults."""
    is_on = policy not in BASELINES
    ledger = Ledger(
        Table(EqualSlots(setup.slots)),
        BucketIndex(capacity=_INDEX_CHUNKS),
        Breaker(threshold=_BREAKER_FAILURES),
        world_size=1,
    )
    settings = KVPlannerSettings(
        coverages=(Coverage(BLOCK_TOKENS, CHUNK_TOKENS),),
        hash_tokens=CHUNK_TOKENS,
        max_wait_s=config.max_wait_ms / 1000,
        recompute_gate=setup.recompute_gate == "on",
        may_load=is_on,
        may_save=is_on,
    )
    pace = Pace(fetches_at_once=config.fetches_at_once(setup.layout.object_bytes))
    return KVPlanner(ledger, pace, settings)


def _figures(
    arrivals: Sequence[Arrival],
    setup: Setup,
    policy: str,
    engines: Sequence[Engine],
    bucket: Bucket,
    disks: Sequence[Disk],
) -> dict[str, Any]:
    counters: Counter[str] = Counter()
    for engine in engines:
        counters.update(engine.planner.counters)
    disk_tokens = sum(engine.seen.disk_tokens for engine in engines)
    tokens = {
        "gpu": sum(engine.seen.gpu_tokens for engine in engines),
        "host": counters["hit_tokens_host"],
        "disk": disk_tokens,
        "bucket": counters["hit_tokens_bucket"] - disk_tokens,
        "computed": sum(engine.seen.computed_tokens for engine in engines),
    }
    prompt_tokens = sum(arrival.prompt_tokens for arrival in arrivals)
    waited_s = [s for engine in engines for s in engine.seen.waited_s if s > 0]
    is_on = policy not in BASELINES
    return {
        "policy": policy,
        "host_gib": setup.host_gib if is_on else 0,
        "bucket_gib": setup.bucket_gib if is_on else 0,
        "stored_share": setup.stored_share if is_on else 1.0,
        "tokens": tokens,
        "percent": {tier: round(100 * n / prompt_tokens, 2) for tier, n in tokens.items()},
        **_bill(setup, bucket, counters["hit_tokens_bucket"], arrivals[-1].time_s),
        "engines_per_host": setup.engines_per_host,
        "disk_gib": setup.disk_gib if is_on else 0,
        "disk_admission": setup.disk_admission,
        "disk": _wear(disks, arrivals[-1].time_s),
        "requests_that_waited": len(waited_s),
        "wait_ms": percentiles_ms(waited_s, 50, 95, 99),
        "ttft_ms": percentiles_ms([s for e in engines for s in e.seen.ttft_s], 50, 95),
        "deadline_cuts": counters["deadline_cuts"],
        "evictions": counters["evictions"],
        "saves": counters["saves"],
        "saves_dropped": counters["saves_dropped"],
    }


def _wear(disks: Sequence[Disk], seconds: float) -> dict[str, float]:
    """What the disks did; `tb_per_day`: is written to each in a day that is like it."""
    counts = sum((disk.counts for disk in disks), Counter[str]())
    tb = disks[0].object_bytes / len(disks) / 1e12 if disks else 0.0
    return {
        **{name: counts[name] for name in ("reads", "writes", "dropped", "evicted")},
        "tb_per_day": round(counts["writes"] * tb * 86_400 / seconds, 2),
        "written_per_read": round(counts["writes"] / max(1, counts["reads"]), 2),
    }


def _bill(setup: Setup, bucket: Bucket, bucket_tokens: int, seconds: float) -> dict[str, Any]:
    """The bill of the run, and of a month that is like it: what the bucket costs, at its largest,
    and the computing that hits in it and on a disk spare. Without a budget a day's objects are
    stored."""
    requests, object_bytes = bucket.requests, setup.form.nbytes
    kept = Counter[str]() if bucket.kept is None else bucket.kept.counts
    puts = requests["put_new"] + requests["put_exists"]
    gets = requests["get_hit"] + requests["get_404"] + requests["get_cancelled"]
    objects = len(bucket.objects) if bucket.kept is None else bucket.kept.peak_objects
    stored_gib = objects * object_bytes / 2**30
    upkeep_puts = kept["copies"] + kept["lists"] + kept["lease_puts"]
    months = seconds / _MONTH_S
    hours = bucket_tokens / setup.prefill_tokens_per_s / 3600
    month = {
        "puts": puts * _PRICES.put / 1000 / months,
        "gets": gets * _PRICES.get / 1000 / months,
        "upkeep": (upkeep_puts * _PRICES.put + kept["heads"] * _PRICES.get) / 1000 / months,
        "storage": stored_gib * _PRICES.storage * (86_400 / seconds if bucket.kept is None else 1),
    }
    spared = hours * setup.engine_dollars_per_hour / months
    return {
        "requests": {verb: requests[verb] for verb in VERBS},
        "kept": {name: kept[name] for name in KEPT},
        "usd_per_month": {
            **{name: round(dollars, 2) for name, dollars in month.items()},
            "spared": round(spared, 2),
            "net": round(spared - sum(month.values()), 2),
        },
        "gib_down": round(requests["get_hit"] * object_bytes / 2**30, 1),
        "gib_up": round(puts * object_bytes / 2**30, 1),
        "gib_stored": round(stored_gib, 1),
    }


def percentiles_ms(seconds: Sequence[float], *percents: int) -> dict[str, float]:
    """By the nearest rank; 0 of nothing."""
    ordered = sorted(seconds)
    return {
        f"p{p}": round(1e3 * ordered[max(0, math.ceil(len(ordered) * p / 100) - 1)], 1)
        if ordered
        else 0.0
        for p in percents
    }
