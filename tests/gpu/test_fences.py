"""Pages that the engine rewrites as soon as it may, the call that keeps it from the copies, and
that no call of the engine's thread waits for the GPU."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from s3kv.messages import CopyPart
from tests.gpu.engine import LONG_S, Engine, slow_copier, synchronize_engine
from tests.gpu.rig import Rig, fill, noise, rig, with_content
from tests.unit.device.caches import DTYPES, ORDERS, Shape, peek
from tests.unit.device.devices import Device

STEPS = 6


def some_shape(order: str, ratio: int, draw: random.Random) -> Shape:
    """What the property test of the copies draws from, and some larger pages."""
    blocks_per_chunk = draw.randint(1, 4)
    return Shape(
        order=order,
        ratio=ratio,
        layers=draw.randint(1, 4),
        blocks=STEPS * blocks_per_chunk + draw.randint(1, 9),
        heads=draw.randint(1, 3),
        tokens=draw.choice([1, 2, 16]),
        content=draw.choice([2, 6, 64]),
        dtype=draw.choice(DTYPES),
        pad=draw.choice([0, 0, 1, 8]),
        lead=draw.choice([0, 1, 4]),
        separate=draw.random() < 0.3,
        shared=draw.random() < 0.3,
        blocks_per_chunk=blocks_per_chunk,
    )


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_pages_come_back_although_the_engine_rewrites_them(
    device: Device, order: str, ratio: int
) -> None:
    """Every step writes all memory, saves a chunk of it, and is over for the next at its fence; the
    host never waits. Then all chunks come back at once, while the engine writes between them."""
    draw = random.Random(f"{order} {ratio} {device.seed}")
    with rig(device, some_shape(order, ratio, draw), STEPS) as r:
        caches = r.caches
        generator = torch.Generator().manual_seed(draw.randrange(2**31))
        contents = [noise(caches, generator) for _ in range(STEPS + 1)]
        size = caches.shape.blocks_per_chunk
        sources = [draw.sample(range(caches.shape.blocks), size) for _ in range(STEPS)]
        device.synchronize()
        for step in range(STEPS):
            device.launch(r.write(contents[step]))
            r.copies.save(step, 0, step, sources[step])
            r.copies.fence([step])
        device.launch(r.write(contents[STEPS]))
        r.finish()
        device.synchronize()
        saved = [with_content(caches, content) for content in contents]
        for step, blocks in enumerate(sources):
            assert r.payload(step) == peek(saved[step].layout(), blocks), f"step {step}"

        want = saved[STEPS]
        blocks = draw.sample(range(caches.shape.blocks), caches.shape.blocks)
        others = blocks[STEPS * size :]
        for step in range(STEPS):
            targets = blocks[step * size :][:size]
            r.copies.load(str(step), [CopyPart(0, step, 0, tuple(targets))])
            device.launch(lambda value=step: fill(caches, others, value))
            want.write(targets, saved[step].content(sources[step]))
        fill(want, others, STEPS - 1)
        r.finish()
        device.synchronize()
        assert caches.memory() == want.memory()


@pytest.mark.parametrize("fenced", [True, False])
def test_the_fence_is_what_holds_the_engine_back(gpu: Device, fenced: bool) -> None:
    """Of copies that come late, one that is fenced finds the page as it was, another does not."""
    shape = Shape("LBNHC", tokens=16, content=64)
    with rig(gpu, shape, 1, partial(slow_copier, gpu)) as r:
        (buffer,) = r.caches.buffers
        gpu.launch(lambda: buffer.fill_(1))
        r.copies.save(1, 0, 0, [0, 1])
        if fenced:
            r.copies.fence([1])
        gpu.launch(lambda: buffer.fill_(2))
        if not fenced:
            synchronize_engine(gpu)
        r.copies.copier._gpu.go_on()
        r.finish()
        assert set(r.payload(0)) == ({1} if fenced else {2})


def test_streams_of_an_engine_are_fenced_each_for_itself(device: Device) -> None:
    """Each writes, saves and rewrites two blocks of its own, and waits for no other."""
    streams_of_engine, rounds = 3, 5
    shape = Shape("LBNHC", blocks=2 * streams_of_engine, tokens=16, content=64)
    with rig(device, shape, streams_of_engine * rounds) as r:
        engine = Engine(device)
        streams = [engine.new_stream() for _ in range(streams_of_engine)]
        for job in range(streams_of_engine * rounds):
            at = job % streams_of_engine
            blocks = [2 * at, 2 * at + 1]
            with engine.on(streams[at]):
                r.copies.fence([job - streams_of_engine])
                device.launch(lambda blocks=blocks, job=job: fill(r.caches, blocks, job))
                r.copies.save(job, 0, job, blocks)
        r.finish()
        for job in range(streams_of_engine * rounds):
            assert set(r.payload(job)) == {job}


def test_a_graph_is_replayed_between_copies(device: Device) -> None:
    """A captured step adds one to every byte."""
    rounds = 8
    with rig(device, Shape("LBNHC", tokens=16, content=64), rounds) as r:
        (buffer,) = r.caches.buffers
        device.launch(lambda: buffer.zero_())
        step = Engine(device).captured(lambda: buffer.add_(1))  # which has run it once
        for job in range(rounds):
            r.copies.fence([job - 1])
            step()
            r.copies.save(job, 0, job, [0, 1])
        r.copies.fence([rounds - 1])
        step()
        r.finish()
        assert [set(r.payload(job)) for job in range(rounds)] == [
            {job + 2} for job in range(rounds)
        ]

        r.copies.load("back", [CopyPart(0, 0, 0, (2, 3))])
        r.finish()
        step()
        device.synchronize()
        for blocks, value in (([2, 3], 3), ([0, 1, 4, 5], rounds + 3)):
            content = r.caches.content(blocks)
            assert all(set(rows.flatten().tolist()) == {value} for rows in content.values())


SHAPE = Shape("LBNHC", layers=8, blocks=16, tokens=16, content=64)
SLOTS = 4
ENGINE = "the engine's own calls"
WAITS = ("Synchronize", "Malloc", "Free", "HostAlloc", "HostRegister")
"""Parts of the names of what waits for the device, or may: freeing and allocating do, too. A
`cudaMemcpy` that is not asynchronous as well."""


def copy_for_a_while(r: Rig) -> None:
    """What an engine calls, as often as pools and caches need to fill up, and then some more."""
    for job in range(40):
        r.copies.fence([job - 2])
        r.copies.save(job, 0, job % 2, [0, 1])
        r.copies.load(str(job), [CopyPart(0, 2 + job % 2, 0, (2, 3))])
        r.copies.poll()
    r.copies.fence(range(40))


def waiting(name: str) -> bool:
    is_copy = "Memcpy" in name or "Memset" in name
    return any(part in name for part in WAITS) or (is_copy and "Async" not in name)


def calls_of_engine(trace: dict[str, Any]) -> list[str]:
    """The CUDA calls that the thread made which was in `ENGINE`, while it was."""
    events = trace["traceEvents"]
    (work,) = (e for e in events if e.get("cat") == "user_annotation" and e["name"] == ENGINE)
    begin, end = work["ts"], work["ts"] + work["dur"]
    return [
        call["name"]
        for call in events
        if call.get("cat") in ("cuda_runtime", "cuda_driver")
        and (call["pid"], call["tid"]) == (work["pid"], work["tid"])
        and begin <= call["ts"] <= end
    ]


@pytest.mark.gpu
def test_no_cuda_call_of_the_engine_s_thread_waits(tmp_path: Path) -> None:
    with rig(Device("cuda"), SHAPE, SLOTS) as r:
        copy_for_a_while(r)
        r.finish()
        calls = calls_of_engine(profiled(lambda: copy_for_a_while(r), tmp_path))
        r.finish()
    print(sorted(set(calls)))
    assert calls, "nothing was recorded of this thread"
    assert [name for name in calls if waiting(name)] == []


@pytest.mark.gpu
def test_a_call_that_waits_is_seen(tmp_path: Path) -> None:
    numbers = torch.ones(8, device="cuda")
    calls = calls_of_engine(profiled(lambda: numbers.sum().item(), tmp_path))
    assert any(waiting(name) for name in calls)


def profiled(work: Callable[[], object], folder: Path) -> dict[str, Any]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    profile = torch.profiler.profile(activities=activities)
    with profile, torch.profiler.record_function(ENGINE):
        work()
    profile.export_chrome_trace(str(folder / "trace.json"))
    return json.loads((folder / "trace.json").read_text())


@contextmanager
def waits_refused() -> Iterator[None]:
    """torch refuses, in every thread, what it knows to wait: blocking copies, `item`, `nonzero`.
    Not the explicit `synchronize` of streams and events, which the profile has to show."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_torch_sees_no_blocking_copy_in_any_thread() -> None:
    with rig(Device("cuda"), SHAPE, SLOTS) as r:
        with waits_refused():
            copy_for_a_while(r)
            assert r.copies.wait_all(LONG_S)
        r.finish()
        with waits_refused(), pytest.raises(RuntimeError, match="synchronizing"):
            r.caches.buffers[0][0].item()
