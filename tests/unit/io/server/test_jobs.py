"""The queue of the I/O process: order, limits, and no starvation."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

import pytest

from s3kv.config import MAX_INFLIGHT_BYTES
from s3kv.io.server.jobs import FETCHES_PER_UPLOAD, UPLOADS_PER_STREAM, JobQueue, TransferJob
from s3kv.io.sources.compressing import MOST_ENCODED_BYTES
from s3kv.messages import JobKind
from s3kv.objects.codec import ChunkFormat
from s3kv.place import Place
from s3kv.types import TensorSpec

FETCH, UPLOAD = JobKind.FETCH, JobKind.UPLOAD
ONE = ChunkFormat("0" * 32, (TensorSpec("layer", "U8", (4096,)),), 0, "h0-7of8-l0-31of32")


def job(job_id: int, kind: JobKind = FETCH, layout: ChunkFormat = ONE) -> TransferJob:
    return TransferJob(job_id, kind, f"key-{job_id}", b"\1", layout, Place.of(b""))


def take_all(queue: JobQueue) -> list[TransferJob]:
    return list(iter(queue.take, None))


def test_fetches_go_before_uploads_that_came_first() -> None:
    queue = JobQueue(4, 2**30)
    for i, direction in enumerate([UPLOAD, UPLOAD, FETCH, UPLOAD, FETCH]):
        queue.add(job(i, direction))
    assert [j.job_id for j in take_all(queue)] == [2, 4, 0]
    assert (queue.waiting, queue.running, queue.running_bytes) == (2, 3, 3 * ONE.object_bytes)


def test_a_fetch_borrows_its_share_of_the_free_places() -> None:
    queue = JobQueue(8, 2**30)
    queue.add(job(1))
    (first,) = take_all(queue)
    freed: list[None] = []
    with contextlib.ExitStack() as stack:

        def borrow(wanted: int) -> tuple[int, Callable[[], None]]:
            return stack.enter_context(queue.borrowed(lambda: freed.append(None), wanted))

        count, give_back = borrow(100)
        assert count == 7
        assert (queue.running, borrow(1)[0]) == (8, 0)
        queue.add(job(2))
        assert queue.take() is None
        give_back()
        (second,) = take_all(queue)
        assert (queue.running, borrow(9)[0], len(freed)) == (8, 0, 1)
        for _ in range(9):  # more than are left
            give_back()
        assert (queue.running, len(freed)) == (2, 7)
        queue.add(job(3, UPLOAD))
        (upload,) = take_all(queue)
        assert [borrow(wanted)[0] for wanted in (2, 9, 9)] == [2, 3, 0]
    assert (queue.running, len(freed)) == (3, 12)
    for one in (first, second, upload):
        queue.end(one)
    assert queue.running == 0


def test_fetches_that_may_come_next_have_their_share() -> None:
    near = JobQueue(8, 2**30)
    queue = JobQueue(8, 2**30, before=near)
    for number in range(3):
        near.add(job(number))
    queue.add(job(3))
    take_all(near), take_all(queue)
    with queue.borrowed(lambda: None, 100) as (count, _):
        assert count == 1


def test_a_smaller_window_lends_nothing() -> None:
    queue = JobQueue(8, 2**30)
    queue.add(job(1))
    queue.add(job(2))
    take_all(queue)
    queue.limit_requests(1)
    with queue.borrowed(lambda: None, 3) as (count, _):
        assert count == 0
    assert queue.running == 2


def test_uploads_go_one_at_a_time_until_many_wait() -> None:
    queue = JobQueue(32, 2**30)
    for i in range(UPLOADS_PER_STREAM):
        queue.add(job(i, UPLOAD))
    running = take_all(queue)
    assert len(running) == 1
    assert queue.has_spare  # for refreshes: the others wait on purpose
    for i in range(UPLOADS_PER_STREAM, 3 * UPLOADS_PER_STREAM):
        queue.add(job(i, UPLOAD))
    running += take_all(queue)
    assert len(running) == 3
    while queue.waiting:
        queue.end(running.pop(0))
        running += take_all(queue)
    assert len(running) == 1
    for i in range(100, 300):
        queue.add(job(i, UPLOAD))
    assert len(running + take_all(queue)) == 16


def test_uploads_leave_half_of_the_places_to_fetches() -> None:
    queue = JobQueue(8, 2**30)
    queue.in_hurry = True
    for i in range(10):
        queue.add(job(i, UPLOAD))
    assert len(take_all(queue)) == 4
    for i in range(10, 20):
        queue.add(job(i, FETCH))
    assert not queue.has_spare
    assert [j.job_id for j in take_all(queue)] == [10, 11, 12, 13]
    assert not queue.has_spare


def test_uploads_leave_half_of_the_bytes_to_fetches() -> None:
    queue = JobQueue(100, 6 * ONE.object_bytes)
    for i in range(10):
        queue.add(job(i, UPLOAD))
        queue.add(job(i + 10, FETCH))
    assert [j.job_id for j in take_all(queue)] == [10, 11, 12, 13, 14, 15]
    queue = JobQueue(100, 6 * ONE.object_bytes)
    queue.in_hurry = True
    for i in range(10):
        queue.add(job(i, UPLOAD))
    assert len(take_all(queue)) == 3


@pytest.mark.parametrize("places", [1, 2, 3, 32])
def test_an_upload_waits_for_a_bounded_number_of_fetches(places: int) -> None:
    queue = JobQueue(places, 2**30)
    queue.add(job(0, UPLOAD))
    running, order = [], []
    for i in range(1, 200):
        queue.add(job(i))
        running += take_all(queue)
        order += [j.job_id for j in running if j.job_id not in order]
        if len(running) == places:
            queue.end(running.pop(0))
    assert 0 in order[: FETCHES_PER_UPLOAD + 1]


def test_a_job_larger_than_the_limit_goes_alone() -> None:
    queue = JobQueue(4, 1)
    queue.add(job(1))
    queue.add(job(2, UPLOAD))
    first = queue.take()
    assert first.job_id == 1
    assert queue.take() is None
    queue.end(first)
    assert queue.take().job_id == 2


def test_no_job_overtakes_one_that_waits_for_bytes() -> None:
    large = ChunkFormat("0" * 32, (TensorSpec("layer", "U8", (65536,)),), 1, "h0-7of8-l0-31of32")
    queue = JobQueue(8, large.object_bytes)
    queue.add(job(1))
    small = queue.take()
    for waiting in (job(2, FETCH, large), job(3), job(4, UPLOAD)):
        queue.add(waiting)
    assert queue.take() is None
    queue.end(small)
    assert [j.job_id for j in take_all(queue)] == [2]


def test_only_waiting_jobs_can_be_withdrawn() -> None:
    queue = JobQueue(1, 2**30)
    queue.add(job(1))
    queue.add(job(2))
    assert queue.take() is not None
    assert queue.withdraw(1) is None
    assert queue.withdraw(2).job_id == 2
    assert queue.withdraw(2) is None
    assert (1 in queue, 2 in queue, queue.ids(FETCH)) == (True, False, (1,))


@pytest.mark.parametrize("seed", range(20))
def test_limits_hold_and_nothing_is_lost(seed: int) -> None:
    rng = random.Random(seed)  # replay: the seed is the test's parameter
    places, nbytes = rng.randint(1, 9), rng.randint(1, 12) * ONE.object_bytes
    queue = JobQueue(places, nbytes)
    added, left, running = 0, set(), []
    for _ in range(2000):
        action = rng.random()
        if action < 0.4:
            queue.add(job(added, rng.choice([FETCH, UPLOAD])))
            left.add(added)
            added += 1
        elif action < 0.5 and left:
            withdrawn = queue.withdraw(rng.choice(sorted(left)))
            left -= {withdrawn.job_id} if withdrawn else set()
        elif running:
            ended = running.pop(rng.randrange(len(running)))
            queue.end(ended)
            left.remove(ended.job_id)
        running += take_all(queue)
        assert len(running) == queue.running <= places
        assert len(running) + queue.waiting == len(left)
        assert queue.running_bytes <= nbytes or queue.running == 1
        assert sum(j.kind is UPLOAD for j in running) <= max(1, places // 2)
        assert running or not queue.waiting
    assert set(queue.ids(FETCH)) | set(queue.ids(UPLOAD)) == left


def test_compressed_objects_have_memory_for_all_uploads_at_once() -> None:
    large = ChunkFormat("0" * 32, (TensorSpec("g0", "U8", (2**25,)),), 0, "whole")
    queue = JobQueue(64, MAX_INFLIGHT_BYTES)
    queue.in_hurry = True
    for number in range(32):
        queue.add(job(number, UPLOAD, large))
    assert len(take_all(queue)) == 15
    assert queue.running_bytes <= MOST_ENCODED_BYTES
