"""The table of a pool's blocks: what is held or pinned stays, and what is idle longest goes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lab.books import check
from s3kv.library.block_table import BlockError, BlockTable
from s3kv.types import ChunkKey
from tests.machines import play


def key(number: int) -> ChunkKey:
    return ChunkKey(0, number.to_bytes(4, "big"))


def test_blocks_given_twice_or_none_at_all_are_refused() -> None:
    for numbers in ([], [1, 2, 1]):
        with pytest.raises(ValueError, match="only once"):
            BlockTable(numbers)


@dataclass
class Model:
    key: ChunkKey | None = None
    holds: int = 0
    pins: int = 0


class BlockMachine(RuleBasedStateMachine):
    """The model is a dict of what each block holds, and a list of those idle, in order."""

    @initialize(count=st.integers(1, 6), first=st.integers(0, 3))
    def start(self, count: int, first: int) -> None:
        self.table = BlockTable(range(first, first + count))
        self.blocks = {n: Model() for n in range(first, first + count)}
        self.idle: list[int] = []

    def settle(self, number: int) -> None:
        block = self.blocks[number]
        if block.key is not None and not block.holds and not block.pins:
            self.idle.append(number)

    @rule(pinned=st.booleans())
    def take(self, pinned: bool) -> None:
        free = [n for n, b in self.blocks.items() if b == Model()]
        number = self.table.take(pinned=pinned)
        if free:
            assert number in free
        elif self.idle:
            assert number == self.idle.pop(0)
        else:
            assert number is None
        if number is not None:
            self.blocks[number] = Model(pins=1) if pinned else Model(holds=1)

    @rule(number=st.integers(-1, 9), of=st.integers(0, 5))
    def name(self, number: int, of: int) -> None:
        block = self.blocks.get(number)
        if block is None or not block.holds or block.key not in (None, key(of)):
            with pytest.raises(BlockError):
                self.table.name(number, key(of))
            return
        others = [b for n, b in self.blocks.items() if b.key == key(of) and n != number]
        assert self.table.name(number, key(of)) == (not others)
        if not others:
            block.key = key(of)

    @rule(number=st.integers(-1, 9), of=st.integers(0, 5))
    def name_filled(self, number: int, of: int) -> None:
        block = self.blocks.get(number)
        if block is None or not block.pins or block.key is not None:
            with pytest.raises(BlockError):
                self.table.name_filled(number, key(of))
            return
        holder = next((n for n, b in self.blocks.items() if b.key == key(of)), number)
        assert self.table.name_filled(number, key(of)) == holder
        self.blocks[holder].key = key(of)
        self.blocks[holder].holds += 1
        self.idle = [n for n in self.idle if n != holder]

    @rule(number=st.integers(-1, 9))
    def hold(self, number: int) -> None:
        block = self.blocks.get(number)
        if block is None or block.key is None:
            with pytest.raises(BlockError):
                self.table.hold(number)
            return
        self.table.hold(number)
        block.holds += 1
        self.idle = [n for n in self.idle if n != number]

    @rule(number=st.integers(-1, 9), event=st.sampled_from(["release", "pin", "unpin"]))
    def count(self, number: int, event: str) -> None:
        block = self.blocks.get(number)
        counted = block and (block.pins if event == "unpin" else block.holds)
        if block is None or not counted:
            with pytest.raises(BlockError):
                getattr(self.table, event)(number)
            return
        getattr(self.table, event)(number)
        block.holds -= event == "release"
        block.pins += {"pin": 1, "unpin": -1, "release": 0}[event]
        if event != "pin":
            self.settle(number)

    @invariant()
    def agrees_with_the_model(self) -> None:
        for number, block in self.blocks.items():
            assert self.table.key_of(number) == block.key
        for of in range(6):
            owners = [n for n, b in self.blocks.items() if b.key == key(of)]
            assert [self.table.find(key(of))] == (owners or [None])
        assert list(self.table._idle) == list(self.idle)
        assert len(self.table._free) == sum(b == Model() for b in self.blocks.values())
        check(self.table)


def test_agrees_with_a_model() -> None:
    play(BlockMachine, games=150, steps=60)
