"""Caches, a slab and copies between them, as a worker has them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, sleep
from typing import Any

import torch

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.shapes import Model, fill_with_noise, make_caches, make_layout
from s3kv.device.copies import BlockCopies
from s3kv.device.selection import memory_near
from s3kv.host.slab import Slab
from s3kv.messages import CopyPart
from s3kv.objects.codec import ChunkFormat

NAMESPACE = "0" * 32
SHARD = "h0-7of8-l0-31of32"
_POLL_S = 20e-6
LONG_S = 60.0


class CopyRig:
    """Chunks of random blocks, and a slot for each of them.

    copied_bytes: how much a round of saves, or of loads, moves; as many chunks as that takes.
    """

    def __init__(
        self, machine: Machine, model: Model, block_tokens: int, copied_bytes: int
    ) -> None:
        self.machine = machine
        self.caches = make_caches(model, block_tokens, 2, torch.device("cpu"))
        self.layout = make_layout(self.caches, block_tokens)
        self.count = max(2, copied_bytes // self.layout.payload_bytes)
        per_chunk = self.layout.blocks_per_chunk
        # Twice as many blocks: a chunk is loaded to others than it was saved from.
        num_blocks = 2 * self.count * per_chunk + 1
        self.caches = make_caches(model, block_tokens, num_blocks, machine.device)
        self.layout = make_layout(self.caches, block_tokens)
        ids = random.Random(block_tokens).sample(range(1, num_blocks), num_blocks - 1)
        chunks = [tuple(ids[at : at + per_chunk]) for at in range(0, len(ids), per_chunk)]
        self.sources, self.targets = chunks[: self.count], chunks[self.count :]
        self.format = ChunkFormat(NAMESPACE, (self.layout.part("g0"),), 0, SHARD)
        self.slot_bytes = -(-self.format.object_bytes // 4096) * 4096
        node = memory_near(machine.device)
        self.slab = Slab.create(self.count * self.slot_bytes, node=node)
        self.memory = torch.frombuffer(self.slab.view, dtype=torch.uint8)
        noise = torch.empty(self.memory.numel(), dtype=torch.uint8, device=machine.device)
        fill_with_noise(noise)
        self.memory.copy_(noise)

    @property
    def copied_bytes(self) -> int:
        return self.count * self.layout.payload_bytes

    @contextmanager
    def copies(self) -> Iterator[BlockCopies]:
        opened = BlockCopies.open(
            {0: self.layout},
            self.slab.view,
            self.slot_bytes,
            {0: self.format.header_bytes},
        )
        try:
            yield opened
        finally:
            opened.close()

    def measured(self, measure: Callable[[BlockCopies], dict[str, Any]]) -> dict[str, Any]:
        """What `measure` finds; then the rig is closed."""
        try:
            with self.copies() as copies:
                return measure(copies)
        finally:
            self.close()

    def close(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.slab.close()

    def save_all(self, copies: BlockCopies) -> float:
        """Seconds from the first order to the last end that was told."""

        def order() -> None:
            for i, ids in enumerate(self.sources):
                copies.save(i, 0, i, ids)

        return self._seconds(copies, order)

    def load_all(self, copies: BlockCopies) -> float:
        def order() -> None:
            for i, ids in enumerate(self.targets):
                copies.load(str(i), [CopyPart(0, i, 0, ids)])

        return self._seconds(copies, order)

    def forget_targets(self) -> None:
        """So that `check` finds there what has been loaded since."""
        blocks = torch.tensor(self.targets, device=self.machine.device).flatten()
        for cache in self.caches.values():
            cache.view(torch.int16).index_fill_(0, blocks, 0)

    def check(self) -> None:
        """After `save_all` and `load_all`: what was saved has been loaded."""
        sources = torch.tensor(self.sources, device=self.machine.device).flatten()
        targets = torch.tensor(self.targets, device=self.machine.device).flatten()
        for name, cache in self.caches.items():
            raw = cache.view(torch.int16)
            if not torch.equal(raw[sources], raw[targets]):
                raise AssertionError(f"{name}: other bytes were loaded than saved")

    def _seconds(self, copies: BlockCopies, order: Callable[[], None]) -> float:
        self.machine.synchronize()
        begin_s = perf_counter()
        order()
        self.drain(copies, self.count)
        return perf_counter() - begin_s

    @staticmethod
    def drain(copies: BlockCopies, left: int) -> None:
        """Until so many more copies have ended."""
        begin_s = perf_counter()
        while left := left - ended(copies):
            if perf_counter() - begin_s > LONG_S:
                raise AssertionError(f"{left} copies have not ended in {LONG_S} s")
            sleep(_POLL_S)


def ended(copies: BlockCopies) -> int:
    """How many copies have ended since the last call, all of them well."""
    ends = copies.poll()
    ok = [end.ok for end in ends.saved] + [end.ok for end in ends.loaded]
    if not all(ok):
        raise AssertionError("a copy has failed; the log says why")
    return len(ok)
