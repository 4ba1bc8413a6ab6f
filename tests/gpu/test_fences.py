"""Pages that the engine rewrites as soon as it may, and the call that keeps it from the copies."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from s3kv.messages import CopyPart
from tests.gpu.engine import Engine, slow_copier, synchronize_engine
from tests.gpu.rig import fill, noise, rig, with_content
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
    host waits for nothing. Then all chunks come back at once, while the engine writes between them.
    """
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
