"""The table of the breaker, walked in full."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from s3kv.planning.breaker import Breaker, BreakerState
from s3kv.types import Outcome

CLOSED, OPEN, HALF_OPEN = BreakerState


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


BREAKER_EVENTS: dict[str, Callable[[Breaker], object]] = {
    "asked": lambda breaker: breaker.allows(NOW_S),
    "asked too early": lambda breaker: breaker.allows(NOW_S - 0.9),
    "succeeded": lambda breaker: breaker.succeeded(),
    "failed": lambda breaker: breaker.failed(NOW_S),
    "failed twice": lambda breaker: [breaker.failed(NOW_S) for _ in range(2)],
    "ended without the store": lambda breaker: breaker.saw(Outcome.OK, NOW_S, near=True),
}

BREAKER_TABLE = {
    CLOSED: [CLOSED, CLOSED, CLOSED, CLOSED, OPEN, CLOSED],
    OPEN: [HALF_OPEN, OPEN, CLOSED, OPEN, OPEN, OPEN],
    HALF_OPEN: [HALF_OPEN, HALF_OPEN, CLOSED, OPEN, OPEN, HALF_OPEN],
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


@pytest.mark.parametrize("state", BreakerState)
def test_after_a_call_ended_without_the_store_the_next_may_find_out(state: BreakerState) -> None:
    breaker = in_state(state)
    breaker.saw(Outcome.OK, NOW_S - 0.9, near=True)
    assert breaker.allows(NOW_S - 0.9) is (state is not OPEN)
    assert breaker.allows(NOW_S - 0.9) is (state is CLOSED), "one"


def test_with_a_disk_a_fetch_that_may_not_call_the_store_is_near() -> None:
    breaker = in_state(OPEN)
    assert not breaker.is_near(NOW_S - 0.9), "without a disk it is refused"
    breaker.has_disk = True
    assert [breaker.is_near(NOW_S) for _ in range(2)] == [False, True], "one finds out"


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
