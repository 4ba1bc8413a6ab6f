"""`s3kv gc`: what goes, what stays, and what an engine notices."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lab.faults import s3_error
from lab.memory_store import MemoryStore
from lab.proxy import proxy
from s3kv.cli import walk
from s3kv.cli.gc import Sweep
from s3kv.config import Config
from s3kv.errors import StoreUnavailable
from s3kv.library.tiered_store import TieredStore
from s3kv.objects.keys import Namespace
from s3kv.objects.s3.s3_store import open_store
from s3kv.objects.store import ObjectInfo
from s3kv.types import ChunkKey
from tests import servers
from tests.unit.cli.conftest import Run

OLD, NEW = Namespace("s3kv", "a" * 32), Namespace("s3kv", "b" * 32)
FOREIGN = (
    "s3kv/v2/readme.txt",
    f"s3kv/v2/{'c' * 32}/00/notes",
    "s3kv/doctor/1",
    Namespace("other", "a" * 32).chunk(ChunkKey(0, b"\0"), "h0-7of8-l0-31of32"),
    Namespace("s3kv/v2/nested", "a" * 32).chunk(ChunkKey(0, b"\0"), "h0-7of8-l0-31of32"),
)


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
        await self.put(key, memoryview(data), if_absent=False)

    async def head(self, key: str) -> ObjectInfo | None:
        self.now_s = 2e9
        if key in self.before_delete:
            await self.write(key, self.before_delete.pop(key))
        return await super().head(key)

    async def delete_many(self, objects: Sequence[ObjectInfo]) -> Sequence[str]:
        for key, data in self.after_look.items():
            await self.write(key, data)
        return await super().delete_many(objects)

    async def keys(self) -> set[str]:
        return {info.key async for info in self.list("")}


def chunk(place: Namespace, number: int) -> str:
    return place.chunk(ChunkKey(0, hashlib.sha256(bytes([number])).digest()), "h0-7of8-l0-31of32")


async def sweep(bucket: MemoryStore, **options: Any) -> Sweep:
    run = Sweep(bucket, "s3kv", **options)
    await run.run()
    return run


async def test_the_oldest_go_first_whatever_namespace_they_are_in() -> None:
    bucket = Bucket()
    await bucket.fill(OLD, range(0, 10, 2))
    await bucket.fill(NEW, range(1, 10, 2))
    run = await sweep(bucket, max_bytes=350)
    assert await bucket.keys() == {chunk(NEW, 7), chunk(OLD, 8), chunk(NEW, 9)}
    old, new = run.namespaces[OLD.digest], run.namespaces[NEW.digest]
    assert (old.deleted_objects, old.deleted_bytes, old.kept_objects) == (4, 400, 1)
    assert (new.deleted_objects, new.kept_objects, new.kept_bytes) == (3, 2, 200)


async def test_what_is_older_goes_even_within_the_budget() -> None:
    bucket = Bucket()
    await bucket.fill(OLD, range(10))
    await sweep(bucket, before_s=1e9 + 4, max_bytes=10_000)
    assert await bucket.keys() == {chunk(OLD, number) for number in range(4, 10)}


async def test_a_manifest_and_shapes_go_last_and_only_with_their_namespace() -> None:
    bucket = Bucket()
    for place in (OLD, NEW):
        await bucket.write(place.manifest, b"{}")
        await bucket.write(place.shape("h0-7of8-l0-31of32"), b"")
    await bucket.fill(OLD, [1, 2])
    await bucket.fill(NEW, [3, 4])
    run = await sweep(bucket, max_bytes=100)
    assert await bucket.keys() == {
        NEW.manifest,
        NEW.shape("h0-7of8-l0-31of32"),
        chunk(NEW, 4),
    }
    assert run.namespaces[OLD.digest].manifest_deleted
    assert not run.namespaces[NEW.digest].manifest_deleted


async def test_a_manifest_stays_when_somebody_has_written_meanwhile() -> None:
    bucket = Bucket()
    await bucket.write(OLD.manifest, b"{}")
    await bucket.fill(OLD, [1])
    bucket.after_look = {chunk(OLD, 5): b"new"}
    await sweep(bucket, max_bytes=0)
    assert await bucket.keys() == {OLD.manifest, chunk(OLD, 5)}


async def test_nobody_elses_objects_are_touched() -> None:
    bucket = Bucket()
    for key in FOREIGN:
        await bucket.write(key, b"theirs" * 1000)
    await bucket.fill(OLD, [1])
    await sweep(bucket, max_bytes=0, before_s=2e9)
    assert await bucket.keys() == set(FOREIGN)


@pytest.mark.parametrize("data", [b"\1" * 100, b"another"], ids=["refreshed", "replaced"])
async def test_what_was_written_after_it_was_listed_stays(data: bytes) -> None:
    bucket = Bucket()
    await bucket.fill(OLD, range(3))
    bucket.before_delete = {chunk(OLD, 1): data}
    run = await sweep(bucket, max_bytes=0)
    assert await bucket.keys() == {chunk(OLD, 1)}
    swept = run.namespaces[OLD.digest]
    assert (swept.deleted_objects, swept.changed, swept.kept_objects) == (2, 1, 1)


async def test_what_was_replaced_at_the_last_moment_stays() -> None:
    bucket = Bucket()
    await bucket.fill(OLD, range(3))
    bucket.after_look = {chunk(OLD, 1): b"another"}
    run = await sweep(bucket, max_bytes=0)
    assert await bucket.keys() == {chunk(OLD, 1)}
    assert run.namespaces[OLD.digest].changed == 1


async def test_a_dry_run_tells_the_same_and_does_nothing() -> None:
    bucket = Bucket()
    await bucket.write(OLD.manifest, b"{}")
    await bucket.fill(OLD, range(10))
    before = await bucket.keys()
    told = await sweep(bucket, max_bytes=0, dry_run=True)
    assert await bucket.keys() == before
    done = await sweep(bucket, max_bytes=0)
    assert told.namespaces == done.namespaces
    assert await bucket.keys() == set()


class Flaky(Bucket):
    """Breaks off every third request and every listing after 40 keys."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    async def list(self, prefix: str, after: str = "") -> Any:
        given = 0
        async for info in super().list(prefix, after):
            yield info
            given += 1
            if given == 40:
                raise StoreUnavailable("planned")

    async def head(self, key: str) -> ObjectInfo | None:
        self.asked += 1
        if self.asked % 3 == 0:
            raise StoreUnavailable("planned")
        return await super().head(key)


async def test_it_gets_through_a_bucket_that_stumbles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "PAUSES_S", (0.0,) * 30)
    bucket = Flaky()
    await bucket.fill(OLD, range(200))
    run = await sweep(bucket, max_bytes=5_000)
    assert run.namespaces[OLD.digest].kept_objects == 50
    assert bucket._objects.keys() == {chunk(OLD, number) for number in range(150, 200)}


def fill(boto: Any, count: int = 12) -> None:
    for number in range(count):
        boto.put_object(Bucket=servers.BUCKET, Key=chunk(OLD, number), Body=b"x" * 1000)


def left(boto: Any) -> int:
    return int(boto.list_objects_v2(Bucket=servers.BUCKET)["KeyCount"])


def test_the_command(run: Run, boto: Any) -> None:
    fill(boto)
    told = run("gc", "--max-bytes", "5kB", "--dry-run", "--json")
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["deleted_bytes"] == 7000
    assert left(boto) == 12
    done = run("gc", "--max-bytes", "5kB")
    assert done.exit_code == 0, done.output
    assert left(boto) == 5
    assert OLD.digest in done.stdout
    assert json.loads(run("gc", "--older-than", "1h", "--json").stdout)["deleted_bytes"] == 0
    assert left(boto) == 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--max-bytes, --older-than or both"),
        (["--max-bytes", "many"], "is not a size"),
        (["--older-than", "yesterday"], "is not a time"),
    ],
)
def test_the_command_used_wrongly(run: Run, arguments: list[str], said: str) -> None:
    result = run("gc", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_who_may_not_delete_is_told_so(run: Run, boto: Any, url: str) -> None:
    fill(boto)
    with proxy(url) as between:
        between.fault(s3_error(403, "AccessDenied", verbs=("POST",)))
        result = run("gc", "--max-bytes", "0", at=between.url)
    assert result.exit_code == 3
    assert "s3:DeleteObject" in result.stderr
    assert left(boto) == 12


async def test_what_is_deleted_under_a_live_engine_costs_it_one_404(url: str, boto: Any) -> None:
    """It believes the chunk to be in the bucket, asks once, computes, and saves it again."""
    config = Config(bucket=servers.BUCKET, endpoint_url=url, host_bytes=2**20)
    shapes = {"k": ((64, 64), torch.float32)}
    blocks = {hashlib.sha256(bytes([n])).digest(): torch.full((64, 64), n) for n in range(80)}
    async with await TieredStore.open(config, shapes=shapes, namespace={"model": "m"}) as store:
        for key, tensor in blocks.items():  # more than fit into host memory
            while not await store.put(key, {"k": tensor.float()}):
                await store.flush()
        await store.flush()
        first = next(iter(blocks))
        assert not store.where(first).host
        assert store.where(first).bucket is True

        client = open_store(config)
        await Sweep(client, "s3kv", max_bytes=0).run()
        await client.close()
        assert left(boto) == 0

        into = {"k": torch.zeros(64, 64)}
        before = dict(store.counters)
        for _ in range(5):
            assert not await store.get(first, into)
        assert store.where(first).bucket is False
        assert store.counters["fetch_missing"] - before.get("fetch_missing", 0) == 1
        assert store.counters["fetches"] - before.get("fetches", 0) == 1
        assert await store.put(first, {"k": blocks[first].float()})
        await store.flush()
        assert left(boto) == 1
        assert await store.get(first, into)
