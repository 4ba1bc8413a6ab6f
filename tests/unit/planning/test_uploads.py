"""Uploads that failed: their pauses, and what a hit does for those that were given up."""

from __future__ import annotations

from s3kv.host.table import Entry
from s3kv.planning.breaker import Breaker
from s3kv.planning.uploads import Unsaved, UploadRetries
from s3kv.types import ChunkKey


def key(number: int) -> ChunkKey:
    return ChunkKey(0, number.to_bytes(4, "big"))


def entry(number: int) -> Entry:
    return Entry(key(number), number, 0, 1, 1)


def test_uploads_are_taken_in_the_order_in_which_they_are_due() -> None:
    retries = UploadRetries()
    for number, attempt in ((1, 1), (2, 0), (3, 0)):
        retries.failed(entry(number), attempt, 0.0)
    assert [retry.entry.number for retry in retries.take_due(60.0)] == [2, 3, 1]


def test_only_what_is_hit_is_taken_and_only_once() -> None:
    unsaved = Unsaved()
    for number in range(3):
        unsaved.add(key(number))
    unsaved.hit(key(2))
    unsaved.hit(key(0))
    unsaved.hit(key(9))
    store = Breaker(threshold=3)
    assert unsaved.take(1, store, 0.0) == [key(2)]
    unsaved.drop(key(0))
    assert unsaved.take(9, store, 0.0) == []
    assert list(unsaved) == [key(1)]
