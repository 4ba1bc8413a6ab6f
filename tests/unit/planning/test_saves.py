"""Which chunks of which groups a step saves, from tables that have gaps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from s3kv.planning.group_kinds import Coverage, LocalAttention, SlidingWindow, States
from s3kv.planning.requests import ScheduledRequest
from tests.unit.planning.desk import Desk

GROUPS = (Coverage(2, 4, members=(1,)), Coverage(2, 4, SlidingWindow(3), number=1, members=(0, 2)))
"""A window between blocks of two groups of the engine, and full attention in the second one."""


def admitted_desk(groups: tuple[Coverage, ...], prompt: str, tables: int = 3) -> Desk:
    """With a request that has no blocks yet in so many tables."""
    desk = Desk(coverages=groups, null_block=0, may_load=False)
    desk.add("r", prompt)
    desk.planner.admitted("r", ([],) * tables, 0)
    return desk


def scheduled(
    tables: tuple[list[int], ...], computed: int, tokens: int, new: tuple[list[int], ...] = ()
) -> ScheduledRequest:
    return ScheduledRequest("r", new, computed == 0, computed, tokens, partial(lambda: tables))


def test_the_table_of_the_step_counts_and_not_what_the_steps_add_up_to() -> None:
    """A block that a group has given up is block 0 in its table; another group has it now."""
    desk = admitted_desk(GROUPS, "aaaabbbb")
    first = [1, 2], [11, 12], [21, 22]
    assert len(desk.plan(scheduled(first, 0, 3, first)).saves) == 0
    moved = [0, 31, 3], [11, 12, 1], [0, 22, 23]
    saves = desk.plan(scheduled(moved, 3, 3, ([31, 3], [1], [23]))).saves
    assert [(s.key.group, s.block_ids) for s in saves] == [(0, (11, 12)), (1, (31, 22))]


@pytest.mark.parametrize("written", [(2,), (12,), (5, 22)])
def test_a_block_that_the_engine_zeroes_or_copies_to_is_fenced(written: tuple[int, ...]) -> None:
    desk = admitted_desk(GROUPS, "aaaa")
    tables = [1, 2], [11, 12], [21, 22]
    saves = desk.plan(scheduled(tables, 0, 4, tables)).saves
    readers = {save.job_id for save in saves if set(save.block_ids) & set(written)}
    assert set(desk.planner.plan((), 1.0, written).fences) == readers != set()


def test_local_attention_saves_nothing_where_it_begins_anew() -> None:
    groups = (Coverage(2, 4), Coverage(2, 4, LocalAttention(8), number=1))
    desk = admitted_desk(groups, "aaaabbbbcccc", tables=2)
    tables = [1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]
    saves = desk.plan(scheduled(tables, 0, 12, tables)).saves
    local = [save.block_ids for save in saves if save.key.group == 1]
    assert local == [(11, 12), (15, 16)], "a resume at 8 tokens needs none of it"


def test_a_window_is_saved_as_long_as_the_engine_has_it() -> None:
    """Its last tokens may be drafts: what they are is known a step later, further on."""
    desk = admitted_desk(GROUPS, "aaaabbbb")
    first = [1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26]
    saves = desk.plan(scheduled(first, 0, 11, first)).saves
    assert [(s.key.group, s.block_ids) for s in saves if s.key.group == 1] == [
        (1, (2, 22)),
        (1, (4, 24)),
    ]
    desk.grow("r", "aaaabbbbcccc")
    kept = [0, 0, 0, 0, 0, 6, 7], [11, 12, 13, 14, 15, 16, 17], [0, 0, 0, 0, 25, 26, 27]
    saves = desk.plan(scheduled(kept, 13, 1, ([7], [17], [27]))).saves
    assert [(s.key.group, s.block_ids) for s in saves] == [(0, (15, 16)), (1, (6, 26))]


STATES = (Coverage(4, 4, members=(2,)), Coverage(4, 4, States(), number=1, members=(0, 1)))


def saved_states(
    desk: Desk,
    state_blocks: list[int],
    computed: int,
    tokens: int,
    new: int = 0,
    states: tuple[int, ...] = (),
) -> list[tuple[int, ...]]:
    """The states saved in a step, as the blocks of both groups. new: how many blocks are new."""
    first, second = list(state_blocks), [block and block + 100 for block in state_blocks]
    tables = first, second, list(range(200, 200 + len(first)))
    fresh = tuple(table[len(table) - new :] for table in tables)
    step = scheduled(tables, computed, tokens, fresh)._replace(states=states)
    return [save.block_ids for save in desk.plan(step).saves if save.key.group == 1]


def state_desk(prompt: str, interval_tokens: int = 1) -> Desk:
    full, state = STATES
    groups = full, replace(state, kind=States(interval_tokens=interval_tokens))
    desk = Desk(coverages=groups, null_block=0, block_tokens=4, slots=40, may_load=False)
    desk.add("r", prompt)
    desk.planner.lookup("r", 0, 0.0, tokens=len(prompt))
    desk.planner.admitted("r", ([], [], []), 0)
    return desk


def test_a_state_is_saved_where_a_step_ends_with_a_chunk() -> None:
    desk = state_desk("aaaabbbbccccdd")
    assert saved_states(desk, [0, 5], 0, 8, 2) == [(5, 105)]
    assert saved_states(desk, [0, 5, 6, 7], 8, 6, 2) == [], "the block of 12 tokens is past them"
    assert saved_states(desk, [0, 0, 0, 7], 14, 1) == []


def test_of_the_ends_of_steps_the_first_after_an_interval_is_saved_and_the_last() -> None:
    """Steps of 4 tokens, and an interval of 10."""
    desk = state_desk("aaaabbbbccccddddeeeeffffgg", interval_tokens=10)
    blocks, saved = [0] * 7, []
    for end in range(4, 28, 4):
        blocks[end // 4 - 1] = end
        if saved_states(desk, blocks[: end // 4], end - 4, 4, 1):
            saved.append(end)
    assert saved == [12, 20, 24]


def test_a_state_that_the_engine_keeps_itself_is_saved_at_any_place() -> None:
    """The engine names those where prompts branch off; or the request has resumed after it."""
    desk = state_desk("aaaabbbbccccdd", interval_tokens=100)
    assert saved_states(desk, [5], 0, 4, 1, (4,)) == [(5, 105)]
    desk = state_desk("aaaabbbbccccdd", interval_tokens=100)
    assert saved_states(desk, [0, 5, 6], 8, 4, 2) == [(5, 105), (6, 106)]


def test_a_state_that_the_engine_writes_within_a_step_is_saved() -> None:
    assert saved_states(state_desk("aaaabbbbccccdd"), [0, 0, 6, 7], 0, 14, 4, (12,)) == [(6, 106)]


def test_a_state_is_saved_only_where_the_prompt_can_resume() -> None:
    """Every state of an answer would cost more than its KV."""
    desk = state_desk("aaaabbbb")
    assert saved_states(desk, [0, 5], 0, 8, 2) == [], "the last token is computed again"
    assert saved_states(desk, [0, 5, 6], 8, 1, 1) == []
    desk.grow("r", "aaaabbbbccccdddd")
    assert saved_states(desk, [0, 5, 6], 11, 1) == []
