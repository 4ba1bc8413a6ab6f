"""Named tensors of a block: exactly those that were declared, and their bytes there and back."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy
import pytest
import torch

from s3kv.device.tensors import BlockTensors, dtype_name
from s3kv.types import item_bytes

SHAPES = {"k": ((2, 3), torch.bfloat16), "v": ((4,), torch.float32)}
DTYPES = [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dtype_has_the_name_of_its_width(dtype: torch.dtype) -> None:
    assert item_bytes(dtype_name(dtype)) == dtype.itemsize


def test_a_dtype_the_format_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="complex64: allowed is one of"):
        dtype_name(torch.complex64)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "error", "said"),
    [
        ("k", (1,), torch.complex64, ValueError, r"tensor 'k' is torch\.complex64: allowed is"),
        *(("k", (3, n), torch.half, ValueError, r"'k' of.* \(3, .*holds nothing") for n in (0, -1)),
        *(("k", n, torch.half, TypeError, "integer|iterable") for n in ((4.0,), 4, "4", (None,))),
        (1, (4,), torch.half, TypeError, "name 1 of a tensor is not text"),
    ],
)
def test_what_describes_no_tensor_is_refused(
    name: Any, shape: Any, dtype: torch.dtype, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        BlockTensors({name: (shape, dtype)})


@pytest.mark.parametrize("before", [{}, {"a": ((3,), torch.int8)}, {"a": ((1,), torch.half)}])
def test_a_block_is_its_tensors_one_behind_the_other(before: Any) -> None:
    """Also with one before them whose length is no multiple of their items'."""
    shapes = {**before, **SHAPES, "s": ((), torch.float64), "t": ((1, 1), torch.half)}
    tensors = BlockTensors(shapes)
    # Every other number of a tensor, as in a view of an engine's cache.
    source = {n: torch.arange(2 * prod(s)).to(d)[1::2].view(s) for n, (s, d) in shapes.items()}
    payload = torch.zeros(tensors.payload_bytes, dtype=torch.uint8)
    tensors.copy_out(source, payload)
    raw = [torch.cat([source[name].flatten()]).view(torch.uint8) for name in shapes]
    assert torch.equal(payload, torch.cat(raw))
    into = {n: torch.zeros(2 * prod(s), dtype=d)[1::2].view(s) for n, (s, d) in shapes.items()}
    tensors.copy_in(payload, into)
    assert all(torch.equal(into[name], source[name]) for name in shapes)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"k": torch.zeros(2, 3, dtype=torch.bfloat16)}, "expected are"),
        (
            {"k": torch.zeros(3, 2, dtype=torch.bfloat16), "v": torch.zeros(4)},
            r"tensor 'k' is \(3, 2\)",
        ),
        (
            {"k": torch.zeros(2, 3, dtype=torch.bfloat16), "v": torch.zeros(4).half()},
            r"'v' is \(4,\) torch.float16 on cpu: expected is \(4,\) torch.float32",
        ),
        (  # torch copies to it, and nothing is there afterwards
            {"k": torch.zeros(2, 3, dtype=torch.bfloat16), "v": torch.zeros(4, device="meta")},
            r"on meta: expected is \(4,\) torch.float32 in memory",
        ),
    ],
)
def test_other_tensors_are_refused(given: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        BlockTensors(SHAPES).check(given)


def test_sizes_of_any_kind_become_plain_numbers() -> None:
    """Messages to the I/O process carry nothing else, and tuples are compared with them."""
    given: Any = [True, numpy.int64(4)]
    (spec,) = BlockTensors({"k": (given, torch.float32)}).specs
    assert repr(spec.shape) == "(1, 4)"
