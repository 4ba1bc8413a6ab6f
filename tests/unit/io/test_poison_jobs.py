"""Poison jobs: which jobs are given up, after which crashes."""

from __future__ import annotations

import pytest

from s3kv.io.poison_jobs import PoisonJobs
from tests.unit.io import rig


def test_three_crashes_without_an_end_make_a_job_poison() -> None:
    poison, (first, second) = PoisonJobs(), (rig.upload(n, n) for n in (1, 2))
    for crash in range(3):
        assert not poison.is_poison(first), crash
        poison.crashed([first, second])
        if crash == 1:
            poison.ended(second)
    assert poison.is_poison(first)
    assert not poison.is_poison(second), "the process survived it"
    assert poison.is_poison(rig.upload(100, 1)), "whatever number it has"
    assert not poison.is_poison(rig.fetch(1, 1)), "another kind of job"


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("s3kv.io.poison_jobs._MOST_COUNTED", 2)
    poison, jobs = PoisonJobs(), [rig.upload(n, n) for n in range(4)]
    for job in jobs:
        for _ in range(3):
            poison.crashed([job])
    assert [poison.is_poison(job) for job in jobs] == [False, False, True, True]
