"""What the bucket index believes, and for how long."""

from __future__ import annotations

from time import process_time

import pytest

from s3kv.planning.index import BucketIndex
from s3kv.types import ChunkKey


def key(number: int, group: int = 0) -> ChunkKey:
    return ChunkKey(group, number.to_bytes(32, "little"))


def test_verdicts_replace_each_other() -> None:
    index = BucketIndex(capacity=100, miss_ttl_s=10.0)
    assert index.verdict(key(1), 0.0) is None
    index.note_present(key(1))
    index.note_absent(key(1), 0.0)
    assert index.verdict(key(1), 9.9) is False
    assert index.verdict(key(1), 10.0) is None
    index.note_present(key(1))
    assert not index.is_absent(key(1), 0.0)
    assert len(index) == 1


def test_groups_are_told_apart() -> None:
    index = BucketIndex(capacity=100, miss_ttl_s=10.0)
    index.note_present(key(1))
    assert not index.is_present(key(1, group=1))
    assert not index.is_present(ChunkKey(0, key(1).block_hash[:31] + b"x"))
    index.note_absent(key(1, group=1), 0.0)
    assert index.is_present(key(1))


@pytest.mark.parametrize("count", [9, 10, 11, 1_000])
def test_what_is_known_is_bounded_and_the_newest_is_kept(count: int) -> None:
    index = BucketIndex(capacity=10, miss_ttl_s=1e9)
    for number in range(count):
        index.note_present(key(number))
        index.note_absent(key(10_000 + number), float(number))
    newest = range(count - 5, count)
    assert len(index) <= 15
    assert all(index.is_present(key(n)) for n in newest)
    assert all(index.is_absent(key(10_000 + n), float(count)) for n in newest[-2:])


def test_expired_misses_are_forgotten() -> None:
    index = BucketIndex(capacity=1_000, miss_ttl_s=1.0)
    for number in range(100):
        index.note_absent(key(number), number / 100)
    index.note_absent(key(100), 1.0)
    assert index.is_absent(key(1), 1.0)
    index.note_absent(key(101), 2.0)
    assert len(index) == 2


def test_a_miss_costs_the_same_among_many_others() -> None:
    """Cold prompts ask for 64 chunks each, on the engine's thread."""

    def seconds(alive: int) -> float:
        index, taken = BucketIndex(capacity=10**6, miss_ttl_s=float(alive)), []
        for number in range(4 * alive):
            began = process_time()
            index.note_absent(key(number), float(number))
            taken.append(process_time() - began)
        return sum(taken[-10_000:])

    assert min(seconds(40_000) for _ in range(3)) < 5 * min(seconds(2_500) for _ in range(3))


def test_noting_the_same_again_forgets_nothing() -> None:
    index = BucketIndex(capacity=4, miss_ttl_s=1.0)
    for number in (1, 2, 3, 4):
        index.note_present(key(number))
    for _ in range(10):
        index.note_present(key(4))
    assert index.is_present(key(1))
