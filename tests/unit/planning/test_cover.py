"""What a resume needs, against a model that asks of every token what the next one depends on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3kv.planning.cover import (
    Cover,
    GroupKind,
    GroupSpec,
    blocks_of_chunk,
    check_groups,
    cover,
)

FULL, WINDOW, LOCAL, STATE = GroupKind


@st.composite
def groups(draw: st.DrawFn) -> GroupSpec:
    block_tokens = draw(st.integers(1, 6))
    chunk_tokens = block_tokens * draw(st.integers(1, 5))
    kind = draw(st.sampled_from(GroupKind))
    reach_tokens = draw(st.integers(1, 40)) if kind in (WINDOW, LOCAL) else 0
    return GroupSpec(block_tokens, chunk_tokens, kind, reach_tokens)


def depends_on(group: GroupSpec, tokens: int) -> set[int]:
    """Positions of the tokens whose KV, or whose state, the token at position `tokens` reads."""
    before = range(tokens)
    match group.kind:
        case GroupKind.FULL:
            return set(before)
        case GroupKind.WINDOW:
            return {t for t in before if tokens - t < group.reach_tokens}
        case GroupKind.LOCAL:
            return {t for t in before if t // group.reach_tokens == tokens // group.reach_tokens}
        case GroupKind.STATE:
            return {t for t in before if t == tokens - 1}


@given(groups(), st.integers(0, 30))
def test_the_cover_is_what_the_next_token_depends_on(group: GroupSpec, blocks: int) -> None:
    tokens = blocks * group.block_tokens
    needed = depends_on(group, tokens)
    covered = cover(group, tokens)
    assert set(covered.blocks) == {t // group.block_tokens for t in needed}
    assert set(covered.chunks) == {t // group.chunk_tokens for t in needed}


@given(groups(), st.integers(0, 8))
def test_the_objects_of_chunks_hold_what_a_resume_at_their_end_needs(
    group: GroupSpec, chunks: int
) -> None:
    needed = cover(group, chunks * group.chunk_tokens)
    held = {block for chunk in needed.chunks for block in blocks_of_chunk(group, chunk)}
    assert set(needed.blocks) <= held


@given(groups(), st.integers(0, 8))
def test_the_object_of_a_chunk_holds_its_own_blocks_alone(group: GroupSpec, chunk: int) -> None:
    own = {b for b in range(500) if b * group.block_tokens // group.chunk_tokens == chunk}
    held = set(blocks_of_chunk(group, chunk))
    assert held <= own
    if group.kind is not LOCAL:
        assert held == own & set(cover(group, (chunk + 1) * group.chunk_tokens).blocks)


@pytest.mark.parametrize(
    ("group", "tokens", "blocks", "chunks"),
    [
        (GroupSpec(16, 256), 1_024, range(64), range(4)),
        (GroupSpec(16, 256, WINDOW, 128), 1_024, range(56, 64), range(3, 4)),
        (GroupSpec(16, 256, WINDOW, 1_024), 4_096, range(192, 256), range(12, 16)),
        (GroupSpec(16, 256, LOCAL, 8_192), 8_448, range(512, 528), range(32, 33)),
        (GroupSpec(1_152, 1_152, STATE), 3_456, range(2, 3), range(2, 3)),
    ],
    ids=["full", "gpt-oss", "gemma3", "llama4", "qwen3-next"],
)
def test_covers_of_known_models(
    group: GroupSpec, tokens: int, blocks: range, chunks: range
) -> None:
    assert cover(group, tokens) == Cover(blocks, chunks)


@pytest.mark.parametrize("tokens", [-16, 8, 17])
def test_a_resume_within_a_block_is_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"^{tokens} tokens: allowed are multiples of 16"):
        cover(GroupSpec(16, 64), tokens)


def test_a_chunk_that_is_no_multiple_of_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk_tokens is 24: allowed are multiples of a block"):
        GroupSpec(16, 24)


@pytest.mark.parametrize(("kind", "reach_tokens"), [(WINDOW, 0), (LOCAL, 0), (FULL, 4), (STATE, 4)])
def test_a_reach_fits_the_kind(kind: GroupKind, reach_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"reach_tokens is {reach_tokens} in a {kind.value} group"):
        GroupSpec(16, 64, kind, reach_tokens)


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ((), r"groups are \[\]: allowed are full ones, then all others"),
        ((GroupSpec(4, 8, WINDOW, 5), GroupSpec(4, 8)), "groups are"),
        ((GroupSpec(4, 8, LOCAL, 12),), "chunk_tokens is 8: allowed is a divisor of .* 12 tokens"),
        ((GroupSpec(8, 8, STATE), GroupSpec(4, 8)), "groups are"),
        ((GroupSpec(4, 8), GroupSpec(4, 16, WINDOW, 5)), r"chunk_tokens are \[8, 16\]"),
    ],
)
def test_groups_that_the_planner_does_not_serve_are_refused(
    groups: tuple[GroupSpec, ...], reason: str
) -> None:
    with pytest.raises(ValueError, match=f"^{reason}"):
        check_groups(groups)


def test_full_groups_with_others_and_others_alone_are_served() -> None:
    check_groups((GroupSpec(4, 8), GroupSpec(8, 8), GroupSpec(4, 8, WINDOW, 5)))
    check_groups((GroupSpec(4, 8, WINDOW, 5),))
    check_groups((GroupSpec(8, 8, STATE),))
    check_groups((GroupSpec(4, 8), GroupSpec(4, 8, WINDOW, 5), GroupSpec(8, 8, STATE)))
    check_groups((GroupSpec(4, 8), GroupSpec(4, 8, LOCAL, 16), GroupSpec(4, 8, WINDOW, 5)))
