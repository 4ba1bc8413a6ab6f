"""The simulation of what a lookup costs."""

from __future__ import annotations

from statistics import fmean

import pytest

from benchmarks import lookups
from benchmarks.lookups import Case
from s3kv.planning import deadline
from s3kv.planning.pace import FetchTime


def test_what_is_there_spares_time_and_what_is_not_costs_some() -> None:
    there = lookups.ratios(Case("steady", 48.0, 8, 8), 4, seed=0)
    absent = lookups.ratios(Case("steady", 48.0, 8, 0), 4, seed=0)
    assert len(there) == len(absent) == 4
    assert max(there) < 0.6
    assert 1 < min(absent) <= max(absent) < 1.2


def test_a_new_prompt_waits_less_because_of_the_chunks_behind_its_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case("tail", 12.0, 32, 0)
    now = lookups.ratios(case, 20, seed=0)
    monkeypatch.setattr(deadline, "likely", lambda facts: facts.missing)
    monkeypatch.setattr(FetchTime, "absent", lambda self, seconds: None)
    before = lookups.ratios(case, 20, seed=0)
    assert fmean(now) < 1.05 < 1.08 < fmean(before)


def test_a_row_tells_the_first_requests_apart() -> None:
    row = lookups.row(Case("tail", 12.0, 32, 1), engines=2, requests=2)
    assert row["first_mean"] > row["later_mean"] == row["later_median"] == 1.0
    assert row["first_worst"] >= row["first_mean"]
