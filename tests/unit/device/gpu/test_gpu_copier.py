"""Which path is taken: decided from times, measured without a trace in the caches."""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable
from itertools import chain, count

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from s3kv.device.copier import BatchRefused, CopyDirection, Path
from s3kv.device.copies import BlockCopies
from s3kv.device.gpu.gather import Stack
from s3kv.device.gpu.gpu_copier import GpuCopier, faster, seconds_per_chunk, spread_blocks
from s3kv.device.gpu.interface import Copies
from s3kv.device.layout import PageLayout
from s3kv.device.slot_payloads import ChunkPlaces
from s3kv.messages import CopyPart
from tests.unit.device.caches import ORDERS, Shape, build, moves, places
from tests.unit.device.devices import Device
from tests.unit.device.simulated import SimulatedGpu, SimulatedStream


def test_batch_is_preferred_unless_gather_is_worth_its_kernels() -> None:
    assert faster(1.0, 1.0) is Path.BATCH
    assert faster(1.0, 0.95) is Path.BATCH
    assert faster(1.0, 0.8) is Path.GATHER
    assert faster(0.5, 1.0) is Path.BATCH


def test_the_best_round_counts_and_the_first_does_not() -> None:
    """And the paths take turns."""
    started: list[tuple[Path, int]] = []
    settled: list[int] = []
    lengths = [1.0, 1.0, 64.0, 32.0, 16.0, 48.0, 80.0, 96.0]
    begins = [100.0 * number for number in range(len(lengths))]
    # What is not counted asks for its begin alone.
    ends = [begin + length for begin, length in zip(begins, lengths, strict=True)]
    now = iter([*begins[:2], *chain.from_iterable(zip(begins[2:], ends[2:], strict=True))])
    both = (Path.GATHER, Path.BATCH)
    seconds = seconds_per_chunk(
        both,
        lambda path, chunk: started.append((path, chunk)),
        lambda: settled.append(len(started)),
        now.__next__,
    )
    assert seconds == {Path.GATHER: 1.0, Path.BATCH: 2.0}
    assert started == [(path, chunk) for path in both for chunk in range(16)] * 4
    assert settled == [16 * number for number in range(1, 9)]


def test_blocks_to_measure_with_are_no_neighbours() -> None:
    for chunk in range(9):
        ids = spread_blocks(chunk, 16, range(1000))
        assert len(set(ids)) == 16
        assert all(0 <= i < 1000 for i in ids)
        assert not {i + 1 for i in ids} & set(ids)
    assert spread_blocks(3, 4, range(4)) == (0, 1, 2, 3)
    assert set(spread_blocks(1, 4, [5, 7])) == {5, 7}


class SlowPath:
    """A clock that only the copies of a simulated GPU move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> None:
        self.now = 0.0
        for name, each in seconds.items():
            monkeypatch.setattr(SimulatedStream, name, self._taking(name, each))

    def __call__(self) -> float:
        return self.now

    def _taking(self, name: str, seconds: float) -> Callable[..., None]:
        real = getattr(SimulatedStream, name)

        def launch(stream: SimulatedStream, *args: object, **kwargs: object) -> None:
            self.now += seconds
            real(stream, *args, **kwargs)

        return launch


@pytest.mark.parametrize("order", ORDERS)
def test_the_faster_path_is_taken_and_the_caches_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, order: str
) -> None:
    clock = SlowPath(monkeypatch, {"copy_batch": 2.0, "gather": 1.0, "scatter": 3.0})
    caches = build(Shape(order, blocks=9), "cpu", torch.Generator().manual_seed(5))
    before = caches.memory()
    with caplog.at_level(logging.INFO):
        copier = GpuCopier(places(caches, caches.layout())[0], SimulatedGpu(11), clock=clock)
    assert caches.memory() == before
    assert copier.choices == (
        (0, CopyDirection.OUT, Path.GATHER, 2.0, 1.0),
        (0, CopyDirection.IN, Path.BATCH, 2.0, 3.0),
    )
    assert [record.getMessage() for record in caplog.records] == [
        "s3kv: KV blocks of group 0 go out by gather: a chunk takes 2000.00 ms by batch, "
        "1000.00 ms by gather",
        "s3kv: KV blocks of group 0 go in by batch: a chunk takes 2000.00 ms by batch, "
        "3000.00 ms by gather",
    ]
    copies = BlockCopies(copier)
    assert copies.copier.choices == copier.choices
    copies.close()


@pytest.mark.parametrize(
    ("slots", "begins"), [(31, {0}), (32, {0}), (63, {0}), (64, {0, 32}), (100, {0, 32, 64})]
)
def test_objects_of_several_slots_are_measured_side_by_side(
    monkeypatch: pytest.MonkeyPatch, slots: int, begins: set[int]
) -> None:
    """Objects of 31 pages, each at a multiple of the next power of two."""
    seen = set()
    locate = ChunkPlaces.locate

    def seeing(where: ChunkPlaces, part: CopyPart) -> tuple[PageLayout, int]:
        seen.add(part.slot)
        return locate(where, part)

    monkeypatch.setattr(ChunkPlaces, "locate", seeing)
    caches = build(Shape("LBNHC", layers=4, blocks=64), "cpu", torch.Generator().manual_seed(5))
    layout, page = caches.layout(), 4096
    header_bytes = 31 * page - layout.payload_bytes
    slab = memoryview(mmap.mmap(-1, slots * page))
    where = ChunkPlaces({0: layout}, slab, page, {0: header_bytes})
    before = caches.memory()
    copier = GpuCopier(where, SimulatedGpu(11), clock=count().__next__)
    assert caches.memory() == before
    assert seen == begins
    copier.close()


def test_only_idle_blocks_are_measured_with(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: set[int] = set()
    rows = Stack.rows

    def seen(stack: Stack, block_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        touched.update(block_ids.tolist())
        return rows(stack, block_ids)

    monkeypatch.setattr(Stack, "rows", seen)
    caches = build(Shape("LBNHC", blocks=9), "cpu", torch.Generator().manual_seed(5))
    copier = GpuCopier(
        places(caches, caches.layout())[0],
        SimulatedGpu(11),
        idle=[2, 3, 5, 7],
        clock=count().__next__,
    )
    assert touched == {2, 3, 5, 7}
    copier.close()
    copier = GpuCopier(places(caches, caches.layout())[0], SimulatedGpu(11), idle=[])
    assert {choice[2:] for choice in copier.choices} == {(Path.BATCH, None, None)}
    copier.close()


def refuse(stream: SimulatedStream, copies: Copies, source_is_stable: bool) -> None:
    raise BatchRefused("cuMemcpyBatchAsync failed with CUresult 801")


def test_a_driver_that_refuses_batches_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(SimulatedStream, "copy_batch", refuse)
    caches = build(Shape("LBNHC", blocks=9), "cpu", torch.Generator().manual_seed(5))
    before = caches.memory()
    with caplog.at_level(logging.WARNING):
        copier = GpuCopier(places(caches, caches.layout())[0], SimulatedGpu(11))
    assert caches.memory() == before
    assert {choice[2:4] for choice in copier.choices} == {(Path.GATHER, None)}
    assert len(caplog.records) == 2
    assert "CUresult 801" in caplog.text
    copier.close()


class Refusing:
    """Copies by batches alone, of a driver that refuses some."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.caches = build(Shape("LBNHC", blocks=9), "cpu", torch.Generator().manual_seed(5))
        self.places, form = places(self.caches, self.caches.layout())
        self.payload = self.places.memory[form.header_bytes :][: self.caches.layout().payload_bytes]
        self.gpu = SimulatedGpu(11)
        self.now_s = 0.0
        self.copies = BlockCopies(
            GpuCopier(self.places, self.gpu, Path.BATCH, clock=self.clock), self.clock
        )
        self.jobs = 0

    def clock(self) -> float:
        return self.now_s

    def save(self, *, refused: bool) -> bool:
        """Whether a save ends well."""
        self.jobs += 1
        with self.patch.context() as patch:
            if refused:
                patch.setattr(SimulatedStream, "copy_batch", refuse)
            self.copies.save(self.jobs, 0, 0, [3, 1])
            assert self.copies.wait_all(10.0)
        (end,) = self.copies.poll().saved
        return end.ok

    def paths(self) -> set[Path]:
        return {choice.path for choice in self.copies.copier.choices}


def test_a_driver_that_begins_to_refuse_batches_is_asked_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Refusing(monkeypatch)
    refusals = [True, True, False] * 3
    assert [rig.save(refused=refused) for refused in refusals] == [not one for one in refusals]
    assert rig.paths() == {Path.BATCH}, "refusals now and then change nothing"
    assert [rig.save(refused=True) for _ in range(3)] == [False] * 3
    assert rig.paths() == {Path.GATHER}
    rig.payload.zero_()
    assert rig.save(refused=True), "the driver was asked again"
    expected = moves(rig.caches.layout(), [3, 1], 0)
    content = b"".join(ctypes.string_at(move.address, move.nbytes) for move in expected)
    assert rig.payload.numpy().tobytes() == content
    rig.copies.load("r", [CopyPart(0, 0, 0, (5, 6))])
    assert rig.copies.wait_all(10.0)
    assert rig.copies.poll().loaded == [("r", True)]
    moved = rig.caches.content([5, 6])
    assert all(torch.equal(moved[name], rows) for name, rows in rig.caches.content([3, 1]).items())
    assert rig.copies.copier.refused == 9
    assert caplog.text.count("gathers KV blocks now") == 1
    rig.copies.close()


def test_a_driver_that_refuses_all_is_logged_and_memory_asked_for_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch empties its cache, and the engine's, before it gives up an allocation."""
    rig = Refusing(monkeypatch)
    asked: list[int] = []
    monkeypatch.setattr(SimulatedGpu, "empty", lambda gpu, n: (asked.append(n), full(gpu, n))[1])
    for minute in (1, 2):
        assert not any(rig.save(refused=True) for _ in range(300))
        assert len(asked) == minute
        assert not any(record.exc_info for record in caplog.records)
        for text in ("CUresult 801", "no memory to gather"):
            assert caplog.text.count(text) == minute
        assert len(caplog.records) == 2 * minute
        rig.now_s += 60.0
    assert rig.copies.copier.refused == 600
    assert rig.save(refused=False), "it is asked again"
    assert not any(rig.save(refused=True) for _ in range(2))
    monkeypatch.undo()
    assert not rig.save(refused=True), "this is the one at which memory is asked for"
    assert rig.save(refused=True)
    assert rig.paths() == {Path.GATHER}
    rig.copies.close()


def full(gpu: SimulatedGpu, count: int) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("memory", ["empty", "host_numbers"])
def test_without_room_to_gather_all_goes_in_batches(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, memory: str
) -> None:
    monkeypatch.setattr(SimulatedGpu, memory, full)
    caches = build(Shape("LBNHC"), "cpu", torch.Generator().manual_seed(5))
    with caplog.at_level(logging.INFO):
        copier = GpuCopier(places(caches, caches.layout())[0], SimulatedGpu(11))
    assert {choice.path for choice in copier.choices} == {Path.BATCH}
    assert "no memory to gather: CUDA out of memory" in caplog.text
    copier.close()
    for gpu, path in ((SimulatedGpu(11, no_batch="old"), None), (SimulatedGpu(11), Path.GATHER)):
        with pytest.raises(torch.OutOfMemoryError):
            GpuCopier(places(caches, caches.layout())[0], gpu, path)
        assert gpu.pinned is None


def test_without_a_batch_call_all_is_gathered_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caches = build(Shape("LBNHC"), "cpu", torch.Generator().manual_seed(5))
    gpu = SimulatedGpu(11, no_batch="the driver is older than CUDA 12.8")
    with caplog.at_level(logging.INFO):
        copier = GpuCopier(places(caches, caches.layout())[0], gpu)
    assert [choice[:3] for choice in copier.choices] == [
        (0, CopyDirection.OUT, Path.GATHER),
        (0, CopyDirection.IN, Path.GATHER),
    ]
    assert "older than CUDA 12.8" in caplog.text
    copier.close()
    with pytest.raises(ValueError, match="older than CUDA"):
        GpuCopier(places(caches, caches.layout())[0], gpu, Path.BATCH)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS)
def test_measuring_on_a_gpu_leaves_the_caches_as_they_are(order: str) -> None:
    caches = build(Shape(order, blocks=9), "cuda", torch.Generator().manual_seed(5))
    before = caches.memory()
    copier = Device("cuda").open(places(caches, caches.layout())[0])
    assert caches.memory() == before
    assert all(choice.gather_s is None or choice.gather_s > 0 for choice in copier.choices)
    copier.close()
