"""What a bucket of any speed costs and gives, in simulated time around the real planner.

One engine, prompts of 64 KiB of KV per token one after another or at once, all in the bucket. The
network gives each direction the same bytes per second, shared by whatever is under way.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from functools import partial

import pytest

from benchmarks.simulation.fleet import Setup, make_engine
from benchmarks.simulation.wire import Bucket, Timeline
from benchmarks.simulation.workload import CHUNK_TOKENS, Arrival, block_hash
from lab.books import check

PROMPTS = 40
CHUNKS = 4
TAIL = math.log(10) / 2.326
"""Shape of first bytes whose 99th percentile is ten times their median."""
MIB = 2**20


@dataclass(frozen=True)
class Case:
    mib_per_s: float
    gap_s: float = 60.0
    then_mib_per_s: float | None = None
    """The speed from the middle of the prompts on."""
    prompts: int = PROMPTS
    chunks: int = CHUNKS
    kib_per_token: float = 64.0
    prefill_tokens_per_s: float = 1_000.0
    first_byte_sigma: float = 0.3
    at_once: int = 1

    @property
    def setup(self) -> Setup:
        return Setup(
            engines=1,
            host_gib=8.0,
            kib_per_token=self.kib_per_token,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            first_byte_ms=30.0,
            first_byte_sigma=self.first_byte_sigma,
            network_gbit_per_s=self.mib_per_s * MIB * 8 / 1e9,
            connection_mb_per_s=1e6,
        )

    def ttfts_s(self, policy: str) -> list[float]:
        """Times to first token, in order."""
        timeline, bucket = Timeline(), Bucket()
        engine = make_engine(timeline, bucket, self.setup, policy, 0)
        for number in range(self.prompts):
            hashes = tuple(block_hash(number * self.chunks + place) for place in range(self.chunks))
            bucket.objects.update(hashes)
            tokens = self.chunks * CHUNK_TOKENS + 100
            arrived_s = number // self.at_once * self.gap_s
            arrival = Arrival(number, arrived_s, tokens, 1, hashes, number)
            timeline.at(arrival.time_s, partial(engine.arrive, arrival))
        if self.then_mib_per_s is not None:
            middle_s = (self.prompts / 2 - 0.5) * self.gap_s
            timeline.at(middle_s, partial(engine.io.set_speed, self.then_mib_per_s * MIB))
        timeline.run()
        check(engine.planner)
        return engine.seen.ttft_s

    def ratios(self) -> list[float]:
        """Per prompt, in the order of first tokens: TTFT over that of an engine without a cache."""
        pairs = zip(self.ttfts_s("lru"), self.ttfts_s("no cache"), strict=True)
        return [with_it / without for with_it, without in pairs]


@pytest.mark.parametrize("gap_s", [5.0, 60.0])
@pytest.mark.parametrize("mib_per_s", [1, 4, 16, 64, 96, 128, 256])
def test_a_bucket_of_any_speed_costs_little(mib_per_s: float, gap_s: float) -> None:
    ratios = Case(mib_per_s, gap_s).ratios()
    assert max(ratios) <= 2.0, "not even the first, when nothing is known"
    assert max(ratios[2:]) <= 1.02, "and then it is"
    assert statistics.mean(ratios) <= 1.05


@pytest.mark.parametrize(
    ("mib_per_s", "ratio"), [(96, 0.7), (128, 0.55), (256, 0.35), (1024, 0.15)]
)
def test_a_bucket_fast_enough_is_of_use(mib_per_s: float, ratio: float) -> None:
    assert statistics.median(Case(mib_per_s).ratios()) <= ratio


def test_a_bucket_that_turns_slow_costs_one_request_something() -> None:
    ratios = Case(256, then_mib_per_s=4).ratios()[PROMPTS // 2 :]
    assert 1.02 < max(ratios) <= 2.0
    assert sum(ratio > 1.02 for ratio in ratios) <= 2


def test_a_bucket_that_turns_fast_is_found_out() -> None:
    assert statistics.median(Case(4, then_mib_per_s=1024).ratios()[PROMPTS // 2 :]) <= 0.2


def test_the_slowest_of_many_answers_is_waited_for() -> None:
    """Computing takes 2.6 s; the slowest of 32 answers often takes five times as long as most."""
    case = Case(
        1024,
        prompts=150,
        chunks=32,
        kib_per_token=4,
        prefill_tokens_per_s=6_400,
        first_byte_sigma=TAIL,
    )
    ratios = case.ratios()
    assert max(ratios) <= 0.9
    assert statistics.mean(ratios) <= 0.13


@pytest.mark.parametrize(
    ("mib_per_s", "most", "mean"),
    [(1024, 1.0, 0.13), (64, 1.1, 1.02), (16, 1.1, 1.02), (1, 1.1, 1.02)],
)
def test_prompts_at_once_wait_behind_each_other(mib_per_s: float, most: float, mean: float) -> None:
    """Fetching the last of 16 takes as long as computing it alone, but it is computed last."""
    ratios = Case(mib_per_s, prompts=64, chunks=8, at_once=16, gap_s=200.0).ratios()
    assert max(ratios) <= most
    assert statistics.mean(ratios) <= mean


def test_a_fetch_that_never_ends_is_given_up_while_the_engine_computes_others() -> None:
    """Prompts that came later are always under way, but the request does not wait for them."""
    timeline, bucket, case = Timeline(), Bucket(), Case(1024, prefill_tokens_per_s=8_000)
    engine = make_engine(timeline, bucket, case.setup, "lru", 0)
    submit, arrived_s = engine.io.submit, 0.0
    hashes = [tuple(block_hash(24 * n + place) for place in range(24)) for n in range(80)]
    bucket.objects.update(*hashes[:6], hashes[20])
    engine.io.submit = lambda job: job.key.block_hash in hashes[20] or submit(job)
    for number in range(80):
        arrived_s += 10.0 if number < 6 else 0.75
        arrival = Arrival(number, arrived_s, 24 * CHUNK_TOKENS + 100, 1, hashes[number], number)
        timeline.at(arrived_s, partial(engine.arrive, arrival))
    timeline.run()
    assert max(engine.seen.waited_s) <= 1.6, "computing it takes 0.77 s"
