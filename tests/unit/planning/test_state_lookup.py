"""Where a request resumes that needs a state, and what it asks the bucket for meanwhile."""

from __future__ import annotations

import random

import pytest

from s3kv.planning.group_kinds import Coverage, SlidingWindow, States
from s3kv.planning.requests import NOTHING, WAIT, Answer
from s3kv.planning.state_lookup import MISSES_PER_LOOKUP
from s3kv.types import ChunkKey
from tests.unit.planning.desk import CHUNK, MISSING, OK, Desk

FULL = Coverage(2, 4)
WINDOW = Coverage(2, 4, SlidingWindow(7), number=1)
STATE = Coverage(4, 4, States(), number=2)
PROMPT = "aaaabbbbccccddddeeeeffff"


def desk_with(*groups: Coverage, prompt: str = PROMPT, **setup: object) -> Desk:
    desk = Desk(**{"coverages": groups, "slots": 60, "max_wait_s": 1e9, **setup})
    desk.add("r", prompt)
    return desk


def key(desk: Desk, group: Coverage, chunk: int) -> ChunkKey:
    return ChunkKey(group.number, desk.hashes["r"][2 * chunk + 1])


def put(desk: Desk, group: Coverage, *chunks: int) -> None:
    """Make these chunks resident."""
    for chunk in chunks:
        reservation = desk.planner.ledger.table.reserve(key(desk, group, chunk))
        desk.planner.ledger.table.commit(reservation.entry, dirty=False)


def asked(desk: Desk) -> list[int]:
    """Chunks whose states this step's fetches are for; they are missing."""
    fetches = desk.fetches()
    assert {fetch.key.group for fetch in fetches} <= {STATE.number}
    desk.end(fetches, MISSING)
    return [desk.hashes["r"].index(fetch.key.block_hash) // 2 for fetch in fetches]


def test_states_are_asked_for_from_the_back_twice_as_many_with_every_miss() -> None:
    prompt = "".join(chr(0x100 + n) * CHUNK for n in range(12)) + "z"
    desk = desk_with(FULL, STATE, prompt=prompt)
    put(desk, FULL, *range(12))
    put(desk, STATE, 2)
    found = []
    while desk.lookup("r") == WAIT:
        found.append(asked(desk))
    assert found == [[10], [9, 8], [7, 6, 5, 4, 3]]
    assert desk.lookup("r") == Answer(False, 3 * CHUNK)
    assert desk.pinned() == 3 + 1, "the prefix up to the state, and the state"


def test_none_is_asked_for_before_one_that_the_bucket_has() -> None:
    desk = desk_with(FULL, STATE)
    put(desk, FULL, *range(6))
    desk.planner.ledger.index.note_present(key(desk, STATE, 3))
    found = [asked(desk) for _ in range(2) if desk.lookup("r") == WAIT]
    assert found == [[4], [3]], "the last token is computed again"


def test_a_model_of_states_alone_asks_for_some_and_no_more() -> None:
    prompt = "".join(chr(0x100 + n) * CHUNK for n in range(200)) + "z"
    desk = desk_with(STATE, prompt=prompt, slots=300)
    count = 0
    while desk.lookup("r") == WAIT:
        count += len(asked(desk))
    assert MISSES_PER_LOOKUP <= count < 2 * MISSES_PER_LOOKUP
    assert desk.lookup("r") == NOTHING


def test_a_deadline_takes_the_last_state_that_is_there() -> None:
    desk = desk_with(FULL, STATE, max_wait_s=5.0)
    put(desk, FULL, *range(6))
    put(desk, STATE, 1)
    assert desk.lookup("r") == WAIT
    late = desk.fetches()
    desk.now_s = 6.0
    assert desk.lookup("r") == Answer(False, 2 * CHUNK)
    desk.end(late)
    desk.planner.finished("r")
    assert desk.pinned() == 0


def longest(there: dict[Coverage, set[int]], local_tokens: int, tokens: int) -> int:
    """Tokens of the longest resume for which every group has what it needs, by trying all."""
    own = set(range(local_tokens // CHUNK))
    ends = [
        end
        for end in range(CHUNK, tokens, CHUNK)
        if all(set(group.chunks_for(end)) - own <= there[group] for group in there)
    ]
    return max([0, *(end - local_tokens for end in ends)])


@pytest.mark.parametrize("groups", [(FULL, WINDOW), (FULL, STATE), (FULL, WINDOW, STATE), (STATE,)])
@pytest.mark.parametrize("seed", range(100))
def test_a_hit_is_the_longest_length_that_every_group_can_resume_at(
    groups: tuple[Coverage, ...], seed: int
) -> None:
    draw = random.Random(seed)
    tokens = draw.randint(8, len(PROMPT))
    desk = desk_with(*groups, prompt=PROMPT[:tokens], probe_chunks=draw.randint(1, 4))
    there: dict[Coverage, set[int]] = {group: set() for group in groups}
    for group in groups:
        places = ["nowhere"] * (4 if group is STATE else 1) + ["host", "host", "bucket", "known"]
        for chunk in range(tokens // CHUNK):
            place = draw.choice(places)
            if place == "host":
                put(desk, group, chunk)
            if place == "known":
                desk.planner.ledger.index.note_present(key(desk, group, chunk))
            if place != "nowhere":
                there[group].add(chunk)
    stored = {key(desk, group, chunk) for group in groups for chunk in there[group]}
    local_tokens = draw.choice([0, 0, 4, 8] if STATE in groups else [0, 0, 2, 4, 8])
    while (answer := desk.planner.lookup("r", local_tokens, 0.0, tokens=tokens)).wait:
        fetches = desk.fetches()
        for fetch in draw.sample(fetches, len(fetches)):
            desk.end(fetch, OK if fetch.key in stored else MISSING)
    assert answer.tokens == longest(there, local_tokens, tokens), f"seed {seed}"
    if answer.tokens:
        check_load(desk, groups, local_tokens, local_tokens + answer.tokens)
    desk.planner.finished("r")
    assert desk.pinned() == 0


def check_load(desk: Desk, groups: tuple[Coverage, ...], begin: int, end: int) -> None:
    """Each group loads the blocks that it needs from their places; of states, the last one."""
    tables = [[100 * n + block for block in range(20)] for n in range(3)]
    desk.planner.admitted("r", tables, end - begin)
    (load,) = desk.plan().loads
    for group in groups:
        needed = group.blocks_for(end)
        first = max(needed.start, begin // group.block_tokens)
        parts = [part for part in load.parts if part.group == group.number]
        blocks = [block for part in parts for block in part.block_ids]
        assert blocks == tables[group.number][first : needed.stop]
        for part in parts:
            at = tables[group.number].index(part.block_ids[0])
            chunk, first_block = divmod(at, group.blocks_per_chunk)
            entry = desk.planner.ledger.table.lookup(key(desk, group, chunk))
            assert (part.slot, part.first_block) == (entry.number, first_block - group.held.start)
    desk.planner.loaded(["r"])
