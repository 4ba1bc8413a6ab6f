"""The table of a request, in full: every event in every state leads where it should or raises."""

from __future__ import annotations

import math

import pytest

from s3kv.planning.deadline import Wait
from s3kv.planning.lookup import ChunkHashes
from s3kv.planning.requests import (
    REQUEST_TRANSITIONS,
    PlannedRequest,
    RequestEvent,
    RequestState,
    Saving,
)

LEGAL = {
    RequestState.NEW: "LOOKUP WAIT OFFER NOTHING ADMIT",
    RequestState.WAITING: "LOOKUP WAIT OFFER NOTHING ADMIT",
    RequestState.OFFERED: "LOOKUP ADMIT LOAD",
    RequestState.LOADING: "LOADED",
    RequestState.COMPUTING: "LOOKUP ADMIT",
}
"""Written down a second time on purpose: what is legal is a decision, not what the code says."""


@pytest.mark.parametrize("event", RequestEvent)
@pytest.mark.parametrize("state", RequestState)
def test_an_event_leads_where_the_table_says_or_nowhere(
    state: RequestState, event: RequestEvent
) -> None:
    request = PlannedRequest("r", ChunkHashes([], 1, b""), (), Wait(), Saving())
    request.state = state
    if event.name in LEGAL[state].split():
        request.step(event)
        assert request.state is REQUEST_TRANSITIONS[state, event]
    else:
        with pytest.raises(AssertionError, match="not possible"):
            request.step(event)
        assert request.state is state


def test_every_state_can_be_reached_and_left() -> None:
    reached = {RequestState.NEW}
    for _ in RequestState:
        reached |= {to for (of, _), to in REQUEST_TRANSITIONS.items() if of in reached}
    assert reached == set(RequestState)
    assert {of for (of, _), to in REQUEST_TRANSITIONS.items() if to is not of} == set(RequestState)


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
