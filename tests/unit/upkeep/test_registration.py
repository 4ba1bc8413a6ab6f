"""Which namespace this is and why, told once, in the way of nobody."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lab.memory_store import MemoryStore, Refusing
from s3kv.errors import StoreDenied, StoreUnavailable
from s3kv.objects.keys import Namespace, canonical_json, fingerprint_digest, parse_sign
from s3kv.objects.manifest import MAX_MANIFEST_BYTES, leaves
from s3kv.place import Place
from s3kv.stores.store import read_small
from s3kv.upkeep.registration import Registration, introduce

BASE: dict[str, Any] = {
    "model": {"name": "m", "dtype": "torch.bfloat16", "config": {"rope": {"theta": 1e4}}},
    "ranks": {"tensor": 1},
    "chunk_tokens": 256,
}


NAMESPACE, MANIFEST = Namespace("s3kv", fingerprint_digest(BASE)), canonical_json(BASE)


async def meet(store: MemoryStore, *shapes: str) -> str:
    return await introduce(store, Registration(NAMESPACE, MANIFEST, shapes))


async def read(store: MemoryStore, key: str) -> bytes | None:
    came = await read_small(store, key, MAX_MANIFEST_BYTES)
    return came and came[1]


async def test_the_first_writes_it_and_the_second_knows_it() -> None:
    store = MemoryStore()
    assert f"{NAMESPACE.root} is new; if others are under s3kv/" in await meet(store)
    assert await read(store, NAMESPACE.manifest) == MANIFEST
    assert fingerprint_digest(json.loads(MANIFEST)) == NAMESPACE.digest
    assert f"{NAMESPACE.root} is known" in await meet(store)


async def test_the_shapes_of_every_engine_are_listed_beside_it() -> None:
    store = MemoryStore()
    await meet(store, "h0-3of8-l0-31of32", "h4-7of8-l0-31of32")
    await meet(store, "h0-7of8-l0-31of32")
    shapes = [info async for info in store.list(f"{NAMESPACE.root}shapes/")]
    names = [info.key.rpartition("/")[2] for info in shapes]
    assert names == ["h0-3of8-l0-31of32", "h0-7of8-l0-31of32", "h4-7of8-l0-31of32"]
    assert all(info.nbytes == 0 and parse_sign(info.key) == NAMESPACE for info in shapes)


async def test_a_bucket_that_may_only_be_read_or_is_full() -> None:
    store = Refusing("put", StoreDenied("s3:PutObject"))
    assert "is new (it has no manifest: writing one was denied)" in await meet(store)
    store.hold(NAMESPACE.manifest, MANIFEST)
    assert "is known" in await meet(store)
    full = Refusing("put", StoreUnavailable("507 disk full"), "/shapes/")
    assert f"{NAMESPACE.root} is new" in await meet(full, "h0-7of8-l0-31of32")


@pytest.mark.parametrize(
    ("opening", "values", "closing"),
    [(b'{"' + b"k" * 20_000 + b'":', 100, b"}"), (b'{"k":' * 900, 100, b"}" * 900)],
    ids=["a long name", "deep"],
)
def test_the_names_of_the_fields_of_others_are_cut_short(
    opening: bytes, values: int, closing: bytes
) -> None:
    """Or those of a manifest with a long one and many values would be gigabytes."""
    found = leaves(opening + b"[" + b",".join([b"1"] * values) + b"]" + closing)
    assert found
    assert max(map(len, found)) <= 1000
    assert leaves(b'{"k":[1' + b",1" * 10_000 + b"]}") is None


def test_every_value_has_the_names_of_all_around_it() -> None:
    tree = {"a": {"b": [1, {"c": None}]}, "d": [], "e": {}, "": {"f": "x"}, "g": [[2, 3]]}
    tree["\x1b"] = 4  # as JSON has it: raw, it would control a terminal
    named = {"a.b.0": "1", "a.b.1.c": "null", "d": "[]", "e": "{}", "f": '"x"'}
    assert leaves(json.dumps(tree).encode()) == named | {"g.0.0": "2", "g.0.1": "3", r"\u001b": "4"}


async def test_a_manifest_that_is_damaged_is_said_to_be() -> None:
    store = MemoryStore()
    for body in (b"{}", b"x" * (MAX_MANIFEST_BYTES + 1)):
        await store.put(NAMESPACE.manifest, Place.of(body), if_absent=False)
        assert "its manifest is damaged" in await meet(store)
        assert await store.head(NAMESPACE.manifest) is not None
