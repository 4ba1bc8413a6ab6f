"""Stacks: a group's pages as rows of one tensor, so that one gather or one scatter moves a chunk.

A row is a contiguous piece of a block. The addresses of all rows differ by multiples of the
tensor's stride; most of its rows belong to other blocks, to other layers or to none. A chunk is
then a list of row numbers, in payload order. The layers are no dimension of their own: torch's
kernels, with offsets of 32 bits, would take several launches for a large cache.

The layers of a group are one stack where they are alike and in one buffer. Otherwise each stack has
a share of every block of the payload.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
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
    chunk: the stack's share of a payload in `staging`, `(blocks_per_chunk, rows of a block,
        words)`; contiguous if there is no other stack.
    first_rows: the rows of block 0, all layers in order.
    block_rows: for each of them, the distance to the same row of the next block.
    """

    pages: torch.Tensor
    chunk: torch.Tensor
    first_rows: NDArray[np.int64]
    block_rows: NDArray[np.int64]

    @property
    def rows_per_block(self) -> int:
        """Rows of a block, in all layers together."""
        return len(self.first_rows)

    def rows(self, block_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row numbers of blocks, in payload order."""
        return (self.first_rows + block_ids[:, None] * self.block_rows).ravel()

    def gather(self, rows: torch.Tensor, first_block: int = 0) -> None:
        """Fill blocks of `chunk`, from its `first_block` on. rows: numbers of the rows to read,
        those of one block or more, int64, on the device."""
        target = self._blocks(rows, first_block)
        if self.rows_per_block == 1 or self.chunk.is_contiguous():
            torch.index_select(self.pages, 0, rows, out=target.flatten(0, 1))
        else:
            target.copy_(torch.index_select(self.pages, 0, rows).view(target.shape))

    def scatter(self, rows: torch.Tensor, first_block: int) -> None:
        """Write blocks of `chunk`, from its `first_block` on, to these rows of the cache."""
        self.pages.index_copy_(0, rows, self._blocks(rows, first_block).flatten(0, 1))

    def _blocks(self, rows: torch.Tensor, first_block: int) -> torch.Tensor:
        return self.chunk[first_block : first_block + len(rows) // self.rows_per_block]


def stacks(layout: PageLayout, staging: torch.Tensor) -> tuple[Stack, ...]:
    """The layout's layers as few stacks as they allow, in payload order. staging: flat uint8 on the
    layout's device, at least a payload long; the chunks are views of it."""
    return tuple(_stack(layout, run, staging) for run in _runs(layout))


def row_numbers(parts: Sequence[Stack], block_ids: Sequence[int]) -> NDArray[np.int64]:
    """The row numbers of all stacks, one after the other."""
    ids = np.array(block_ids, dtype=np.int64)
    return np.concatenate([stack.rows(ids) for stack in parts])


def with_rows(parts: Sequence[Stack], rows: torch.Tensor) -> Iterator[tuple[Stack, torch.Tensor]]:
    """Each stack with its own share of the `row_numbers`."""
    blocks = len(rows) // sum(stack.rows_per_block for stack in parts)
    begin = 0
    for stack in parts:
        end = begin + stack.rows_per_block * blocks
        yield stack, rows[begin:end]
        begin = end


def _runs(layout: PageLayout) -> Iterator[range]:
    """Runs of consecutive layers in one storage whose rows do not get shorter when joined."""
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
    """The rows of a stack. base: the lowest address; others are multiples of `step_bytes` on."""

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
    begin, offset = base - storage.data_ptr(), layers[0].block_offset
    word_bytes = gcd(8, base, storage.data_ptr(), step_bytes, row_bytes, offset, layout.block_bytes)
    dtype = _WORDS[word_bytes]
    starts, strides = np.array(
        [
            (layer.address - base + at + i, layer.block_stride_bytes)
            for layer in layers
            for at, size in layer.runs
            for i in range(0, size, row_bytes)
        ],
        dtype=np.int64,
    ).T
    first_rows, block_rows = starts // step_bytes, strides // step_bytes
    last_row = int((first_rows + (layout.num_blocks - 1) * block_rows).max())
    pages = torch.empty(0, dtype=dtype, device=layout.device).set_(
        storage,
        begin // word_bytes,
        (last_row + 1, row_bytes // word_bytes),
        (step_bytes // word_bytes, 1),
    )
    payload = staging[: layout.payload_bytes].view(dtype).view(layout.blocks_per_chunk, -1)
    first, words = offset // word_bytes, row_bytes // word_bytes
    share = payload[:, first : first + len(starts) * words]
    return Stack(pages, share.view(-1, len(starts), words), first_rows, block_rows)
