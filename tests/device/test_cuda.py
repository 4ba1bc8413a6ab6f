"""What only a GPU has: streams that order the copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from s3kv.device.copies import BlockCopies, open_copier
from s3kv.messages import LoadPart
from tests.device.caches import Caches, Shape, build, places

LONG_S = 10.0
A_WHILE_CYCLES = 200_000_000
"""Some 0.1 s of a GPU's time, far longer than the host takes to launch what follows."""


@contextmanager
def on_gpu(shape: Shape) -> Iterator[SimpleNamespace]:
    caches: Caches = build(shape, "cuda", torch.Generator().manual_seed(3))
    where, form = places(caches, caches.layout())
    copies = BlockCopies(open_copier(where))
    nbytes = caches.layout().payload_bytes
    yield SimpleNamespace(
        caches=caches,
        copies=copies,
        slab=memoryview(where.slab),
        payload=where.memory.narrow(0, form.header_bytes, nbytes),
    )
    copies.close()


@pytest.mark.gpu
def test_the_slab_is_pinned_until_the_end() -> None:
    with on_gpu(Shape("LBNHC")) as r:
        assert r.copies.statistics().pinned
        assert r.payload.is_pinned()
    assert not torch.frombuffer(r.slab, dtype=torch.uint8).is_pinned()


@pytest.mark.gpu
def test_a_save_waits_for_what_the_engine_has_launched() -> None:
    with on_gpu(Shape("LBNHC")) as r:
        (buffer,) = r.caches.buffers
        buffer.fill_(1)
        torch.cuda.synchronize()
        torch.cuda._sleep(A_WHILE_CYCLES)
        buffer.fill_(2)
        r.copies.save(1, 0, 0, [0, 1])
        assert r.copies.poll().saved == [], "the save did not wait"
        assert r.copies.wait_all(LONG_S)
        assert set(r.payload.tolist()) == {2}


@pytest.mark.gpu
def test_a_fence_holds_the_stream_and_not_the_host() -> None:
    with on_gpu(Shape("LBNHC")) as r:
        (buffer,) = r.caches.buffers
        buffer.fill_(1)
        torch.cuda._sleep(A_WHILE_CYCLES)
        r.copies.save(1, 0, 0, [0, 1])
        r.copies.fence([1])
        assert r.copies.poll().saved == [], "the fence waited for the copy itself"
        buffer.fill_(2)
        assert r.copies.wait_all(LONG_S)
        assert set(r.payload.tolist()) == {1}


@pytest.mark.gpu
def test_a_load_waits_for_what_still_uses_its_blocks() -> None:
    with on_gpu(Shape("LBNHC")) as r:
        (buffer,) = r.caches.buffers
        r.payload.fill_(7)
        torch.cuda._sleep(A_WHILE_CYCLES)
        buffer.fill_(2)
        r.copies.load("r", [LoadPart(0, 0, 0, (2, 3))])
        assert r.copies.wait_all(LONG_S)
        assert r.copies.poll().loaded == [("r", True)]
        content = r.caches.content([2, 3])
        assert all(set(rows.flatten().tolist()) == {7} for rows in content.values())


@pytest.mark.gpu
def test_caches_made_in_inference_mode_can_be_loaded_into() -> None:
    with torch.inference_mode():
        caches = build(Shape("BLNHC"), "cuda", torch.Generator().manual_seed(3))
    copies = BlockCopies(open_copier(places(caches, caches.layout())[0]))
    copies.load("r", [LoadPart(0, 0, 0, (2, 3))])
    assert copies.wait_all(LONG_S)
    assert copies.poll().loaded == [("r", True)]
    copies.close()
