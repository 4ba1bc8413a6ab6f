"""The small engine's paged memory: blocks in order of their freeing, found again by prefix."""

from __future__ import annotations

from collections import deque

from tests.unit.planning.setup import Request


class BlockPool:
    """Blocks are freed with what they hold, and found until used again. size: their tokens."""

    def __init__(self, count: int, size: int) -> None:
        self._size = size
        self._free = deque(range(count))
        self._users = [0] * count
        self._block_of: dict[int, int] = {}
        self._prefix_of: dict[int, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def users(self, block: int) -> int:
        return self._users[block]

    def hit(self, request: Request) -> tuple[int, list[int]]:
        """The length of the request's prefix that is found again, and its blocks; the last token
        is always computed."""
        table: list[int] = []
        for end in range(self._size, request.known, self._size):
            block = self._block_of.get(request.chain[end - 1])
            if block is None:
                break
            table.append(block)
        return len(table) * self._size, table

    def missing(self, request: Request, tokens: int, hit: list[int]) -> int:
        """How many free blocks `allocate` would use up."""
        count = max(0, -(-tokens // self._size) - len(request.table) - len(hit))
        return count + sum(not self._users[block] for block in hit)

    def allocate(self, request: Request, tokens: int, hit: list[int]) -> list[int] | None:
        """Give the request its `hit` and new blocks, so that there is room for `tokens`. Returns
        the new ones; None when there are not enough."""
        if self.missing(request, tokens, hit) > len(self._free):
            return None
        for block in hit:
            self._take(block)
        request.table += hit
        new = [self._new() for _ in range(-(-tokens // self._size) - len(request.table))]
        request.table += new
        return new

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

    def give_back(self, request: Request) -> None:
        for block in reversed(request.table):
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)
        request.table = []

    def remember(self, request: Request, tokens: int) -> None:
        """The blocks of the request's first `tokens` are findable."""
        for end in range(self._size, min(tokens, request.known) + 1, self._size):
            prefix, block = request.chain[end - 1], request.table[end // self._size - 1]
            if prefix not in self._block_of and block not in self._prefix_of:
                self._block_of[prefix] = block
                self._prefix_of[block] = prefix

    def forget(self) -> None:
        """Nothing is findable any more."""
        self._block_of.clear()
        self._prefix_of.clear()
