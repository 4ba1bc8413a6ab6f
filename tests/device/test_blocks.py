"""The blocks of a pool while copies come late: what is held or being copied keeps its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from s3kv.device.blocks import DeviceBlocks
from s3kv.device.caller import CallerStream
from s3kv.device.copies import CopyEnds, LoadedEnd, SavedEnd
from s3kv.device.pools import BlockPools
from s3kv.device.tensors import BlockTensors
from s3kv.messages import LoadPart
from s3kv.types import ChunkKey
from tests.machines import play

CPU = torch.device("cpu")
NOBODY_S = 0
"""What a block is filled with that has been taken and not been written to yet."""


def key(number: int) -> ChunkKey:
    return ChunkKey(0, bytes([number]))


@dataclass
class LateCopies:
    """Copies that move their bytes when they end, and end when they are told to: as late as real
    ones may read and write."""

    pool: torch.Tensor
    slots: dict[int, int] = field(default_factory=dict)
    """What the slots hold."""
    under_way: list[tuple[str, Any, int, int]] = field(default_factory=list)
    ends: CopyEnds = field(default_factory=lambda: CopyEnds([], []))

    def save(self, job_id: int, group: int, slot: int, block_ids: Sequence[int]) -> None:
        self.under_way.append(("save", job_id, slot, block_ids[0]))

    def load(self, load_id: str, parts: Sequence[LoadPart]) -> None:
        (part,) = parts
        self.under_way.append(("load", load_id, part.slot, part.block_ids[0]))

    def finish(self, at: int, ok: bool) -> None:
        kind, ident, slot, block = self.under_way.pop(at % len(self.under_way))
        if kind == "save":
            self.slots[slot] = int(self.pool[block, 0]) if ok else -1
            self.ends.saved.append(SavedEnd(ident, ok, 0.0))
        else:
            self.pool[block] = self.slots[slot] if ok else 255
            self.ends.loaded.append(LoadedEnd(ident, ok))

    def poll(self) -> CopyEnds:
        ends, self.ends = self.ends, CopyEnds([], [])
        return ends


class PoolMachine(RuleBasedStateMachine):
    """Every block holds the number of its key. A save brings its key's number to a slot of its own,
    and a load reads one that was saved."""

    @initialize(count=st.integers(1, 5))
    def start(self, count: int) -> None:
        self.stream = CallerStream.current(CPU)
        self.pool = torch.zeros(count, 4, dtype=torch.uint8)
        self.copies = LateCopies(self.pool)
        pools = BlockPools(BlockTensors({"x": ((4,), torch.uint8)}), {"x": self.pool})
        self.blocks = DeviceBlocks(pools, range(count), self.copies, self.stream.mark())  # type: ignore[arg-type]
        self.held: list[tuple[int, int]] = []
        """(block, the number of its key), once per hold."""
        self.saved: dict[int, int] = {}
        """The number of the key by slot, of saves that have ended well."""
        self.jobs = 0

    @rule(number=st.integers(1, 6))
    def compute(self, number: int) -> None:
        """A block taken, filled and named."""
        block = self.blocks.take(self.stream)
        if block is None:
            assert self.blocks.statistics().idle == 0
            return
        assert block not in [held for held, _ in self.held]
        self.pool[block] = number
        if self.blocks.name(block, key(number), self.stream):
            self.held.append((block, number))
        else:
            assert self.blocks.holds(key(number))
            self.pool[block] = NOBODY_S
            self.blocks.release(block, self.stream)

    @rule(number=st.integers(1, 6))
    def acquire(self, number: int) -> None:
        block = self.blocks.acquire(key(number), self.stream)
        assert (block is not None) == self.blocks.holds(key(number))
        if block is not None:
            self.held.append((block, number))

    @precondition(lambda self: self.held)
    @rule(at=st.integers(0, 50), save=st.booleans())
    def release(self, at: int, save: bool) -> None:
        """Also right after a save of it was ordered."""
        block, number = self.held.pop(at % len(self.held))
        if save:
            self.jobs += 1
            slot = self.jobs

            def ended(ok: bool) -> None:
                if ok:
                    self.saved[slot] = number

            self.blocks.save(self.jobs, slot, block, self.stream, ended)
        self.blocks.release(block, self.stream)

    @precondition(lambda self: self.saved)
    @rule(at=st.integers(0, 50))
    def load(self, at: int) -> None:
        slot = sorted(self.saved)[at % len(self.saved)]
        number = self.saved[slot]

        def ended(block: int | None) -> None:
            if block is not None:
                self.held.append((block, number))

        if not self.blocks.load(slot, key(number), ended):
            assert self.blocks.statistics().free + self.blocks.statistics().idle == 0

    @precondition(lambda self: self.copies.under_way)
    @rule(at=st.integers(0, 50), ok=st.sampled_from([True, True, True, False]))
    def finish(self, at: int, ok: bool) -> None:
        self.copies.finish(at, ok)

    @rule()
    def poll(self) -> None:
        assert self.blocks.poll() == bool(self.copies.under_way)

    @invariant()
    def what_is_held_keeps_its_bytes(self) -> None:
        for block, number in self.held:
            assert set(self.pool[block].tolist()) == {number}, f"block {block}"

    @invariant()
    def what_was_saved_is_what_it_is_called(self) -> None:
        assert all(self.copies.slots[slot] == number for slot, number in self.saved.items())

    def teardown(self) -> None:
        while self.copies.under_way:
            self.copies.finish(0, ok=True)
        assert not self.blocks.poll()
        self.what_is_held_keeps_its_bytes()
        self.what_was_saved_is_what_it_is_called()
        for block, _ in self.held:
            self.blocks.release(block, self.stream)
        assert self.blocks.statistics().used == 0, "a block is pinned for ever"


def test_late_copies_read_and_write_what_is_theirs() -> None:
    play(PoolMachine, games=120, steps=50)
