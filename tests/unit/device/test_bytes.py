"""The right bytes in the right place, in every layout, against indexing of the logical view."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from s3kv.device.copies import BlockCopies
from s3kv.messages import CopyPart
from s3kv.place import Place
from tests.unit.device.caches import DTYPES, ORDERS, Caches, Shape, build, places, raw
from tests.unit.device.devices import Device

HASH = b"\x07" * 32


def shapes(order: str, ratio: int) -> st.SearchStrategy[Shape]:
    return st.builds(
        Shape,
        order=st.just(order),
        ratio=st.just(ratio),
        layers=st.integers(1, 3),
        blocks=st.integers(4, 9),
        heads=st.integers(1, 3),
        tokens=st.sampled_from([1, 2, 4]),
        content=st.sampled_from([2, 6, 16]),
        dtype=st.sampled_from(DTYPES),
        pad=st.sampled_from([0, 0, 1, 8]),
        lead=st.sampled_from([0, 1, 4]),
        separate=st.booleans(),
        shared=st.booleans(),
        blocks_per_chunk=st.integers(1, 4),
    )


@st.composite
def cases(draw: st.DrawFn, order: str, ratio: int) -> tuple[Shape, list[int], list[int], int, int]:
    """A shape, the blocks of a save, those of a load, its first block, and a seed."""
    shape = draw(shapes(order, ratio))
    ids = st.permutations(range(shape.blocks))
    first = draw(st.integers(0, shape.blocks_per_chunk - 1))
    count = draw(st.integers(1, shape.blocks_per_chunk - first))
    sources = draw(ids)[: shape.blocks_per_chunk]
    return shape, sources, draw(ids)[:count], first, draw(st.integers(0, 2**31))


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_what_was_saved_is_loaded(device: Device, order: str, ratio: int) -> None:
    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(case=cases(order, ratio))
    def check(case: tuple[Shape, list[int], list[int], int, int]) -> None:
        save_and_load(device, *case)

    check()


def save_and_load(
    device: Device, shape: Shape, sources: list[int], targets: list[int], first: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    caches = build(shape, device.memory, generator)
    where, form = places(caches)
    slab = memoryview(where.slab)
    device.seed = seed
    copies = BlockCopies(device.open(where))
    saved = caches.content(sources)

    copies.save(7, 0, 1, sources)
    assert copies.wait_all(10)
    (end,) = copies.poll().saved
    assert end[:2] == (7, True)
    slot = slab[where.slot_bytes : 2 * where.slot_bytes]
    form.seal(Place.of(slot, form.header_bytes), HASH)
    assert_is_content(bytes(slot[: form.object_bytes]), saved, caches)
    assert set(slab[: where.slot_bytes]) == {0xA5}, "another slot was written to"
    assert set(slab[2 * where.slot_bytes :]) == {0xA5}, "another slot was written to"
    assert set(slot[form.object_bytes :]) <= {0xA5}, "the slot's tail was written to"

    caches.fill(generator)
    expected = caches.clone()
    rows = slice(first * shape.ratio, (first + len(targets)) * shape.ratio)
    expected.write(targets, {name: content[rows] for name, content in saved.items()})
    copies.load("r", [CopyPart(0, 1, first, tuple(targets))])
    assert copies.wait_all(10)
    assert copies.poll().loaded == [("r", True)]
    assert caches.memory() == expected.memory()
    copies.close()


def assert_is_content(file: bytes, content: dict[str, torch.Tensor], caches: Caches) -> None:
    """The object holds every distinct layer of every block, in the order its header tells."""
    layout, tensor = caches.layout(), safetensors.torch.load(file)["g0"]
    assert [layer.name for layer in layout.part("g0").layers] == [p.name for p in layout.layers]
    blocks = raw(tensor)
    for layer, spec in zip(layout.layers, layout.part("g0").layers, strict=True):
        share = blocks[:, layer.block_offset : layer.block_offset + layer.block_bytes]
        dtype = caches.views[layer.name].dtype
        stored = share.contiguous().view(dtype).view(-1, *spec.shape[-3:])
        order = "B" + layer.order
        logical = stored.permute([order.index(d) for d in "BHNC"])
        assert torch.equal(raw(logical), content[layer.name])
