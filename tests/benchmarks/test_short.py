"""The benchmarks of one engine whose connector comes and goes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks import short

SEED = 5


def test_the_interval_has_the_true_median_nineteen_times_of_twenty() -> None:
    rng = random.Random(SEED)
    inside = 0
    for _ in range(1_000):
        low, high = short.median([rng.lognormvariate(0, 0.1) for _ in range(30)])["interval_95"]
        inside += low <= 1.0 <= high
    assert 930 <= inside <= 985, f"seed {SEED}"


def test_few_values_have_no_interval() -> None:
    assert short.median([1.0, 3.0, 2.0]) == {"median": 2.0, "interval_95": None}


@pytest.mark.long
def test_the_quick_benchmark_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short, "PROMPTS", 2)
    short.main(["--quick", "--json", str(tmp_path / "result")])
    result = json.loads((tmp_path / "result").read_text())
    assert set(result["ratio"]) == {"again", "empty", "own"}
    assert all(rate > 0 for rate in result["requests_per_s"].values())
