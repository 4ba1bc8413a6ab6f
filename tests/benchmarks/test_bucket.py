"""The simulation of a bucket with a budget: near an ideal LRU, and never far above the budget."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bucket
from benchmarks.simulation.expiry import IdealBucket, SweptBucket, Upkeep
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
        assert ours["duplicates"] == 0
        assert ours["refreshes"] < runs["without chance"]["refreshes"]


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


def test_of_replicas_that_hit_at_once_one_copies() -> None:
    upkeep = Upkeep(refresh_after_s=100.0, sweep_every_s=1e9)
    swept = SweptBucket(10, 1, upkeep, 0)
    swept.put(b"a", 0, 0.0)
    for replica in range(50):
        assert swept.get(b"a", replica, 200.0)
    swept.get(b"b", 0, 300.0)
    assert swept.counts["refreshes"] == 1
    assert swept.counts["refused"] == 49


def test_a_sweep_spares_what_is_refreshed_while_it_runs() -> None:
    upkeep = Upkeep(10.0, sweep_every_s=100.0, sweep_takes_s=50.0, refresh_takes_s=1e-9)
    swept = SweptBucket(1, 1, upkeep, 0)
    for time_s, key in enumerate((b"a", b"b", b"c")):
        swept.put(key, 0, float(time_s))
    assert swept.get(b"a", 0, 120.0)
    assert [swept.get(key, 0, 160.0) for key in (b"a", b"b", b"c")] == [True, False, True]
    assert swept.counts["spared"] == 1


@pytest.mark.parametrize("seed", range(20))
def test_chance_does_not_lose_what_is_used(seed: int) -> None:
    """A bucket that turns over in five times the age keeps what is asked for now and then."""
    swept = SweptBucket(50, 1, Upkeep(10.0, sweep_every_s=5.0, refresh_takes_s=0.01), seed)
    for second in range(300):
        swept.put(str(second).encode(), 0, float(second))
        if second % 15 == 0:
            assert swept.get(b"0", 0, second + 0.5), second
    assert swept.counts["deleted"] > 200
