"""Where the pages of one KV-cache group lie in device memory, and in which order a chunk holds
them.

vLLM hands every layer's cache over as a logical view `[B, H, N, C]` (blocks, KV heads, tokens of a
block, content of a token) whose strides tell the physical layout: LBNHC, LBHNC, BLNHC, BLHNC,
LHBNC or BHLNC, pages padded or not, many layers in one buffer. A kernel may work with smaller
blocks than the block manager: then `B` is a multiple of the number of blocks, and block `b` is
rows `[b * ratio, (b + 1) * ratio)`.

The payload of a chunk is, layer by layer, all its blocks in order; a row is written in the order
its dimensions have in memory, so that copying it is as few contiguous runs as the layout allows.
Nobody interprets these bytes on the way: on a CPU, for instance, the content of a page is packed
in an order the logical view does not tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch

from s3kv.errors import UnsupportedError
from s3kv.types import TensorSpec

_DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DIMENSIONS = "BHNC"


class Dim(NamedTuple):
    """One dimension of a block in device memory; both in bytes but the size of an outer one."""

    size: int
    stride_bytes: int


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The pages of one layer. Block `b` begins at `address + b * block_stride_bytes`.

    order: the dimensions of a page from the slowest to the fastest in memory, such as "NHC".
    page: their sizes, in that order.
    ratio: kernel blocks in one block.
    dims: a block's dimensions in the order of the payload, with neighbours in memory merged; the
        last is the contiguous run, of `size` bytes and stride 1.
    runs: (offset from the block's begin, length) of its contiguous pieces, in payload order.
    block_bytes: what a block takes in the payload; never counts padding.
    payload_offset: where the layer's first block begins in the payload.
    """

    name: str
    dtype: str
    order: str
    page: tuple[int, ...]
    ratio: int
    address: int
    block_stride_bytes: int
    dims: tuple[Dim, ...]
    runs: tuple[tuple[int, int], ...] = field(repr=False)
    block_bytes: int
    payload_offset: int


class Move(NamedTuple):
    """`nbytes` at a device address that are also contiguous in the payload, from `offset` on."""

    address: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The layout of all chunks of one group on one rank. Immutable, and safe in any thread.

    It keeps the tensors alive, and with them every address it tells.
    """

    layers: tuple[LayerPages, ...]
    caches: tuple[torch.Tensor, ...] = field(repr=False)
    """The tensors of `layers`, as vLLM registered them."""
    num_blocks: int
    blocks_per_chunk: int

    @classmethod
    def of(
        cls,
        kv_caches: Mapping[str, torch.Tensor],
        num_blocks: int,
        layer_names: Sequence[str],
        blocks_per_chunk: int,
    ) -> PageLayout:
        """Read the layout off the tensors given to `register_kv_caches`.

        num_blocks: blocks of the block manager. layer_names: the layers of the group, in the
        order the chunk is to have. Layers that are the same memory seen the same way (KV sharing)
        are stored once, under the first name.

        Raises `UnsupportedError` with the layer and the reason when the caches cannot be served.
        """
        if not layer_names:
            raise UnsupportedError("this rank has no layer of the KV-cache group")
        distinct: dict[tuple[Any, ...], tuple[str, torch.Tensor]] = {}
        for name in layer_names:
            cache = kv_caches.get(name)
            if not isinstance(cache, torch.Tensor):
                raise UnsupportedError(f"layer {name}: its KV cache is a {type(cache).__name__}")
            same = (cache.data_ptr(), cache.shape, cache.stride(), cache.dtype)
            distinct.setdefault(same, (name, cache))
        layers: list[LayerPages] = []
        offset = 0
        for name, cache in distinct.values():
            try:
                layers.append(_read_layer(name, cache, num_blocks, offset))
            except UnsupportedError as error:
                shape, strides = tuple(cache.shape), tuple(cache.stride())
                raise UnsupportedError(
                    f"layer {name}, shape {shape}, strides {strides}, {cache.dtype}: {error}"
                ) from None
            offset += blocks_per_chunk * layers[-1].block_bytes
        caches = tuple(cache for _, cache in distinct.values())
        devices = {str(cache.device) for cache in caches}
        if len(devices) > 1:
            raise UnsupportedError(f"one KV-cache group on several devices: {sorted(devices)}")
        return cls(tuple(layers), caches, num_blocks, blocks_per_chunk)

    @property
    def device(self) -> torch.device:
        return self.caches[0].device

    @property
    def payload_bytes(self) -> int:
        return self.blocks_per_chunk * sum(layer.block_bytes for layer in self.layers)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """One tensor per layer, `(blocks_per_chunk * ratio, *page)`, in payload order."""
        return tuple(
            TensorSpec(p.name, p.dtype, (self.blocks_per_chunk * p.ratio, *p.page))
            for p in self.layers
        )

    def describe(self) -> dict[str, Any]:
        """All that determines the bytes of a payload, as plain data, for the fingerprint.

        Not in it: addresses, the number of blocks, padding, and which layers are neighbours in
        memory. Engines that differ in those share chunks.
        """
        return {
            "blocks_per_chunk": self.blocks_per_chunk,
            "layers": [
                {
                    "name": p.name,
                    "dtype": p.dtype,
                    "order": p.order,
                    "page": list(p.page),
                    "kernel_blocks_per_block": p.ratio,
                }
                for p in self.layers
            ],
        }

    def moves(self, block_ids: Sequence[int], first_block: int) -> Iterator[Move]:
        """The copies that make up blocks `first_block …` of a chunk, in payload order.

        Pieces that are neighbours in memory and in the payload come as one.
        """
        address = offset = nbytes = 0
        for layer in self.layers:
            at = layer.payload_offset + first_block * layer.block_bytes
            for block in block_ids:
                begin = layer.address + block * layer.block_stride_bytes
                for run_offset, run_bytes in layer.runs:
                    if begin + run_offset == address + nbytes and at == offset + nbytes:
                        nbytes += run_bytes
                    else:
                        if nbytes:
                            yield Move(address, offset, nbytes)
                        address, offset, nbytes = begin + run_offset, at, run_bytes
                    at += run_bytes
        if nbytes:
            yield Move(address, offset, nbytes)


def _read_layer(name: str, cache: torch.Tensor, num_blocks: int, offset: int) -> LayerPages:
    """The pages of one layer. Raises `UnsupportedError` with the bare reason."""
    _check(cache, num_blocks)
    ratio = cache.shape[0] // num_blocks
    item = cache.element_size()
    # Dimensions of size 1 have no meaningful stride: first, in logical order, on every engine.
    page_dims = sorted((1, 2, 3), key=lambda d: (cache.shape[d] > 1, -cache.stride()[d]))
    sizes = tuple(cache.shape[d] for d in page_dims)
    strides = [cache.stride()[d] * item for d in page_dims]
    row_stride_bytes = cache.stride(0) * item
    dims = merge([Dim(ratio, row_stride_bytes), *map(Dim, sizes, strides), Dim(item, 1)])
    return LayerPages(
        name=name,
        dtype=_DTYPES[cache.dtype],
        order="".join(_DIMENSIONS[d] for d in page_dims),
        page=sizes,
        ratio=ratio,
        address=cache.data_ptr(),
        block_stride_bytes=ratio * row_stride_bytes,
        dims=dims,
        runs=_runs(dims),
        block_bytes=ratio * prod(sizes) * item,
        payload_offset=offset,
    )


def _check(cache: torch.Tensor, num_blocks: int) -> None:
    if cache.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"KV caches on {cache.device.type!r} are not supported")
    if cache.dtype not in _DTYPES:
        raise UnsupportedError("this dtype has no place in the object format")
    if cache.dim() != len(_DIMENSIONS):
        raise UnsupportedError("not a view [blocks, heads, tokens, content], as vLLM >= 0.29 has")
    if num_blocks < 1 or cache.shape[0] < num_blocks or cache.shape[0] % num_blocks:
        raise UnsupportedError(f"rows are no multiple of the {num_blocks} blocks")
    if cache.numel() == 0:
        raise UnsupportedError("the pages are empty")
    reach = 1
    for stride, size in sorted(zip(cache.stride(), cache.shape, strict=True)):
        if size == 1:
            continue
        if stride < reach:
            raise UnsupportedError("elements of the view share memory")
        if reach == 1 and stride != 1:
            raise UnsupportedError("the elements of a token are not adjacent in memory")
        reach += (size - 1) * stride


def merge(dims: Sequence[Dim]) -> tuple[Dim, ...]:
    """The same bytes in the same order with as few dimensions as possible; sizes of 1 vanish, but
    for the last, an item and its bytes.
    """
    merged = [dims[-1]]
    for dim in reversed(dims[:-1]):
        inner = merged[0]
        if dim.size == 1:
            continue
        if dim.stride_bytes == inner.size * inner.stride_bytes:
            merged[0] = Dim(dim.size * inner.size, inner.stride_bytes)
        else:
            merged.insert(0, dim)
    return tuple(merged)


def _runs(dims: Sequence[Dim]) -> tuple[tuple[int, int], ...]:
    *outer, run = dims
    offsets = product(*([i * dim.stride_bytes for i in range(dim.size)] for dim in outer))
    return tuple((sum(parts), run.size) for parts in offsets)
