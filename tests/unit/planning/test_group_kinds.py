"""What a resume needs, against a model that asks of every token what the next one depends on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3kv.planning.group_kinds import (
    Coverage,
    FullAttention,
    GroupKind,
    LocalAttention,
    SlidingWindow,
    States,
    check_coverages,
)


@st.composite
def coverages(draw: st.DrawFn) -> Coverage:
    block_tokens = draw(st.integers(1, 6))
    chunk_tokens = block_tokens * draw(st.integers(1, 5))
    kinds: list[GroupKind] = [
        FullAttention(),
        SlidingWindow(draw(st.integers(2, 40))),
        LocalAttention(chunk_tokens * draw(st.integers(1, 4))),
        States(),
    ]
    return Coverage(block_tokens, chunk_tokens, draw(st.sampled_from(kinds)))


def depends_on(kind: GroupKind, tokens: int) -> set[int]:
    """Positions of the tokens whose KV, or whose state, the token at position `tokens` reads."""
    before, reach = range(tokens), kind.reach_tokens
    if isinstance(kind, SlidingWindow):
        return {t for t in before if tokens - t < reach}
    if isinstance(kind, LocalAttention):
        return {t for t in before if t // reach == tokens // reach}
    return {t for t in before if t == tokens - 1} if isinstance(kind, States) else set(before)


@given(coverages(), st.integers(0, 30))
def test_needed_is_what_the_next_token_depends_on(coverage: Coverage, blocks: int) -> None:
    tokens = blocks * coverage.block_tokens
    needed = depends_on(coverage.kind, tokens)
    assert set(coverage.blocks_for(tokens)) == {t // coverage.block_tokens for t in needed}
    assert set(coverage.chunks_for(tokens)) == {t // coverage.chunk_tokens for t in needed}


@given(coverages(), st.integers(0, 8))
def test_the_objects_of_chunks_hold_what_a_resume_at_their_end_needs(
    coverage: Coverage, chunks: int
) -> None:
    tokens = chunks * coverage.chunk_tokens
    held = {b for chunk in coverage.chunks_for(tokens) for b in coverage.blocks_of(chunk)}
    assert set(coverage.blocks_for(tokens)) <= held


@given(coverages(), st.integers(0, 8))
def test_the_object_of_a_chunk_holds_its_own_blocks_alone(coverage: Coverage, chunk: int) -> None:
    size = coverage.chunk_tokens
    own = {b for b in range(500) if b * coverage.block_tokens // size == chunk}
    held = set(coverage.blocks_of(chunk))
    assert held <= own
    if not isinstance(coverage.kind, LocalAttention):
        assert held == own & set(coverage.blocks_for((chunk + 1) * size))


@pytest.mark.parametrize("tokens", [-16, 8, 17])
def test_a_resume_within_a_block_is_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"^{tokens} tokens: allowed are multiples of 16"):
        Coverage(16, 64).blocks_for(tokens)


@pytest.mark.parametrize(
    ("kind", "tokens", "reason"),
    [
        (FullAttention(), 24, "chunk_tokens is 24: allowed are multiples of a block"),
        (LocalAttention(48), 32, "chunk_tokens is 32: allowed is a divisor of 48"),
        (SlidingWindow(1), 32, "a window of 1 token needs no cache"),
    ],
)
def test_a_chunk_that_does_not_fit_is_refused(kind: GroupKind, tokens: int, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}"):
        Coverage(16, tokens, kind)


FULL, WINDOW, STATE = Coverage(4, 8), Coverage(4, 8, SlidingWindow(5)), Coverage(8, 8, States())


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        ((), r"groups are \[\]: allowed are full ones, then all others"),
        ((WINDOW, FULL), r"groups are \['window', 'full'\]"),
        ((STATE, FULL), "groups are"),
        ((FULL, Coverage(4, 16, SlidingWindow(5))), r"chunk_tokens are \[8, 16\]"),
    ],
)
def test_what_is_not_served_is_refused(refused: tuple[Coverage, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}"):
        check_coverages(refused)


def test_full_attention_with_others_and_others_alone_are_served() -> None:
    for served in ((FULL, Coverage(8, 8), WINDOW), (WINDOW,), (STATE,), (FULL, WINDOW, STATE)):
        check_coverages(served)
