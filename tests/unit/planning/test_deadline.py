"""The rule for how long a request waits, case by case."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3kv.planning.deadline import (
    Forecast,
    Queue,
    Wait,
    WaitFacts,
    decide,
    keep_waiting,
    likely,
    lost,
)
from s3kv.types import Tally

UNKNOWN = Forecast(None, None)
FACTS = WaitFacts(
    now_s=100.0,
    wait=Wait(started_s=100.0, asked_s=100.0, arrived_s=100.0, seen_s=100.0, wanted=10),
    missing=10,
    unproven=0,
    progress_s=-math.inf,
    queue=Queue(),
    compute_s=0.1,
    forecast=Forecast(0.2, 0.2),
    max_wait_s=10.0,
    gate=True,
)
"""Ten chunks, of which none has arrived, take a second to compute and 0.2 s to fetch."""


def slow(all_s: float) -> Forecast:
    return Forecast(all_s, 0.2)


@pytest.mark.parametrize(
    ("facts", "until_s"),
    [
        # No gate.
        ({"gate": False, "forecast": slow(1e9)}, 110.0),
        # Nothing is measured: patience is a second, whatever is missing.
        ({"forecast": UNKNOWN, "wanted": 100, "missing": 1}, 101.0),
        ({"forecast": UNKNOWN, "wanted": 100, "arrived_s": 100.4}, 101.4),
        ({"forecast": UNKNOWN, "wanted": 4}, 100.4),
        ({"forecast": UNKNOWN, "max_wait_s": 0.3}, 100.3),
        # Absences are measured, but no fetch.
        ({"forecast": Forecast(0.8, None, None, 0.8), "wanted": 100}, 101.0),
        # Fetches are measured: patience is two of them, at least 0.25 s, or half of computing.
        ({"missing": 3}, 100.4),
        ({"missing": 3, "forecast": Forecast(0.01, 0.01)}, 100.25),
        ({}, 100.5),
        ({"missing": 30, "wanted": 30}, 101.0),
        ({"missing": 30, "wanted": 30, "forecast": Forecast(1.0, 0.8)}, 101.6),
        ({"missing": 10, "arrived_s": 100.9}, 101.0),
        ({"missing": 3, "max_wait_s": 0.1}, 100.1),
        # To fetch takes too long, and all of it is still to come.
        ({"forecast": slow(0.89)}, 100.5),
        ({"forecast": slow(0.91)}, -math.inf),
        # The rest of it is short enough: up to 1.5 of the time after the last sign of life.
        ({"forecast": slow(0.95), "now_s": 100.04}, -math.inf),
        ({"forecast": slow(0.95), "now_s": 100.06}, 100.5),
        ({"forecast": Forecast(0.2, 0.2), "missing": 2, "now_s": 100.1}, 100.3),
        ({"forecast": Forecast(0.2, 0.2), "missing": 2, "now_s": 100.3}, -math.inf),
        ({"missing": 2, "now_s": 100.1, "arrived_s": 100.05}, 100.35),
        ({"missing": 2, "now_s": 100.1, "asked_s": 100.05}, 100.35),
        # Where the bucket may have none of them, half are expected.
        ({"missing": 4, "unproven": 4, "forecast": Forecast(0.2, 0.2, 0.2, 0.2)}, -math.inf),
        ({"missing": 4, "unproven": 1, "forecast": Forecast(0.2, 0.2, 0.2, 0.2)}, 100.4),
        # Chunks ordered before arrive: these are still to come.
        ({"progress_s": 100.3}, 100.8),
        ({"progress_s": 100.25, "missing": 2, "now_s": 100.3}, 100.55),
        # The engine computes 20 chunks before: patience and computing end later.
        ({"queue": Queue(new=20)}, 102.0),
        ({"queue": Queue(new=3)}, 100.5),
        ({"queue": Queue(new=20), "max_wait_s": 1.5}, 101.5),
        ({"queue": Queue(new=20), "forecast": slow(2.69)}, 102.0),
        ({"queue": Queue(new=20), "forecast": slow(2.71)}, -math.inf),
        # Of 2.3 s since the last decision, what was ahead took 2 s; before, 0.5 s were lost.
        ({"now_s": 102.3, "seen_ahead": 20, "arrived_s": 102.3}, 102.8),
        ({"now_s": 102.3, "seen_ahead": 20, "arrived_s": 102.3, "lost_s": 0.5}, 102.5),
        # Those that have overtaken it do not count: 15 of 20 are left at most.
        ({"now_s": 100.5, "seen_ahead": 20, "queue": Queue(begun=30)}, 102.0),
        ({"now_s": 100.5, "seen_ahead": 20, "queue": Queue(begun=10, new=2)}, 101.7),
    ],
)
def test_the_deadline_of_each_case(facts: dict[str, Any], until_s: float) -> None:
    facts = {**facts}
    of_wait = {name: facts.pop(name) for name in [*facts] if hasattr(FACTS.wait, name)}
    deadline_s = decide(replace(FACTS, wait=replace(FACTS.wait, **of_wait), **facts))
    assert deadline_s == pytest.approx(until_s)


def unproven(
    count: int,
    waited_s: float,
    alone_s: float | None,
    absence_s: float | None,
    absent_share: float = 0.0,
) -> float:
    """The number of so many unproven chunks that are expected to be there."""
    forecast = Forecast(None, None, alone_s, absence_s, absent_share)
    now_s = FACTS.wait.asked_s + waited_s
    return likely(replace(FACTS, now_s=now_s, missing=count, unproven=count, forecast=forecast))


def test_before_an_absent_chunk_every_length_is_as_likely() -> None:
    assert unproven(3, 1.0, None, None) == 3, "nothing is known of absences yet"
    assert unproven(0, 0.0, None, 0.1) == 0
    for waited_s in (0.0, 1.0):
        assert unproven(1, waited_s, None, 0.1) == pytest.approx(1 / 2)
        assert unproven(4, waited_s, None, 0.1) == pytest.approx(2)


def test_where_lookups_find_nothing_fewer_are_expected_before_an_absent_chunk() -> None:
    assert unproven(4, 0.0, None, 0.1, absent_share=0.75) == pytest.approx(0.5)
    assert unproven(4, 0.0, None, None, absent_share=1.0) == 4, "none is absent yet"


def test_where_fetches_take_longer_than_absences_silence_is_a_good_sign() -> None:
    assert unproven(4, 0.0, 0.5, 0.1) == pytest.approx(2)
    assert unproven(1, 0.1, 0.5, 0.1) == pytest.approx(1 / (1 + math.exp(-1)))
    assert unproven(4, 0.1, 0.5, 0.1) > 2.9
    # From 0.4 s on a chunk that is there may have had its first byte as late as that, too.
    assert unproven(4, 0.4, 0.5, 0.1) == unproven(4, 60.0, 0.5, 0.1) > 3.9


SECONDS = st.floats(0.0, 30.0)
MEASURED = st.floats(0.001, 30.0) | st.none()
CHUNKS_AHEAD = st.just(0.0) | st.floats(0.0, 300.0)


@st.composite
def any_facts(draw: st.DrawFn) -> WaitFacts:
    started_s = draw(SECONDS)
    arrived_s, asked_s = started_s + draw(SECONDS), started_s + draw(st.floats(-5.0, 30.0))
    missing, wanted = draw(st.integers(0, 300)), draw(st.integers(0, 300))
    times = started_s, asked_s, arrived_s
    return WaitFacts(
        now_s=max(arrived_s, asked_s) + draw(SECONDS),
        wait=Wait(True, *times, draw(SECONDS), started_s, draw(CHUNKS_AHEAD), wanted=wanted),
        missing=missing,
        unproven=draw(st.integers(0, missing)),
        compute_s=draw(st.floats(0.0001, 1.0)),
        progress_s=draw(st.just(-math.inf) | st.floats(started_s, arrived_s)),
        queue=Queue(draw(CHUNKS_AHEAD), draw(CHUNKS_AHEAD)),
        forecast=Forecast(*(draw(MEASURED) for _ in range(4)), draw(st.floats(0.0, 1.0))),
        max_wait_s=draw(SECONDS),
        gate=draw(st.booleans()),
    )


@given(any_facts())
def test_no_wait_outlasts_its_bounds(facts: WaitFacts) -> None:
    until_s = decide(facts)
    assert until_s <= facts.wait.started_s + facts.max_wait_s
    if facts.gate:
        computed_s = facts.compute_s * (facts.ahead + facts.wait.wanted)
        assert until_s <= facts.now_s + computed_s - lost(facts) + 1e-6
        assert until_s <= decide(replace(facts, gate=False))


@given(any_facts(), SECONDS, st.floats(1.0, 10.0))
def test_a_longer_limit_or_slower_computing_never_ends_a_wait_earlier(
    facts: WaitFacts, more_s: float, times: float
) -> None:
    longer = replace(facts, max_wait_s=facts.max_wait_s + more_s)
    slower = replace(facts, compute_s=facts.compute_s * times)
    assert min(decide(longer), decide(slower)) >= decide(facts)


@given(any_facts())
def test_as_time_passes_a_deadline_is_kept_or_withdrawn(facts: WaitFacts) -> None:
    """With nothing new, the answer at the deadline is not another, later one."""
    facts, counters = replace(facts, wait=replace(facts.wait)), Tally()
    if facts.unproven == 0 and keep_waiting(facts, counters, lambda _: None):
        until_s = facts.wait.until_s
        begun = max(0.0, sum(facts.queue) - (until_s - facts.now_s) / facts.compute_s)
        assert decide(replace(facts, now_s=until_s, queue=Queue(begun))) <= until_s + 1e-6


@given(any_facts())
def test_the_bucket_is_expected_to_have_some_of_what_is_missing(facts: WaitFacts) -> None:
    least = facts.missing - facts.unproven + (1 - facts.forecast.absent_share) * facts.unproven / 2
    assert least - 1e-6 <= likely(facts) <= facts.missing + 1e-6
