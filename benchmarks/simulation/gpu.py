"""The engine's own prefix cache: paged device memory, the least recently used page goes first.

Like vLLM's block pool (vllm/v1/core/block_pool.py, 0.32): what no request uses any more keeps its
content until its page is needed, a request's tail is given up before its head, and pages come back
into use when a request finds its prefix in them. Pages are chunks here, as the trace knows no less.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain


class PagePool:
    """`keeps`: find pages again by their prefix. Otherwise there is no cache, only memory."""

    def __init__(self, count: int, *, keeps: bool) -> None:
        self._keeps = keeps
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self._users = [0] * count
        self._hash_of: list[bytes | None] = [None] * count
        self._page_of: dict[bytes, int] = {}

    def hit(self, hashes: Sequence[bytes], prompt_tokens: int, page_tokens: int) -> list[int]:
        """Pages with the longest known prefix; the last token of a prompt is always computed."""
        pages: list[int] = []
        for block_hash in hashes[: (prompt_tokens - 1) // page_tokens]:
            page = self._page_of.get(block_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def take(self, hit: Sequence[int], count: int) -> list[int] | None:
        """`count` pages in all, the first of them `hit`. None, and nothing changed, without."""
        unused = sum(not self._users[page] for page in hit)
        new_count = count - len(hit)
        if new_count > len(self._free) - unused:
            return None
        for page in hit:
            self._free.pop(page, None)
        new = [self._free.popitem(last=False)[0] for _ in range(new_count)]
        for page in new:
            block_hash, self._hash_of[page] = self._hash_of[page], None
            if block_hash is not None:
                del self._page_of[block_hash]
        for page in chain(hit, new):
            self._users[page] += 1
        return [*hit, *new]

    def fill(self, page: int, block_hash: bytes) -> None:
        """The page holds this chunk now, and may be found, if no other page is first."""
        if self._keeps and block_hash not in self._page_of:
            self._page_of[block_hash] = page
            self._hash_of[page] = block_hash

    def give_back(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            self._users[page] -= 1
            if not self._users[page]:
                self._free[page] = None
