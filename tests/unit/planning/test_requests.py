"""The tables of a request and its lookups, walked in full: every event in every state leads where
it should or raises."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

from s3kv.planning.group_kinds import Coverage
from s3kv.planning.lookup import (
    LOOKUP_TRANSITIONS,
    ChunkHashes,
    Lookup,
    LookupEvent,
    LookupState,
)
from s3kv.planning.requests import (
    REQUEST_TRANSITIONS,
    PlannedRequest,
    RequestEvent,
    RequestState,
    Saving,
    ScheduledRequest,
)
from s3kv.planning.wait import Wait
from tests.unit.planning.setup import Setup

Legal = dict[Any, str]

REQUEST: Legal = {
    RequestState.NEW: "LOOKUP WAIT OFFER NOTHING ADMIT",
    RequestState.WAITING: "LOOKUP WAIT OFFER NOTHING ADMIT",
    RequestState.OFFERED: "LOOKUP ADMIT LOAD",
    RequestState.LOADING: "LOADED",
    RequestState.COMPUTING: "LOOKUP ADMIT",
}
LOOKUP: Legal = {
    LookupState.OPEN: "COLLECT RELEASE HOLD CLOSE",
    LookupState.HELD: "COLLECT CLOSE",
    LookupState.CLOSED: "CLOSE REOPEN",
}
"""Written down a second time on purpose: what is legal is a decision, not what the code says."""


def request() -> PlannedRequest:
    return PlannedRequest("r", ChunkHashes([], 1, b""), (), Wait(), Saving(1))


def lookup() -> Lookup:
    ledger = Setup().planner().ledger
    return Lookup("r", ledger, Coverage(2, 4), ChunkHashes([], 1, b""), Wait(), 1)


ON_REQUEST = {event: (lambda of, e=event: of.step(e)) for event in RequestEvent}
ON_LOOKUP: dict[enum.Enum, Callable[[Any], object]] = {
    LookupEvent.COLLECT: lambda of: of.collect(0, None, 0.0),
    LookupEvent.RELEASE: lambda of: of.release(),
    LookupEvent.HOLD: lambda of: of.hold(0),
    LookupEvent.CLOSE: lambda of: of.close(),
    LookupEvent.REOPEN: lambda of: of.reopen(),
}

TABLES: list[tuple[Callable[[], Any], Any, Legal, Any]] = [
    (request, REQUEST_TRANSITIONS, REQUEST, ON_REQUEST),
    (lookup, LOOKUP_TRANSITIONS, LOOKUP, ON_LOOKUP),
]
CASES = [
    (make, table, legal, calls, state, event)
    for make, table, legal, calls in TABLES
    for state, event in itertools.product(legal, calls)
]


@pytest.mark.parametrize(
    ("make", "table", "legal", "calls", "state", "event"),
    [pytest.param(*case, id=f"{case[4]}-{case[5]}") for case in CASES],
)
def test_an_event_leads_where_the_table_says_or_nowhere(
    make: Callable[[], Any], table: Any, legal: Legal, calls: Any, state: Any, event: Any
) -> None:
    subject = make()
    subject.state = state
    if event.name in legal[state].split():
        calls[event](subject)
        assert subject.state is table[state, event]
    else:
        with pytest.raises(AssertionError, match="not possible"):
            calls[event](subject)
        assert subject.state is state


@pytest.mark.parametrize(
    ("table", "first"),
    [
        (REQUEST_TRANSITIONS, RequestState.NEW),
        (LOOKUP_TRANSITIONS, LookupState.OPEN),
    ],
    ids=["request", "lookup"],
)
def test_every_state_can_be_reached_and_left(table: Any, first: Any) -> None:
    states: Any = type(first)
    reached = {first}
    for _ in states:
        reached |= {to for (of, _), to in table.items() if of in reached}
    assert reached == set(states)
    left = {of for (of, _), to in table.items() if to is not of}
    assert left == set(states)


def test_the_clock_of_a_wait_goes_on_until_it_starts_over() -> None:
    wait = Wait()
    wait.begin(1.0, 7)
    wait.until_s = 5.0
    wait.arrived(2.0)
    assert wait.until_s == -math.inf, "there is something to look at"
    wait.begin(3.0, 6)
    assert (wait.started_s, wait.arrived_s, wait.wanted) == (1.0, 2.0, 7)
    wait.start_over()
    wait.begin(9.0, 5)
    assert (wait.started_s, wait.arrived_s, wait.wanted) == (9.0, 9.0, 5)


def test_a_chunk_is_taken_once() -> None:
    saving = Saving(1)
    assert saving.take(2) == [(0, 0), (0, 1)]
    assert saving.take(1) == [], "preempted, and not computed that far again"
    assert saving.take(3) == [(0, 2)]
    assert saving.take(3) == []
    assert saving.saved == 3
    saving.is_barred = True
    with pytest.raises(AssertionError, match="barred"):
        saving.take(4)


def test_the_groups_of_a_request_are_saved_side_by_side() -> None:
    saving = Saving(2)
    saving.place(ScheduledRequest("r", ([1, 2], [3]), True, 0, 8))
    saving.place(ScheduledRequest("r", ([4], []), False, 8, 4))
    assert saving.block_ids == [[1, 2, 4], [3]]
    assert saving.take(2) == [(0, 0), (1, 0), (0, 1), (1, 1)]
