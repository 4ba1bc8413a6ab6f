"""Tensor descriptions of a store: the named tensors of a block and their bytes, or rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from s3kv.types import TensorSpec

_NAMES = {
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
    if dtype not in _NAMES:
        raise ValueError(f"{dtype}: allowed is one of {list(_NAMES)}")
    return _NAMES[dtype]


class BlockTensors:
    """Shapes and dtypes of the tensors of every block of a store.

    shapes: name to shape and dtype, in the order of the payload. Raises `ValueError` for a dtype
    that the object format does not have.
    """

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        for name, (_, dtype) in shapes.items():
            if dtype not in _NAMES:
                raise ValueError(f"tensor {name!r} is {dtype}: allowed is one of {list(_NAMES)}")
        self._shapes = {n: (tuple(shape), dtype) for n, (shape, dtype) in shapes.items()}
        self.specs = tuple(
            TensorSpec(name, _NAMES[dtype], shape) for name, (shape, dtype) in self._shapes.items()
        )
        self.payload_bytes = sum(spec.nbytes for spec in self.specs)

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise `ValueError` unless `tensors` has exactly these names, shapes and dtypes."""
        if tensors.keys() != self._shapes.keys():
            raise ValueError(f"tensors {sorted(tensors)}: expected are {sorted(self._shapes)}")
        for name, tensor in tensors.items():
            shape, dtype = self._shapes[name]
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise ValueError(
                    f"tensor {name!r} is {tuple(tensor.shape)} {tensor.dtype}: expected is "
                    f"{shape} {dtype}"
                )

    def empty(self, count: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Uninitialised memory for `count` blocks: name to `[count, *shape]`."""
        return {
            name: torch.empty((count, *shape), dtype=dtype, device=device)
            for name, (shape, dtype) in self._shapes.items()
        }

    def copy_out(self, source: Mapping[str, torch.Tensor], payload: torch.Tensor) -> None:
        """Write the tensors into `payload`, flat uint8 in host memory. Copies from a GPU may still
        be under way on its current stream when this returns.
        """
        for name, view in self._views(payload).items():
            view.copy_(source[name].detach(), non_blocking=True)

    def copy_in(self, payload: torch.Tensor, into: Mapping[str, torch.Tensor]) -> None:
        """Fill `into` from `payload`. Copies to a GPU may still be under way, as in `copy_out`."""
        with torch.inference_mode():
            for name, view in self._views(payload).items():
                into[name].copy_(view, non_blocking=True)

    def _views(self, payload: torch.Tensor) -> dict[str, torch.Tensor]:
        views, offset = {}, 0
        for name, (shape, dtype) in self._shapes.items():
            nbytes = prod(shape) * dtype.itemsize
            views[name] = payload[offset : offset + nbytes].view(dtype).view(shape)
            offset += nbytes
        return views


@dataclass(frozen=True, slots=True)
class TensorRows:
    """The common shape and dtype of the tensors of a store, and the memory for them.

    shape: of one row; a tensor is [rows, *shape], with at least one row.
    host_bytes: memory for all of them, up to a quarter of it for those arriving from the bucket.
    Raises `ValueError` for a dtype that the object format does not have, and for an empty row.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    host_bytes: int = 2**30

    def __post_init__(self) -> None:
        dtype_name(self.dtype)
        if min(self.shape, default=1) < 1:
            raise ValueError(f"a row of shape {self.shape} holds nothing")

    @property
    def row_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def check(self, tensor: torch.Tensor) -> None:
        """Raise `ValueError` unless this is such a tensor."""
        fits = tensor.ndim == 1 + len(self.shape) and tuple(tensor.shape[1:]) == self.shape
        if not fits or not len(tensor) or tensor.dtype != self.dtype:
            sizes = ", ".join(str(n) for n in ("rows", *self.shape))
            raise ValueError(
                f"the tensor is {tuple(tensor.shape)} {tensor.dtype}: allowed is [{sizes}] "
                f"{self.dtype} with 1 row or more, as the store was opened for"
            )
