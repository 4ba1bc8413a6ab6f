"""The model of a bucket with a budget: near an exact LRU, and never far above the budget."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from benchmarks.simulation.expiry import KeptBucket, Upkeep

CHATS, REQUESTS, REPLICAS, ROOM = 400, 3_000, 4, 2_000


def traffic(seed: int) -> list[list[bytes]]:
    """The chunks of each request: chats that grow, of which some are far more popular than others,
    behind one system prompt."""
    rng = random.Random(seed)
    chats: list[list[bytes]] = [[b"0"] for _ in range(CHATS)]
    asked = []
    for turn in range(REQUESTS):
        at = min(int(rng.paretovariate(0.7)) - 1, CHATS - 1)
        if len(chats[at]) > 40 or rng.random() < 0.02:
            chats[at] = [b"0"]  # somebody new
        chats[at] = chats[at] + [b"%d/%d" % (turn, n) for n in range(rng.randrange(1, 6))]
        asked.append(chats[at])
    return asked


def hits_of_an_exact_lru(asked: list[list[bytes]]) -> int:
    held: OrderedDict[bytes, None] = OrderedDict()
    hits = 0
    for chunks in asked:
        found = True
        for key in chunks:
            found = found and key in held
            hits += found
            held[key] = None
            held.move_to_end(key)
            if len(held) > ROOM:
                held.popitem(last=False)
    return hits


def hits_of(bucket: KeptBucket, asked: list[list[bytes]]) -> int:
    """Each replica asks for the leading part of its prompt, and saves the rest."""
    for number, chunks in enumerate(asked):
        found, replica, now_s = True, number % REPLICAS, 3.0 * number
        for key in chunks:
            found = found and bucket.get(key, replica, now_s)
            if not found:
                bucket.put(key, replica, now_s)
    bucket.end(3.0 * len(asked))
    return bucket.counts["hits"]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_near_an_exact_lru_and_never_far_above_the_budget(seed: int) -> None:
    asked = traffic(seed)
    exact = hits_of_an_exact_lru(asked)
    ours = kept(ROOM, replicas=REPLICAS)
    assert 0.95 * exact <= hits_of(ours, asked)
    assert ours.peak_objects <= 1.1 * ROOM
    assert ours.counts["deleted"] > 0
    assert ours.counts["refreshes"] > 0
    without = hits_of(kept(ROOM, replicas=REPLICAS, refreshes=False), asked)
    assert without < ours.counts["hits"]


def kept(objects: int, *, replicas: int = 1, refreshes: bool = True) -> KeptBucket:
    """A bucket with room for so many objects of one byte."""
    upkeep = Upkeep(objects, min_age_s=0.0, refreshes=refreshes)
    return KeptBucket(1, upkeep, replicas=replicas, seed=1)


def fill(bucket: KeptBucket, seconds: int) -> None:
    """One new object a second, of which the first is also read now and then."""
    for second in range(seconds):
        assert bucket.put(str(second).encode(), 0, float(second))
        if second % 20 == 0:
            bucket.get(b"0", 0, second + 0.5)


def test_a_bucket_keeps_to_its_budget_and_counts_what_that_takes() -> None:
    bucket = kept(500)
    fill(bucket, 4_000)
    bucket.end(4_000.0)
    counts = bucket.counts
    assert bucket.peak_objects <= 550
    assert counts["puts"] - counts["deleted"] <= 500
    assert counts["lists"] >= counts["sweeps"] > 10
    assert counts["lease_puts"] > 10


@pytest.mark.parametrize("refreshes", [True, False])
def test_what_is_used_stays_because_it_is_refreshed(refreshes: bool) -> None:
    bucket = kept(500, refreshes=refreshes)
    fill(bucket, 2_500)
    assert bucket.get(b"0", 0, 2_500.0) == refreshes
    assert (bucket.counts["refreshes"] > 0) == refreshes


def test_one_of_many_replicas_sweeps() -> None:
    one, many = kept(500), kept(500, replicas=8)
    for either in (one, many):
        fill(either, 2_500)
        either.end(2_500.0)
    assert many.counts["sweeps"] == pytest.approx(one.counts["sweeps"], rel=0.2)
