"""The sweep of a bucket: what goes, what stays, and what an engine notices."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from lab.memory_store import MemoryStore
from s3kv.errors import StoreUnavailable
from s3kv.objects.keys import Namespace, cleaner
from s3kv.place import Place
from s3kv.stores.store import ObjectInfo
from s3kv.types import ChunkKey
from s3kv.upkeep import listing
from s3kv.upkeep import sweep as sweeping
from s3kv.upkeep.sweep import Sweep
from tests.unit.cli.conftest import chunk

OLD, NEW = Namespace("s3kv", "a" * 32), Namespace("s3kv", "b" * 32)
OTHERS = (
    "s3kv/v3/readme.txt",
    f"s3kv/v3/{'c' * 32}/00/notes",
    "s3kv/doctor/1",
    Namespace("other", "a" * 32).chunk(ChunkKey(0, b"\0"), "h0-7of8-l0-31of32"),
    Namespace("s3kv/v3/nested", "a" * 32).chunk(ChunkKey(0, b"\0"), "h0-7of8-l0-31of32"),
)
"""Keys that are no namespace's under s3kv."""


class Bucket(MemoryStore):
    """Objects whose last write is what `now_s` was then."""

    def __init__(self) -> None:
        super().__init__(lambda: self.now_s)
        self.now_s = 1e9
        self.before_delete: dict[str, bytes] = {}
        """Written by somebody else between the listing and the deletion."""
        self.after_look: dict[str, bytes] = {}
        """The same, between the second look and the deletion."""

    async def fill(self, place: Namespace, numbers: Sequence[int], nbytes: int = 100) -> None:
        for number in numbers:
            self.now_s = 1e9 + number
            await self.write(chunk(place, number), bytes([number]) * nbytes)

    async def write(self, key: str, data: bytes) -> None:
        await self.put(key, Place.of(data), if_absent=False)

    async def head(self, key: str) -> ObjectInfo | None:
        self.now_s = 2e9
        if key in self.before_delete:
            await self.write(key, self.before_delete.pop(key))
        return await super().head(key)

    async def delete_many(self, objects: Sequence[ObjectInfo]) -> Sequence[str]:
        assert len(objects) <= sweeping.MAX_BATCH
        for key, data in self.after_look.items():
            await self.write(key, data)
        return await super().delete_many(objects)

    async def keys(self) -> set[str]:
        return {info.key async for info in self.list("")}


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


async def sweep(bucket: MemoryStore, **options: Any) -> Sweep:
    run = Sweep(bucket, "s3kv", **options)
    await run.run()
    return run


async def test_the_young_stay_even_beyond_the_budget(bucket: Bucket) -> None:
    await bucket.fill(OLD, range(10))
    run = await sweep(bucket, max_bytes=0, before_s=2e9, spare_s=1e9 + 7)
    assert await bucket.keys() == {chunk(OLD, number) for number in (7, 8, 9)}
    assert run.oldest_s == 1e9 + 7


async def test_the_second_in_which_the_young_begin_is_split_at_no_place(bucket: Bucket) -> None:
    """Of the objects of one second some may go for the budget, but none that is young."""
    await bucket.fill(OLD, [1, 7])
    bucket.now_s = 1e9 + 7.6
    for number in (70, 71, 72):
        await bucket.write(chunk(OLD, number), bytes(100))
    await sweep(bucket, max_bytes=100, spare_s=1e9 + 7.5)
    assert await bucket.keys() == {chunk(OLD, number) for number in (7, 70, 71, 72)}


async def test_a_checkpoint_comes_before_every_attempt_to_delete_and_can_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listing, "PAUSES_S", (0.0, 0.0))
    told: list[str] = []

    class Unlucky(Bucket):
        async def delete_many(self, objects: Sequence[ObjectInfo]) -> Sequence[str]:
            told.append("attempt")
            raise StoreUnavailable("planned")

    async def checkpoint() -> None:
        told.append("checkpoint")
        if len(told) > 4:
            raise LookupError

    bucket = Unlucky()
    await bucket.fill(OLD, range(3))
    with pytest.raises(LookupError):
        await sweep(bucket, max_bytes=0, look_again=False, checkpoint=checkpoint)
    assert told == ["checkpoint", "attempt"] * 2 + ["checkpoint"]
    assert len(await bucket.keys()) == 3


async def test_the_oldest_go_first_whatever_namespace_they_are_in(bucket: Bucket) -> None:
    await bucket.fill(OLD, range(0, 10, 2))
    await bucket.fill(NEW, range(1, 10, 2))
    run = await sweep(bucket, max_bytes=350)
    assert await bucket.keys() == {chunk(NEW, 7), chunk(OLD, 8), chunk(NEW, 9)}
    old, new = run.namespaces[OLD.digest], run.namespaces[NEW.digest]
    assert (old.deleted_objects, old.deleted_bytes, old.kept_objects) == (4, 400, 1)
    assert (new.deleted_objects, new.kept_objects, new.kept_bytes) == (3, 2, 200)


async def test_what_is_older_goes_even_within_the_budget(bucket: Bucket) -> None:
    await bucket.fill(OLD, range(10))
    await sweep(bucket, before_s=1e9 + 4, max_bytes=10_000)
    assert await bucket.keys() == {chunk(OLD, number) for number in range(4, 10)}


async def test_a_manifest_and_shapes_go_last_and_only_with_their_namespace(bucket: Bucket) -> None:
    for place in (OLD, NEW):
        await bucket.write(place.manifest, b"{}")
        await bucket.write(place.shape("h0-7of8-l0-31of32"), b"")
    await bucket.fill(OLD, [1, 2])
    await bucket.fill(NEW, [3, 4])
    run = await sweep(bucket, max_bytes=100)
    assert await bucket.keys() == {NEW.manifest, NEW.shape("h0-7of8-l0-31of32"), chunk(NEW, 4)}
    assert run.namespaces[OLD.digest].manifest_deleted
    assert not run.namespaces[NEW.digest].manifest_deleted


async def test_what_a_run_cannot_hold_is_left_for_the_next(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "MOST_HELD", 3)
    monkeypatch.setattr(sweeping, "MAX_BATCH", 1)
    for number in range(5):
        place = Namespace("s3kv", f"{number:032x}")
        await bucket.fill(place, [1])
        await bucket.write(place.manifest, b"{}")
        await bucket.write(place.shape("whole"), b"")
    runs = [(await sweep(bucket, max_bytes=0), len(await bucket.keys())) for _ in range(4)]
    assert [left for _, left in runs] == [7, 4, 1, 0]
    assert runs[0][0].namespaces["others"].deleted_objects == 2


async def test_a_manifest_stays_when_somebody_has_written_meanwhile(bucket: Bucket) -> None:
    await bucket.write(OLD.manifest, b"{}")
    await bucket.fill(OLD, [1])
    bucket.after_look = {chunk(OLD, 5): b"new"}
    await sweep(bucket, max_bytes=0)
    assert await bucket.keys() == {OLD.manifest, chunk(OLD, 5)}


async def test_nobody_elses_objects_are_touched(bucket: Bucket) -> None:
    foreign = {*OTHERS, cleaner("s3kv")}
    for key in foreign:
        await bucket.write(key, b"theirs" * 1000)
    await bucket.fill(OLD, [1])
    await sweep(bucket, max_bytes=0, before_s=2e9)
    assert await bucket.keys() == foreign


@pytest.mark.parametrize(
    ("when", "data"),
    [("before_delete", b"\1" * 100), ("before_delete", b"another"), ("after_look", b"another")],
    ids=["refreshed", "replaced", "replaced at the last moment"],
)
async def test_an_object_that_was_written_after_it_was_listed_stays(
    bucket: Bucket, when: str, data: bytes
) -> None:
    await bucket.fill(OLD, range(3))
    setattr(bucket, when, {chunk(OLD, 1): data})
    run = await sweep(bucket, max_bytes=0)
    assert await bucket.keys() == {chunk(OLD, 1)}
    swept = run.namespaces[OLD.digest]
    assert (swept.deleted_objects, swept.changed, swept.kept_objects) == (2, 1, 1)


async def test_a_dry_run_tells_the_same_and_does_nothing(bucket: Bucket) -> None:
    await bucket.write(OLD.manifest, b"{}")
    await bucket.fill(OLD, range(10))
    before = await bucket.keys()
    told = await sweep(bucket, max_bytes=0, dry_run=True)
    assert await bucket.keys() == before
    assert told.namespaces == (await sweep(bucket, max_bytes=0)).namespaces
    assert await bucket.keys() == set()


class Flaky(Bucket):
    """Breaks off every third request and every listing after 40 keys."""

    async def begin(self, verb: str, key: str) -> None:
        if verb == "head" and self.asked[verb] % 3 == 2:
            self.asked[verb] += 1
            raise StoreUnavailable("planned")
        await super().begin(verb, key)

    async def list(self, prefix: str, after: str = "") -> Any:
        given = 0
        async for info in super().list(prefix, after):
            yield info
            given += 1
            if given == 40:
                raise StoreUnavailable("planned")


async def test_it_gets_through_a_bucket_that_stumbles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "PAUSES_S", (0.0,) * 30)
    bucket = Flaky()
    await bucket.fill(OLD, range(200))
    assert (await sweep(bucket, max_bytes=5_000)).namespaces[OLD.digest].kept_objects == 50
    assert bucket._objects.keys() == {chunk(OLD, number) for number in range(150, 200)}


@pytest.mark.parametrize(("remembered", "listings"), [(0, 2), (5, 2), (6, 1), (10, 1), (100, 1)])
async def test_what_is_remembered_is_not_listed_again(
    remembered: int, listings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "REMEMBERED", remembered)
    bucket = Bucket()
    await bucket.fill(OLD, range(0, 10, 2))
    await bucket.fill(NEW, range(1, 10, 2))
    run = await sweep(bucket, max_bytes=400, look_again=False)
    assert bucket.asked["list"] == listings
    assert await bucket.keys() == {chunk((OLD, NEW)[n % 2], n) for n in range(6, 10)}
    old, new = run.namespaces[OLD.digest], run.namespaces[NEW.digest]
    assert (old.deleted_objects, old.kept_bytes) == (3, 200)
    assert (new.deleted_objects, new.kept_bytes) == (3, 200)


@pytest.mark.parametrize("seed", range(30))
async def test_what_is_remembered_makes_no_difference(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    numbers = [rng.randrange(20) for _ in range(30)]
    left = []
    for remembered in (0, rng.randrange(1, 30)):
        bucket = Bucket()
        for place, number in enumerate(numbers):
            bucket.now_s = 1e9 + number + place / 100
            await bucket.write(chunk((OLD, NEW)[place % 2], place), b"x" * 100)
        options = {"max_bytes": 100 * (seed % 20), "spare_s": 1e9 + 15}
        monkeypatch.setattr(sweeping, "REMEMBERED", remembered)
        await sweep(bucket, look_again=False, **options)
        left.append(len(await bucket.keys()))
    assert left[0] == left[1]
