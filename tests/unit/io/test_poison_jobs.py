"""Poison jobs: which jobs are suspected, which are sent, and which are given up."""

from __future__ import annotations

import pytest

from s3kv.io.poison_jobs import PoisonJobs
from s3kv.messages import BucketJob
from tests.unit.io import rig


def jobs_of(*numbers: int, first_id: int = 0) -> list[BucketJob]:
    return [rig.upload(first_id + n, n) for n in numbers]


def sent(suspects: PoisonJobs) -> int | None:
    job = suspects.release()
    return None if job is None else job.job_id


def test_suspects_go_one_at_a_time() -> None:
    suspects = PoisonJobs()
    jobs = jobs_of(1, 2, 3)
    assert not any(suspects.hold(job) for job in jobs), "nobody is suspected of anything"
    suspects.died(jobs)
    assert all(suspects.hold(job) for job in jobs)
    for job in jobs:
        assert sent(suspects) == job.job_id
        assert sent(suspects) is None
        suspects.ended(job)
        assert not suspects.hold(job), "it has done nobody any harm"


def test_the_process_has_to_die_of_a_suspect_twice() -> None:
    suspects = PoisonJobs()
    (job,) = jobs_of(1)
    suspects.died([job])
    for death in range(2):
        assert not suspects.is_poison(job), death
        assert suspects.hold(job)
        assert sent(suspects) == 1
        suspects.died([job, *jobs_of(50)])
    assert suspects.is_poison(job)
    assert not suspects.is_poison(jobs_of(50)[0])
    assert suspects.is_poison(jobs_of(1, first_id=100)[0]), "whatever number it has"


def test_what_waits_may_be_dropped() -> None:
    suspects = PoisonJobs()
    first, second = jobs_of(1, 2)
    suspects.died([first, second])
    suspects.hold(first)
    suspects.hold(second)
    assert suspects.drop(1)
    assert not suspects.drop(1)
    assert sent(suspects) == 2


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("s3kv.io.poison_jobs._MOST_SUSPECTS", 3)
    suspects = PoisonJobs()
    jobs = jobs_of(*range(10))
    suspects.died(jobs)
    assert [suspects.hold(job) for job in jobs] == [False] * 7 + [True] * 3
