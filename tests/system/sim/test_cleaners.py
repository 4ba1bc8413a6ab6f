"""Fleets that keep their bucket to a budget, each through faults of its own.

A seed that fails is replayed with `python -m tests.system.sim SEED --trace --kept`.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.nightly import some_by_day
from tests.system.sim.cleaner_mutants import MUTANTS
from tests.system.sim.mutants import Mutant
from tests.system.sim.runs import run_seeds
from tests.system.sim.test_simulation import check_all_ran_well, check_it_is_noticed, trace

SEEDS = 20
NIGHTLY_SEEDS = 2_000
MUTANT_SEEDS = 120
"""Within so many seeds every mutant is noticed; most are within ten."""
EVERYWHERE = (
    "I/O processes killed",
    "I/O processes stopped",
    "crashes",
    "deleted chunks asked for",
    "deleted in bulk",
    "leases lost",
    "long stalls",
    "objects damaged",
    "refreshes",
    "shutdowns",
    "stopped at a deletion",
    "stopped at a listing",
)


@pytest.mark.timeout(600)
def test_they_keep_to_it_and_delete_nothing_else() -> None:
    check_all_ran_well(run_seeds(0, SEEDS, "kept"), EVERYWHERE)


@pytest.mark.nightly
@pytest.mark.timeout(3 * 3_600)
def test_they_do_in_runs_nobody_has_seen() -> None:
    first = int(os.environ.get("S3KV_SEED", random.SystemRandom().randrange(2**40)))
    print(f"S3KV_SEED={first}")
    check_all_ran_well(run_seeds(first, NIGHTLY_SEEDS, "kept"), EVERYWHERE)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutate", some_by_day(MUTANTS, 2))
def test_it_is_noticed_that_the_cleaner(mutate: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    check_it_is_noticed(MUTANT_SEEDS, "kept")


def test_a_seed_is_replayed_to_the_letter() -> None:
    first, second = trace(17, "1", "--kept"), trace(17, "2", "--kept")
    assert first == second
    assert len(first.splitlines()) > 100
