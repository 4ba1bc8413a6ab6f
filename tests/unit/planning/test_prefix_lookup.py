"""When the chunks of windows are requested, and how long a request waits for them."""

from __future__ import annotations

import pytest

from lab.books import check
from s3kv.planning.group_kinds import Coverage, SlidingWindow, States
from s3kv.planning.lookup import Lookup
from s3kv.planning.requests import NOTHING, WAIT, Answer, PlannedRequest
from s3kv.types import ChunkKey
from tests.unit.planning.desk import CHUNK, MISSING, OK, Desk

FULL = Coverage(2, CHUNK)
WINDOW = Coverage(2, CHUNK, SlidingWindow(7), number=1)
"""The two chunks before the length."""
STATE = Coverage(4, CHUNK, States(), number=1)
LETTERS = "abcdefgh"
PROMPT = "".join(letter * CHUNK for letter in LETTERS) + "z"


def desk_with(*groups: Coverage, probe_chunks: int = 16) -> Desk:
    """Computing a chunk takes half a second, and all fetches take 1.2 s, measured."""
    desk = Desk(max_wait_s=50.0, gate=True, probe_chunks=probe_chunks, coverages=groups, slots=60)
    for fetches in (1, 2, 3, 4):
        desk.planner.pace.fetched(OK, 1.2, began_with=fetches, ended_with=fetches)
    desk.add("r", PROMPT)
    return desk


def lookup(desk: Desk) -> Answer:
    answer = desk.planner.lookup("r", 0, desk.now_s, tokens=len(PROMPT))
    check(desk.planner)
    return answer


def asked(desk: Desk, group: Coverage) -> list[int]:
    """Positions of the chunks of a group that wait for their answers."""
    number = [lookup.coverage for lookup in lookups(desk)].index(group)
    return sorted(lookups(desk)[number].pending)


def lookups(desk: Desk) -> tuple[Lookup, ...]:
    return desk.planner._requests["r"].lookups


def test_a_window_is_requested_together_with_the_prefix() -> None:
    desk = desk_with(FULL, WINDOW)
    assert lookup(desk) == WAIT
    assert (asked(desk, FULL), asked(desk, WINDOW)) == ([*range(8)], [6, 7])
    desk.end(desk.fetches(), seconds=1.2)
    assert lookup(desk) == Answer(False, 8 * CHUNK), "after one round of answers"


def test_a_window_is_requested_elsewhere_where_the_prefix_ends_before() -> None:
    desk = desk_with(FULL, WINDOW)
    assert lookup(desk) == WAIT
    fetches = desk.fetches()
    desk.end(fetches[5], MISSING)
    desk.end([*fetches[:5], *fetches[6:8]])
    desk.end(fetches[8:], MISSING)
    assert lookup(desk) == WAIT
    assert asked(desk, WINDOW) == [3, 4]
    desk.end(desk.fetches())
    assert lookup(desk) == Answer(False, 5 * CHUNK)
    assert desk.pinned() == 5 + 2


@pytest.mark.parametrize("probe_chunks", [5, 7])
def test_no_window_is_requested_where_the_end_of_the_prefix_is_not(probe_chunks: int) -> None:
    desk = desk_with(FULL, WINDOW, probe_chunks=probe_chunks)
    assert lookup(desk) == WAIT
    assert (len(asked(desk, FULL)), asked(desk, WINDOW)) == (probe_chunks, [])


def test_no_state_is_requested_before_the_prefix_is_known() -> None:
    desk = desk_with(FULL, STATE)
    assert lookup(desk) == WAIT
    assert asked(desk, STATE) == []


def test_a_window_is_worth_the_prefix_that_it_lets_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight chunks are in host memory and take four seconds to compute. Two of the window are on
    their way, which take 1.2 s to fetch, and one to compute."""
    monkeypatch.setattr(PlannedRequest, "_prefetch_windows", lambda *args: None)
    desk = desk_with(FULL, WINDOW)
    assert lookup(desk) == WAIT
    desk.end(desk.fetches())
    assert lookup(desk) == WAIT
    assert (asked(desk, FULL), asked(desk, WINDOW)) == ([], [6, 7])
    assert (lookups(desk)[1].limit, lookups(desk)[1].secured) == (8, 0)
    desk.end(desk.fetches())
    assert lookup(desk) == Answer(False, 8 * CHUNK)


def test_a_model_of_windows_alone_waits_for_as_much() -> None:
    desk = desk_with(Coverage(2, CHUNK, SlidingWindow(7)))
    assert lookup(desk) == WAIT
    assert desk.planner._requests["r"].wait.wanted == 8
    desk.now_s = 3.0
    assert lookup(desk) == NOTHING, "twice 1.2 s, and no answer"


def test_a_window_of_a_longer_prefix_is_not_waited_for() -> None:
    """The prefix proves to be shorter than was hoped, and all that it needs has arrived."""
    desk = desk_with(FULL, WINDOW)
    assert lookup(desk) == WAIT
    fetches = desk.fetches()
    desk.end(fetches[6:8], MISSING)
    desk.end(fetches[:6])
    assert lookup(desk) == WAIT
    desk.end(desk.fetches())
    assert asked(desk, WINDOW) == [6, 7], "on their way, and not needed"
    assert lookup(desk) == Answer(False, 6 * CHUNK)
    assert desk.planner.counters["deadline_cuts"] == 0


def test_a_window_that_comes_too_late_is_not_looked_for_at_shorter_prefixes() -> None:
    desk = desk_with(FULL, WINDOW)
    assert lookup(desk) == WAIT
    desk.end(desk.fetches()[:8], seconds=1.2)
    ordered = desk.planner.counters["fetches"]
    while lookup(desk) == WAIT:
        desk.now_s += 0.1
    assert desk.planner.counters["fetches"] == ordered
    assert desk.planner.counters["deadline_cuts"] == 1


def test_a_window_at_a_shorter_prefix_counts_if_it_is_there() -> None:
    desk = desk_with(FULL, WINDOW)
    for chunk in (2, 3):
        key = ChunkKey(1, desk.hashes["r"][2 * chunk + 1])
        desk.end(desk.planner.ledger.plan_fetch(key, desk.now_s).for_bucket())
    assert lookup(desk) == WAIT
    desk.end([fetch for fetch in desk.fetches() if fetch.key.group == 0])
    while (answer := lookup(desk)) == WAIT:
        desk.now_s += 0.1
    assert answer == Answer(False, 4 * CHUNK)


@pytest.mark.parametrize("chunks", [3, 8])
@pytest.mark.parametrize("free", [0, 1, 2])
def test_without_room_for_a_window_the_prefix_is_shorter(chunks: int, free: int) -> None:
    """No place is free beside those of the prefix, or one, or two: enough for the window."""
    desk = Desk(max_wait_s=50.0, gate=False, coverages=(FULL, WINDOW), slots=chunks + free)
    desk.add("r", PROMPT[: chunks * CHUNK] + "z")
    while (answer := lookup(desk)) == WAIT:
        fetches = desk.fetches()
        assert fetches, "it waits for chunks on their way"
        desk.end(fetches)
    assert answer == Answer(False, (chunks - 2 + free) * CHUNK)
    assert desk.planner.counters["fetches"] <= chunks + 2
