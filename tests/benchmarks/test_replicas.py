"""Fleets on a bucket with limits: the model of S3 by hand, the scaled trace, and small runs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks import replicas
from benchmarks.shaped import Shape
from benchmarks.simulation.replicas import NAMESPACE, SETUP, Scenario, run
from benchmarks.simulation.s3 import Limits, Partitions
from benchmarks.simulation.scaled import scaled
from benchmarks.simulation.workload import load
from benchmarks.throttled import modelled
from s3kv.types import ChunkKey
from tests.benchmarks.test_trace import write_trace

SMALL = dataclasses.replace(SETUP, host_gib=2.0, gpu_gib=4.0)
SHARD = "h0-7of8-l0-31of32"


def partitions(limits: Limits, **settings: Any) -> Partitions:
    return Partitions(limits, random.Random(0), **settings)


def asked(bucket: Partitions, count: int, now_s: float, *, write: bool = False) -> int:
    """How many of so many requests at one moment are served."""
    return sum(bucket.take(f"{n % 97:02}", now_s, write=write) for n in range(count))


def test_a_second_of_requests_at_once_and_then_the_rate() -> None:
    bucket = partitions(Limits())
    assert asked(bucket, 6_000, 0.0) == pytest.approx(5_500, abs=1)
    assert asked(bucket, 6_000, 0.5) == pytest.approx(2_750, abs=1)
    assert asked(bucket, 6_000, 9.0) == pytest.approx(5_500, abs=1)
    assert asked(partitions(Limits()), 6_000, 0.0, write=True) == pytest.approx(3_500, abs=1)


def test_reads_and_writes_share_a_partition() -> None:
    bucket = partitions(Limits())
    assert asked(bucket, 2_750, 0.0) == 2_750
    assert asked(bucket, 3_500, 0.0, write=True) == pytest.approx(1_750, abs=1)


def test_refused_requests_count_if_they_are_said_to() -> None:
    bucket = partitions(Limits(put_per_s=10, get_per_s=10, refused_share=1.0))
    assert asked(bucket, 30, 0.0) == 10
    assert asked(bucket, 10, 1.0) == 0
    assert asked(bucket, 10, 5.0) == 10


def test_of_a_sample_as_many_are_refused_as_the_whole_load_demands() -> None:
    limits = Limits(get_per_s=1_000, split_after_s=1e9)
    bucket = partitions(limits, weight=100.0, smooth_s=10.0)
    served = [bucket.take("a", number / 40, write=False) for number in range(40 * 100)]
    assert sum(served[800:]) / len(served[800:]) == pytest.approx(0.25, abs=0.03)
    assert all(partitions(limits, weight=10.0).take("a", n / 40, write=False) for n in range(4_000))


def pressed(bucket: Partitions, keys: list[str], seconds: int, from_s: int = 0) -> float:
    """Ask for so long, for ten times what a partition of `SLOW` serves; the share served in the
    last tenth."""
    rng = random.Random(1)
    served: list[bool] = []
    for tick in range(from_s * 10, (from_s + seconds) * 10):
        served += [bucket.take(rng.choice(keys), tick / 10, write=False) for _ in range(10)]
    last = served[-len(served) // 10 :]
    return sum(last) / len(last)


SLOW = Limits(put_per_s=10, get_per_s=10, split_after_s=60)


def chunk_keys(count: int) -> list[str]:
    hashes = (hashlib.sha256(n.to_bytes(8, "little")).digest() for n in range(count))
    return [NAMESPACE.chunk(ChunkKey(0, one), SHARD) for one in hashes]


def test_a_partition_splits_after_minutes_of_load_and_not_before() -> None:
    bucket = partitions(SLOW)
    assert pressed(bucket, chunk_keys(500), 55) == pytest.approx(0.1, abs=0.02)
    assert not bucket.splits_s
    pressed(bucket, chunk_keys(500), 20, from_s=55)
    assert len(bucket.all) == 2
    assert pressed(bucket, chunk_keys(500), 45, from_s=75) == pytest.approx(0.2, abs=0.05)


def test_a_load_below_the_limit_splits_nothing() -> None:
    bucket = partitions(SLOW)
    keys = chunk_keys(500)
    assert all(bucket.take(keys[n % 500], n / 7, write=False) for n in range(7 * 600))
    assert not bucket.splits_s


def test_the_keys_of_chunks_spread_over_the_partitions() -> None:
    bucket = partitions(SLOW)
    assert pressed(bucket, chunk_keys(500), 600) == pytest.approx(1.0, abs=0.1)
    assert len(bucket.all) >= 12
    # Keys in the order of time all go to the last partition, however many there are.
    ordered = partitions(SLOW)
    rng = random.Random(1)
    served = [
        ordered.take(f"{n // 100:08} {rng.random()}", n / 100, write=False) for n in range(60_000)
    ]
    assert sum(served[-6_000:]) < 1_500


def test_one_hot_key_is_not_split() -> None:
    bucket = partitions(SLOW)
    assert pressed(bucket, ["hot"], 300) == pytest.approx(0.1, abs=0.02)
    assert len(bucket.all) == 2  # all before it, which nobody asks for


def test_every_replica_has_as_much_to_do_in_a_fleet_of_any_size(tmp_path: Path) -> None:
    arrivals = load(write_trace(tmp_path / "trace.jsonl"))
    for size in (10, 20, 100):
        for routing in ("round-robin", "session"):
            own = scaled(arrivals, size, size, routing, 0).own
            assert len(own) == len(arrivals) * size // 10
    places = Counter(place for place, _ in scaled(arrivals, 100, 100, "round-robin", 0).own)
    assert max(places.values()) - min(places.values()) <= 1


def test_copies_of_a_conversation_share_the_system_prompt_alone(tmp_path: Path) -> None:
    arrivals = load(write_trace(tmp_path / "trace.jsonl"))
    own = [arrival for _, arrival in scaled(arrivals, 20, 20, "session", 0).own]
    firsts = {arrival.hashes[0] for arrival in own}
    assert len(firsts) == 1
    chunks = {one for arrival in own for one in arrival.hashes}
    assert len(chunks) - 1 == 2 * (len({h for a in arrivals for h in a.hashes}) - 1)


def test_a_sample_knows_what_others_did_for_its_conversations(tmp_path: Path) -> None:
    arrivals = load(write_trace(tmp_path / "trace.jsonl"))
    whole = scaled(arrivals, 40, 40, "round-robin", 0)
    sample = scaled(arrivals, 40, 4, "round-robin", 0)
    assert [one for one in whole.own if one[0] < 4] == list(sample.own)
    sessions = {arrival.hashes[1] for _, arrival in sample.own}
    asked = {a.number for _, a in whole.own if a.hashes[1] in sessions}
    told = {a.number for a in sample.others} | {a.number for _, a in sample.own}
    assert told == asked
    by_session = scaled(arrivals, 40, 4, "session", 0)
    assert not by_session.others


def scenario(**changes: Any) -> Scenario:
    return Scenario(**{"replicas": 4, "sampled": 4, "setup": SMALL, "until_s": 3600.0} | changes)


def test_a_fleet_below_the_limits_is_never_told_to_slow_down(tmp_path: Path) -> None:
    arrivals = load(write_trace(tmp_path / "trace.jsonl"))
    found = run(arrivals, scenario())
    assert found["slow_downs"] == {"get": 0, "put": 0, "list": 0}
    assert found["fetches"]["ok"] > 0
    assert found["service"]["io_defects"] == 0
    assert sum(found["percent"].values()) == pytest.approx(100, abs=1)
    assert found["s3_requests"]["put_new"] > 0
    assert found == run(arrivals, scenario())


def test_a_fleet_above_them_is_and_finds_less(tmp_path: Path) -> None:
    arrivals = load(write_trace(tmp_path / "trace.jsonl", gap_ms=500))
    free = run(arrivals, scenario())
    slow = run(arrivals, scenario(limits=Limits(put_per_s=5, get_per_s=8)))
    assert slow["slow_downs"]["get"] > 0
    assert slow["service"]["io_window_cuts"] > 0
    assert slow["percent"]["bucket"] < free["percent"]["bucket"]
    assert slow["requests"] == free["requests"]
    slow = run(arrivals, scenario(limits=Limits(put_per_s=2, get_per_s=1e9)))
    assert slow["slow_downs"]["put"] > 0


def test_replicas_that_start_on_a_full_bucket_read_from_it(tmp_path: Path) -> None:
    arrivals = load(write_trace(tmp_path / "trace.jsonl"))
    begun = {"from_s": 24.0, "waiting_s": 6.0}
    full = run(arrivals, scenario(**begun, full=True))
    empty = run(arrivals, scenario(**begun))
    assert full["percent"]["bucket"] > empty["percent"]["bucket"]
    late = run(arrivals, scenario(**begun, full=True, spread_s=300.0, replicas=8, sampled=2))
    assert late["requests"] > 0


def test_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = write_trace(tmp_path / "trace.jsonl"), tmp_path / "out.json"
    monkeypatch.setattr(replicas, "RESTART_S", 24.0)
    few = ("--minutes=1", "--sizes=10", "--stampede=20")
    replicas.main([f"--trace={path}", f"--json={out}", *few])
    result = json.loads(out.read_text())
    assert result["benchmark"] == "replicas"
    assert result["runs"].keys() == replicas.scenarios(1, [10], 20).keys()


def test_the_client_keeps_near_a_limit_in_the_model() -> None:
    told = {
        per_s: modelled(Shape(requests_per_s=per_s), 20.0, 0) for per_s in (50.0, 200.0, 100_000.0)
    }
    assert told[100_000.0]["slow_down_percent"] == 0
    assert told[100_000.0]["answered_per_s"] > 300
    assert 0.8 * 200 < told[200.0]["answered_per_s"] <= 1.06 * 200
    assert told[50.0]["answered_per_s"] <= 1.06 * 50
    assert told[50.0]["slow_down_percent"] > told[200.0]["slow_down_percent"] > 0
