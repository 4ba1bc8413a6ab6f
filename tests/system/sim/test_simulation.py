"""Hundreds of fleets, each through faults of its own; and proof that a fault of ours would show.

In most, some engines compress what they save, and in some an engine cannot read that. In half of
them, engines encrypt, with keys that differ or are being rotated. Some keep
their bucket to a budget ("kept"), in some engines share chunks between parallel sizes
("shared"), in some s3kv is a tier of vLLM's offloading ("tiers"), and in some engines have a local
disk before the bucket ("disks"). A seed that fails is replayed with
`python -m tests.system.sim SEED --trace`, and `--kept`, `--shared`, `--tiers` or `--disks`.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.mutants import Mutant, Patch
from tests.nightly import some_by_day
from tests.project import ROOT
from tests.system.sim import (
    cleaner_mutants,
    disk_mutants,
    form_mutants,
    mutants,
    sharing_mutants,
    tier_mutants,
)
from tests.system.sim.runs import Failure, run_seed, run_seeds, try_seeds

CORE_SEEDS = 100
SEEDS = {"plain": 400, "kept": 20, "shared": 90, "tiers": 210, "disks": 200}
"""By kind of fleet, for each change. Every mutant of all but the kept fleets is noticed within so
many."""
NIGHTLY_SEEDS = {"plain": 100_000, "kept": 2_000, "shared": 10_000, "tiers": 10_000, "disks": 5_000}
MUTANT_SEEDS = {"plain": 500, "kept": 120, "shared": 200, "tiers": 100, "disks": 200}
"""Within so many seeds every mutant is noticed; most are within ten."""
MUTANTS = [
    case
    for kind, module, by_day in (
        ("plain", mutants, 6),
        ("plain", form_mutants, 4),
        ("kept", cleaner_mutants, 2),
        ("shared", sharing_mutants, 2),
        ("tiers", tier_mutants, 3),
        ("disks", disk_mutants, 2),
    )
    for case in some_by_day([(mutate, kind) for mutate in module.MUTANTS], by_day)
]

EVENTS = {
    "plain": (
        "I/O processes killed, I/O processes stopped, aborted while loading, aborted while "
        "running, aborted while waiting, arrivals cut off, compressed objects fetched, compressed "
        "objects written, crashes, deadline_cuts, encrypted objects read, encrypted objects "
        "written, evictions, fences that mattered, fetch CANCELLED, fetch CORRUPT, fetch DENIED, "
        "fetch FAILED, fetch MISSING, fetch OK, fetches_refused_by_breaker, fetches_spared, "
        "hit_tokens_bucket, hit_tokens_host, killed while coding, loads, loads failed, objects "
        "damaged, objects lost, objects replaced, objects under an old key read, preempted, "
        "ranges, resets, resets refused, save FAILED, saves_dropped, second requests, service "
        "fetch CORRUPT encryption, service fetch MISSING codec, shutdowns, unplaced offers, upload "
        "DENIED, upload EXISTS, upload FAILED, upload OK"
    ),
    "kept": (
        "I/O processes killed, I/O processes stopped, compressed objects fetched, crashes, deleted "
        "chunks asked for, deleted in bulk, encrypted objects deleted in bulk, encrypted objects "
        "read, leases lost, long stalls, objects damaged, refreshes, shutdowns, stopped at a "
        "deletion, stopped at a listing"
    ),
    "shared": (
        "I/O processes killed, bad shards of others, compressed objects fetched, crashes, "
        "encrypted objects read, fetch CANCELLED, fetch CORRUPT, fetch FAILED, fetch MISSING, "
        "objects damaged, objects lost, put together, put together of several, shutdowns, upload "
        "EXISTS"
    ),
    "tiers": (
        "I/O processes killed, I/O processes stopped, aborted while loading, aborted while "
        "waiting, compressed objects fetched, crashes, deadline_cuts, deleted in bulk, encrypted "
        "objects read, fetch_cancelled, fetch_corrupt, fetch_failed, fetch_missing, fetch_ok, "
        "fetches_without_room, loads, objects damaged, preempted, removals announced, resets, "
        "resets refused, saves_after_reset, saves_refused_by_breaker, shutdowns, stores without "
        "room, upload_exists, upload_failed"
    ),
    "disks": (
        "I/O processes killed, I/O processes stopped, compressed objects fetched, crashes, disk "
        "calls that fail, disk calls that hang, disk hits, disks emptied, encrypted objects read, "
        "fetch CANCELLED, fetch FAILED, files damaged, files damaged and read, objects deleted on "
        "a disk, objects dropped, objects written to a disk, put together, writers killed"
    ),
}
EVERYWHERE = {kind: events.split(", ") for kind, events in EVENTS.items()}
OFTEN = 5
"""Each at least so often in a test. All but the rarest happen hundreds of times."""


def check_all_ran_well(runs: tuple[Counter[str], list[Failure]], events: Sequence[str]) -> None:
    """They did, and the events happened often enough to say anything."""
    seen, failures = runs
    assert not failures, "\n".join(str(failure) for failure in failures)
    rare = {event: seen[event] for event in events if seen[event] < OFTEN}
    assert not rare, f"happens too seldom to say anything: {rare}"


@pytest.mark.core
def test_a_hundred_fleets_run_well() -> None:
    check_all_ran_well(run_seeds(0, CORE_SEEDS), ())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", SEEDS)
def test_nothing_is_ever_wrong_or_stuck(kind: str) -> None:
    first = CORE_SEEDS if kind == "plain" else 0
    check_all_ran_well(run_seeds(first, SEEDS[kind] - first, kind), EVERYWHERE[kind])


@pytest.mark.nightly
@pytest.mark.timeout(3 * 3_600)
@pytest.mark.parametrize("kind", SEEDS)
def test_nothing_is_ever_wrong_or_stuck_in_runs_nobody_has_seen(kind: str) -> None:
    first = int(os.environ.get("S3KV_SEED", random.SystemRandom().randrange(2**40)))
    print(f"S3KV_SEED={first}")
    check_all_ran_well(run_seeds(first, NIGHTLY_SEEDS[kind], kind), EVERYWHERE[kind])


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("mutate", "kind"), MUTANTS)
def test_it_is_noticed_that_s3kv(mutate: Mutant, kind: str, monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    _, failures = try_seeds(range(MUTANT_SEEDS[kind]), failures_wanted=1, kind=kind)
    assert failures, f"{MUTANT_SEEDS[kind]} fleets ran well without noticing"
    assert failures[0].is_finding, f"the mutant itself fails: {failures[0]}"


def trace(hash_seed: str, kind: str) -> list[str]:
    command = [sys.executable, "-m", "tests.system.sim", "19", "--trace", f"--{kind}"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("kind", SEEDS)
def test_a_seed_is_replayed_to_the_letter(kind: str) -> None:
    """In other processes, where sets and dicts of texts have another order."""
    first, second = trace("1", kind), trace("2", kind)
    assert first == second
    assert len(first) > 30
    another: list[str] = []
    run_seed(18, another.append, kind)
    assert "\n".join(another).splitlines() != first
