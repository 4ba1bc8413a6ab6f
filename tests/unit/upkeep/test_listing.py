"""The walk over a bucket: which objects it sees, and how it goes on after a failure."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from lab.memory_store import MemoryStore
from s3kv.errors import StoreError, StoreUnavailable
from s3kv.place import Place
from s3kv.stores.store import ObjectInfo
from s3kv.upkeep import listing


class Breaking(MemoryStore):
    """Breaks off each listing after `given` keys; `obeys`: begins after the key it is told."""

    def __init__(self, given: int, *, obeys: bool = True) -> None:
        super().__init__()
        self.given, self.obeys = given, obeys

    async def list(self, prefix: str, after: str = "") -> AsyncIterator[ObjectInfo]:
        count = 0
        async for info in super().list(prefix, after if self.obeys else ""):
            if count == self.given:
                raise StoreUnavailable("planned")
            count += 1
            yield info


async def broken(store: Breaking) -> list[str]:
    for number in range(7):
        await store.put(f"k{number}", Place.of(b"x"), if_absent=True)
    return [info.key async for info in listing.listed(store, "k")]


async def test_a_listing_that_breaks_off_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "PAUSES_S", (0.0, 0.0))
    assert await broken(Breaking(2)) == [f"k{number}" for number in range(7)]
    with pytest.raises(StoreUnavailable):
        await broken(Breaking(0))
    with pytest.raises(StoreError, match="cannot be resumed"):
        await broken(Breaking(2, obeys=False))


async def test_a_call_is_tried_again_only_while_the_store_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listing, "PAUSES_S", (0.0, 0.0))
    errors: list[StoreError] = [StoreUnavailable("planned"), StoreUnavailable("planned")]

    async def call() -> str:
        if errors:
            raise errors.pop()
        return "answer"

    assert await listing.tried(call) == "answer"
    errors = [StoreUnavailable("planned"), StoreError("refused")]
    with pytest.raises(StoreError, match="refused"):
        await listing.tried(call)
    assert len(errors) == 1
