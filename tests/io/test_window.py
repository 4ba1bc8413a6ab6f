"""The window on requests: how it shrinks, grows, and settles where a store can bear it."""

from __future__ import annotations

import random

import pytest

from s3kv.io.window import Window


def test_a_throttled_answer_halves_it() -> None:
    window = Window(32)
    window.throttled(0.0, 1.0)
    assert (window.size, window.is_cut, window.cuts) == (16, True, 1)


def test_one_overload_cuts_once() -> None:
    """All requests that were under way then are refused; only the first says something new."""
    window = Window(32)
    for i in range(32):
        window.throttled(0.0, 1.0 + i / 100)
    assert window.size == 16
    window.throttled(1.0, 2.0)
    assert window.size == 8


def test_it_never_closes() -> None:
    window = Window(4)
    for i in range(50):
        window.throttled(float(i), float(i))
    assert window.size == 1


def test_a_full_window_grows_by_one_per_round() -> None:
    window = Window(32)
    window.throttled(0.0, 1.0)
    for _ in range(17):
        window.answered(running=16)
    assert window.size == 17
    for _ in range(10_000):
        window.answered(running=window.size)
    assert (window.size, window.is_cut) == (32, False)


def test_a_window_that_is_not_used_does_not_grow() -> None:
    window = Window(32)
    window.throttled(0.0, 1.0)
    for _ in range(1000):
        window.answered(running=3)
    assert window.size == 16


def began(window: Window, sent_s: float, seconds: float, count: int = 30) -> None:
    for i in range(count):
        window.began(sent_s + i, sent_s + i + seconds)


def test_latency_several_times_the_best_cuts_and_leaves_a_quarter() -> None:
    window = Window(32)
    began(window, 0.0, 0.04)
    assert window.size == 32
    began(window, 100.0, 0.8)
    assert window.size == 8


@pytest.mark.parametrize("seconds", [0.05, 0.09])
def test_a_store_that_is_merely_less_quick_is_left_alone(seconds: float) -> None:
    window = Window(32)
    began(window, 0.0, 0.001)
    began(window, 100.0, seconds)
    assert window.size == 32, "below a tenth of a second nothing is congestion"


def test_a_store_that_is_slower_for_good_gets_its_window_back() -> None:
    window = Window(32)
    began(window, 0.0, 0.04)
    began(window, 100.0, 0.3, count=1500)
    assert window.is_cut
    for i in range(2000):
        window.began(2000.0 + i, 2000.3 + i)
        window.answered(running=window.size)
    assert window.size == 32


@pytest.mark.parametrize("seed", range(10))
def test_it_settles_where_the_store_can_bear_it(seed: int) -> None:
    """A store that throttles whatever is above `capacity`; rounds of a second."""
    rng = random.Random(seed)  # replay: the seed is the test's parameter
    capacity = rng.randint(2, 60)
    window, now_s, sizes = Window(64), 0.0, []
    for turn in range(2000):
        size = window.size
        for _ in range(size):
            if rng.random() < max(0.0, 1 - capacity / size):
                window.throttled(now_s, now_s + 1.0)
            else:
                window.answered(running=size)
        now_s += 1.0
        if turn >= 500:
            sizes.append(size)
    assert 0.45 * capacity <= sum(sizes) / len(sizes) <= 1.05 * capacity + 1
