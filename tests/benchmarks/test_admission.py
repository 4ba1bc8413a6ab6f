"""Admission in the trace simulation, and the verdict on budgets and rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import trace
from benchmarks.simulation.admission import Admission
from benchmarks.simulation.fleet import Setup, run
from benchmarks.simulation.workload import CHUNK_TOKENS, Arrival, block_hash, load
from s3kv.types import ChunkKey
from tests.benchmarks.test_trace import write_trace

APART_S = 600.0


def asked(number: int, *chunks: int) -> Arrival:
    """A request for these chunks, long after the one before it, of a session of its own."""
    hashes = tuple(map(block_hash, chunks))
    return Arrival(number, number * APART_S, len(chunks) * CHUNK_TOKENS + 1, 1, hashes, number)


def stored(arrivals: list[Arrival], **setup: Any) -> int:
    return int(run(arrivals, Setup(gpu_gib=2.0, **setup), "lru")["requests"]["put_new"])


def test_a_chunk_that_nobody_asks_for_again_is_not_uploaded() -> None:
    arrivals = [asked(0, 1, 2, 3), asked(1, 4, 5)]
    assert stored(arrivals, save="all") == 5
    assert stored(arrivals, save="second_use") == 0


@pytest.mark.parametrize("routing", ["session", "round-robin"])
def test_a_chunk_is_stored_when_it_is_asked_for_again(routing: str) -> None:
    """From the host memory of whoever has it, or by the engine that computes it again."""
    arrivals = [asked(0, 1, 2, 3), asked(1, 1, 2, 4), asked(2, 1, 2)]
    assert stored(arrivals, save="second_use", routing=routing) == 2


def test_what_host_memory_has_lost_is_uploaded_when_it_is_computed_again() -> None:
    other = list(range(10, 30))
    arrivals = [asked(0, 1, 2), asked(1, *other), asked(2, 1, 2), asked(3, 1, 2)]
    setup = {"engines": 1, "host_gib": 0.7, "recompute_gate": "off"}
    assert stored(arrivals, save="second_use", **setup) == 2


def test_the_rule_knows_what_all_engines_were_asked_for() -> None:
    late: list[ChunkKey] = []
    rule, key = Admission("second_use"), ChunkKey(0, b"\1" * 32)
    rule.ask([key.block_hash])
    assert not rule.allows(key.block_hash)
    rule.withhold(key, late.append)
    rule.ask([key.block_hash, b"\2" * 32])
    assert late == [key]
    assert rule.allows(key.block_hash)
    rule.ask([key.block_hash])
    assert late == [key]


def figures(bucket_gib: float, save: str, net: float, bucket: int) -> dict[str, Any]:
    return {
        "policy": "lru",
        "host_gib": 32.0,
        "bucket_gib": bucket_gib,
        "save": save,
        "usd_per_month": {"net": net},
        "tokens": {"bucket": bucket},
    }


GRID = [
    figures(0, "all", -9_000.0, 200),
    figures(0, "second_use", 7_000.0, 150),
    figures(1000.0, "all", 500.0, 100),
    figures(1000.0, "second_use", 1_250.0, 90),
    figures(4096.0, "all", 1_000.0, 190),
]


def test_a_verdict_compares_with_the_best_budget_and_with_none() -> None:
    (verdict,) = trace.verdicts(GRID)
    assert (verdict["bucket_gib"], verdict["save"], verdict["net"]) == (4096.0, "all", 1_000.0)
    assert verdict["best"] == {"bucket_gib": 1000.0, "save": "second_use", "net": 1_250.0}
    assert (verdict["net_of_best"], verdict["hits_of_unbound"]) == (0.8, 0.95)
    assert "0.8 of the best (bucket_gib 1000, save second_use: $1,250.00)" in trace.told(verdict)


@pytest.mark.parametrize("left_out", [0, 4])
def test_there_is_no_verdict_without_its_parts(left_out: int) -> None:
    assert list(trace.verdicts(GRID[:left_out] + GRID[left_out + 1 :])) == []


def test_a_grid_ends_with_a_verdict(tmp_path: Path) -> None:
    out = tmp_path / "grid.json"
    path = write_trace(tmp_path / "trace.jsonl")
    grid = ["--bucket-gib", "0", "1", "4096", "--save", "all", "second_use"]
    common = ["--trace", str(path), "--engines", "2", "--host-gib", "1"]
    trace.main([*common, *grid, "--json", str(out)])
    assert '"net_of_best"' in out.read_text()
    assert len(load(path)) == 48
