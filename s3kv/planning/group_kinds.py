"""Kinds of KV-cache groups, and coverages: the groups that need the same positions to resume. Pure.

Positions count from the start of the prompt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import ClassVar

STATE_SPACING = 4
"""Bytes of KV between two states of a prompt, relative to the bytes of one state. The states
between a prompt's first and last therefore amount to at most a quarter of its KV."""


@dataclass(frozen=True, slots=True)
class GroupKind(ABC):
    """Kind of a KV-cache group: the tokens that a resume depends on, and the rules that follow.
    `str(kind)` names its layers, for people.

    name: its name in manifests. plural: name of its layers. reach_tokens: reach of its attention;
        0: to the start.
    is_cumulative: a resume needs everything that a shorter one needs. Every chunk therefore makes a
        hit longer, and tables have no gaps.
    is_sparse: the engine writes a block only where a step ends. Most chunks therefore have none,
        and a resume needs only the block of the last chunk.
    """

    reach_tokens: int = 0
    name: ClassVar[str]
    plural: ClassVar[str]
    is_cumulative: ClassVar[bool] = False
    is_sparse: ClassVar[bool] = False

    def __str__(self) -> str:
        return self.plural + (f" of {self.reach_tokens:,} tokens" if self.reach_tokens else "")

    @abstractmethod
    def first_token(self, tokens: int) -> int:
        """The first token that the computation of the token at position `tokens` depends on."""

    def first_held(self, chunk_tokens: int) -> int:
        """The first token of a chunk that a resume at the chunk's end or later depends on."""
        return self.first_token(chunk_tokens)

    def chunk_tokens(self, block_tokens: int, wanted: int) -> int:
        """The chunk length without a setting. wanted: preferred length, a multiple of the block."""
        return wanted

    def objection(self, chunk_tokens: int) -> str:
        """The reason why chunks cannot have this length; empty: they can."""
        return ""

    def is_saved(
        self, end: int, computed: int, scheduled: int, states: Sequence[int], last: int | None
    ) -> bool:
        """Whether to save the chunk that ends after `end` tokens, once a step of `scheduled` tokens
        after `computed` ones has run: a resume at `end` must need a block of the group, and the
        block must exist and be worth its bytes.

        states: as in `ScheduledRequest`. last: largest number of tokens, in whole chunks, after
            which the prompt can resume; None: not known.
        """
        return self.first_token(end) < end


class FullAttention(GroupKind):
    """Full attention, including MLA: a token sees all tokens before it."""

    name, plural = "full", "full attention"
    is_cumulative = True

    def first_token(self, tokens: int) -> int:
        return 0


class SlidingWindow(GroupKind):
    """Sliding window: a token sees itself and the `reach_tokens - 1` tokens before it."""

    name, plural = "window", "windows"

    def first_token(self, tokens: int) -> int:
        return max(0, tokens - self.reach_tokens + 1)

    def objection(self, chunk_tokens: int) -> str:
        return "" if self.reach_tokens > 1 else "a window of 1 token needs no cache"


class LocalAttention(GroupKind):
    """Chunked-local attention: a token sees itself and the tokens since the last multiple of
    `reach_tokens`. A chunk divides the reach, so all its blocks are needed at the same lengths."""

    name, plural = "local", "local attention"

    def first_token(self, tokens: int) -> int:
        return tokens - tokens % self.reach_tokens

    def first_held(self, chunk_tokens: int) -> int:
        return 0

    def chunk_tokens(self, block_tokens: int, wanted: int) -> int:
        return gcd(wanted, self.reach_tokens)

    def objection(self, chunk_tokens: int) -> str:
        if self.reach_tokens % chunk_tokens == 0:
            return ""
        return (
            f"chunk_tokens is {chunk_tokens}: allowed is a divisor of {self.reach_tokens}, "
            "because this model's local attention restarts after each block of that length"
        )


@dataclass(frozen=True, slots=True)
class States(GroupKind):
    """Mamba, linear attention or short convolution: a block is the state after its last token.

    interval_tokens: tokens between two states that are saved because a step ends there; 1: every
        such state is saved.
    """

    interval_tokens: int = 1
    name, plural = "state", "states"
    is_sparse = True

    def first_token(self, tokens: int) -> int:
        return max(0, tokens - 1)

    def chunk_tokens(self, block_tokens: int, wanted: int) -> int:
        """The length of a block: only the state after a prompt's last whole block is certain to be
        kept by the engine."""
        return block_tokens

    def is_saved(
        self, end: int, computed: int, scheduled: int, states: Sequence[int], last: int | None
    ) -> bool:
        """A step writes one state, at its end; the next step writes to another block if this one is
        full. The saved states are the prompt's last, the first after each multiple of the interval,
        and those that the engine itself keeps: `states`, and the one at which the step began."""
        if last is not None and end > last:
            return False
        if end == computed or end in states:
            return True
        interval = self.interval_tokens
        return end == computed + scheduled and (
            last is None or end == last or end // interval > computed // interval
        )


KINDS: tuple[type[GroupKind], ...] = (FullAttention, SlidingWindow, LocalAttention, States)
"""All kinds, in the order in which their coverages are numbered."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """KV-cache groups of the engine that need the same positions to resume. Their pages of a chunk
    form one object. A chunk is a whole number of blocks.

    number: the number in the keys of its chunks.
    members: the engine's numbers of the groups, in the order of their parts; empty: `number` alone.
    """

    block_tokens: int
    chunk_tokens: int
    kind: GroupKind = field(default_factory=FullAttention)
    number: int = 0
    members: tuple[int, ...] = ()
    blocks_per_chunk: int = field(init=False, repr=False, compare=False)
    held: range = field(init=False, repr=False, compare=False)
    """The blocks that the object of a chunk holds, counted from the chunk's first: those that a
    resume at the chunk's end or later needs. They are the same in every chunk."""

    def __post_init__(self) -> None:
        if self.chunk_tokens % self.block_tokens:
            raise ValueError(
                f"chunk_tokens is {self.chunk_tokens}: allowed are multiples of a block, "
                f"{self.block_tokens} tokens"
            )
        if objection := self.kind.objection(self.chunk_tokens):
            raise ValueError(objection)
        blocks = self.chunk_tokens // self.block_tokens
        first = self.kind.first_held(self.chunk_tokens) // self.block_tokens
        object.__setattr__(self, "members", self.members or (self.number,))
        object.__setattr__(self, "blocks_per_chunk", blocks)
        object.__setattr__(self, "held", range(first, blocks))

    def blocks_for(self, tokens: int) -> range:
        """Positions of the blocks that a resume at `tokens` needs. Raises `ValueError` if `tokens`
        is negative or not a whole number of blocks."""
        if tokens < 0 or tokens % self.block_tokens:
            raise ValueError(f"{tokens} tokens: allowed are multiples of {self.block_tokens}")
        first = self.kind.first_token(tokens) // self.block_tokens
        return range(first, tokens // self.block_tokens)

    def chunks_for(self, tokens: int) -> range:
        """Positions of the chunks that hold the blocks of `blocks_for`."""
        blocks, size = self.blocks_for(tokens), self.blocks_per_chunk
        return range(blocks.start // size, -(-blocks.stop // size))

    def blocks_of(self, chunk: int) -> range:
        """Positions of the blocks that the object of the chunk at this position holds."""
        first = chunk * self.blocks_per_chunk
        return range(first + self.held.start, first + self.held.stop)


def check_coverages(coverages: Sequence[Coverage]) -> None:
    """Raise `ValueError` for coverages that the planner cannot serve together: an empty sequence,
    cumulative ones after others, or chunks of different lengths."""
    kinds = [coverage.kind for coverage in coverages]
    if not kinds or sorted(kinds, key=lambda kind: not kind.is_cumulative) != kinds:
        raise ValueError(
            f"groups are {[kind.name for kind in kinds]}: allowed are full ones, then all others"
        )
    sizes = {coverage.chunk_tokens for coverage in coverages}
    if len(sizes) > 1:
        raise ValueError(f"chunk_tokens are {sorted(sizes)}: allowed is one length for all groups")


def blocks_after(
    coverages: Sequence[Coverage], tokens: int, tables: Sequence[Sequence[int]]
) -> Iterator[int]:
    """The blocks after the first `tokens`, of all KV-cache groups of the engine. tables: the blocks
    of a request in each of them."""
    for coverage in coverages:
        for member in coverage.members:
            yield from tables[member][tokens // coverage.block_tokens :]
