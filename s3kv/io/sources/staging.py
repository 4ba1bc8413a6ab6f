"""Staging: bounded memory beside the slab, for bytes that cannot arrive in their slot.

A buffer is reused for the next lease of its length, because new memory costs a page fault for every
4 KiB. Until then it holds the bytes of its last lease.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence


class StagingMemory:
    """Memory of one I/O process, leased first come, first served. Belongs to one asyncio loop.
    most_bytes: limit on all leases and kept buffers together."""

    def __init__(self, most_bytes: int) -> None:
        self.leased_bytes = self._kept_bytes = 0
        self._most_bytes = most_bytes
        self._kept: dict[int, list[bytearray]] = {}
        """Buffers of ended leases, by length."""
        self._turn = asyncio.Lock()
        self._ended = asyncio.Event()

    @contextlib.asynccontextmanager
    async def lease(self, lengths: Sequence[int]) -> AsyncIterator[list[memoryview]]:
        """Lease buffers of these lengths during the block; their content is undefined. Waits until
        all fit at once. A lease beyond the limit runs alone. Nothing may use them afterwards."""
        nbytes = sum(lengths)
        async with self._turn:
            while self.leased_bytes and self.leased_bytes + nbytes > self._most_bytes:
                self._ended.clear()
                await self._ended.wait()
            self.leased_bytes += nbytes
        buffers: list[bytearray] = []
        try:
            buffers += map(self._buffer, lengths)
            yield [memoryview(buffer) for buffer in buffers]
        finally:
            self.leased_bytes -= nbytes
            self._ended.set()
            for buffer in buffers:
                self._keep(buffer)

    def take(self, nbytes: int) -> bytearray | None:
        """Lease a buffer until `give_back`; None if it does not fit now."""
        if self.leased_bytes + nbytes > self._most_bytes:
            return None
        self.leased_bytes += nbytes
        try:
            return self._buffer(nbytes)
        except MemoryError:
            self.leased_bytes -= nbytes
            return None

    def give_back(self, buffer: bytearray) -> None:
        """End the lease of `take`. Nothing may use the buffer afterwards."""
        self.leased_bytes -= len(buffer)
        self._ended.set()
        self._keep(buffer)

    def _buffer(self, length: int) -> bytearray:
        if self._kept.get(length):
            self._kept_bytes -= length
            return self._kept[length].pop()
        if self.leased_bytes + self._kept_bytes > self._most_bytes:
            self._kept.clear()
            self._kept_bytes = 0
        return bytearray(length)

    def _keep(self, buffer: bytearray) -> None:
        if self.leased_bytes + self._kept_bytes + len(buffer) <= self._most_bytes:
            self._kept.setdefault(len(buffer), []).append(buffer)
            self._kept_bytes += len(buffer)
