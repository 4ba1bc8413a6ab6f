"""The small engine's paged memory: blocks in order of their freeing, found again by prefix."""

from __future__ import annotations

from collections import deque

from tests.unit.planning.setup import Request


class BlockPool:
    """Blocks are freed with what they hold and stay findable until they are used again."""

    def __init__(self, count: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._free = deque(range(count))
        self._users = [0] * count
        self._block_of: dict[int, int] = {}
        self._prefix_of: dict[int, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def users(self, block: int) -> int:
        return self._users[block]

    def hit(self, request: Request) -> list[int]:
        """Blocks that hold the request's prefix; its last token is always computed."""
        size, blocks = self._block_tokens, []
        for end in range(size, request.known, size):
            block = self._block_of.get(request.chain[end - 1])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def missing(self, request: Request, tokens: int, hit: list[int]) -> int:
        """How many free blocks `allocate` would use up."""
        unused = sum(not self._users[block] for block in hit)
        return -(-tokens // self._block_tokens) - len(request.blocks) - len(hit) + unused

    def allocate(self, request: Request, tokens: int, hit: list[int]) -> list[int] | None:
        """Give the request its `hit` and new blocks, so that there is room for `tokens`. Returns
        the new ones; None, and nothing has changed, when there are not enough.
        """
        if self.missing(request, tokens, hit) > len(self._free):
            return None
        for block in hit:
            self._take(block)
        request.blocks += hit
        new: list[int] = []
        while len(request.blocks) * self._block_tokens < tokens:
            block = self._free[0]
            self._take(block)
            self._block_of.pop(self._prefix_of.pop(block, -1), None)
            new.append(block)
            request.blocks.append(block)
        return new

    def _take(self, block: int) -> None:
        if not self._users[block]:
            self._free.remove(block)
        self._users[block] += 1

    def give_back(self, request: Request) -> None:
        for block in reversed(request.blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)
        request.blocks = []

    def remember(self, request: Request, tokens: int) -> None:
        """The blocks of the request's first `tokens`, as far as those are known, are findable."""
        size = self._block_tokens
        for end in range(size, min(tokens, request.known) + 1, size):
            prefix, block = request.chain[end - 1], request.blocks[end // size - 1]
            if prefix not in self._block_of and block not in self._prefix_of:
                self._block_of[prefix] = block
                self._prefix_of[block] = prefix

    def forget(self) -> None:
        """Nothing is findable any more."""
        self._block_of.clear()
        self._prefix_of.clear()
