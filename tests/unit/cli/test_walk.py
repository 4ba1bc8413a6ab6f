"""The content of a bucket: what is seen and counted of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lab.memory_store import MemoryStore
from s3kv.cli import walk
from s3kv.cli.show import DAY_S, HOUR_S
from s3kv.cli.walk import NamespaceContent
from s3kv.errors import ConfigError, StoreDenied
from s3kv.objects.keys import Namespace, canonical_json, fingerprint_digest
from s3kv.place import Place
from s3kv.stores.store import ObjectInfo
from s3kv.types import ChunkKey

HALF = {"model": {"name": "m@main", "dtype": "half"}, "chunk_tokens": 256}
FULL = {"model": {"name": "m@main", "dtype": "float"}, "chunk_tokens": 256}
HALVES, FULLS = (Namespace("s3kv", fingerprint_digest(f)) for f in (HALF, FULL))


def key(place: Namespace, number: int) -> str:
    return place.chunk(ChunkKey(0, bytes([number])), "h0-7of8-l0-31of32")


async def filled() -> MemoryStore:
    store = MemoryStore(clock=lambda: 1e9)
    nested = Namespace("s3kv/v2/nested", "c" * 32)
    objects = {
        HALVES.manifest: canonical_json(HALF),
        FULLS.manifest: canonical_json(FULL),
        key(HALVES, 1): b"1" * 10,
        key(HALVES, 2): b"1" * 10,
        key(FULLS, 1): b"1" * 100,
        f"{HALVES.root}somebody-elses": b"1" * 1000,
        "other/v2/elsewhere": b"1" * 1000,
        key(nested, 1): b"1" * 1000,
    }
    for name, data in objects.items():
        await store.put(name, Place.of(data), if_absent=True)
    return store


async def test_namespaces_are_counted_the_largest_first() -> None:
    store = await filled()
    known = [await walk.describe(store, HALVES)]
    large, small = await walk.count(store, "s3kv", known, 1e9)
    assert (large.namespace, large.objects, large.nbytes, large.model) == (FULLS, 1, 100, None)
    assert (small.namespace, small.objects, small.nbytes, small.model) == (HALVES, 2, 20, "m@main")
    assert small.bytes_by_age["under 1 h"] == 20


async def test_the_fields_in_which_manifests_differ() -> None:
    found = await walk.namespaces(await filled(), "s3kv")
    assert {one.namespace for one in found} == {HALVES, FULLS}
    assert walk.differing(found) == ["model.dtype"]
    assert walk.differing([*found, NamespaceContent(HALVES)]) == ["model.dtype"]
    assert walk.differing(found[:1]) == []


async def test_a_manifest_that_the_namespace_is_not_named_after_does_not_count() -> None:
    store = MemoryStore()
    await store.put(FULLS.manifest, Place.of(canonical_json(HALF)), if_absent=True)
    assert (await walk.describe(store, FULLS)).manifest == {}


@pytest.mark.parametrize("start", ["", "no-such-namespace"])
async def test_a_beginning_that_does_not_name_one_namespace(start: str) -> None:
    with pytest.raises(ConfigError, match=HALVES.digest):
        await walk.resolve(await filled(), "s3kv", start)


async def test_a_beginning_where_there_is_no_namespace() -> None:
    with pytest.raises(ConfigError, match=r"exactly one \(none exists\)$"):
        await walk.resolve(MemoryStore(), "s3kv", "a")


@pytest.mark.parametrize(
    ("age_s", "name"),
    [
        (-5.0, "under 1 h"),
        (HOUR_S - 1, "under 1 h"),
        (HOUR_S, "1 h to 1 d"),
        (DAY_S, "1 to 7 d"),
        (7 * DAY_S, "7 to 30 d"),
        (30 * DAY_S, "over 30 d"),
        (9000 * DAY_S, "over 30 d"),
    ],
)
def test_ages(age_s: float, name: str) -> None:
    content = NamespaceContent(HALVES)
    content.add(ObjectInfo("key", 7, 1e9 - age_s), 1e9)
    assert {n: b for n, b in content.bytes_by_age.items() if b} == {name: 7}


class OnlyUnderThePrefix(MemoryStore):
    async def folders(self, prefix: str, limit: int) -> Sequence[str]:
        if not prefix.startswith("s3kw/"):
            raise StoreDenied("not allowed")
        return await super().folders(prefix, limit)


async def test_who_may_list_the_prefix_alone_learns_that_it_is_empty(
    capsys: pytest.CaptureFixture[str],
) -> None:
    await walk.report_empty(OnlyUnderThePrefix(), "bkt", "s3kw")
    assert capsys.readouterr().err == "s3kv: nothing of s3kv is under 's3kw/' in 'bkt'\n"
