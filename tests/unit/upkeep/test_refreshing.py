"""Objects in use are written anew: when, how often, by how many, and what it must not disturb."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from lab.memory_store import MemoryStore
from s3kv.config import Config
from s3kv.errors import StoreDenied, StoreError, StoreUnavailable
from s3kv.io import wire
from s3kv.messages import BucketJob, JobEnd, JobKind
from s3kv.place import Place
from s3kv.stores.store import ObjectInfo
from s3kv.types import ChunkKey, Outcome
from s3kv.upkeep import refreshing
from s3kv.upkeep.cleaner import LEASE_S
from s3kv.upkeep.refreshing import CERTAIN_AT, MAX_WAITING, Refresher, RefreshRule
from tests.unit.io import rig
from tests.unit.io.rig import served
from tests.waiting import until

AFTER_S = 1000.0


class Bucket(MemoryStore):
    """age_s: how long it has held the objects of these numbers."""

    def __init__(self, *numbers: int, age_s: float = 0.0) -> None:
        self.now_s = 1e9
        super().__init__(lambda: self.now_s)
        rig.hold(self, *numbers)
        self.now_s += age_s
        self.hangs = False
        """Whether copies and HEADs get no answer."""

    async def begin(self, verb: str, key: str) -> None:
        await super().begin(verb, key)
        if self.hangs and verb in ("refresh", "head"):
            await asyncio.Event().wait()

    def ages(self) -> dict[str, float]:
        return {key: self.now_s - modified_s for key, (_, modified_s) in self._objects.items()}


class Pauses:
    """Stands for `asyncio.sleep`: notes for how long, and lets others run."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.taken.append(seconds)
        for _ in range(5):
            await asyncio.sleep(0)


async def turning(work: Coroutine[Any, Any, None], turns: int) -> None:
    """Let work that has no end run for so many turns of the loop."""
    task = asyncio.ensure_future(work)
    for _ in range(turns):
        await asyncio.sleep(0)
    assert not task.done(), task.exception()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def settle(refresher: Refresher, turns: int = 2000) -> None:
    await turning(refresher.run(), turns)


async def looked(refresher: Refresher) -> None:
    await turning(refresher.look(), 200)


def make(bucket: Bucket, *, is_idle: bool = True) -> tuple[Refresher, Pauses]:
    pauses = Pauses()
    rule = RefreshRule(AFTER_S, random.Random(0))
    return Refresher(bucket, rule, lambda: is_idle, sleep=pauses), pauses


async def read(bucket: Bucket, number: int) -> ObjectInfo:
    return await bucket.get_into(rig.object_key(number), Place.of(bytearray(2**20)))


def test_the_probability_rises_from_none_to_certainty() -> None:
    rule = RefreshRule(AFTER_S, random.Random(1))

    def share(age_s: float) -> float:
        return sum(rule.wants(age_s) for _ in range(4000)) / 4000

    assert share(0) == share(AFTER_S) == 0
    assert share(AFTER_S * CERTAIN_AT) == share(AFTER_S * 100) == 1
    half = share(AFTER_S * (1 + CERTAIN_AT) / 2)
    assert 0.46 < half < 0.54  # 5 σ
    assert share(AFTER_S * 1.01) < half / 2


async def test_only_what_is_old_is_written_anew() -> None:
    bucket = Bucket(1, 2, age_s=CERTAIN_AT * AFTER_S)
    rig.hold(bucket, 2)
    refresher, pauses = make(bucket)
    for number in (1, 2):
        refresher.hit(await read(bucket, number))
    await settle(refresher)
    assert bucket.asked["refresh"] == 1
    assert set(bucket.ages().values()) == {0.0}
    assert (refresher.done, refresher.failed, refresher.skipped) == (1, 0, 0)
    assert pauses.taken == [refreshing.PAUSE_S]
    assert await read(bucket, 1)


async def test_of_many_replicas_one_writes() -> None:
    """An object whose age is not told is left alone."""
    bucket = Bucket(1, 2, age_s=2 * AFTER_S)
    replicas = [make(bucket)[0] for _ in range(20)]
    for replica in replicas:
        replica.hit(await read(bucket, 1))
        replica.hit(ObjectInfo(rig.object_key(2), 10, 0.0))
    await asyncio.gather(*(settle(replica, 200) for replica in replicas))
    assert sum(replica.done for replica in replicas) == 1
    assert sum(replica.skipped for replica in replicas) == 19


@pytest.mark.parametrize(("age", "copies"), [(0.5, 0), (2.0, 1)])
async def test_of_what_an_upload_found_the_age_is_asked(age: float, copies: int) -> None:
    bucket = Bucket(1, age_s=age * AFTER_S)
    refresher, _ = make(bucket)
    refresher.exists(rig.object_key(1))
    refresher.exists(rig.object_key(2))  # and gone again
    await looked(refresher)
    await settle(refresher)
    assert (bucket.asked["head"], bucket.asked["refresh"]) == (2, copies)


async def test_nothing_is_asked_while_jobs_wait() -> None:
    bucket = Bucket(1, age_s=2 * AFTER_S)
    refresher, _ = make(bucket, is_idle=False)
    refresher.hit(await read(bucket, 1))
    await settle(refresher)
    assert not bucket.asked["refresh"]


async def test_what_waits_is_bounded_and_what_is_dropped_is_counted() -> None:
    refresher, _ = make(Bucket())
    for number in range(MAX_WAITING + 7):
        old = ObjectInfo(f"key-{number}", 10, 0.0, age_s=2 * AFTER_S)
        refresher.hit(old)
        refresher.hit(old)
    assert refresher.skipped == 14
    for number in range(MAX_WAITING + 7):
        refresher.exists(f"key-{number}")
    assert refresher.skipped == 21


@pytest.mark.parametrize(
    ("error", "pause_s", "said"),
    [
        (StoreDenied("s3:PutObject on arn:aws:s3:::bkt"), 3600.0, 1),
        (StoreError("501 NotImplemented"), 3600.0, 1),
        (StoreUnavailable("500"), 10.0, 0),
    ],
)
async def test_a_store_that_refuses_is_left_alone_for_a_while(
    error: StoreError, pause_s: float, said: int, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = Bucket(*range(5), age_s=2 * AFTER_S)
    bucket.errors["refresh"] = [error] * 3
    refresher, pauses = make(bucket)
    for _ in range(3):
        for number in range(5):
            refresher.hit(await read(bucket, number))
        await settle(refresher)
    assert (refresher.done, refresher.failed, refresher.skipped) == (0, 3, 12)
    assert pauses.taken.count(pause_s) == 3
    assert sum(str(error) in message for message in caplog.messages) == said
    refresher.hit(await read(bucket, 0))
    await settle(refresher)
    assert refresher.done == 1


def used(refresher: Refresher, *keys: str) -> list[tuple[Outcome, float]]:
    """The answers to these uses, as they come."""
    answers: list[tuple[Outcome, float]] = []
    for key in keys:
        refresher.use(key, lambda outcome, fresh_s: answers.append((outcome, fresh_s)))
    return answers


def test_uses_need_not_be_reported_before_the_object_is_due() -> None:
    """And from a random age on, so that the replicas of a fleet do not ask all at once."""
    rule = RefreshRule(AFTER_S, random.Random(1))
    for age_s in (0.0, AFTER_S / 2, AFTER_S, 1.2 * AFTER_S):
        due_s = [age_s + rule.fresh_s(age_s) for _ in range(1000)]
        first_s = max(age_s, AFTER_S)
        assert first_s <= min(due_s)
        assert max(due_s) <= CERTAIN_AT * AFTER_S
        spread_s = CERTAIN_AT * AFTER_S - first_s
        assert max(due_s) - min(due_s) > 0.9 * spread_s


@pytest.mark.parametrize("after_s", [math.inf, 100 * refreshing.LOOK_S])
def test_an_object_in_use_is_looked_at_now_and_then_whatever_is_set(after_s: float) -> None:
    rule = RefreshRule(after_s, random.Random(1))
    fresh_s = [rule.fresh_s(0.0) for _ in range(1000)]
    assert 0.8 * refreshing.LOOK_S <= min(fresh_s) < max(fresh_s) <= refreshing.LOOK_S
    assert not any(rule.spares() for _ in range(1000))


def test_while_the_cleaner_deletes_nothing_uses_are_reported_and_seldom_looked_at() -> None:
    rule = RefreshRule(math.inf, random.Random(1), follows_cleaner=True)
    assert max(rule.fresh_s(0.0) for _ in range(1000)) <= LEASE_S
    looks = sum(not rule.spares() for _ in range(12_000))
    assert 850 < looks < 1150  # one in twelve, 5 σ
    rule.follow(AFTER_S)
    assert not any(rule.spares() for _ in range(1000))


@pytest.mark.parametrize(
    ("settings", "after_s"),
    [
        ({}, math.inf),
        ({"refresh_after_s": 5.0, "bucket_idle_s": 100.0}, 5.0),
        ({"refresh_after_s": 50.0, "bucket_idle_s": 100.0}, 25.0),
        ({"bucket_idle_s": 12.0}, 3.0),
        ({"bucket_bytes": 2**30}, math.inf),
        ({"bucket": "b--use1-az4--x-s3", "refresh_after_s": 5.0}, math.inf),
    ],
)
def test_the_rule_of_the_settings(settings: dict[str, Any], after_s: float) -> None:
    rule = RefreshRule.of(Config(**{"bucket": "bkt", **settings}), random.Random(0))
    assert rule.refresh_after_s == after_s


def test_the_earlier_of_the_settings_age_and_the_cleaners_counts() -> None:
    config = Config(bucket="bkt", refresh_after_s=50.0, bucket_bytes=2**30)
    rule, ages = RefreshRule.of(config, random.Random(0)), []
    for lease_s in (10.0, 90.0, math.inf):
        rule.follow(lease_s)
        ages.append(rule.refresh_after_s)
    assert ages == [10.0, 50.0, 50.0]


async def test_a_use_that_is_reported_counts_as_a_hit() -> None:
    bucket = Bucket(1, 2, age_s=2 * AFTER_S)
    rig.hold(bucket, 2)
    refresher, _ = make(bucket)
    answers = used(refresher, *map(rig.object_key, (1, 2, 3)))
    await looked(refresher)
    old, young, gone = answers
    assert old[0] is young[0] is Outcome.EXISTS
    assert min(old[1], young[1]) >= AFTER_S
    assert gone[0] is Outcome.MISSING
    await settle(refresher)
    assert (bucket.asked["head"], bucket.asked["refresh"]) == (3, 1)
    assert max(bucket.ages().values()) == 0.0


@pytest.mark.parametrize("count", [1, 20])
async def test_a_fleet_refreshes_an_object_once_per_interval_however_many_use_it(
    count: int,
) -> None:
    """All have it in memory, and use it all the time."""
    bucket = Bucket(1)
    rng = random.Random(count)
    replicas = []
    for _ in range(count):
        rule = RefreshRule(AFTER_S, random.Random(rng.random()))
        replicas.append(Refresher(bucket, rule, lambda: True, sleep=Pauses()))
    tasks = [asyncio.ensure_future(work) for r in replicas for work in (r.look(), r.run())]
    due_s = {replica: bucket.now_s + replica.written() for replica in replicas}
    intervals, oldest_s = 20, 0.0
    end_s = bucket.now_s + intervals * AFTER_S
    while bucket.now_s < end_s:
        bucket.now_s += AFTER_S / 200
        for replica in [one for one in replicas if due_s[one] <= bucket.now_s]:
            answers = used(replica, rig.object_key(1))
            for _ in range(50):
                await asyncio.sleep(0)
            ((outcome, fresh_s),) = answers
            assert outcome is Outcome.EXISTS
            due_s[replica] = bucket.now_s + fresh_s
        oldest_s = max(oldest_s, *bucket.ages().values())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert oldest_s <= 1.3 * AFTER_S
    assert 0.75 * intervals <= sum(replica.done for replica in replicas) <= intervals
    assert sum(replica.skipped for replica in replicas) == 0
    # A replica alone asks about twice before it refreshes; of many, most only see that it is done.
    assert bucket.asked["head"] <= (3 if count == 1 else 1.5) * count * intervals


async def test_what_cannot_be_looked_at_is_answered_all_the_same() -> None:
    refresher, _ = make(Bucket())
    answers = used(refresher, *(f"key-{number}" for number in range(MAX_WAITING + 7)))
    assert answers == [(Outcome.CANCELLED, 0.0)] * 7
    refresher.give_up()
    assert answers == [(Outcome.CANCELLED, 0.0)] * (MAX_WAITING + 7)
    assert len(used(refresher, "key")) == 1, "at once: nobody looks any more"


async def test_a_failed_look_is_an_answer_and_the_end_of_one_use() -> None:
    bucket = Bucket(1)
    bucket.errors["head"] = [StoreUnavailable("500"), StoreDenied("403")]
    refresher, _ = make(bucket)
    answers = used(refresher, *[rig.object_key(1)] * 3)
    await looked(refresher)
    assert [outcome for outcome, _ in answers] == [Outcome.CANCELLED] * 2 + [Outcome.EXISTS]
    assert refresher.failed == 2


async def test_a_look_that_is_cut_short_is_answered_once() -> None:
    bucket = Bucket()
    bucket.hangs = True
    refresher, _ = make(bucket)
    answers = used(refresher, "one", "two")
    await looked(refresher)
    assert bucket.asked["head"] == 1
    assert answers == [(Outcome.CANCELLED, 0.0)] * 2


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refreshing, "PAUSE_S", 0.001)


async def counted(worker: rig.Worker, counter: str, count: int = 1) -> wire.Stats:
    """The process's statistics once it has counted so many."""
    while (stats := await worker.settled()).counters[counter] < count:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    return stats


async def test_a_process_refreshes_what_it_reads_and_what_it_finds() -> None:
    """And nothing that does not verify."""
    bucket = Bucket(1, 2, 3)
    await bucket.put(rig.object_key(4), Place.of(b"bad" * 1000), if_absent=True)
    bucket.now_s += 2 * AFTER_S
    async with rig.serving(bucket, refresh_after_s=AFTER_S) as (worker, _):
        assert (await worker.end_of(rig.fetch(4))).outcome is Outcome.CORRUPT
        worker.fill(2, 2)
        worker.say(rig.fetch(1), rig.upload(2))
        ends = await worker.done(2)
        assert (ends[1].outcome, ends[2].outcome) == (Outcome.OK, Outcome.EXISTS)
        stats = await counted(worker, "io_refresh_done", 2)
        assert (stats.counters["io_refresh_failed"], stats.counters["io_refresh_skipped"]) == (0, 0)
    young = {key for key, age_s in bucket.ages().items() if age_s == 0}
    assert young == {rig.object_key(1), rig.object_key(2)}


async def test_a_copy_that_fails_is_nobody_elses_affair() -> None:
    bucket = Bucket(1, age_s=2 * AFTER_S)
    bucket.errors["refresh"] = [StoreUnavailable("503")]
    async with rig.serving(bucket, refresh_after_s=AFTER_S) as (worker, _):
        assert (await worker.end_of(rig.fetch(1))).outcome is Outcome.OK
        stats = await counted(worker, "io_refresh_failed")
        others = ("io_retries", "io_throttled", "io_window_cuts", "io_defects")
        assert [stats.counters[name] for name in others] == [0, 0, 0, 0]


def use(job_id: int) -> BucketJob:
    return BucketJob(job_id, JobKind.USE, rig.chunk(job_id))


@pytest.mark.parametrize("settings", [{"refresh_after_s": AFTER_S}, {}], ids=["on", "off"])
async def test_a_process_says_of_what_is_used_whether_it_is_there(settings: dict[str, Any]) -> None:
    bucket = Bucket(1, age_s=2 * AFTER_S)
    async with served(lambda _: bucket, **settings) as (worker, _):
        worker.say(use(1), use(2), BucketJob(3, JobKind.USE, ChunkKey(0, b"")))
        ends = {}
        while len(ends) < 3:  # the third is answered before the bucket has been tried
            message = await worker.hear()
            if isinstance(message, JobEnd):
                ends[message.job_id] = message
        outcomes = [ends[number].outcome for number in (1, 2, 3)]
        assert outcomes == [Outcome.EXISTS, Outcome.MISSING, Outcome.INVALID]
        assert {end.kind for end in ends.values()} == {JobKind.USE}
        assert 0 < ends[1].fresh_s < math.inf
        if settings:
            await counted(worker, "io_refresh_done")
        worker.say(wire.Drain(100.0))
        assert await worker.hear() == wire.Drained(0)
    assert bucket.asked["refresh"] == len(settings)


async def test_a_shutdown_answers_the_uses_that_wait() -> None:
    bucket = Bucket()
    bucket.hangs = True
    async with rig.serving(bucket) as (worker, _):
        worker.say(use(1), use(2))
        await until(lambda: bucket.asked["head"] > 0)
        worker.say(wire.Drain(100.0))
        assert {end.outcome for end in (await worker.done(2)).values()} == {Outcome.CANCELLED}
        assert await worker.hear() == wire.Drained(0)


async def test_a_shutdown_does_not_wait_for_copies() -> None:
    bucket = Bucket(1, age_s=2 * AFTER_S)
    bucket.hangs = True
    async with rig.serving(bucket, refresh_after_s=AFTER_S) as (worker, _):
        await worker.end_of(rig.fetch(1))
        await until(lambda: bucket.asked["refresh"] > 0)
        await worker.end_of(rig.fetch(2))  # and nobody else waits for one
        worker.say(wire.Drain(100.0))
        assert await worker.hear() == wire.Drained(0)


BUCKETS = ["bkt", "cache--use1-az4--x-s3", "arn:aws:s3::123456789012:accesspoint/mfzwi23gn.mrap"]


@pytest.mark.parametrize("bucket", BUCKETS, ids=["off", "directory bucket", "multi-region"])
async def test_where_it_is_off_nothing_is_copied(
    caplog: pytest.LogCaptureFixture, bucket: str
) -> None:
    caplog.set_level(logging.WARNING)
    store, is_set = Bucket(1, age_s=1e9), bucket != "bkt"
    greeting = rig.handshake(rig.Config(bucket=bucket, refresh_after_s=AFTER_S * is_set))
    async with rig.serving(store, greeting=greeting) as (worker, _):
        await worker.end_of(rig.fetch(1))
        await asyncio.sleep(0.05)
        assert not store.asked["refresh"]
    assert sum("refresh_after_s has no effect" in message for message in caplog.messages) == is_set


async def test_the_manifest_stays_as_young_as_the_chunks() -> None:
    bucket = Bucket()
    greeting = rig.handshake(rig.Config(bucket="bkt", refresh_after_s=0.01))
    named = msgspec.structs.replace(greeting, manifest=b"{}")
    async with rig.serving(bucket, greeting=named) as (worker, _):
        await until(lambda: rig.NAMESPACE.manifest in bucket._objects)
        bucket.now_s += 100
        await counted(worker, "io_refresh_done")
        assert bucket.ages()[rig.NAMESPACE.manifest] == 0
        await bucket.delete(rig.NAMESPACE.manifest)  # expired
        await until(lambda: rig.NAMESPACE.manifest in bucket._objects)
