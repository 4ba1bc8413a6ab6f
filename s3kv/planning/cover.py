"""Cover of KV-cache groups: the blocks that a resume at a length needs. Pure.

A full-attention group needs every block before the length, a sliding window those that the next
token can see, chunked-local attention those since the last multiple of its size, and a state group
the one state after the last token. Positions count from the start of the prompt.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class GroupKind(enum.Enum):
    FULL = "full"
    WINDOW = "window"
    """Sliding window: a token sees itself and the `reach_tokens - 1` tokens before it."""
    LOCAL = "local"
    """Chunked-local attention: a token sees itself and those since a multiple of `reach_tokens`."""
    STATE = "state"
    """Mamba, linear attention or short convolution: a block is the state after its last token."""


STATE_SPACING = 4
"""Bytes of KV between two states of a prompt, relative to the bytes of a state. So the states
between a prompt's first and its last are a quarter of its KV at most."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The KV-cache groups of the engine that need the same positions to resume. Their pages of a
    chunk are one object. A chunk is a whole number of blocks.

    number: the number in the keys of its chunks.
    members: the engine's numbers of the groups, in the order of their parts; none: `number`.
    reach_tokens: of a window or local group, how far its attention reaches; otherwise 0.
    interval_tokens: of a state group, the tokens between two states that are saved because a step
        ends there; 1: each of them is.
    """

    block_tokens: int
    chunk_tokens: int
    kind: GroupKind = GroupKind.FULL
    reach_tokens: int = 0
    number: int = 0
    members: tuple[int, ...] = ()
    interval_tokens: int = 1

    def __post_init__(self) -> None:
        if not self.members:
            object.__setattr__(self, "members", (self.number,))
        if self.chunk_tokens % self.block_tokens:
            raise ValueError(
                f"chunk_tokens is {self.chunk_tokens}: allowed are multiples of a block, "
                f"{self.block_tokens} tokens"
            )
        if (self.reach_tokens > 0) != (self.kind in (GroupKind.WINDOW, GroupKind.LOCAL)):
            raise ValueError(
                f"reach_tokens is {self.reach_tokens} in a {self.kind.value} group: allowed is "
                "more than 0 for windows and local attention, and 0 for all others"
            )


def check_groups(groups: Sequence[GroupSpec]) -> None:
    """Raise `ValueError` for groups that the planner does not serve together: none at all, full
    ones behind others, or with chunks of different lengths. A chunk divides the reach of local
    attention, so that all of its blocks have the same covers."""
    kinds = [group.kind for group in groups]
    if not kinds or GroupKind.FULL in kinds[kinds.count(GroupKind.FULL) :]:
        raise ValueError(
            f"groups are {[kind.value for kind in kinds]}: allowed are full ones, then all others"
        )
    sizes = {group.chunk_tokens for group in groups}
    if len(sizes) > 1:
        raise ValueError(f"chunk_tokens are {sorted(sizes)}: allowed is one length for all groups")
    for group in groups:
        if group.kind is GroupKind.LOCAL and group.reach_tokens % group.chunk_tokens:
            raise ValueError(
                f"chunk_tokens is {group.chunk_tokens}: allowed is a divisor of the reach of local "
                f"attention, {group.reach_tokens} tokens"
            )


class Cover(NamedTuple):
    """Positions of `blocks`, and of the `chunks` that hold them."""

    blocks: range
    chunks: range


def cover(group: GroupSpec, tokens: int) -> Cover:
    """Cover of a resume at `tokens`. Raises `ValueError` if they do not end with a block."""
    if tokens < 0 or tokens % group.block_tokens:
        raise ValueError(f"{tokens} tokens: allowed are multiples of {group.block_tokens}")
    end = tokens // group.block_tokens
    start = min(_first_token(group, tokens) // group.block_tokens, end)
    per_chunk = group.chunk_tokens // group.block_tokens
    chunks = range(start // per_chunk, -(-end // per_chunk) if start < end else start // per_chunk)
    return Cover(range(start, end), chunks)


def blocks_after(
    groups: Sequence[GroupSpec], tokens: int, tables: Sequence[Sequence[int]]
) -> Iterator[int]:
    """The blocks after the first `tokens`, of all KV-cache groups of the engine. tables: the blocks
    of a request in each of them."""
    for group in groups:
        for member in group.members:
            yield from tables[member][tokens // group.block_tokens :]


def blocks_of_chunk(group: GroupSpec, position: int) -> range:
    """Positions of the blocks that the object of the chunk at `position` holds: those that a resume
    at the chunk's end or later needs."""
    first = position * (group.chunk_tokens // group.block_tokens)
    held = held_blocks(group)
    return range(first + held.start, first + held.stop)


def held_blocks(group: GroupSpec) -> range:
    """The blocks that the object of a chunk holds, counted from the chunk's first. They are the
    same in every chunk."""
    per_chunk = group.chunk_tokens // group.block_tokens
    if group.kind in (GroupKind.FULL, GroupKind.LOCAL):
        return range(per_chunk)
    # A chunk so far from the prompt's start that no window ends there.
    far = 1 + group.reach_tokens // group.chunk_tokens
    needed = cover(group, (far + 1) * group.chunk_tokens).blocks
    return range(max(0, needed.start - far * per_chunk), per_chunk)


def _first_token(group: GroupSpec, tokens: int) -> int:
    """The first token that the computation of the token at position `tokens` depends on."""
    if group.kind is GroupKind.FULL:
        return 0
    if group.kind is GroupKind.WINDOW:
        return max(0, tokens - group.reach_tokens + 1)
    if group.kind is GroupKind.LOCAL:
        return tokens - tokens % group.reach_tokens
    return max(0, tokens - group.block_tokens)
