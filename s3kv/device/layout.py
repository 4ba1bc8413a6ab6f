"""Page layout of one KV-cache group: addresses of its pages in device memory, and order in a chunk.

vLLM hands every layer's cache over as a logical view `[B, H, N, C]` (blocks, KV heads, tokens of a
block, content of a token). Its strides give the physical layout: LBNHC, LBHNC, BLNHC, BLHNC,
LHBNC or BHLNC, pages padded or not, many layers in one buffer. A kernel may work with smaller
blocks than the block manager: then `B` is a multiple of the number of blocks, and block `b` is
rows `[b * ratio, (b + 1) * ratio)`.

The payload of a chunk holds its blocks in order, and in each block all layers in order. A page is
written in the order its dimensions have in memory. So a block is one contiguous run where its
layers are side by side in memory, and at most one run per layer and piece of a page elsewhere.
These bytes are never interpreted: on a CPU, for instance, a page's content is packed in an order
that the logical view does not show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch

from s3kv.device.tensors import DTYPES
from s3kv.errors import UnsupportedError
from s3kv.types import TensorSpec

_DIMENSIONS = "BHNC"


class Dim(NamedTuple):
    """One dimension of a block in device memory. The size of an outer one is a count."""

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
    block_bytes: length of the layer's share of a block in the payload, without padding.
    block_offset: offset of that share in the block.
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
    block_offset: int

    @property
    def spec(self) -> TensorSpec:
        """Its share of a block as a tensor: the page, or that of several kernel blocks ("B")."""
        if self.ratio == 1:
            return TensorSpec(self.name, self.dtype, self.page, (), self.order)
        return TensorSpec(self.name, self.dtype, (self.ratio, *self.page), (), f"B{self.order}")


class Piece(NamedTuple):
    """A contiguous piece of a block: `nbytes` at `address + b * stride_bytes` in device memory for
    block `b`, and at `offset` from the block's begin in the payload."""

    address: int
    offset: int
    nbytes: int
    stride_bytes: int


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The layout of all chunks of one group on one rank. Immutable, and safe in any thread. It
    keeps the tensors alive, so every address it returns stays valid."""

    layers: tuple[LayerPages, ...]
    caches: tuple[torch.Tensor, ...] = field(repr=False)
    """The tensors of `layers`, as vLLM registered them."""
    num_blocks: int
    blocks_per_chunk: int
    pieces: tuple[Piece, ...] = field(init=False, repr=False, compare=False)
    """A block in payload order. Neighbours in both memory and payload form one piece."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pieces", _pieces_of(self.layers))

    @classmethod
    def of(
        cls,
        kv_caches: Mapping[str, torch.Tensor],
        num_blocks: int,
        layer_names: Sequence[str],
        blocks_per_chunk: int,
    ) -> PageLayout:
        """Read the layout from the tensors given to `register_kv_caches`.

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
                told = f"layer {name}, shape {shape}, strides {strides}, {cache.dtype}: {error}"
                raise UnsupportedError(told) from None
            offset += layers[-1].block_bytes
        caches = tuple(cache for _, cache in distinct.values())
        devices = {str(cache.device) for cache in caches}
        if len(devices) > 1:
            raise UnsupportedError(f"one KV-cache group on several devices: {sorted(devices)}")
        return cls(tuple(layers), caches, num_blocks, blocks_per_chunk)

    @property
    def device(self) -> torch.device:
        return self.caches[0].device

    @property
    def block_bytes(self) -> int:
        """Length of a block in the payload: all its layers, without padding."""
        return sum(layer.block_bytes for layer in self.layers)

    @property
    def payload_bytes(self) -> int:
        return self.blocks_per_chunk * self.block_bytes

    def part(self, name: str) -> TensorSpec:
        """The payload as one tensor: `[blocks, layers, …page]` if the layers are alike, otherwise
        `[blocks, bytes]` of U8. Its `layers` are those of one block."""
        layers = tuple(layer.spec for layer in self.layers)
        return TensorSpec.of_layers(name, self.blocks_per_chunk, layers)

    def describe(self) -> dict[str, Any]:
        """Everything that determines the bytes of a payload, as plain data, for the fingerprint.

        It leaves out addresses, the number of blocks, padding, and which layers are neighbours in
        memory. Engines that differ only in those share chunks.
        """
        return {
            "blocks_per_chunk": self.blocks_per_chunk,
            "layers": [
                {"name": s.name, "dtype": s.dtype, "order": s.order, "page": list(s.shape)}
                for s in (layer.spec for layer in self.layers)
            ],
        }


def _pieces_of(layers: Sequence[LayerPages]) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    at = 0
    for layer in layers:
        stride_bytes = layer.block_stride_bytes
        for begin, nbytes in layer.runs:
            piece = Piece(layer.address + begin, at, nbytes, stride_bytes)
            last = pieces[-1] if pieces else Piece(0, 0, 0, 0)
            if last.address + last.nbytes == piece.address and last.stride_bytes == stride_bytes:
                pieces[-1] = last._replace(nbytes=last.nbytes + nbytes)
            else:
                pieces.append(piece)
            at += nbytes
    return tuple(pieces)


def _read_layer(name: str, cache: torch.Tensor, num_blocks: int, offset: int) -> LayerPages:
    """The pages of one layer. Raises `UnsupportedError` with the bare reason."""
    _check(cache, num_blocks)
    ratio = cache.shape[0] // num_blocks
    item = cache.element_size()
    # Dimensions of size 1 have no meaningful stride: they go first, in logical order, everywhere.
    page_dims = sorted((1, 2, 3), key=lambda d: (cache.shape[d] > 1, -cache.stride()[d]))
    sizes = tuple(cache.shape[d] for d in page_dims)
    strides = [cache.stride()[d] * item for d in page_dims]
    row_stride_bytes = cache.stride(0) * item
    dims = merge([Dim(ratio, row_stride_bytes), *map(Dim, sizes, strides), Dim(item, 1)])
    return LayerPages(
        name=name,
        dtype=DTYPES[cache.dtype],
        order="".join(_DIMENSIONS[d] for d in page_dims),
        page=sizes,
        ratio=ratio,
        address=cache.data_ptr(),
        block_stride_bytes=ratio * row_stride_bytes,
        dims=dims,
        runs=_runs(dims),
        block_bytes=ratio * prod(sizes) * item,
        block_offset=offset,
    )


def _check(cache: torch.Tensor, num_blocks: int) -> None:
    if cache.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"KV caches on {cache.device.type!r} are not supported")
    if cache.dtype not in DTYPES:
        raise UnsupportedError("the object format has no such dtype")
    if cache.dim() != len(_DIMENSIONS):
        raise UnsupportedError("not a view [blocks, heads, tokens, content], as in vLLM >= 0.31")
    if num_blocks < 1 or cache.shape[0] < num_blocks or cache.shape[0] % num_blocks:
        raise UnsupportedError(f"the rows are not a multiple of the {num_blocks} blocks")
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
    """The same bytes in the same order, with as few dimensions as possible. Dimensions of size 1
    vanish, except for the last, which is an item and its bytes."""
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
