"""What the planner costs the engine's thread: `python -m benchmarks.planner`.

Times are the least of several rounds, on one core, without the engine beside it. Chunks are 128
tokens, hash blocks 16, so a prompt of 131,072 tokens has 1,024 chunks and 8,192 hashes. The first
lookup of a prompt includes picking the chunks' hashes out of the engine's list. Bytes are what
`BucketIndex` holds per chunk it knows, its keys included.

`tier_scan_…` is one scan of a prompt's chunks by vLLM's offloading that the tier answers, in the
first pass and while the request waits; `obj_scan_…` the same with vLLM's own tier for S3, whose
thread gives no answer meanwhile. What vLLM's manager does for each chunk comes on top of both.
"""

from __future__ import annotations

import gc
import json
import math
import platform
import random
import threading
import tracemalloc
from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter_ns
from typing import Any

from benchmarks.deadline import ends
from benchmarks.origin import commit, computing
from benchmarks.shaped import Shape
from s3kv.host.room import EqualSlots
from s3kv.host.table import Table
from s3kv.messages import JobEnd, JobKind, StepReport
from s3kv.planning.breaker import Breaker
from s3kv.planning.group_kinds import Coverage
from s3kv.planning.index import BucketIndex
from s3kv.planning.kv import KVPlanner, KVPlannerSettings
from s3kv.planning.ledger import Ledger
from s3kv.planning.offload import OffloadPlanner
from s3kv.planning.pace import Pace
from s3kv.planning.requests import ScheduledRequest
from s3kv.planning.row_transfers import RowKey
from s3kv.types import ChunkKey, Outcome

CHUNK_TOKENS = 128
BLOCK_TOKENS = 16
CHUNKS = 1_024
KNOWN = 100_000
SLOTS = 8_192
ROUNDS = 15


def make_planner(*, recompute_gate: bool = False) -> KVPlanner:
    ledger = Ledger(
        Table(EqualSlots(SLOTS)),
        BucketIndex(capacity=2_000_000, miss_ttl_s=20.0),
        Breaker(threshold=5),
        world_size=1,
    )
    settings = KVPlannerSettings(
        coverages=(Coverage(BLOCK_TOKENS, CHUNK_TOKENS),),
        hash_tokens=BLOCK_TOKENS,
        max_wait_s=10.0,
        recompute_gate=recompute_gate,
    )
    return KVPlanner(ledger, Pace(prefill_tokens_per_s=8_000.0, fetches_at_once=32), settings)


def prompt(rng: random.Random) -> list[bytes]:
    return [rng.randbytes(32) for _ in range(CHUNKS * CHUNK_TOKENS // BLOCK_TOKENS)]


def chunk_hashes(hashes: list[bytes]) -> list[bytes]:
    stride = CHUNK_TOKENS // BLOCK_TOKENS
    return hashes[stride - 1 :: stride]


def know(planner: KVPlanner, rng: random.Random, count: int) -> None:
    """The bucket holds these chunks, and host memory is full of the newest."""
    for _ in range(count):
        key = ChunkKey(0, rng.randbytes(32))
        planner.ledger.index.note_present(key)
        make_resident(planner, [key])


def make_resident(planner: KVPlanner, keys: Iterable[ChunkKey]) -> None:
    table = planner.ledger.table
    for key in keys:
        reservation = table.reserve(key)
        assert reservation is not None
        table.commit(reservation.entry, dirty=False)


def least_us(prepare: Callable[[int], Callable[[], object]]) -> float:
    """`prepare(round)` is not measured, what it returns is."""
    times = []
    gc.disable()
    for number in range(ROUNDS):
        work = prepare(number)
        start = perf_counter_ns()
        work()
        times.append(perf_counter_ns() - start)
    gc.enable()
    return round(min(times) / 1_000, 2)


def first_lookup(
    planner: KVPlanner, rng: random.Random, *, kind: str, arrives: bool = False
) -> float:
    """Of a new request each time. kind: what is known of its chunks. arrives: not its lookup, but
    what is done for it before, when it arrives."""
    known = prompt(rng)
    if kind == "resident":
        make_resident(planner, (ChunkKey(0, h) for h in chunk_hashes(known)))

    def prepare(number: int) -> Callable[[], object]:
        request_id = f"{kind} {number}"
        # Hashes equal to those known, not the same objects, as a new request brings them.
        hashes = [bytes(bytearray(block_hash)) for block_hash in known]
        if kind != "resident":
            hashes = prompt(rng)
        if kind == "in the bucket":
            for block_hash in chunk_hashes(hashes):
                planner.ledger.index.note_present(ChunkKey(0, block_hash))
        settle(planner, f"{kind} {number - 1}")
        planner.add_request(request_id, hashes)
        if arrives:
            return lambda: planner.prefetch(request_id, 0, 0.0)
        return lambda: planner.lookup(request_id, 0, 0.0)

    cost = least_us(prepare)
    settle(planner, f"{kind} {ROUNDS - 1}")
    return cost


def settle(planner: KVPlanner, request_id: str) -> None:
    """The request is over, and so are its fetches."""
    planner.finished(request_id)
    report = StepReport()
    for fetch in planner.plan((), 0.0).jobs:
        report.add(JobEnd(fetch.job_id, JobKind.FETCH, Outcome.CANCELLED, 0, 0.0))
    planner.on_report(report, 0.0)


def waiting(planner: KVPlanner, rng: random.Random) -> float:
    """The mean over 256 requests that wait."""
    names = [f"waiting {number}" for number in range(256)]
    for name in names:
        planner.add_request(name, prompt(rng)[:512])
        assert planner.lookup(name, 0, 0.0).wait

    def ask_all() -> None:
        for name in names:
            planner.lookup(name, 0, 0.0)

    cost = least_us(lambda _: ask_all)
    for name in names:
        settle(planner, name)
    return round(cost / len(names), 3)


def decode_step(planner: KVPlanner, rng: random.Random) -> float:
    """A step in which 256 requests of 4,096 tokens decode one token each."""
    hashes = prompt(rng)[:256]
    for number in range(256):
        planner.add_request(f"decoding {number}", hashes)
        planner.admitted(f"decoding {number}", ([],), 0)
    first = [
        ScheduledRequest(f"decoding {n}", ([n * 300 + b for b in range(257)],), True, 0, 4_096)
        for n in range(256)
    ]
    planner.plan(first, 0.0)
    step = [ScheduledRequest(f"decoding {n}", (), False, 4_097, 1) for n in range(256)]
    cost = least_us(lambda _: lambda: planner.plan(step, 0.0))
    for number in range(256):
        planner.finished(f"decoding {number}")
    return cost


def cold_waits(prompts: int = 200, chunks: int = 12, chunk_s: float = 0.043) -> dict[str, float]:
    """In virtual time: how long prompts of which the bucket has nothing wait for its answers, one
    after another in an engine that has nothing else to do. First bytes are those of
    `benchmarks.shaped`, and the engine looks every 4 ms."""
    rng, planner = random.Random(3), make_planner(recompute_gate=True)
    shape, now_s, waits_ms = Shape(), 0.0, []
    for number in range(prompts):
        began_s, arriving = now_s, list[tuple[float, int, float]]()
        planner.add_request(str(number), prompt(rng)[: chunks * CHUNK_TOKENS // BLOCK_TOKENS])
        planner.prefetch(str(number), 0, now_s)
        while planner.lookup(str(number), 0, now_s).wait:
            for job in planner.plan((), now_s).jobs:
                late_s = shape.first_byte_ms / 1e3 * math.exp(rng.gauss(0.0, shape.sigma))
                arriving.append((now_s + late_s, job.job_id, now_s))
            arriving.sort()
            now_s = min(now_s + 0.004, arriving[0][0])
            answer(planner, arriving, now_s)
        waits_ms.append(1e3 * (now_s - began_s))
        now_s += chunks * chunk_s
        planner.pace.prefilled(chunks * CHUNK_TOKENS, chunks * chunk_s)
        answer(planner, arriving, now_s)
        settle(planner, str(number))
    mean_ms = sum(waits_ms) / prompts
    return {"cold_wait_first_ms": round(waits_ms[0], 1), "cold_wait_mean_ms": round(mean_ms, 1)}


def answer(planner: KVPlanner, arriving: list[tuple[float, int, float]], now_s: float) -> None:
    """Report the absences that have arrived by now. arriving: time, job, and time of its order."""
    report = StepReport()
    while arriving and arriving[0][0] <= now_s:
        at_s, job_id, asked_s = arriving.pop(0)
        report.add(JobEnd(job_id, JobKind.FETCH, Outcome.MISSING, 0, at_s - asked_s))
    planner.on_report(report, now_s)


def tier_scans() -> dict[str, float]:
    """Scans of a prompt of which nothing is known, by the tier of s3kv and by vLLM's `obj`."""
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
    from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
    from vllm.v1.kv_offload.tiering.obj.manager import ObjectStoreSecondaryTierManager

    from s3kv.connectors.offload_tier import S3Tier

    class Asking(AsyncLookupManager):  # type: ignore[misc]
        def batch_lookup(self, keys: list[Any], req_context: ReqContext) -> Iterable[bool]:
            threading.Event().wait()
            return ()

    rng = random.Random(2)
    s3kv: Any = S3Tier.__new__(S3Tier)
    s3kv._may_load, s3kv._now_s, s3kv._salt = True, 0.0, b""
    obj: Any = ObjectStoreSecondaryTierManager.__new__(ObjectStoreSecondaryTierManager)
    obj._lookup_manager = Asking("obj")

    def scan(tier: Any, context: ReqContext, keys: list[Any]) -> int:
        """As vLLM does it. Returns the number of hits, which the primary tier has from then on."""
        hits = 0
        for key in keys:
            answer = tier.lookup(key, context)
            hits += answer is LookupResult.HIT
            if answer is LookupResult.MISS:
                break
        return hits

    def prepare(tier: Any, is_first: bool, _: int) -> Callable[[], object]:
        context = ReqContext(rng.randbytes(8).hex())
        keys = [make_offload_key(rng.randbytes(32), 0) for _ in range(CHUNKS)]
        for position, key in enumerate(keys):
            context.set_offload_key_position(key, CHUNK_TOKENS * (1 + position))
        index, pace = BucketIndex(capacity=10 * CHUNKS), Pace(fetches_at_once=32)
        s3kv.planner = planner = OffloadPlanner(
            index, Breaker(), pace, rows=SLOTS, chunk_tokens=CHUNK_TOKENS, max_wait_s=10.0
        )
        planner.begin(context.req_id)
        if not is_first:
            hits = scan(tier, context, keys)
            rows = [(RowKey(key, s3kv._chunk(key)), 0) for key in keys[:hits]]
            planner.load(0, context.req_id, rows, 0.0)
            planner.end_pass((), 0.0)
            obj._lookup_manager.flush()
            keys = keys[hits:]
        return partial(scan, tier, context, keys)

    return {
        f"{name}_scan_{'first' if is_first else 'waiting'}_us": least_us(
            partial(prepare, tier, is_first)
        )
        for name, tier in (("tier", s3kv), ("obj", obj))
        for is_first in (True, False)
    }


def index_bytes(count: int, *, present: bool) -> float:
    rng = random.Random(count)
    tracemalloc.start()
    index = BucketIndex(capacity=4 * count, miss_ttl_s=20.0)
    for number in range(count):
        key = ChunkKey(0, rng.randbytes(32))
        if present:
            index.note_present(key)
        else:
            index.note_absent(key, number / count)
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return round(nbytes / len(index), 1)


@ends(600)
def main() -> None:
    rng = random.Random(1)
    planner = make_planner()
    know(planner, rng, KNOWN)
    idle = least_us(lambda _: lambda: planner.plan((), 0.0))
    measured = {
        "lookup_waiting_us": waiting(planner, rng),
        "plan_idle_us": idle,
        "plan_256_decoding_us": decode_step(make_planner(), rng),
        "first_lookup_all_resident_us": first_lookup(planner, rng, kind="resident"),
        "first_lookup_nothing_known_us": first_lookup(planner, rng, kind="unknown"),
        "arrival_nothing_known_us": first_lookup(planner, rng, kind="unknown", arrives=True),
        "first_lookup_all_in_bucket_us": first_lookup(make_planner(), rng, kind="in the bucket"),
        "arrival_all_in_bucket_us": first_lookup(
            make_planner(), rng, kind="in the bucket", arrives=True
        ),
        **tier_scans(),
        **cold_waits(),
        "index_present_bytes_per_chunk": index_bytes(KNOWN, present=True),
        "index_absent_bytes_per_chunk": index_bytes(KNOWN, present=False),
    }
    report = {
        "benchmark": "planner",
        "commit": commit(),
        "computing": computing(),
        "python": platform.python_version(),
        "chunks_per_prompt": CHUNKS,
        "chunks_known": KNOWN,
        "measured": measured,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
