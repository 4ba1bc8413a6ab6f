"""Where to cut, against sorting everything."""

from __future__ import annotations

import random

import pytest

from s3kv.upkeep.ages import Ages


def counted(objects: list[tuple[float, int]]) -> Ages:
    ages = Ages()
    for modified_s, nbytes in objects:
        ages.add(modified_s, nbytes)
    return ages


@pytest.mark.parametrize("seed", range(100))
def test_the_oldest_go_and_no_more_than_must(seed: int) -> None:
    rng = random.Random(seed)  # replay: the seed is the test's parameter
    span_s = rng.choice([3, 30, 3000])
    objects = [(1e9 + rng.uniform(0, span_s), rng.randrange(1, 100)) for _ in range(200)]
    total = sum(nbytes for _, nbytes in objects)
    ages = counted(objects)
    assert ages.nbytes == total
    max_bytes = rng.randrange(2 * total)
    before_s = rng.choice([0.0, 1e9 + rng.uniform(0, span_s)])
    cut = ages.cut(max_bytes=max_bytes, before_s=before_s)
    rng.shuffle(objects)
    gone = [o for o in objects if cut.takes(*o)]
    kept = [o for o in objects if o not in gone]
    left = sum(nbytes for _, nbytes in kept)
    assert left <= max_bytes
    assert all(modified_s >= int(before_s) for modified_s, _ in kept)
    if gone and kept:
        assert int(max(gone)[0]) <= int(min(kept)[0])
    # Whatever went last, without it there would be too much.
    in_budget = [o for o in gone if o[0] >= int(before_s)]
    if in_budget:
        newest = max(int(modified_s) for modified_s, _ in in_budget)
        last = [nbytes for modified_s, nbytes in in_budget if int(modified_s) == newest]
        assert left + max(last) > max_bytes


def test_of_one_second_only_as_much_as_must() -> None:
    ages = counted([(1e9 + i / 10, 10) for i in range(10)])
    for limits, gone in (({}, 0), ({"max_bytes": 100}, 0), ({"max_bytes": 75}, 3)):
        cut = ages.cut(**limits)
        taken = [cut.takes(1e9 + i / 10, 10) for i in range(10)]
        assert taken == [True] * gone + [False] * (10 - gone)


@pytest.mark.parametrize("max_bytes", [None, 0, 1, 15, 29, 30, 31])
@pytest.mark.parametrize("before_s", [0.0, 2.0, 9.0])
def test_what_a_cut_takes_is_known_before(max_bytes: int | None, before_s: float) -> None:
    ages = Ages()
    for second in (1, 2, 3):
        for _ in range(10):
            ages.add(second + 0.5, 1)
    cut = ages.cut(max_bytes=max_bytes, before_s=before_s)
    assert ages.taken(cut) == sum(cut.takes(s + 0.5, 1) for s in (1, 2, 3) for _ in range(10))


@pytest.mark.parametrize("before_s", [0.0, 1e9 + 500_003])
@pytest.mark.parametrize("max_bytes", [0, 12_345, 600_000, 999_999, 2_000_000])
def test_of_an_old_bucket_few_times_are_told_apart(max_bytes: int, before_s: float) -> None:
    """All of them are sorted at once, in a process that serves fetches meanwhile."""
    times = range(10**9, 10**9 + 1_000_000, 5)
    ages = counted([(float(at), 5) for at in random.Random(1).sample(times, len(times))])
    assert len(ages._bytes) <= 2**14
    assert ages.nbytes == 1_000_000
    cut = ages.cut(max_bytes=max_bytes, before_s=before_s)
    oldest_s = ages.oldest_s(cut)
    kept = [at for at in times if not cut.takes(at, 5)]
    assert all(at >= int(before_s) for at in kept)
    wanted = min(max_bytes, sum(5 for at in times if at >= before_s)) if before_s else max_bytes
    assert min(wanted, 1_000_000) - 2 * 128 < 5 * len(kept) <= max_bytes
    assert (oldest_s is None) == (not kept)
    assert not kept or abs(min(kept) - oldest_s) <= 128
