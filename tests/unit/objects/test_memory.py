"""The store in memory, by the suite that every store has to pass; its ages follow its clock."""

from __future__ import annotations

import pytest

from s3kv.objects.memory import MemoryStore
from tests.unit.objects.suite import ObjectStoreSuite


class TestMemoryStore(ObjectStoreSuite):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()


async def test_an_age_is_the_time_since_the_write() -> None:
    now = [1_000.0]
    store = MemoryStore(clock=lambda: now[0])
    await store.put("k", memoryview(b"x"), if_absent=True)
    now[0] += 60
    info = await store.head("k")
    assert info is not None
    assert (info.modified_s, info.age_s) == (1_000.0, 60.0)
    assert await store.refresh("k", 999.0) is False
    assert await store.refresh("k", 1_000.0) is True
    info = await store.get_into("k", memoryview(bytearray(1)))
    assert info is not None
    assert (info.modified_s, info.age_s) == (1_060.0, 0.0)
