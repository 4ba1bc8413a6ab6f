"""An engine that uses `BlockCopies` as the planner would, on a simulated GPU, all from one seed.

There is no thread: the copy thread's steps are actions like any other, taken when the seed says.
The engine knows what each of its blocks holds in the order of what it launched; every save, load
and read is compared with that. A schedule that fails is replayed with

    python -m tests.unit.device.schedule SEED
"""

from __future__ import annotations

import ctypes
import itertools
import random
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from s3kv.device import copies as copies_module
from s3kv.device.copier import Copier
from s3kv.device.copies import BlockCopies
from s3kv.device.gpu import copy_streams
from s3kv.device.gpu.gpu_copier import GpuCopier
from s3kv.device.layout import PageLayout
from s3kv.device.slot_payloads import ChunkPlaces
from s3kv.messages import CopyPart
from tests.unit.device.caches import ORDERS, Caches, Shape, build, moves, peek
from tests.unit.device.simulated import SimulatedEvent, SimulatedGpu

ACTIONS = 150
SLOTS = 5
HEADER_BYTES = 64


class SteppedThread:
    """In place of the copy thread. It runs when it is joined, and then only to end."""

    def __init__(self, target: Callable[[], None], name: str, daemon: bool) -> None:
        self.target = target

    def start(self) -> None:
        return

    def join(self, timeout_s: float) -> None:
        self.target()

    def is_alive(self) -> bool:
        return False


class SteppedCondition:
    """In place of the lock between the threads. Who waits takes the copy thread's steps."""

    step: Callable[[], object]

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        return

    def notify_all(self) -> None:
        return

    def wait_for(self, predicate: Callable[[], Any], timeout_s: float | None = None) -> bool:
        while not predicate():
            self.step()
        return True


def stepped(copier: Copier, clock: Callable[[], float] = float) -> BlockCopies:
    """`BlockCopies` whose copy thread starts a part when `_start_next` is called. clock: stands
    still unless another is given."""
    doubles = SimpleNamespace(Thread=SteppedThread, Condition=SteppedCondition)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies_module, "threading", doubles)
        copies = BlockCopies(copier, clock)
    copies._changed.step = copies._start_next  # type: ignore[attr-defined]
    return copies


def poke(layout: PageLayout, block: int, data: bytes) -> None:
    at = 0
    for address, _, nbytes in moves(layout, (block,), 0):
        ctypes.memmove(address, data[at : at + nbytes], nbytes)
        at += nbytes


@dataclass
class Group:
    """caches: what the GPU has. truth: what it will have when all that was launched has run."""

    caches: Caches
    layout: PageLayout
    truth: Caches
    truth_layout: PageLayout
    loading: set[int] = field(default_factory=set)
    """Blocks that a load may be writing to."""
    readers: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By block, the saves that were not fenced."""

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes


@dataclass(eq=False)
class Slot:
    group: int = 0
    content: bytes | None = None
    """The whole payload; None when it is not known."""
    saving: bool = False
    loads: int = 0

    @property
    def free(self) -> bool:
        return not self.saving and not self.loads


class Schedule:
    """deaf: as for `SimulatedGpu`, to see that it is noticed."""

    def __init__(self, seed: int, deaf: tuple[str, str] | None = None) -> None:
        self.random = random.Random(seed)
        self.gpu = SimulatedGpu(self.random.randrange(2**32), deaf=deaf, stalls_end=True)
        self.engine = [self.gpu.current, self.gpu.engine_stream()]
        self.groups = [self._group() for _ in range(self.random.choice([1, 2]))]
        slot_bytes = HEADER_BYTES + max(group.layout.payload_bytes for group in self.groups) + 8
        self.slab = bytearray(b"\xa5" * (SLOTS * slot_bytes))
        self.slot_bytes = slot_bytes
        layouts = {number: group.layout for number, group in enumerate(self.groups)}
        places = ChunkPlaces(
            layouts, memoryview(self.slab), slot_bytes, dict.fromkeys(layouts, HEADER_BYTES)
        )
        if self.random.random() < 0.5:
            self.stall()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(copy_streams, "MOST_PLACES", self.random.choice([2, 3, 256]))
            self.copier = GpuCopier(places, self.gpu)
        self.now_s = 0.0
        self.copies = stepped(self.copier, self.clock)
        for queue in (self.copies._out, self.copies._in):
            queue.window.seconds = self.random.choice([1e-9, 1e-2])
        self.slots = [Slot() for _ in range(SLOTS)]
        self.saves: dict[int, tuple[Slot, bytes]] = {}
        self.loads: dict[str, tuple[int, list[CopyPart]]] = {}
        self.wrong_reads: list[str] = []
        self.failures = 0
        self.numbers = itertools.count(1)

    def run(self) -> None:
        """Raises `AssertionError` for any byte in the wrong place."""
        actions = {
            self.write: 10,
            self.read: 6,
            self.save: 8,
            self.load: 6,
            self.refill: 3,
            self.copies._start_next: 14,
            self.poll: 8,
            self.gpu.pass_time: 4,
            self.switch: 2,
            self.stall: 1,
            self.go_on: 1,
            self.fail: 1,
            self.sleep: 1,
        }
        self.refill()
        self.refill()
        for _ in range(ACTIONS):
            (action,) = self.random.choices(list(actions), list(actions.values()))
            action()
        self.finish()

    def finish(self) -> None:
        self.go_on()
        while self.copies._urgent or self.copies._out.waiting or self.copies._in.waiting:
            self.copies._start_next()
            self.gpu.step()
        while self.saves or self.loads:
            self.gpu.step()
            self.poll()
        self.gpu.synchronize()
        assert self.wrong_reads == []
        for group in self.groups:
            assert group.caches.memory() == group.truth.memory()
        self.copies.close()
        assert self.gpu.pinned is None
        for number, slot in enumerate(self.slots):
            begin = number * self.slot_bytes
            assert set(self.slab[begin : begin + HEADER_BYTES]) == {0xA5}
            assert set(self.slab[begin + self.slot_bytes - 8 : begin + self.slot_bytes]) == {0xA5}
            assert slot.free

    def clock(self) -> float:
        self.now_s += self.random.choice([0.0, 1e-6, 1e-3])
        return self.now_s

    # --- what the engine does -------------------------------------------------------------------

    def write(self) -> None:
        self._write(*self._block())

    def _write(self, group: Group, block: int) -> None:
        self._fence(group, (block,))
        data = self.random.randbytes(group.block_bytes)
        poke(group.truth_layout, block, data)
        self.gpu.current.run(lambda: poke(group.layout, block, data))

    def read(self) -> None:
        group, block = self._block()
        expected = peek(group.truth_layout, (block,))

        def check() -> None:
            if peek(group.layout, (block,)) != expected:
                self.wrong_reads.append(f"block {block}")

        self.gpu.current.run(check)

    def switch(self) -> None:
        """Go on launching on the other stream, after what this one was given."""
        event = SimulatedEvent(self.gpu)
        self.gpu.current.record(event)
        self.gpu.current = self.engine[self.gpu.current is self.engine[0]]
        self.gpu.current.wait(event)

    def save(self) -> None:
        free = [slot for slot in self.slots if slot.free]
        number, group = self._any_group()
        idle = self._idle(group)
        if not free or len(idle) < group.layout.blocks_per_chunk:
            return
        slot = self.random.choice(free)
        blocks = tuple(self.random.sample(idle, group.layout.blocks_per_chunk))
        slot.group, slot.content, slot.saving = number, None, True
        job = next(self.numbers)
        self.saves[job] = slot, peek(group.truth_layout, blocks)
        for block in blocks:
            group.readers[block].add(job)
        self.copies.save(job, number, self.slots.index(slot), blocks)

    def load(self) -> None:
        number, group = self._any_group()
        full = [s for s in self.slots if s.content and s.group == number and not s.saving]
        idle = self._idle(group)[1:]
        parts = []
        for _ in range(self.random.choice([1, 1, 2, 4])):
            first = self.random.randrange(group.layout.blocks_per_chunk)
            count = self.random.randint(1, group.layout.blocks_per_chunk - first)
            if not full or len(idle) < count:
                break
            slot = self.random.choice(full)
            blocks = self.random.sample(idle, count)
            idle = [block for block in idle if block not in blocks]
            parts.append(CopyPart(number, self.slots.index(slot), first, tuple(blocks)))
        for part in parts:
            self.slots[part.slot].loads += 1
            group.loading.update(part.block_ids)
            self._fence(group, part.block_ids)
        load_id = str(next(self.numbers))
        self.loads[load_id] = number, parts
        self.copies.load(load_id, parts)

    def refill(self) -> None:
        """What the I/O process does: another object arrives in a slot that nobody uses."""
        free = [slot for slot in self.slots if slot.free]
        if free:
            slot = self.random.choice(free)
            slot.group, group = self._any_group()
            slot.content = self.random.randbytes(group.layout.payload_bytes)
            begin = self._payload_begin(slot)
            self.slab[begin : begin + len(slot.content)] = slot.content

    def poll(self) -> None:
        saved, loaded = self.copies.poll()
        for end in saved:
            slot, expected = self.saves.pop(end.job_id)
            slot.saving = False
            slot.content = expected if self._ended(end.ok) else None
            begin = self._payload_begin(slot)
            if end.ok:
                assert self.slab[begin : begin + len(expected)] == expected, "saved other bytes"
            for readers in self.groups[slot.group].readers.values():
                readers.discard(end.job_id)
        for load_id, ok in loaded:
            number, parts = self.loads.pop(load_id)
            self._ended(ok)
            for part in parts:
                self._loaded(self.groups[number], part, ok)

    def _loaded(self, group: Group, part: CopyPart, ok: bool) -> None:
        slot = self.slots[part.slot]
        slot.loads -= 1
        group.loading.difference_update(part.block_ids)
        assert slot.content is not None
        for i, block in enumerate(part.block_ids):
            if not ok:
                self._write(group, block)
                continue
            begin = (part.first_block + i) * group.block_bytes
            data = slot.content[begin : begin + group.block_bytes]
            assert peek(group.layout, (block,)) == data, "loaded other bytes"
            poke(group.truth_layout, block, data)

    # --- what happens to it -----------------------------------------------------------------------

    def stall(self) -> None:
        """The engine is busy for a while, unless something will fail, for which the host waits."""
        if not self.gpu.failing:
            self.gpu.current.stall()

    def go_on(self) -> None:
        for stream in self.engine:
            stream.go_on()

    def sleep(self) -> None:
        """Who waits for the copy thread and then for the device has waited for all copies."""
        self.go_on()
        assert self.copies.wait_started(0.0)
        self.gpu.synchronize()
        self.poll()
        assert not self.saves
        assert not self.loads

    def fail(self) -> None:
        """Some launch of the next copies is refused."""
        if not self.gpu.failing:
            self.go_on()
            self.failures += 1
            self.gpu.failing = self.random.randint(1, 12)

    # --- the rest ---------------------------------------------------------------------------------

    def _group(self) -> Group:
        shape = Shape(
            self.random.choice(ORDERS),
            layers=self.random.randint(1, 3),
            blocks=self.random.randint(8, 12),
            ratio=self.random.choice([1, 1, 2]),
            separate=self.random.random() < 0.5,
            pad=self.random.choice([0, 1]),
            blocks_per_chunk=self.random.randint(1, 3),
        )
        generator = torch.Generator().manual_seed(self.random.randrange(2**32))
        caches = build(shape, "cpu", generator)
        truth = caches.clone()
        return Group(caches, caches.layout(), truth, truth.layout())

    def _any_group(self) -> tuple[int, Group]:
        number = self.random.randrange(len(self.groups))
        return number, self.groups[number]

    def _block(self) -> tuple[Group, int]:
        _, group = self._any_group()
        return group, self.random.choice(self._idle(group))

    def _idle(self, group: Group) -> list[int]:
        """Blocks that no load writes to; there is always one."""
        return sorted(set(range(group.layout.num_blocks)) - group.loading)

    def _fence(self, group: Group, block_ids: tuple[int, ...]) -> None:
        jobs = {job for block in block_ids for job in group.readers.pop(block, ())}
        for readers in group.readers.values():
            readers -= jobs
        self.copies.fence(jobs)

    def _payload_begin(self, slot: Slot) -> int:
        return self.slots.index(slot) * self.slot_bytes + HEADER_BYTES

    def _ended(self, ok: bool) -> bool:
        self.failures -= not ok
        assert self.failures >= 0, "a copy failed that nobody disturbed"
        return ok


if __name__ == "__main__":
    Schedule(int(sys.argv[1])).run()
