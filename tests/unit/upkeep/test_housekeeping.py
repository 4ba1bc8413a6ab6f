"""Beside the jobs of an I/O process: the namespace, the budget and the growth of its bucket."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import msgspec
import pytest

from lab.memory_store import MemoryStore
from s3kv.config import Config
from s3kv.errors import StoreDenied, StoreUnavailable
from s3kv.io import wire
from s3kv.messages import BucketJob, JobKind
from s3kv.objects import keys
from s3kv.types import Outcome
from s3kv.upkeep import cleaner as cleaning
from s3kv.upkeep import costs, housekeeping, refreshing
from s3kv.upkeep.housekeeping import Housekeeping
from s3kv.upkeep.registration import Registration
from tests.system.sim.loop import VirtualLoop
from tests.unit.io import rig
from tests.unit.upkeep.test_refreshing import counted
from tests.waiting import until

EPOCH_S = 1e9
MIN_AGE_S = 60.0


@pytest.fixture
def with_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = rig.handshake

    def handshake(config: Config) -> wire.Handshake:
        return msgspec.structs.replace(plain(config), manifest=b'{"model":"m"}')

    monkeypatch.setattr(rig, "handshake", handshake)


class Bucket(MemoryStore):
    """Answers reads of the manifest as told: `answers` are the next ones, and None is no answer."""

    def __init__(self, *answers: Exception | None) -> None:
        super().__init__()
        self.answers = list(answers)
        self.read, self.written = asyncio.Event(), asyncio.Event()

    async def begin(self, verb: str, key: str) -> None:
        await super().begin(verb, key)
        if verb == "put":
            self.written.set()
        if (verb, key) == ("get_into", rig.NAMESPACE.manifest) and self.answers:
            self.read.set()
            error = self.answers.pop(0)
            if error is not None:
                raise error
            await asyncio.Event().wait()


@pytest.mark.usefixtures("with_manifest")
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, ""),
        (StoreDenied("s3:GetObject on"), "namespace's manifest cannot be read: s3:GetObject"),
        (ZeroDivisionError("oops"), "ZeroDivisionError"),
    ],
    ids=["no answer", "denied", "a defect"],
)
async def test_nobody_waits_for_it(
    error: Exception | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What befalls it is said, a defect is counted, and jobs are served."""
    store = Bucket(error)
    async with rig.serving(store) as (worker, serving):
        await store.read.wait()
        worker.fill(1, number=1)
        assert (await worker.end_of(rig.upload(1))).outcome is Outcome.OK
        defects = (await worker.settled()).counters["io_defects"]
        assert defects == isinstance(error, ZeroDivisionError)
        worker.hang_up()
        await asyncio.wait_for(serving, 100)
    assert said in caplog.text


@pytest.mark.usefixtures("with_manifest")
@pytest.mark.parametrize("error", [StoreUnavailable("refused"), StoreDenied("no credentials")])
async def test_it_is_written_as_soon_as_the_bucket_is_there(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(housekeeping, "_INTRODUCTION_PAUSE_S", 0.01)
    monkeypatch.setattr(housekeeping, "_INTRODUCED_AGAIN_S", 0.01)
    store = Bucket(*[error] * 5)
    caplog.set_level(logging.INFO, "s3kv.io")
    async with rig.serving(store, max_attempts=1):
        await store.written.wait()
        await until(lambda: f"namespace {rig.NAMESPACE.root} is new" in caplog.text)
        await store.delete(rig.NAMESPACE.manifest)  # with all that the engine has written
        await until(lambda: rig.NAMESPACE.manifest in store._objects)
    assert store._objects[rig.NAMESPACE.manifest][0] == b'{"model":"m"}'


def test_it_is_refreshed_before_objects_that_nobody_uses_expire() -> None:
    loop, after_s = VirtualLoop(), 1_000.0
    store = MemoryStore(lambda: EPOCH_S + loop.time())
    registration = Registration(rig.NAMESPACE, b"{}", ["shape"])
    settings = Config(bucket="bkt", refresh_after_s=after_s)
    keeping = Housekeeping(store, settings, registration, lambda: True, random.Random(0))
    loop.call_soon(keeping.start)
    oldest_s = 0.0
    while loop.time() < 20 * after_s:
        loop.run_until(loop.time() + after_s / 10)
        written_s = [store._objects[key][1] for key in registration.keys]
        oldest_s = max(oldest_s, EPOCH_S + loop.time() - min(written_s))
    assert after_s < oldest_s < 1.6 * after_s
    loop.give_up()


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleaning, "RENEW_S", 0.01)
    monkeypatch.setattr(cleaning, "_SETTLE_S", 0.0)
    monkeypatch.setattr(refreshing, "PAUSE_S", 0.001)
    monkeypatch.setattr(housekeeping, "_DEFECT_PAUSE_S", 0.001)


@pytest.mark.usefixtures("short_pauses")
async def test_a_process_keeps_its_bucket_and_refreshes_as_the_lease_says() -> None:
    bucket = MemoryStore(lambda: time_s)
    time_s = EPOCH_S
    for number in range(8):
        time_s += MIN_AGE_S
        rig.hold(bucket, number)
    time_s += 2 * MIN_AGE_S
    oldest_left = rig.object_key(2)
    async with rig.serving(bucket, bucket_bytes=7 * rig.FORMAT.object_bytes) as (worker, _):
        await counted(worker, "io_cleaner_sweeps")
        left = {key for key in bucket._objects if keys.parse(key)}
        assert left == {rig.object_key(number) for number in range(2, 8)}
        assert (await worker.end_of(rig.fetch(2))).outcome is Outcome.OK
        await counted(worker, "io_refresh_done")
    assert bucket._objects[oldest_left][1] == time_s


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({}, True),
        ({"bucket_bytes": 10**12}, False),
        ({"bucket_idle_s": 3600.0}, False),
        ({"refresh_after_s": 3600.0}, False),
    ],
)
async def test_a_process_warns_of_a_bucket_without_a_bound(
    settings: dict[str, Any],
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(housekeeping, "_GROWTH_LOOK_S", 0.001)
    monkeypatch.setattr(costs, "GROWTH_KNOWN_S", 0.01)
    store = MemoryStore(lambda: EPOCH_S)
    store.traffic.sent_bytes = 2**30
    async with rig.serving(store, **settings):
        await until(lambda: not warns or "no bound" in caplog.text)
        for _ in range(50):
            await asyncio.sleep(0.001)
    assert caplog.text.count("no bound") == warns


def with_a_defect(verb: str) -> MemoryStore:
    """A bucket with an old chunk, whose first answer to `verb` is one that nobody expects."""
    bucket = MemoryStore(lambda: EPOCH_S, {verb: [ZeroDivisionError("oops")]})
    rig.hold(bucket, 1)
    bucket._objects[rig.object_key(1)] = (rig.sealed(1), 0.0)
    return bucket


@pytest.mark.usefixtures("short_pauses")
async def test_after_a_defect_objects_are_refreshed_again() -> None:
    async with rig.serving(with_a_defect("refresh"), refresh_after_s=60.0) as (worker, _):
        for counter in ("io_defects", "io_refresh_done"):
            assert (await worker.end_of(rig.fetch(1))).outcome is Outcome.OK
            await counted(worker, counter)


@pytest.mark.usefixtures("short_pauses")
async def test_after_a_defect_uses_are_answered_again() -> None:
    use, outcomes = BucketJob(1, JobKind.USE, rig.chunk(1)), []
    async with rig.serving(with_a_defect("head"), refresh_after_s=60.0) as (worker, _):
        while Outcome.EXISTS not in outcomes:
            outcomes.append((await worker.end_of(use)).outcome)
        assert (await worker.settled()).counters["io_defects"] == 1
    assert {*outcomes[:-1]} == {Outcome.CANCELLED}, "meanwhile nobody waits for an answer"


@pytest.mark.usefixtures("short_pauses")
async def test_after_a_defect_the_bucket_is_kept_again() -> None:
    async with rig.serving(with_a_defect("list"), bucket_bytes=10**9) as (worker, _):
        await counted(worker, "io_cleaner_sweeps")
        assert (await worker.settled()).counters["io_defects"] == 1


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("begins_first", [True, False])
async def test_nothing_begins_once_it_drains(begins_first: bool) -> None:
    store = Bucket(ZeroDivisionError("oops"), ZeroDivisionError("oops"))
    registration = Registration(rig.NAMESPACE, b"{}", ())
    keeping = Housekeeping(
        store, Config(bucket="bkt"), registration, lambda: True, random.Random(0)
    )
    steps = [keeping.start, keeping.drain]
    for step in steps if begins_first else reversed(steps):
        step()
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert keeping.defects == store.asked["get_into"] == begins_first
    await asyncio.gather(*keeping.cancel(), return_exceptions=True)
