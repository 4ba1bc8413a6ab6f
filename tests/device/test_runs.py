"""The arrays of a chunk's pieces are those that `PageLayout.moves` tells one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from s3kv.device.layout import Move, PageLayout
from s3kv.device.runs import RunTable
from tests.device.caches import ORDERS, Shape, build
from tests.device.test_bytes import shapes


def moves(layout: PageLayout, block_ids: tuple[int, ...], first_block: int) -> list[Move]:
    runs = RunTable(layout).runs(block_ids, first_block)
    assert {array.dtype for array in runs} == {np.dtype(np.int64)}
    assert all(array.flags.c_contiguous for array in runs)
    return [Move(*move) for move in zip(*(array.tolist() for array in runs), strict=True)]


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_they_are_the_moves(data: st.DataObject) -> None:
    shape = data.draw(
        shapes(data.draw(st.sampled_from(ORDERS)), data.draw(st.sampled_from([1, 2, 4])))
    )
    layout = build(shape, "cpu", torch.Generator().manual_seed(0)).layout()
    first = data.draw(st.integers(0, shape.blocks_per_chunk - 1))
    count = data.draw(st.integers(1, shape.blocks_per_chunk - first))
    # Often neighbours, upwards and downwards.
    start = data.draw(st.integers(0, shape.blocks - count))
    ids = data.draw(
        st.sampled_from([range(start, start + count), range(start + count - 1, start - 1, -1)])
        | st.permutations(range(shape.blocks)).map(lambda ids: ids[:count])
    )
    assert moves(layout, tuple(ids), first) == list(layout.moves(tuple(ids), first))


def test_layers_of_different_widths() -> None:
    base = torch.zeros(4096, dtype=torch.float16)
    views = {
        "narrow": base.as_strided((8, 2, 4, 8), (64, 8, 16, 1), 0),
        "wide": base.as_strided((8, 1, 4, 16), (128, 64, 16, 1), 1024),
    }
    layout = PageLayout.of(views, 8, list(views), 3)
    for ids, first in (((5, 6, 2), 0), ((7,), 2), ((3, 4), 1)):
        assert moves(layout, ids, first) == list(layout.moves(ids, first))


@pytest.mark.parametrize(("ids", "count"), [(range(4), 2), ((0, 2, 4, 6), 8), ((1, 2, 5, 6), 4)])
def test_neighbours_are_one_copy(ids: tuple[int, ...], count: int) -> None:
    layout = build(
        Shape("LBNHC", blocks=8, blocks_per_chunk=4), "cpu", torch.Generator().manual_seed(0)
    ).layout()
    assert len(moves(layout, tuple(ids), 0)) == count
