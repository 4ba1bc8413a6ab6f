"""Hundreds of fleets, each through faults of its own; and proof that a fault of ours would show.

A seed that fails is replayed with `python -m tests.system.sim SEED --trace`.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.nightly import some_by_day
from tests.system.sim.mutants import MUTANTS, Mutant
from tests.system.sim.runs import Failure, run_seeds, try_seeds

ROOT = Path(__file__).parents[3]
CORE_SEEDS = 100
SEEDS = 800
"""With those of the fleets that keep their bucket or share it, a thousand for each change."""
NIGHTLY_SEEDS = 100_000
MUTANT_SEEDS = 500
"""Within so many seeds every mutant is noticed; most are within ten."""

EVERYWHERE = (
    "I/O processes killed",
    "I/O processes stopped",
    "aborted while loading",
    "aborted while running",
    "aborted while waiting",
    "crashes",
    "deadline_cuts",
    "evictions",
    "fences that mattered",
    "fetch CANCELLED",
    "fetch CORRUPT",
    "fetch DENIED",
    "fetch FAILED",
    "fetch MISSING",
    "fetch OK",
    "fetches_refused_by_breaker",
    "fetches_spared",
    "hit_tokens_bucket",
    "hit_tokens_host",
    "loads",
    "loads failed",
    "objects damaged",
    "objects lost",
    "preempted",
    "ranges",
    "resets",
    "resets refused",
    "save FAILED",
    "saves_dropped",
    "second requests",
    "shutdowns",
    "unplaced offers",
    "upload DENIED",
    "upload EXISTS",
    "upload FAILED",
    "upload OK",
)


OFTEN = 5
"""Each at least so often in a test. All but the rarest happen hundreds of times."""


def check_all_ran_well(runs: tuple[Counter[str], list[Failure]], events: Sequence[str]) -> None:
    """They did, and the events happened often enough to say anything."""
    seen, failures = runs
    assert not failures, "\n".join(str(failure) for failure in failures)
    rare = {event: seen[event] for event in events if seen[event] < OFTEN}
    assert not rare, f"happens too seldom to say anything: {rare}"


def check_it_is_noticed(seeds: int, kind: str = "plain") -> None:
    _, failures = try_seeds(range(seeds), failures_wanted=1, kind=kind)
    assert failures, f"{seeds} fleets ran well without noticing"
    assert failures[0].is_finding, f"the mutant itself fails: {failures[0]}"


@pytest.mark.core
def test_a_hundred_fleets_run_well() -> None:
    check_all_ran_well(run_seeds(0, CORE_SEEDS), ())


@pytest.mark.timeout(600)
def test_nothing_is_ever_wrong_or_stuck() -> None:
    check_all_ran_well(run_seeds(CORE_SEEDS, SEEDS - CORE_SEEDS), EVERYWHERE)


@pytest.mark.nightly
@pytest.mark.timeout(3 * 3_600)
def test_nothing_is_ever_wrong_or_stuck_in_runs_nobody_has_seen() -> None:
    first = int(os.environ.get("S3KV_SEED", random.SystemRandom().randrange(2**40)))
    print(f"S3KV_SEED={first}")
    check_all_ran_well(run_seeds(first, NIGHTLY_SEEDS), EVERYWHERE)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutate", some_by_day(MUTANTS, 6))
def test_it_is_noticed_that_s3kv(mutate: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    check_it_is_noticed(MUTANT_SEEDS)


def trace(seed: int, hash_seed: str, *options: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "tests.system.sim", str(seed), "--trace", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_a_seed_is_replayed_to_the_letter() -> None:
    """In other processes, where sets and dicts of texts have another order."""
    first, second = trace(17, "1"), trace(17, "2")
    assert first == second
    assert len(first.splitlines()) > 30
    assert trace(18, "1") != first
