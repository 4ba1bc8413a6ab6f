"""Stacks of pages: as few as the layers allow, rows that are contiguous, and every byte moved."""

from __future__ import annotations

import pytest
import torch

from s3kv.device.gpu.gather import Stack, row_numbers, stacks, with_rows
from s3kv.device.layout import PageLayout
from tests.unit.device.caches import ORDERS, Shape, build


def stacked(layout: PageLayout) -> tuple[list[Stack], torch.Tensor]:
    """The stacks of a chunk, and the staging memory that they fill."""
    staging = torch.empty(layout.payload_bytes, dtype=torch.uint8)
    return stacks(layout, staging), staging


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("separate", "count"), [(False, 1), (True, 3)])
def test_even_layers_are_one_stack(order: str, separate: bool, count: int) -> None:
    found, _ = stacked(build(Shape(order, layers=3, separate=separate)).layout())
    assert len(found) == count


def test_layers_that_would_shorten_the_rows_are_another_stack() -> None:
    # Two layers, one twice as wide, two layers, one at a distance that is no number of pages.
    base = torch.zeros(10_000, dtype=torch.float16)

    def layer(begin: int, content: int) -> torch.Tensor:
        return base.as_strided((8, 1, 4, content), (4 * content, 4 * content, content, 1), begin)

    views = {"a": layer(0, 8), "b": layer(256, 8), "wide": layer(512, 16)}
    views |= {"c": layer(1024, 8), "d": layer(1344, 8), "e": layer(1700, 8)}
    layout = PageLayout.of(views, 8, list(views), 2)
    assert [stack.rows_per_block for stack in stacked(layout)[0]] == [2, 1, 2, 1]
    part = layout.part("g0")
    assert (part.dtype, part.shape) == ("U8", (2, layout.block_bytes))
    assert [layer.shape for layer in part.layers] == [(1, 4, n) for n in (8, 8, 16, 8, 8, 8)]


@pytest.mark.parametrize(
    ("order", "pad", "row_bytes"),
    [
        ("LBNHC", 0, 192),  # a page
        ("LBNHC", 48, 192),  # and a quarter of one behind it
        ("LBNHC", 1, 192),
        ("BLNHC", 96, 192),
        ("LHBNC", 0, 64),  # a head of a page
        ("BHLNC", 0, 64),
    ],
)
def test_rows_are_contiguous_pieces(order: str, pad: int, row_bytes: int) -> None:
    layout = build(Shape(order, heads=3, tokens=4, content=8, pad=pad)).layout()
    (stack,), _ = stacked(layout)
    assert stack.chunk.shape[-1] * stack.chunk.element_size() == row_bytes
    assert stack.rows_per_block * row_bytes * layout.blocks_per_chunk == layout.payload_bytes


def test_rows_that_would_overlap_are_shorter() -> None:
    # Heads of 48 bytes at multiples of 64, blocks at multiples of 160: 32 divides both.
    cache = torch.arange(6 * 80, dtype=torch.int16).as_strided((6, 2, 1, 24), (80, 32, 24, 1))
    (stack,), staging = stacked(PageLayout.of({"x": cache.view(torch.float16)}, 6, ["x"], 2))
    assert stack.chunk.shape[-1] * stack.chunk.element_size() == 16
    rows = torch.from_numpy(row_numbers([stack], [4, 1]))
    stack.gather(rows)
    assert torch.equal(staging.view(torch.int16), cache[[4, 1]].flatten())
    staging.view(torch.int16).neg_()
    expected = cache.clone()
    expected[[4, 1]] = -expected[[4, 1]]
    stack.scatter(rows, 0)
    assert torch.equal(cache, expected)


def test_a_single_block_without_a_stride_is_a_stack() -> None:
    cache = torch.arange(32.0).as_strided((1, 1, 4, 8), (0, 0, 8, 1))
    (stack,), staging = stacked(PageLayout.of({"x": cache}, 1, ["x"], 1))
    stack.gather(torch.from_numpy(row_numbers([stack], [0])))
    assert staging.view(torch.float32).tolist() == list(range(32))


def test_a_stack_behind_an_odd_number_of_bytes() -> None:
    views = {
        "odd": torch.zeros(6, 1, 1, 3, dtype=torch.uint8),
        "wide": torch.arange(6 * 8, dtype=torch.uint8).view(6, 1, 1, 8),
    }
    both, staging = stacked(PageLayout.of(views, 6, list(views), 1))
    for stack, rows in with_rows(both, torch.from_numpy(row_numbers(both, [2]))):
        stack.gather(rows)
    assert staging.tolist() == [0, 0, 0, *range(16, 24)]
