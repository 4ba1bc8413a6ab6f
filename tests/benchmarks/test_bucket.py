"""The simulation of a bucket with a budget: near an ideal LRU, and never far above the budget."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bucket
from benchmarks.simulation.expiry import IdealBucket, KeptBucket, Upkeep
from benchmarks.simulation.workload import CHUNK_TOKENS

CHATS, REQUESTS = 400, 3000


def write_trace(path: Path, seed: int = 1) -> Path:
    """Chats that grow, of which some are far more popular than others, behind one system prompt."""
    rng = random.Random(seed)
    histories: list[list[int]] = [[0] for _ in range(CHATS)]
    next_id, lines = 1, []
    for turn in range(REQUESTS):
        at = min(int(rng.paretovariate(0.7)) - 1, CHATS - 1)
        if len(histories[at]) > 40 or rng.random() < 0.02:
            histories[at] = [0]  # somebody new
        grows = rng.randrange(1, 6)
        histories[at] = histories[at] + list(range(next_id, next_id + grows))
        next_id += grows
        line = {
            "timestamp": turn * 3000,
            "input_length": len(histories[at]) * CHUNK_TOKENS,
            "output_length": 1,
            "hash_ids": histories[at],
        }
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines))
    return path


def simulated(path: Path, out: Path, *arguments: str) -> dict[str, Any]:
    common = ["--trace", str(path), "--json", str(out), "--host-gib", "1"]
    bucket.main([*common, *arguments])
    document: dict[str, Any] = json.loads(out.read_text())
    del document["command"]
    return document


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_near_an_ideal_lru_and_never_far_above_the_budget(tmp_path: Path, seed: int) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", seed)
    arguments = ("--replicas", "4", "--budget-gib", "120", "180", "--seed", str(seed))
    for result in simulated(trace, tmp_path / "out.json", *arguments)["budgets"]:
        runs = result["runs"]
        ours, ideal = runs["s3kv"], runs["ideal LRU"]
        assert ours["peak_of_budget"] <= 1.1
        assert ours["hits_of_ideal"] >= 0.95
        assert ideal["peak_of_budget"] == 1
        assert ours["deleted"] > 0
        assert ours["refreshes"] > 0
        assert runs["without refreshes"]["hits_of_ideal"] < ours["hits_of_ideal"]


def test_the_same_seed_gives_the_same_figures(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl")
    first = simulated(trace, tmp_path / "1.json", "--budget-gib", "60")
    assert simulated(trace, tmp_path / "2.json", "--budget-gib", "60") == first


def test_an_ideal_lru() -> None:
    lru = IdealBucket(2)
    for key in (b"a", b"b"):
        lru.put(key, 0, 0.0)
    assert lru.get(b"a", 0, 0.0)
    lru.put(b"c", 0, 0.0)
    assert [lru.get(key, 0, 0.0) for key in (b"a", b"b", b"c")] == [True, False, True]


def kept(objects: int, *, replicas: int = 1, refreshes: bool = True) -> KeptBucket:
    """A bucket with room for so many objects of one byte."""
    upkeep = Upkeep(objects, min_age_s=0.0, refreshes=refreshes)
    return KeptBucket(1, upkeep, replicas=replicas, seed=1)


def fill(bucket: KeptBucket, seconds: int) -> None:
    """One new object a second, of which the first is also read now and then."""
    for second in range(seconds):
        assert bucket.put(str(second).encode(), 0, float(second))
        if second % 20 == 0:
            bucket.get(b"0", 0, second + 0.5)


def test_a_bucket_keeps_to_its_budget_and_counts_what_that_takes() -> None:
    bucket = kept(500)
    fill(bucket, 4_000)
    bucket.end(4_000.0)
    counts = bucket.counts
    assert bucket.peak_objects <= 550
    assert counts["puts"] - counts["deleted"] <= 500
    assert counts["lists"] >= counts["sweeps"] > 10
    assert counts["lease_puts"] > 10


@pytest.mark.parametrize("refreshes", [True, False])
def test_what_is_used_stays_because_it_is_refreshed(refreshes: bool) -> None:
    bucket = kept(500, refreshes=refreshes)
    fill(bucket, 2_500)
    assert bucket.get(b"0", 0, 2_500.0) == refreshes
    assert (bucket.counts["refreshes"] > 0) == refreshes


def test_one_of_many_replicas_sweeps() -> None:
    one, many = kept(500), kept(500, replicas=8)
    for either in (one, many):
        fill(either, 2_500)
        either.end(2_500.0)
    assert many.counts["sweeps"] == pytest.approx(one.counts["sweeps"], rel=0.2)
