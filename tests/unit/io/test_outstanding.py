"""A job that crashes the I/O process: it is found and dropped, and those it survives are not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from s3kv.host.slab import Slab
from s3kv.io import wire
from s3kv.io.client import IoClient
from s3kv.io.outstanding import OutstandingJobs, PoisonJobs
from s3kv.io.process_life import State
from s3kv.messages import BucketJob, JobEnd, JobKind
from s3kv.types import ChunkKey, Outcome
from tests.servers import moto_server
from tests.unit.io import rig
from tests.unit.io.conftest import Open
from tests.unit.io.delicate import POISON
from tests.unit.io.stubborn import stubborn_server


def carry_out(client: IoClient, jobs: dict[int, Callable[[int], None]]) -> dict[int, Outcome]:
    """Order the jobs, each anew as long as it fails, as the planner does; how they end at last."""
    ended: dict[int, Outcome] = {}
    number, names = 0, {}
    due = list(jobs)
    while len(ended) < len(jobs):
        if client.life.state is State.UP:
            for name in due:
                number += 1
                names[number] = name
                jobs[name](number)
            due = []
        for done in client.poll(0.01):
            name = names.pop(done.job_id)
            if done.outcome is Outcome.FAILED:
                due.append(name)
            else:
                ended[name] = Outcome.OK if done.outcome.is_success else done.outcome
    return ended


def uploads(client: IoClient, slab: Slab, *numbers: int) -> dict[int, Callable[[int], None]]:
    def upload(number: int) -> Callable[[int], None]:
        rig.fill(slab, number, number)
        return lambda job_id: client.submit(rig.upload(job_id, number, slot=number))

    return {number: upload(number) for number in numbers}


def test_what_it_dies_of_is_sent_three_times(slab: Slab, open_client: Open) -> None:
    with moto_server() as url:
        client = open_client(url, module="tests.unit.io.delicate")
        assert carry_out(client, uploads(client, slab, POISON)) == {POISON: Outcome.INVALID}
        assert client.life.deaths == 3
        for _ in range(5):  # it is not sent any more, whoever orders it
            again = carry_out(client, uploads(client, slab, POISON, 13))
            assert again == {POISON: Outcome.INVALID, 13: Outcome.OK}
        assert client.life.deaths == 3


@pytest.mark.long
def test_a_hash_that_is_no_hash_kills_it_three_times(slab: Slab, open_client: Open) -> None:
    with moto_server() as url:
        client = open_client(url)
        poison: Any = ChunkKey(0, "a string")  # type: ignore[arg-type]
        job = {99: lambda job_id: client.submit(BucketJob(job_id, JobKind.UPLOAD, poison))}
        assert carry_out(client, job) == {99: Outcome.INVALID}
        assert client.life.deaths == 3


@pytest.mark.long
def test_who_is_there_when_somebody_kills_it_again_and_again_is_not_dropped(
    slab: Slab, open_client: Open
) -> None:
    with stubborn_server(rig.sealed(1)) as server:
        client = open_client(server.url)
        for kill in range(4):
            while client.life.state is not State.UP:
                client.poll()
            client.submit(rig.fetch(kill, 1))
            while len(server.begun) <= kill:
                client.poll(0.01)
            os.kill(client.pid, signal.SIGKILL)
            ended: list[JobEnd] = []
            while not ended:
                ended = client.poll(0.01)
            assert ended[0].outcome is Outcome.FAILED
        server.go_on.set()
        jobs = {1: lambda job_id: client.submit(rig.fetch(job_id, 1, slot=1))}
        assert carry_out(client, jobs) == {1: Outcome.OK}


def test_a_job_that_ends_as_another_kind_is_still_there_when_the_process_dies() -> None:
    jobs = OutstandingJobs(time.monotonic)
    assert jobs.add(rig.fetch(7), "")
    with pytest.raises(wire.WireError, match="never sent"):
        jobs.ended(JobEnd(7, JobKind.UPLOAD, Outcome.OK))
    jobs.died("it broke the protocol", crashed=True)
    assert [(end.job_id, end.outcome) for end in jobs.take_ends()] == [(7, Outcome.FAILED)]


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
    monkeypatch.setattr("s3kv.io.outstanding._MOST_COUNTED", 2)
    poison, jobs = PoisonJobs(), [rig.upload(n, n) for n in range(4)]
    for job in jobs:
        for _ in range(3):
            poison.crashed([job])
    assert [poison.is_poison(job) for job in jobs] == [False, False, True, True]
