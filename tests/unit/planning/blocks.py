"""The small engine's paged memory: blocks in order of their freeing, found again by prefix.

All groups of the engine take their blocks from one pool. What lies behind a window is given up when
the next step is scheduled; in its place the table has the null block. A step writes one state, to
the block of its last token, and the next step begins from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import lcm

from s3kv.planning.group_kinds import Coverage, LocalAttention, SlidingWindow, States
from tests.unit.planning.setup import Request

Tables = list[list[int]]


def copied(tables: Tables) -> Tables:
    return [list(table) for table in tables]


class BlockPool:
    """Blocks are freed with what they hold and stay findable until they are used again.

    null: the number that stands for no block; None if no table has gaps.
    """

    def __init__(self, count: int, tables: Sequence[Coverage], null: int | None = None) -> None:
        self._specs = tables
        self._null = null
        self._step = lcm(*(spec.block_tokens for spec in tables))
        self._free = deque(block for block in range(count) if block != null)
        self._users = [0] * count
        self._block_of: dict[tuple[int, int], int] = {}
        self._prefix_of: dict[int, tuple[int, int]] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def users(self, block: int) -> int:
        return self._users[block]

    def hit(self, request: Request) -> tuple[int, Tables]:
        """The length of the request's prefix that is found again, and the blocks that a resume
        there needs; the last token is always computed."""
        whole = (request.known - 1) // self._step * self._step
        for tokens in range(whole, 0, -self._step):
            tables = [self._found(request, number, tokens) for number in range(len(self._specs))]
            if None not in tables:
                return tokens, [table for table in tables if table is not None]
        return 0, []

    def _found(self, request: Request, number: int, tokens: int) -> list[int] | None:
        size, first = self._specs[number].block_tokens, self._first_block(number, tokens)
        table = [self._null or 0] * first
        for end in range((first + 1) * size, tokens + 1, size):
            block = self._block_of.get((number, request.chain[end - 1]))
            if block is None:
                return None
            table.append(block)
        return table

    def _first_block(self, number: int, computed: int) -> int:
        """The first block that the token at `computed` or a later one sees."""
        spec, kind, first = self._specs[number], self._specs[number].kind, 0
        if isinstance(kind, SlidingWindow):
            first = max(0, computed - kind.reach_tokens + 1)
        elif isinstance(kind, LocalAttention):
            first = computed - computed % kind.reach_tokens
        elif isinstance(kind, States):
            first = max(0, computed - 1)
        return first // spec.block_tokens

    def _first_new(self, number: int, computed: int, tokens: int) -> int:
        """The first block that is written when those up to `tokens` are computed or loaded."""
        if isinstance(self._specs[number].kind, States):
            return self._first_block(number, tokens)
        return self._first_block(number, computed)

    def missing(self, request: Request, computed: int, tokens: int, hit: Tables) -> int:
        """How many free blocks `allocate` would use up."""
        count = 0
        for number, spec in enumerate(self._specs):
            own = [*self._of(request.tables, number), *self._of(hit, number)]
            first = max(self._first_new(number, computed, tokens), len(own))
            count += max(0, -(-tokens // spec.block_tokens) - first)
            kept = self._of(hit, number)[self._first_block(number, computed) :]
            count += sum(block != self._null and not self._users[block] for block in kept)
        return count

    def allocate(self, request: Request, computed: int, tokens: int, hit: Tables) -> Tables | None:
        """Give the request its `hit` and new blocks, so that there is room for `tokens`, of which
        those before `computed` are or will be there. Returns the new ones; None when there are not
        enough. What no token from `computed` on sees is given up in both cases."""
        self._give_up(request, computed)
        if self.missing(request, computed, tokens, hit) > len(self._free):
            return None
        request.tables = request.tables or [[] for _ in self._specs]
        kept: Tables = []
        for number, table in enumerate(request.tables):
            first = self._first_block(number, computed)
            own = self._of(hit, number)
            kept.append([self._no_block if at < first else block for at, block in enumerate(own)])
            for block in kept[number]:
                if block != self._null:
                    self._take(block)
            table += kept[number]
        new: Tables = []
        for number, (table, spec) in enumerate(zip(request.tables, self._specs, strict=True)):
            first, added = self._first_new(number, computed, tokens), []
            while len(table) + len(added) < -(-tokens // spec.block_tokens):
                seen = len(table) + len(added) >= first
                added.append(self._new() if seen else self._no_block)
            table += added
            new.append(added)
        return new

    @staticmethod
    def _of(tables: Tables, number: int) -> list[int]:
        return tables[number] if tables else []

    @property
    def _no_block(self) -> int:
        assert self._null is not None, "a table with full attention has a gap"
        return self._null

    def _new(self) -> int:
        block = self._free[0]
        self._take(block)
        if block in self._prefix_of:
            del self._block_of[self._prefix_of.pop(block)]
        return block

    def _take(self, block: int) -> None:
        if not self._users[block]:
            self._free.remove(block)
        self._users[block] += 1

    def _drop(self, block: int) -> None:
        if block == self._null:
            return
        self._users[block] -= 1
        if not self._users[block]:
            self._free.append(block)

    def _give_up(self, request: Request, computed: int) -> None:
        """What no token from `computed` on sees."""
        for number, table in enumerate(request.tables):
            for at in reversed(range(min(self._first_block(number, computed), len(table)))):
                self._drop(table[at])
                table[at] = self._no_block

    def give_back(self, request: Request) -> None:
        for table in request.tables:
            for block in reversed(table):
                self._drop(block)
        request.tables = []

    def remember(self, request: Request, tokens: int) -> None:
        """The blocks of the request's first `tokens` are findable; of the states, the last."""
        for number, (table, spec) in enumerate(zip(request.tables, self._specs, strict=True)):
            size, first = spec.block_tokens, spec.block_tokens
            if isinstance(spec.kind, States):
                first = -(-tokens // size) * size
            for end in range(first, min(tokens, request.known) + 1, size):
                prefix, block = (number, request.chain[end - 1]), table[end // size - 1]
                if block == self._null or prefix in self._block_of or block in self._prefix_of:
                    continue
                self._block_of[prefix] = block
                self._prefix_of[block] = prefix

    def forget(self) -> None:
        """Nothing is findable any more."""
        self._block_of.clear()
        self._prefix_of.clear()
