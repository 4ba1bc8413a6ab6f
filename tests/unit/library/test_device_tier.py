"""The blocks of a pool while copies come late: what is held or being copied keeps its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from s3kv.device.copies import CopyEnds, LoadedEnd, SavedEnd
from s3kv.device.tensors import BlockTensors
from s3kv.errors import UnsupportedError
from s3kv.library.caller_streams import (
    Beside,
    current_stream,
    has_passed,
    mark,
    new_stream,
    on,
    wait,
)
from s3kv.library.device_tier import BlockPools, DeviceBlocks
from s3kv.messages import CopyPart
from s3kv.types import ChunkKey
from tests.machines import play
from tests.unit.device.caches import moves

NOBODY_S = 0
"""What a block is filled with that has been taken and not been written to yet."""


def key(number: int) -> ChunkKey:
    return ChunkKey(0, bytes([number]))


@dataclass
class LateCopies:
    """Copies that move their bytes when told to end: as late as real ones may read and write."""

    pool: torch.Tensor
    slots: dict[int, int] = field(default_factory=dict)
    """What the slots hold."""
    under_way: list[tuple[str, Any, int, int]] = field(default_factory=list)
    ends: CopyEnds = field(default_factory=lambda: CopyEnds([], []))

    def save(self, job_id: int, group: int, slot: int, block_ids: Sequence[int]) -> None:
        self.under_way.append(("save", job_id, slot, block_ids[0]))

    def load(self, load_id: str, parts: Sequence[CopyPart]) -> None:
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
        self.stream = None
        self.pool = torch.zeros(count, 4, dtype=torch.uint8)
        self.copies = LateCopies(self.pool)
        pools = BlockPools(BlockTensors({"x": ((4,), torch.uint8)}), {"x": self.pool})
        self.blocks = DeviceBlocks(pools, range(count), self.copies, None)  # type: ignore[arg-type]
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
            assert not self.blocks._table._idle
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
            assert not self.blocks._table._free
            assert not self.blocks._table._idle

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
        in_use = [block for block in self.blocks._table._blocks.values() if block.in_use]
        assert not in_use, "a block is pinned for ever"


def test_late_copies_read_and_write_what_is_theirs() -> None:
    play(PoolMachine, games=120, steps=50)


DTYPES = (torch.bfloat16, torch.float64, torch.int32)
BLOCKS = 5


@st.composite
def strided(draw: st.DrawFn) -> tuple[tuple[int, ...], torch.dtype, list[int], int]:
    """A block's shape and dtype, how far each of its dimensions reaches too far, and where the
    dimension of the blocks comes among them."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=5)))
    pads = [draw(st.sampled_from([0, 0, 0, 1, 3])) for _ in range(len(shape) + 1)]
    return shape, draw(st.sampled_from(DTYPES)), pads, draw(st.integers(0, len(shape)))


def pool_of(case: tuple[tuple[int, ...], torch.dtype, list[int], int]) -> torch.Tensor:
    """Full of noise; its blocks may be padded, or lie between each other's rows."""
    shape, dtype, pads, at = case
    sizes = [*shape[:at], BLOCKS, *shape[at:]]
    strides, reach = [0] * len(sizes), 1
    for d in range(len(sizes) - 1, -1, -1):
        reach += pads[d]
        strides[d] = reach
        reach *= sizes[d]
    memory = torch.randint(0, 256, (reach * dtype.itemsize + 8,), dtype=torch.uint8).view(dtype)
    return torch.as_strided(memory, sizes, strides).movedim(at, 0)


def raw(tensor: torch.Tensor) -> bytes:
    return torch.cat([tensor.reshape(-1)]).view(torch.uint8).numpy().tobytes()


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(cases=st.lists(strided(), min_size=1, max_size=3), number=st.integers(0, BLOCKS - 1))
def test_the_moves_are_a_block_s_payload(
    cases: list[tuple[tuple[int, ...], torch.dtype, list[int], int]], number: int
) -> None:
    pools = {f"t{n}": pool_of(case) for n, case in enumerate(cases)}
    shapes = {name: (tuple(pool.shape[1:]), pool.dtype) for name, pool in pools.items()}
    found = moves(BlockPools(BlockTensors(shapes), pools).layout, (number,), 0)
    assert [move.offset for move in found] == [0, *(m.offset + m.nbytes for m in found[:-1])]
    payload = b"".join(_memory(pools.values(), move.address, move.nbytes) for move in found)
    assert payload == b"".join(raw(pool[number]) for pool in pools.values())


def _memory(pools: object, address: int, nbytes: int) -> bytes:
    for pool in pools:  # type: ignore[attr-defined]
        storage = pool.untyped_storage()
        begin = address - storage.data_ptr()
        if begin >= 0 and begin + nbytes <= storage.nbytes():
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            return whole[begin : begin + nbytes].numpy().tobytes()
    raise AssertionError(f"{address} is in none of the pools")


def test_an_engine_s_cache_is_one_move_per_side_and_layer() -> None:
    # [layers, 2, blocks, tokens, heads, content]: a block is 2 x layers runs.
    cache = torch.zeros(3, 2, BLOCKS, 4, 2, 8, dtype=torch.bfloat16).movedim(2, 0)
    shapes = {"kv": (tuple(cache.shape[1:]), cache.dtype)}
    found = moves(BlockPools(BlockTensors(shapes), {"kv": cache}).layout, (1,), 0)
    assert [move.nbytes for move in found] == [4 * 2 * 8 * 2] * 6
    assert all(b.address - a.address == BLOCKS * 128 for a, b in pairwise(found))


ONE = {"a": ((2, 4), torch.float32)}
TWO = {"a": ((2, 4), torch.float32), "b": ((2, 4), torch.float32)}
MEMORY = torch.zeros(BLOCKS, 2, 4)
REFUSED = [
    (ONE, {"b": MEMORY}, "expected are"),
    (ONE, {"a": torch.zeros(BLOCKS, 4, 2)}, "expected is"),
    (ONE, {"a": torch.zeros(BLOCKS, 4, 2).transpose(1, 2)}, "as they do in memory"),
    (ONE, {"a": torch.tensor(0.0)}, "blocks"),
    (ONE, {"a": MEMORY[:0]}, "blocks"),
    (TWO, {"a": MEMORY, "b": torch.zeros(BLOCKS + 1, 2, 4)}, r"\[5, 6\] blocks"),
    (TWO, {"a": MEMORY, "b": MEMORY}, "same memory"),
    (ONE, {"a": MEMORY.to("meta")}, "on meta"),
]


@pytest.mark.parametrize(("shapes", "pools", "reason"), REFUSED)
def test_pools_that_do_not_fit_are_refused(
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]],
    pools: dict[str, torch.Tensor],
    reason: str,
) -> None:
    with pytest.raises(ValueError, match=reason):
        BlockPools(BlockTensors(shapes), pools)


def test_memory_that_cannot_be_copied_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="layer a"):
        BlockPools(BlockTensors(ONE), {"a": torch.zeros(1, 2, 4).expand(5, 2, 4)})


CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


class Recorder:
    """Stands for `torch.cuda`: which streams there are, and what they were told."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.made = 0
        self.current = self.named("caller")

    def named(self, name: str) -> SimpleNamespace:
        def record() -> SimpleNamespace:
            self.log.append(f"{name} records")
            return SimpleNamespace(of=name, query=lambda: name != "busy")

        return SimpleNamespace(
            name=name,
            record_event=record,
            wait_event=lambda event: self.log.append(f"{name} waits for {event.of}"),
            synchronize=lambda: self.log.append(f"host waits for {name}"),
        )

    def new(self, device: torch.device) -> SimpleNamespace:
        self.made += 1
        return self.named(f"side {self.made}")

    @contextmanager
    def on(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(torch.cuda, "Stream", recorder.new)
    monkeypatch.setattr(torch.cuda, "stream", recorder.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: recorder.current)
    return recorder


def test_a_stream_waits_for_marks_of_others(cuda: Recorder) -> None:
    caller, own = current_stream(CUDA), new_stream(CUDA)
    wait(own, [mark(caller), None])
    with on(own):
        assert cuda.current.name == "side 1"
    assert cuda.current.name == "caller"
    assert cuda.log == ["caller records", "side 1 waits for caller"]


def test_a_mark_tells_when_it_has_passed(cuda: Recorder) -> None:
    assert has_passed(mark(current_stream(CUDA)))
    cuda.current = cuda.named("busy")
    assert not has_passed(mark(current_stream(CUDA)))


@pytest.mark.parametrize("fails", [False, True])
def test_copies_beside_are_over_before_anything_else(cuda: Recorder, fails: bool) -> None:
    beside = Beside([CUDA, CPU, CUDA])

    def work() -> None:
        cuda.log.append(f"work on {cuda.current.name}")
        if fails:
            raise RuntimeError("the copy was refused")

    with pytest.raises(RuntimeError, match="refused") if fails else nullcontext():
        beside(work)
    assert cuda.log == [
        "caller records",
        "side 1 waits for caller",
        "work on side 1",
        "host waits for side 1",
    ]
    assert cuda.current.name == "caller"
