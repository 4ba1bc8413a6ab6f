"""Poison jobs: which jobs are suspected, which are sent, and which are given up."""

from __future__ import annotations

import pytest

from s3kv.io.poison_jobs import PoisonJobs
from s3kv.messages import BucketJob
from tests.unit.io import rig

# ---- suspects, and poison jobs


def jobs_of(*numbers: int, first_id: int = 0) -> list[BucketJob]:
    return [rig.upload(first_id + n, n) for n in numbers]


def released(suspects: PoisonJobs) -> list[int]:
    return [job.job_id for job in suspects.release()]


def test_after_a_crash_suspects_go_one_at_a_time() -> None:
    suspects = PoisonJobs()
    jobs = jobs_of(1, 2, 3)
    assert not any(suspects.hold(job) for job in jobs), "nobody is suspected of anything"
    suspects.died(jobs, crashed=True)
    assert all(suspects.hold(job) for job in jobs)
    for job in jobs:
        assert released(suspects) == [job.job_id]
        assert released(suspects) == []
        suspects.ended(job)
        assert not suspects.hold(job), "it has done nobody any harm"
        suspects.drop(job.job_id)


def test_after_a_kill_from_outside_more_and_more_go_at_once() -> None:
    suspects = PoisonJobs()
    jobs = jobs_of(*range(15))
    suspects.died(jobs, crashed=False)
    for job in jobs:
        suspects.hold(job)
    counts = []
    while suspects.waiting:
        batch = suspects.release()
        counts.append(len(batch))
        for job in batch:
            suspects.ended(job)
    assert counts == [1, 2, 8, 4]


@pytest.mark.parametrize(
    ("crashed", "beside", "deaths"), [(True, 0, 1), (True, 1, 3), (False, 0, 3), (False, 1, 3)]
)
def test_how_many_deaths_make_a_job_poison(crashed: bool, beside: int, deaths: int) -> None:
    """Of a suspect that is the only one, with and without jobs beside it."""
    suspects = PoisonJobs()
    (job,) = jobs_of(1)
    suspects.died([job], crashed=crashed)
    for death in range(deaths):
        assert not suspects.is_poison(job), death
        assert suspects.hold(job)
        assert released(suspects) == [1]
        suspects.died([job, *jobs_of(*range(50, 50 + beside))], crashed=crashed)
    assert suspects.is_poison(job)
    assert not any(suspects.is_poison(other) for other in jobs_of(50))
    assert suspects.is_poison(jobs_of(1, first_id=100)[0]), "whatever number it has"


def test_of_several_suspects_none_is_poison() -> None:
    suspects = PoisonJobs()
    jobs = jobs_of(1, 2, 3)
    suspects.died(jobs, crashed=False)
    for _ in range(10):
        for job in jobs:
            suspects.hold(job)
        suspects.ended(suspects.release()[0])
        assert len(suspects.release()) == 2
        suspects.died(jobs, crashed=False)
    assert not any(suspects.is_poison(job) for job in jobs)


def test_what_waits_may_be_dropped() -> None:
    suspects = PoisonJobs()
    first, second = jobs_of(1, 2)
    suspects.died([first, second], crashed=True)
    suspects.hold(first)
    suspects.hold(second)
    assert suspects.drop(1)
    assert not suspects.drop(1)
    assert released(suspects) == [2]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("s3kv.io.poison_jobs._MOST_SUSPECTS", 3)
    monkeypatch.setattr("s3kv.io.poison_jobs._MOST_POISON", 2)
    suspects = PoisonJobs()
    jobs = jobs_of(*range(10))
    suspects.died(jobs, crashed=True)
    assert sum(suspects.hold(job) for job in jobs) == 3
    suspects.waiting.clear()
    for job in jobs:
        suspects.died([job], crashed=True)
        suspects.hold(job)
        suspects.release()
        suspects.died([job], crashed=True)
    assert [suspects.is_poison(job) for job in jobs] == [False] * 8 + [True] * 2
