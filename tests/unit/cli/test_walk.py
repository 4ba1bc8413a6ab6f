"""The content of a bucket: what is seen and counted of it."""

from __future__ import annotations

import asyncio

import pytest

from lab.memory_store import MemoryStore
from s3kv.cli import walk
from s3kv.cli.show import DAY_S, HOUR_S
from s3kv.cli.walk import NamespaceContent
from s3kv.errors import ConfigError, StoreDenied
from s3kv.objects.keys import Namespace
from s3kv.place import Place
from s3kv.stores.store import ObjectInfo
from s3kv.types import ChunkKey


async def test_a_beginning_where_there_is_no_namespace() -> None:
    with pytest.raises(ConfigError, match=r"exactly one \(none exists\)$"):
        await walk.resolve(MemoryStore(), "s3kv", "a")


async def test_of_many_namespaces_some_are_named() -> None:
    store = MemoryStore()
    for number in range(7):
        key = f"{Namespace('s3kv', f'a{number:031x}').root}x"
        await store.put(key, Place.of(bytearray(1)), if_absent=True)
    named = r"^NAMESPACE is 'a', and 7 .* one of (\w{32}(, )?){5} and 2 others$"
    with pytest.raises(ConfigError, match=named):
        await walk.resolve(store, "s3kv", "a")


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
    content = NamespaceContent(Namespace("s3kv", "a" * 32))
    content.add(ObjectInfo("key", 7, 1e9 - age_s), 1e9)
    assert {n: b for n, b in content.bytes_by_age.items() if b} == {name: 7}


async def test_a_count_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "_REPORT_EVERY", 1)
    store = MemoryStore()
    store.hold(Namespace("s3kv", "a" * 32).chunk(ChunkKey(0, bytes(32)), "whole"), b"x")
    counting = asyncio.ensure_future(
        walk.count(store, "s3kv", [], 0.0, on_progress=lambda *_: counting.cancel())
    )
    with pytest.raises(asyncio.CancelledError):
        await counting


class OnlyUnderThePrefix(MemoryStore):
    async def begin(self, verb: str, key: str) -> None:
        if not key.startswith("s3kw/"):
            raise StoreDenied("not allowed")


async def test_who_may_list_the_prefix_alone_learns_that_it_is_empty(
    capsys: pytest.CaptureFixture[str],
) -> None:
    await walk.report_empty(OnlyUnderThePrefix(), "bkt", "s3kw")
    assert capsys.readouterr().err == "s3kv: nothing of s3kv is under 's3kw/' in 'bkt'\n"
