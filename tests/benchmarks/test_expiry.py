"""The model of a bucket with a budget: near an exact LRU, and never far above the budget."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from benchmarks.simulation import expiry
from benchmarks.simulation.expiry import KeptBucket
from s3kv.upkeep.refreshing import Refresher

CHATS, REQUESTS, REPLICAS, ROOM = 400, 3_000, 4, 2_000


def traffic(seed: int) -> list[list[bytes]]:
    """The chunks of each request: growing chats, some far more popular, after one system prompt."""
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


def test_without_refreshes_less_is_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = traffic(1)
    ours = hits_of(kept(ROOM, replicas=REPLICAS), asked)
    monkeypatch.setattr(Refresher, "hit", lambda self, info: 0.0)
    assert hits_of(kept(ROOM, replicas=REPLICAS), asked) < ours


@pytest.fixture(autouse=True)
def deleted_at_any_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry, "MIN_AGE_S", 0.0)


def kept(objects: int, *, replicas: int = 1) -> KeptBucket:
    """A bucket with room for so many objects of one byte."""
    return KeptBucket(1, objects, replicas=replicas, seed=1)


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


def test_one_of_many_replicas_sweeps() -> None:
    one, many = kept(500), kept(500, replicas=8)
    for either in (one, many):
        fill(either, 2_500)
        either.end(2_500.0)
    assert many.counts["sweeps"] == pytest.approx(one.counts["sweeps"], rel=0.2)
