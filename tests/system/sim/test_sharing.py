"""Fleets whose engines share chunks between parallel sizes, each through faults of its own.

A seed that fails is replayed with `python -m tests.system.sim SEED --trace --shared`.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.nightly import some_by_day
from tests.system.sim.mutants import Mutant
from tests.system.sim.runs import run_seeds
from tests.system.sim.sharing_mutants import MUTANTS
from tests.system.sim.test_simulation import check_all_ran_well, check_it_is_noticed, trace

SEEDS = 180
NIGHTLY_SEEDS = 10_000
MUTANT_SEEDS = 200
"""Within so many seeds every mutant is noticed; most are within ten."""
EVERYWHERE = (
    "I/O processes killed",
    "bad shards of others",
    "crashes",
    "fetch CANCELLED",
    "fetch CORRUPT",
    "fetch FAILED",
    "fetch MISSING",
    "objects damaged",
    "objects lost",
    "put together",
    "put together of several",
    "shutdowns",
    "upload EXISTS",
)


@pytest.mark.timeout(600)
def test_they_read_of_each_other_what_is_right() -> None:
    check_all_ran_well(run_seeds(0, SEEDS, "shared"), EVERYWHERE)


@pytest.mark.nightly
@pytest.mark.timeout(3_600)
def test_they_do_in_runs_nobody_has_seen() -> None:
    first = int(os.environ.get("S3KV_SEED", random.SystemRandom().randrange(2**40)))
    print(f"S3KV_SEED={first}")
    check_all_ran_well(run_seeds(first, NIGHTLY_SEEDS, "shared"), EVERYWHERE)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutate", some_by_day(MUTANTS, 2))
def test_it_is_noticed_that_s3kv(mutate: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    check_it_is_noticed(MUTANT_SEEDS, "shared")


def test_a_seed_is_replayed_to_the_letter() -> None:
    first, second = trace(17, "1", "--shared"), trace(17, "2", "--shared")
    assert first == second
    assert len(first.splitlines()) > 30
