"""What `PageLayout` reads off a view, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from s3kv.device.layout import PageLayout
from s3kv.errors import UnsupportedError
from tests.unit.device.caches import ORDERS, Move, Shape, build, moves
from tests.unit.device.test_bytes import shapes


@pytest.mark.parametrize(
    ("order", "page", "runs"),
    [
        ("LBNHC", "NHC", 2),
        ("LBHNC", "HNC", 2),
        ("BLNHC", "NHC", 1),
        ("BLHNC", "HNC", 1),
        ("LHBNC", "HNC", 6),
        ("BHLNC", "HNC", 6),
    ],
)
def test_a_block_is_as_few_runs_as_the_layout_allows(order: str, page: str, runs: int) -> None:
    layout = build(Shape(order, heads=3, blocks_per_chunk=1)).layout()
    assert layout.layers[0].order == page
    assert len(layout.pieces) == runs


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_kernel_blocks_are_a_dimension_of_the_page(order: str, ratio: int) -> None:
    shape = Shape(order, heads=3, tokens=4, content=8, ratio=ratio, blocks_per_chunk=2)
    layout = build(shape).layout()
    sizes = {"H": 3, "N": 4, "C": 8}
    part, page = layout.part("g0"), tuple(sizes[d] for d in layout.layers[0].order)
    assert part.shape == (2, 2, *((ratio, *page) if ratio > 1 else page))
    assert part.layers[1].shape == part.shape[2:]
    assert part.layers[1].order == "B" * (ratio > 1) + layout.layers[1].order
    assert layout.payload_bytes == part.nbytes


@pytest.mark.parametrize("stride", [1, 8, 10**6])
def test_dimensions_of_size_one_do_not_depend_on_their_strides(stride: int) -> None:
    cache = torch.zeros(6 * 32).as_strided((6, 1, 4, 8), (32, stride, 8, 1))
    (layer,) = PageLayout.of({"x": cache}, 6, ["x"], 2).layers
    assert (layer.order, layer.page) == ("HNC", (1, 4, 8))


def test_layers_that_swap_their_orders_are_other_parts() -> None:
    """The memory and the sizes are equal, and an engine's set of orders is, too."""
    memory = torch.zeros(6 * 32)
    heads_first = memory.as_strided((6, 2, 2, 8), (32, 16, 8, 1))
    tokens_first = memory.as_strided((6, 2, 2, 8), (32, 8, 16, 1))
    one = PageLayout.of({"a": heads_first, "b": tokens_first}, 6, ["a", "b"], 2).part("g0")
    other = PageLayout.of({"a": tokens_first, "b": heads_first}, 6, ["a", "b"], 2).part("g0")
    assert [(t.shape, t.order) for t in one.layers] == [((2, 2, 8), "HNC"), ((2, 2, 8), "NHC")]
    assert [(t.shape, t.order) for t in other.layers] == [((2, 2, 8), "NHC"), ((2, 2, 8), "HNC")]
    assert (one.dtype, one.shape) == (other.dtype, other.shape) == ("U8", (2, 256))


def test_the_description_tells_layouts_apart_but_not_engines() -> None:
    one = Shape("LBNHC")
    base = build(one).layout().describe()
    same = [replace(one, blocks=12), replace(one, lead=3), replace(one, pad=8)]
    same += [replace(one, order="BLNHC"), replace(one, separate=True), replace(one, shared=True)]
    assert all(build(shape).layout().describe() == base for shape in same)
    different = [
        replace(one, order="LBHNC"),
        replace(one, dtype=torch.float16),
        replace(one, ratio=2, tokens=2),
        replace(one, blocks_per_chunk=3),
        replace(one, layers=3),
        replace(one, heads=4, tokens=2),
    ]
    assert all(build(shape).layout().describe() != base for shape in different)


REFUSED = {
    "rows are not a multiple": torch.zeros(7, 2, 4, 8),
    "not a view": torch.zeros(6, 4, 8),
    "dtype": torch.zeros(6, 2, 4, 8, dtype=torch.complex64),
    "share memory": torch.zeros(1, 2, 4, 8).expand(6, 2, 4, 8),
    "not adjacent": torch.zeros(6, 2, 4, 16)[..., ::2],
    "empty": torch.zeros(6, 0, 4, 8),
    "'meta'": torch.zeros(6, 2, 4, 8, device="meta"),
    "elements of the view share": torch.zeros(500).as_strided((6, 2, 4, 8), (32, 16, 8, 1)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_served_is_refused_with_the_reason(reason: str) -> None:
    with pytest.raises(UnsupportedError, match=f"layer x, .*{reason}"):
        PageLayout.of({"x": REFUSED[reason]}, 6, ["x"], 2)


def test_a_missing_layer_and_a_rank_without_layers_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="layer y"):
        PageLayout.of({}, 6, ["y"], 2)
    with pytest.raises(UnsupportedError, match="no layer"):
        PageLayout.of({}, 6, [], 2)


def pieces(layout: PageLayout, block: int) -> list[Move]:
    return [
        Move(piece.address + block * piece.stride_bytes, piece.offset, piece.nbytes)
        for piece in layout.pieces
    ]


@settings(max_examples=400)
@given(data=st.data())
def test_pieces_are_the_moves_of_a_block(data: st.DataObject) -> None:
    shape = data.draw(
        shapes(data.draw(st.sampled_from(ORDERS)), data.draw(st.sampled_from([1, 2, 4])))
    )
    layout = build(shape).layout()
    block = data.draw(st.integers(0, shape.blocks - 1))
    assert pieces(layout, block) == moves(layout, (block,), 0)


def test_layers_of_different_widths() -> None:
    base = torch.zeros(4096, dtype=torch.float16)
    views = {
        "narrow": base.as_strided((8, 2, 4, 8), (64, 8, 16, 1), 0),
        "wide": base.as_strided((8, 1, 4, 16), (128, 64, 16, 1), 1024),
    }
    layout = PageLayout.of(views, 8, list(views), 3)
    assert pieces(layout, 5) == moves(layout, (5,), 0)
