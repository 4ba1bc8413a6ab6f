"""The tables of what may happen when, walked in full; and what the bucket index believes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from s3kv.planning.breaker import Breaker, BreakerState
from s3kv.planning.index import BucketIndex
from s3kv.planning.requests import (
    REQUEST_TRANSITIONS,
    RequestEvent,
    RequestRecord,
    RequestState,
)
from s3kv.types import ChunkKey

CLOSED, OPEN, HALF_OPEN = BreakerState


# ---- requests

LEGAL = {
    RequestState.NEW: "LOOKUP WAIT OFFER NOTHING ADMIT",
    RequestState.WAITING: "LOOKUP WAIT OFFER NOTHING ADMIT",
    RequestState.OFFERED: "LOOKUP ADMIT LOAD",
    RequestState.LOADING: "LOADED",
    RequestState.COMPUTING: "LOOKUP ADMIT",
}
"""Written down a second time on purpose: what is legal is a decision, not what the code says."""


@pytest.mark.parametrize(
    ("state", "event"), list(itertools.product(RequestState, RequestEvent)), ids=str
)
def test_a_request_goes_where_the_table_says_or_nowhere(
    state: RequestState, event: RequestEvent
) -> None:
    record = RequestRecord("r", [], state=state)
    if event.name in LEGAL[state].split():
        record.step(event)
        assert record.state is REQUEST_TRANSITIONS[state, event]
    else:
        with pytest.raises(AssertionError, match="not possible"):
            record.step(event)
        assert record.state is state


def test_every_state_of_a_request_can_be_reached_and_left() -> None:
    reached = {RequestState.NEW}
    for _ in RequestState:
        reached |= {to for (of, _), to in REQUEST_TRANSITIONS.items() if of in reached}
    assert reached == set(RequestState)
    assert all(
        any(to is not state for (of, _), to in REQUEST_TRANSITIONS.items() if of is state)
        for state in RequestState
    )


# ---- the breaker

NOW_S = 100.0


def in_state(state: BreakerState) -> Breaker:
    breaker = Breaker(threshold=2)
    if state is not CLOSED:
        breaker.failed(NOW_S - 1.0)
        breaker.failed(NOW_S - 1.0)
    if state is HALF_OPEN:
        assert breaker.allows(NOW_S)
    assert breaker.state is state
    return breaker


def fail_twice(breaker: Breaker) -> None:
    breaker.failed(NOW_S)
    breaker.failed(NOW_S)


BREAKER_EVENTS: dict[str, Callable[[Breaker], object]] = {
    "asked": lambda breaker: breaker.allows(NOW_S),
    "asked too early": lambda breaker: breaker.allows(NOW_S - 0.9),
    "succeeded": lambda breaker: breaker.succeeded(),
    "failed": lambda breaker: breaker.failed(NOW_S),
    "failed twice": fail_twice,
}

BREAKER_TABLE = {
    CLOSED: [CLOSED, CLOSED, CLOSED, CLOSED, OPEN],
    OPEN: [HALF_OPEN, OPEN, CLOSED, OPEN, OPEN],
    HALF_OPEN: [HALF_OPEN, HALF_OPEN, CLOSED, OPEN, OPEN],
}


@pytest.mark.parametrize(
    ("state", "event"), list(itertools.product(BreakerState, BREAKER_EVENTS)), ids=str
)
def test_the_breaker_goes_where_the_table_says(state: BreakerState, event: str) -> None:
    breaker = in_state(state)
    BREAKER_EVENTS[event](breaker)
    assert breaker.state is BREAKER_TABLE[state][list(BREAKER_EVENTS).index(event)]


def test_a_half_open_breaker_lets_one_through_per_pause() -> None:
    breaker = in_state(HALF_OPEN)
    assert not breaker.allows(NOW_S + 0.4)
    assert breaker.allows(NOW_S + 0.5), "the one before has never been answered"


def test_failures_with_a_success_between_do_not_open_it() -> None:
    breaker = Breaker(threshold=2)
    for _ in range(5):
        breaker.failed(NOW_S)
        breaker.succeeded()
    assert breaker.state is CLOSED


def test_the_pause_has_an_end() -> None:
    breaker = in_state(OPEN)
    now_s = NOW_S
    for _ in range(20):
        now_s += 30.0
        assert breaker.allows(now_s)
        breaker.failed(now_s)
    assert not breaker.allows(now_s + 29.9)
    assert breaker.allows(now_s + 30.0)


# ---- the index


def key(number: int, group: int = 0) -> ChunkKey:
    return ChunkKey(group, number.to_bytes(32, "little"))


def test_verdicts_replace_each_other() -> None:
    index = BucketIndex(capacity=100, miss_ttl_s=10.0)
    assert not index.is_present(key(1))
    assert not index.is_absent(key(1), 0.0)
    index.note_present(key(1))
    assert index.is_present(key(1))
    index.note_absent(key(1), 0.0)
    assert not index.is_present(key(1))
    assert index.is_absent(key(1), 9.9)
    assert not index.is_absent(key(1), 10.0)
    index.note_present(key(1))
    assert not index.is_absent(key(1), 0.0)
    assert len(index) == 1


def test_groups_are_told_apart() -> None:
    index = BucketIndex(capacity=100, miss_ttl_s=10.0)
    index.note_present(key(1))
    assert not index.is_present(key(1, group=1))
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
    assert all(index.is_present(key(number)) for number in newest)
    assert all(index.is_absent(key(10_000 + number), float(count)) for number in newest)


def test_expired_misses_are_forgotten() -> None:
    index = BucketIndex(capacity=1_000, miss_ttl_s=1.0)
    for number in range(100):
        index.note_absent(key(number), 0.0)
    index.note_absent(key(100), 1.0)
    assert len(index) == 1


def test_noting_the_same_again_forgets_nothing() -> None:
    index = BucketIndex(capacity=4, miss_ttl_s=1.0)
    for number in (1, 2, 3, 4):
        index.note_present(key(number))
    for _ in range(10):
        index.note_present(key(4))
    assert index.is_present(key(1))
