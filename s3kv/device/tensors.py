"""Tensor descriptions of a store: the named tensors of a block and their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import index

import torch

from s3kv.types import TensorSpec

DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a dtype. Raises `ValueError` for one the format does not have."""
    if dtype not in DTYPES:
        raise ValueError(f"{dtype}: allowed is one of {list(DTYPES)}")
    return DTYPES[dtype]


class BlockTensors:
    """Shapes and dtypes of the tensors of every block of a store.

    shapes: name to shape and dtype, in the order of the payload. Raises `ValueError` for a dtype
    that the object format does not have and a shape that holds nothing, `TypeError` for names that
    are not text and sizes that are not whole numbers.
    """

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        self._shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, (shape, dtype) in shapes.items():
            if not isinstance(name, str):
                raise TypeError(f"the name {name!r} of a tensor is not text")
            if dtype not in DTYPES:
                raise ValueError(f"tensor {name!r} is {dtype}: allowed is one of {list(DTYPES)}")
            self._shapes[name] = _sizes(f"tensor {name!r}", shape), dtype
        self.specs = tuple(
            TensorSpec(name, DTYPES[dtype], shape) for name, (shape, dtype) in self._shapes.items()
        )
        self.payload_bytes = sum(spec.nbytes for spec in self.specs)

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise `ValueError` unless `tensors` has exactly these names, shapes and dtypes."""
        if tensors.keys() != self._shapes.keys():
            raise ValueError(f"tensors {sorted(tensors)}: expected are {sorted(self._shapes)}")
        for name, tensor in tensors.items():
            shape, dtype = self._shapes[name]
            # torch copies to one on "meta" without an error.
            if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.is_meta:
                raise ValueError(
                    f"tensor {name!r} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}: "
                    f"expected is {shape} {dtype} in memory"
                )

    def copy_out(self, source: Mapping[str, torch.Tensor], payload: torch.Tensor) -> None:
        """Write the tensors into `payload`, flat uint8 in host memory. Copies from a GPU may still
        be under way on its current stream when this returns."""
        for name, part, is_aligned in self._parts(payload):
            tensor = source[name].detach()
            if is_aligned:
                part.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
            else:
                whole = tensor.clone(memory_format=torch.contiguous_format)
                part.copy_(whole.view(-1).view(torch.uint8), non_blocking=True)

    def copy_in(self, payload: torch.Tensor, into: Mapping[str, torch.Tensor]) -> None:
        """Fill `into` from `payload`. Copies to a GPU may still be under way, as in `copy_out`."""
        with torch.inference_mode():
            for name, part, is_aligned in self._parts(payload):
                tensor = into[name]
                near = part if is_aligned else part.to(tensor.device, copy=True)
                tensor.copy_(near.view(tensor.dtype).view(tensor.shape), non_blocking=True)

    def _parts(self, payload: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Name and bytes of each tensor, and whether torch can view these bytes as its dtype."""
        parts = payload.split([spec.nbytes for spec in self.specs])
        for (name, (_, dtype)), part in zip(self._shapes.items(), parts, strict=True):
            yield name, part, part.storage_offset() % dtype.itemsize == 0


def _sizes(what: str, shape: Iterable[int]) -> tuple[int, ...]:
    """The shape as plain numbers. Raises `TypeError` for other sizes, `ValueError` below 1."""
    sizes = tuple(map(index, shape))
    if min(sizes, default=1) < 1:
        raise ValueError(f"{what} of shape {sizes} holds nothing")
    return sizes
