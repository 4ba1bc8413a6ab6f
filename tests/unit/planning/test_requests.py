"""The table of a request, in full, and the limits that a request sets to its own caching."""

from __future__ import annotations

import math

import pytest

from s3kv.planning.deadline import Wait
from s3kv.planning.group_kinds import Coverage, SlidingWindow
from s3kv.planning.lookup import ChunkHashes
from s3kv.planning.requests import (
    NO_LIMITS,
    NOTHING,
    REQUEST_TRANSITIONS,
    Answer,
    PlannedRequest,
    RequestEvent,
    RequestLimits,
    RequestState,
    Saving,
)
from tests.plans import fetches_of
from tests.unit.planning.desk import MISSING, Desk

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
def test_events_lead_as_the_table_says_or_nowhere(state: RequestState, event: RequestEvent) -> None:
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


PRIVATE = RequestLimits(save_tokens=0)
NO_LOADS = RequestLimits(load_tokens=0)
PROMPT = "aaaabbbbcccc"


def computed(limits: RequestLimits, prompt: str = PROMPT, **setup: object) -> Desk:
    """A request that is about to be computed; the bucket has nothing of it."""
    desk = Desk(**setup)
    desk.add("r", prompt, limits)
    while desk.lookup("r").wait:
        desk.end(desk.fetches(), MISSING)
    desk.admit("r")
    return desk


@pytest.mark.parametrize(
    ("tokens", "chunks"), [(None, 3), (12, 3), (11, 2), (8, 2), (4, 1), (3, 0), (0, 0)]
)
def test_chunks_that_end_within_the_limit_are_saved(tokens: int | None, chunks: int) -> None:
    desk = computed(RequestLimits(save_tokens=tokens))
    saves = desk.run("r", range(6), 0, 12, new=True).saves
    assert desk.keys(saves) == [desk.key(PROMPT[: 4 * n]) for n in range(1, chunks + 1)]


def test_a_private_request_hides_nothing_from_a_public_one_that_saves_the_same() -> None:
    """The engine's own cache has the private request's blocks, so nothing is computed again."""
    desk = computed(PRIVATE)
    desk.run("r", range(6), 0, 12, new=True)
    desk.add("public", PROMPT + "d")
    desk.now_s = 1_000.0
    while desk.lookup("public", 12).wait:
        desk.end(desk.fetches(), MISSING)
    desk.admit("public")
    saves = desk.run("public", range(7), 12, 1, new=True).saves
    assert [save.block_ids for save in saves] == [(0, 1), (2, 3), (4, 5)]


def test_a_private_turn_of_a_session_is_not_saved_nor_is_what_follows_it() -> None:
    desk = computed(NO_LIMITS)
    assert len(desk.run("r", range(2), 0, 4, new=True).saves) == 1
    for computed_tokens, limits in ((4, PRIVATE), (8, NO_LIMITS)):
        desk.planner.restrict("r", limits)
        blocks = range(computed_tokens // 2, computed_tokens // 2 + 2)
        assert desk.run("r", blocks, computed_tokens, 4, new=False).saves == ()


def test_a_request_that_must_not_load_asks_for_nothing_and_saves() -> None:
    desk = Desk()
    desk.make_resident("aaaa")
    desk.add("r", PROMPT, NO_LOADS)
    desk.planner.prefetch("r", 0, 0.0)
    assert desk.lookup("r") == NOTHING
    assert desk.pinned() == 0
    desk.admit("r")
    plan = desk.run("r", range(6), 0, 12, new=True)
    assert fetches_of(plan) == ()
    assert desk.keys(plan.saves) == [desk.key("aaaabbbb"), desk.key(PROMPT)]


@pytest.mark.parametrize(
    ("local", "most", "offered"), [(0, 9, 8), (0, 8, 8), (0, 7, 4), (4, 7, 4), (2, 6, 6), (2, 1, 0)]
)
def test_no_more_is_offered_than_a_request_allows(local: int, most: int, offered: int) -> None:
    desk = Desk()
    desk.make_resident(PROMPT)
    desk.add("r", PROMPT + "z", RequestLimits(load_tokens=most))
    assert desk.lookup("r", local) == Answer(False, offered)
    assert desk.fetches() == ()


def test_an_engine_that_loses_tokens_of_its_own_is_not_offered_more_for_it() -> None:
    desk = Desk()
    desk.make_resident(PROMPT)
    desk.add("r", PROMPT + "z", RequestLimits(load_tokens=6))
    assert desk.lookup("r", 2) == Answer(False, 6)
    assert desk.lookup("r", 0) == Answer(False, 4)
    desk.admit("r", range(7), 4)
    (load,) = desk.plan().loads
    assert [part.block_ids for part in load.parts] == [(0, 1)]


def test_a_window_resumes_where_the_limit_is() -> None:
    groups = (Coverage(2, 4), Coverage(2, 4, SlidingWindow(3), number=1, members=(1,)))
    desk = Desk(coverages=groups, null_block=0)
    desk.make_resident(PROMPT + "z")
    desk.add("r", PROMPT + "z", RequestLimits(load_tokens=9))
    answer = desk.lookup("r")
    while answer.wait:
        desk.end(desk.fetches())
        answer = desk.lookup("r")
    assert answer == Answer(False, 8)
