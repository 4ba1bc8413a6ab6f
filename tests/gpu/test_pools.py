"""The blocks of a caller's pool, by the real copies: what its streams see, and when."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from s3kv.device.copies import BlockCopies
from s3kv.device.tensors import BlockTensors
from s3kv.library.caller_streams import CallerStream, current_stream, mark
from s3kv.library.device_tier import GROUP, BlockPools, DeviceBlocks
from s3kv.types import ChunkKey
from tests.gpu.engine import LONG_S, Engine
from tests.unit.device.devices import Device

HEADER_BYTES = 256
SLOT_BYTES = 65536
SLOTS = 8
ELEMENTS = 4096


def key(number: int) -> ChunkKey:
    return ChunkKey(GROUP, bytes([number]))


@dataclass
class Pool:
    device: Device
    memory: torch.Tensor
    blocks: DeviceBlocks
    copies: BlockCopies
    slab: memoryview
    saved: list[bool] = field(default_factory=list)

    def stream(self) -> CallerStream:
        return current_stream(self.memory.device)

    def compute(self, number: int) -> int:
        """A block that says of which number it is, before the device has written it."""
        stream = self.stream()
        block = self.blocks.take(stream)
        assert block is not None
        self.device.stall()
        self.memory[block] = float(number)
        self.blocks.name(block, key(number), stream)
        return block

    def finish(self) -> None:
        assert self.copies.wait_all(LONG_S)
        assert not self.blocks.poll()

    def load(self, slot: int, number: int) -> int:
        found: list[int | None] = []
        assert self.blocks.load(slot, key(number), found.append)
        self.finish()
        (block,) = found
        assert block is not None
        return block

    def saved_as(self, slot: int, number: int) -> bool:
        begin = slot * SLOT_BYTES + HEADER_BYTES
        payload = torch.frombuffer(self.slab, dtype=torch.uint8)[begin : begin + 2 * ELEMENTS]
        return set(payload.view(torch.bfloat16).tolist()) == {float(number)}


class Eager(Device):
    def stall(self) -> None:
        if self.kind == "cuda":
            super().stall()


@contextmanager
def pool(kind: str, count: int) -> Iterator[Pool]:
    device = Eager(kind)
    memory = torch.zeros(count, 2, ELEMENTS // 2, dtype=torch.bfloat16, device=device.memory)
    tensors = BlockTensors({"kv": ((2, ELEMENTS // 2), torch.bfloat16)})
    pools = BlockPools(tensors, {"kv": memory})
    slab = memoryview(mmap.mmap(-1, SLOTS * SLOT_BYTES))
    headers = {GROUP: HEADER_BYTES}
    copies = BlockCopies.open({GROUP: pools.layout}, slab, SLOT_BYTES, headers)
    opened = mark(current_stream(memory.device))
    try:
        yield Pool(device, memory, DeviceBlocks(pools, range(count), copies, opened), copies, slab)
    finally:
        copies.close()


KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_and_another_stream_see_what_was_launched_before(kind: str) -> None:
    with pool(kind, 2) as p:
        engine = Engine(p.device)
        first, second = engine.new_stream(), engine.new_stream()
        with engine.on(first):
            block = p.compute(7)
            p.blocks.save(1, 3, block, p.stream(), p.saved.append)
            p.blocks.release(block, p.stream())
        with engine.on(second):
            assert p.blocks.acquire(key(7), p.stream()) == block
            seen = p.memory[block].clone()
        p.finish()
        p.device.synchronize()
        assert set(seen.flatten().tolist()) == {7.0}
        assert p.saved == [True]
        assert p.saved_as(3, 7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_not_loaded_into_before_its_readers_are_done(kind: str) -> None:
    with pool(kind, 1) as p:
        engine = Engine(p.device)
        block = p.compute(1)
        p.blocks.save(1, 0, block, p.stream(), p.saved.append)
        p.blocks.release(block, p.stream())
        p.finish()
        other = p.compute(2)
        p.device.synchronize()
        reader = engine.new_stream()
        with engine.on(reader):
            p.device.stall()
            seen = p.memory[other].clone()
            p.blocks.release(other, p.stream())
        assert p.load(0, 1) == other  # launched on the first stream, which has nothing to do
        p.device.synchronize()
        assert set(seen.flatten().tolist()) == {2.0}
        assert set(p.memory[other].flatten().tolist()) == {1.0}


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_not_computed_into_before_its_readers_are_done(kind: str) -> None:
    with pool(kind, 1) as p:
        engine = Engine(p.device)
        block = p.compute(1)
        reader, writer = engine.new_stream(), engine.new_stream()
        with engine.on(reader):
            p.device.stall()
            seen = p.memory[block].clone()
            p.blocks.release(block, p.stream())
        with engine.on(writer):
            assert p.blocks.take(p.stream()) == block
            p.memory[block] = 2.0
        p.device.synchronize()
        assert set(seen.flatten().tolist()) == {1.0}
