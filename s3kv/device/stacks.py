"""A group's pages seen as rows of one tensor, so that one gather or one scatter moves a chunk.

A row is a contiguous piece of a block, and the tensor's stride is what all their addresses differ
by a multiple of; most of its rows belong to other blocks, layers or nobody. A chunk is then a list
of row numbers, in payload order. That the layers are not a dimension of their own keeps torch's
kernels to one launch: their offsets are of 32 bits, and two layers of a large cache further apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from s3kv.device.layout import LayerPages, PageLayout

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class Stack:
    """Some consecutive layers of a group, for chunks of `blocks_per_chunk` blocks.

    pages: the cache's rows, `(rows, words)`, strided, in the widest integers that fit its
        addresses. Writing to it writes to the cache.
    chunk: the stack's part of a payload in `staging`, `(layers, blocks_per_chunk, rows of a block,
        words)`, contiguous.
    first_rows: where block 0 of each layer has its rows, `(layers, 1, rows of a block)`.
    block_rows: from a block's rows to those of the next, `(layers, 1, 1)`.
    """

    pages: torch.Tensor
    chunk: torch.Tensor
    first_rows: NDArray[np.int64]
    block_rows: NDArray[np.int64]

    @property
    def rows_per_block(self) -> int:
        """In all layers."""
        return self.first_rows.size

    def rows(self, block_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row numbers of blocks, in payload order."""
        return (self.first_rows + block_ids[:, None] * self.block_rows).ravel()

    def gather(self, rows: torch.Tensor, begin: int = 0) -> None:
        """Fill `chunk` from its row `begin` on; row numbers are int64, on the device."""
        target = self.chunk.view(-1, self.chunk.shape[-1])
        torch.index_select(self.pages, 0, rows, out=target[begin : begin + len(rows)])

    def scatter(self, rows: torch.Tensor, first_block: int, blocks: int, begin: int = 0) -> None:
        """Write the rows of `blocks` blocks of `chunk`, from its `first_block` on, to the cache;
        only those from `begin` on, as many as there are numbers.
        """
        source = self.chunk[:, first_block : first_block + blocks]
        source = source.reshape(-1, self.chunk.shape[-1])
        self.pages.index_copy_(0, rows, source[begin : begin + len(rows)])


def stacks(layout: PageLayout, staging: torch.Tensor) -> tuple[Stack, ...]:
    """The layout's layers as few stacks as they allow, in payload order.

    staging: flat uint8 on the layout's device, at least a payload long; the chunks are views of it.
    """
    return tuple(_stack(layout, run, staging) for run in _runs(layout))


def row_numbers(parts: Sequence[Stack], block_ids: Sequence[int]) -> NDArray[np.int64]:
    """Those of all stacks, one after the other."""
    ids = np.array(block_ids, dtype=np.int64)
    return np.concatenate([stack.rows(ids) for stack in parts])


def with_rows(parts: Sequence[Stack], rows: torch.Tensor) -> Iterator[tuple[Stack, torch.Tensor]]:
    """Each stack with its own of the `row_numbers`."""
    blocks = len(rows) // sum(stack.rows_per_block for stack in parts)
    begin = 0
    for stack in parts:
        end = begin + stack.rows_per_block * blocks
        yield stack, rows[begin:end]
        begin = end


def _runs(layout: PageLayout) -> Iterator[range]:
    """Consecutive layers in one storage, as long as another one does not make the rows shorter."""
    start = 0
    for i in range(1, len(layout.layers) + 1):
        if i < len(layout.layers) and _alike(layout, start, i):
            rows = _rows(layout.layers[start : i + 1])
            if rows.row_bytes == _rows(layout.layers[start:i]).row_bytes:
                continue
        yield range(start, i)
        start = i


def _alike(layout: PageLayout, i: int, k: int) -> bool:
    one, other = layout.layers[i], layout.layers[k]
    storages = [layout.caches[n].untyped_storage().data_ptr() for n in (i, k)]
    return (
        storages[0] == storages[1]
        and one.block_bytes == other.block_bytes
        and one.dims[-1] == other.dims[-1]
    )


class _Rows(NamedTuple):
    """base: the lowest address of a row. Others are multiples of `step_bytes` further."""

    base: int
    step_bytes: int
    row_bytes: int


def _rows(layers: Sequence[LayerPages]) -> _Rows:
    run_bytes = layers[0].dims[-1].size
    base = min(layer.address for layer in layers)
    step = 0
    for layer in layers:
        *outer, _ = layer.dims
        step = gcd(step, layer.address - base, layer.block_stride_bytes)
        step = gcd(step, *(dim.stride_bytes for dim in outer))
    step = step or run_bytes  # a single block need not have a stride
    if step < run_bytes:  # odd padding: whole runs would overlap as rows
        step = gcd(run_bytes, step)
    return _Rows(base, step, min(step, run_bytes))


def _stack(layout: PageLayout, run: range, staging: torch.Tensor) -> Stack:
    layers = [layout.layers[i] for i in run]
    storage = layout.caches[run[0]].untyped_storage()
    base, step_bytes, row_bytes = _rows(layers)
    begin, offset = base - storage.data_ptr(), layers[0].payload_offset
    word_bytes = gcd(8, base, storage.data_ptr(), step_bytes, row_bytes, offset)
    dtype = _WORDS[word_bytes]
    starts = [
        [
            layer.address - base + at + i
            for at, size in layer.runs
            for i in range(0, size, row_bytes)
        ]
        for layer in layers
    ]
    strides = [layer.block_stride_bytes for layer in layers]
    first_rows = np.array(starts, dtype=np.int64)[:, None] // step_bytes
    block_rows = np.array(strides, dtype=np.int64)[:, None, None] // step_bytes
    last_row = int((first_rows + (layout.num_blocks - 1) * block_rows).max())
    pages = torch.empty(0, dtype=dtype, device=layout.device).set_(
        storage,
        begin // word_bytes,
        (last_row + 1, row_bytes // word_bytes),
        (step_bytes // word_bytes, 1),
    )
    shape = (len(layers), layout.blocks_per_chunk, len(starts[0]), row_bytes // word_bytes)
    chunk = staging[offset : offset + prod(shape) * word_bytes].view(dtype).view(shape)
    return Stack(pages, chunk, first_rows, block_rows)
