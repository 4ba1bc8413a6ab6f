"""The cleaner of a bucket, in virtual time: what it leaves, and who holds the lease."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from lab.memory_store import MemoryStore
from s3kv.errors import StoreDenied, StoreError, StoreUnavailable
from s3kv.objects import keys
from s3kv.objects.keys import Namespace
from s3kv.place import Place
from s3kv.stores.store import ObjectInfo
from s3kv.types import ChunkKey
from s3kv.upkeep import listing
from s3kv.upkeep.cleaner import LEASE_S, LEFT, MIN_REFRESH_S, REFRESHED, SWEEP_MAX_S, Cleaner
from s3kv.upkeep.refreshing import RefreshRule
from tests.system.sim.loop import VirtualLoop
from tests.unit.upkeep.test_sweep import OTHERS

EPOCH_S = 1e9
HOUR_S, DAY_S = 3600.0, 86_400.0
NBYTES = 1_000
BUDGET = 200 * NBYTES
MIN_AGE_S = 600.0
DATA = b"\1" * NBYTES
PLACE = Namespace("s3kv", "a" * 32)
FOREIGN = (*OTHERS, keys.cleaner("other"))


def chunk(number: int) -> str:
    return PLACE.chunk(ChunkKey(0, number.to_bytes(8, "big")), "whole")


class Bucket(MemoryStore):
    """Objects in virtual time. Notes the most bytes there were, and each deletion's age."""

    def __init__(self, loop: VirtualLoop, *, conditional: bool = True) -> None:
        super().__init__(lambda: EPOCH_S + loop.time())
        self._loop = loop
        self._conditional = conditional
        self.peak = 0
        self.deleted: list[tuple[float, str]] = []
        """Age and key of each object deleted."""
        for key in FOREIGN:
            self._objects[key] = (b"theirs" * 100, EPOCH_S - 100 * DAY_S)

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks: all but the others' objects and the lease."""
        lease = keys.cleaner("s3kv") in self._objects
        return NBYTES * (len(self._objects) - len(FOREIGN) - lease)

    def __contains__(self, key: str) -> bool:
        return key in self._objects and key not in FOREIGN and key != keys.cleaner("s3kv")

    def write(self, *numbers: int) -> None:
        for number in numbers:
            self._objects[chunk(number)] = (DATA, EPOCH_S + self._loop.time())
        self.peak = max(self.peak, self.nbytes)

    def age_s(self, key: str) -> float:
        return EPOCH_S + self._loop.time() - self._objects[key][1]

    async def put(self, key: str, place: Place, *, if_absent: bool) -> bool:
        return await super().put(key, place, if_absent=if_absent and self._conditional)

    async def delete(self, key: str, *, if_etag: str | None = None) -> bool:
        if key in self._objects and keys.parse(key):
            self.deleted.append((self.age_s(key), key))
        return await super().delete(key, if_etag=if_etag if self._conditional else None)


class Line(MemoryStore):
    """One process's way to the bucket. It can be cut, and stall as if the process was stopped."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__()
        self._bucket = bucket
        self.error: StoreError | None = None
        self.runs = asyncio.Event()
        self.runs.set()
        self.page_s = 0.05
        """Time that 100 objects of a listing take."""
        self.stops_in_listing = 0
        """Number of the listing at whose end the process is stopped."""
        self.failing_deletions = 0
        self._listings = 0

    async def _pass(self) -> None:
        await asyncio.sleep(0.05)
        await self.runs.wait()
        if self.error is not None:
            raise self.error

    def __getattribute__(self, name: str) -> Any:
        if name not in ("get_into", "head", "put", "delete"):
            return super().__getattribute__(name)

        async def passed(*arguments: Any, **options: Any) -> Any:
            await self._pass()
            return await getattr(self._bucket, name)(*arguments, **options)

        return passed

    async def delete_many(self, objects: Sequence[ObjectInfo]) -> Sequence[str]:
        await self._pass()
        if self.failing_deletions:
            self.failing_deletions -= 1
            raise StoreUnavailable("planned")
        return await self._bucket.delete_many(objects)

    async def list(self, prefix: str, after: str = "") -> Any:
        self._listings += 1
        await self._pass()
        for number, info in enumerate([i async for i in self._bucket.list(prefix, after)]):
            if number % 100 == 99:
                await asyncio.sleep(self.page_s)
                await self._pass()
            yield info
        if self._listings == self.stops_in_listing:
            self.runs.clear()
            await self._pass()


class Engine:
    """One process with a cleaner. `refresh_after_s`: as it was told."""

    def __init__(self, fleet: Fleet, name: str, **budget: float) -> None:
        self.line = Line(fleet.bucket)
        self.refresh_after_s = math.inf
        self.cleaner = Cleaner(
            self.line,
            "s3kv",
            max_bytes=int(budget.get("max_bytes", 0)),
            idle_s=budget.get("idle_s", 0.0),
            min_age_s=MIN_AGE_S,
            holder=name,
            on_refresh_after=lambda seconds: setattr(self, "refresh_after_s", seconds),
            rng=fleet.rng,
            clock=fleet.loop.time,
        )
        self.task = fleet.loop.create_task(self.cleaner.run())


class Fleet:
    """Cleaners on one bucket, and a writer that stores `per_hour` objects."""

    def __init__(self, seed: int = 1, *, conditional: bool = True) -> None:
        self.loop = VirtualLoop()
        self.rng = random.Random(seed)
        self.bucket = Bucket(self.loop, conditional=conditional)
        self.engines: list[Engine] = []
        self._written = 0

    def start(self, count: int, **budget: float) -> None:
        for _ in range(count):
            self.engines.append(Engine(self, f"engine {len(self.engines)}", **budget))

    def run(self, hours: float, *, per_hour: int, every: Callable[[], None] | None = None) -> None:
        step_s = HOUR_S / per_hour if per_hour else 60.0
        until_s = self.loop.time() + hours * HOUR_S
        while self.loop.time() < until_s:
            self.loop.run_until(self.loop.time() + step_s)
            if per_hour:
                self.bucket.write(self._written)
                self._written += 1
            if every is not None:
                every()
        assert self.loop.failures == []

    def begin_with(self, objects: int, engines: int = 1) -> Engine:
        """Start engines on a bucket with objects that are no more young; the first of them."""
        self.bucket.write(*range(objects))
        self.loop.run_until(2 * MIN_AGE_S)
        self.start(engines, max_bytes=BUDGET)
        return self.engines[0]

    @property
    def sweepers(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.cleaner.sweeps]

    def check(self) -> None:
        """Nothing outside the prefix, and nothing young, was ever deleted."""
        assert all(key in self.bucket._objects for key in FOREIGN)
        assert all(age_s >= MIN_AGE_S for age_s, _ in self.bucket.deleted), self.bucket.deleted


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.check()
    fleet.loop.give_up()


def test_a_bucket_stays_within_its_budget_and_is_used(fleet: Fleet) -> None:
    fleet.start(1, max_bytes=BUDGET)
    least = []

    def look() -> None:
        if fleet.loop.time() > 4 * HOUR_S:
            least.append(fleet.bucket.nbytes)

    fleet.run(24, per_hour=60, every=look)
    assert fleet.bucket.peak <= 1.1 * BUDGET
    assert min(least) >= (LEFT - 0.01) * BUDGET
    assert fleet.sweepers[0].cleaner.deleted_bytes == NBYTES * len(fleet.bucket.deleted)
    # A quiet bucket is listed seldom, a busy one before it has grown by the rest of the budget.
    assert 24 * HOUR_S / SWEEP_MAX_S <= fleet.sweepers[0].cleaner.sweeps <= 24 * 60 / 8


def test_what_is_hit_stays_and_what_is_not_hit_goes(fleet: Fleet) -> None:
    fleet.start(2, max_bytes=BUDGET)
    rule = RefreshRule(math.inf, fleet.rng)
    hot = [chunk(number) for number in range(10)]

    def hit() -> None:
        rule.refresh_after_s = fleet.engines[1].refresh_after_s
        for key in hot:
            if key in fleet.bucket and rule.wants(fleet.bucket.age_s(key)):
                data, _ = fleet.bucket._objects[key]
                fleet.bucket._objects[key] = (data, EPOCH_S + fleet.loop.time())

    fleet.run(24, per_hour=60, every=hit)
    assert all(key in fleet.bucket for key in hot)
    assert chunk(11) not in fleet.bucket
    after_s = pytest.approx(BUDGET / NBYTES * 60 / REFRESHED, rel=0.2)
    assert [engine.refresh_after_s for engine in fleet.engines] == [after_s, after_s]


def test_a_bucket_that_is_far_from_full_is_left_alone(fleet: Fleet) -> None:
    fleet.start(2, max_bytes=BUDGET)
    fleet.run(2, per_hour=60)
    assert fleet.bucket.deleted == []
    assert {engine.refresh_after_s for engine in fleet.engines} == {math.inf}


def test_what_is_not_used_for_long_goes(fleet: Fleet) -> None:
    fleet.start(3, idle_s=HOUR_S)
    fleet.run(6, per_hour=60)
    assert {engine.refresh_after_s for engine in fleet.engines} == {HOUR_S / REFRESHED}
    oldest_s = max(fleet.bucket.age_s(key) for key in fleet.bucket._objects if key in fleet.bucket)
    assert HOUR_S / 2 < oldest_s < HOUR_S * 1.2
    assert min(age_s for age_s, _ in fleet.bucket.deleted) > HOUR_S
    assert 50 < max(engine.cleaner.sweeps for engine in fleet.engines) <= 61


def test_nothing_young_goes_though_the_budget_is_exceeded(fleet: Fleet) -> None:
    fleet.start(1, max_bytes=5 * NBYTES, idle_s=1.0)
    fleet.run(3, per_hour=600)
    assert len(fleet.bucket.deleted) > 1_000
    assert fleet.engines[0].refresh_after_s == MIN_REFRESH_S


def test_one_engine_sweeps_and_another_goes_on_when_it_dies(fleet: Fleet) -> None:
    fleet.start(5, max_bytes=BUDGET)
    fleet.run(6, per_hour=60)
    (first,) = fleet.sweepers
    first.task.cancel()
    fleet.run(13 / 60, per_hour=60)
    (second,) = (engine for engine in fleet.sweepers if engine is not first)
    swept = second.cleaner.sweeps
    fleet.run(6, per_hour=60)
    assert second.cleaner.sweeps > swept
    assert set(fleet.sweepers) == {first, second}
    assert fleet.bucket.nbytes <= BUDGET


def test_one_that_was_stopped_in_a_sweep_deletes_nothing_when_it_wakes(fleet: Fleet) -> None:
    """What it has listed has been refreshed meanwhile."""
    engine = fleet.begin_with(300)
    engine.line.stops_in_listing = 1
    fleet.loop.run_until(HOUR_S)
    assert not engine.line.runs.is_set()
    fleet.bucket.write(*range(300))
    engine.line.runs.set()
    fleet.loop.run_until(HOUR_S + MIN_AGE_S / 2)
    assert fleet.bucket.deleted == []


def test_one_that_was_stopped_between_two_attempts_to_delete_deletes_nothing(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has listed has been written again meanwhile."""
    monkeypatch.setattr(listing, "PAUSES_S", (1.5 * LEASE_S,))  # as if it was stopped in the pause
    engine = fleet.begin_with(300)
    engine.line.failing_deletions = 1
    while engine.line.failing_deletions:
        fleet.loop.run_until(fleet.loop.time() + 1.0)
    fleet.bucket.write(*range(300))
    fleet.run(2, per_hour=0)
    assert fleet.bucket.nbytes <= BUDGET


@pytest.mark.parametrize("folder", ["shapes", "foreign"])
def test_a_sweep_that_takes_long_keeps_its_lease(folder: str, fleet: Fleet) -> None:
    more = [f"{PLACE.root}{folder}/{number}" for number in range(3_000)]
    fleet.bucket._objects |= dict.fromkeys(more, (b"", EPOCH_S))
    fleet.begin_with(3_000, engines=3)
    for engine in fleet.engines:
        engine.line.page_s = LEASE_S / 25
    fleet.run(3, per_hour=0)
    assert len(fleet.sweepers) == 1
    assert fleet.bucket.nbytes <= BUDGET + len(more) * NBYTES


@pytest.mark.parametrize("conditional", [True, False])
def test_of_two_that_take_the_lease_at_once_one_has_it(conditional: bool) -> None:
    fleet = Fleet(conditional=conditional)
    fleet.rng.uniform = lambda a, b: (a + b) / 2  # chance treats all alike
    fleet.start(3, max_bytes=BUDGET)
    fleet.run(1, per_hour=0)
    assert len(fleet.sweepers) == 1
    fleet.loop.give_up()


@pytest.mark.parametrize(
    "lease",
    [
        *(b"\xff not JSON", b'{"holder": "\xe1("}', b"[]"),
        *(b'{"holder":"x","refresh_after_s":%s}' % n for n in b'0 1e-9 14.9 -60 NaN ""'.split()),
    ],
)
def test_a_lease_without_sense_is_somebodys_until_it_is_old(lease: bytes, fleet: Fleet) -> None:
    """Anybody may have written it, and the age of an object is divided by what it says."""
    fleet.bucket._objects[keys.cleaner("s3kv")] = (lease, EPOCH_S)
    fleet.start(1, max_bytes=BUDGET)
    fleet.engines[0].refresh_after_s = 1.0
    fleet.loop.run_until(LEASE_S - 1)
    assert fleet.sweepers == []
    assert fleet.engines[0].refresh_after_s == math.inf
    fleet.run(1, per_hour=0)
    assert len(fleet.sweepers) == 1


def test_a_lease_whose_age_no_answer_tells_is_said_not_to_be_enforced(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be somebody's for ever, though its holder is long gone."""
    fleet.bucket._objects[keys.cleaner("s3kv")] = (b'{"holder":"gone"}', EPOCH_S)
    monkeypatch.setattr(fleet.bucket, "_told", fleet.bucket._info)
    fleet.start(1, max_bytes=BUDGET)
    fleet.run(3, per_hour=0)
    assert caplog.text.count("cannot enforce bucket_bytes") == 1
    assert "no Date" in caplog.text


def test_who_may_not_delete_says_so_once(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    fleet.start(1, max_bytes=BUDGET)
    fleet.engines[0].line.error = StoreDenied("s3:DeleteObject is not allowed")
    fleet.run(24, per_hour=0)
    (said,) = caplog.messages
    assert "bucket_bytes" in said
    assert "s3:DeleteObject" in said
    assert 20 < fleet.engines[0].cleaner.failed < 30
