"""Layers that lie at equal distances in one buffer, seen as one tensor, so that one gather or one
scatter moves a chunk of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod

import torch

from s3kv.device.layout import Dim, LayerPages, PageLayout

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class Stack:
    """Some consecutive layers of a group, for chunks of `blocks_per_chunk` blocks.

    pages: the cache, `(layers, num_blocks, *dimensions of a block in payload order)`, strided,
        in the widest integers that fit its addresses. Writing to it writes to the cache.
    chunk: the stack's part of a payload in `staging`, `(layers, blocks_per_chunk, …)`, contiguous.
    """

    pages: torch.Tensor
    chunk: torch.Tensor

    def gather(self, block_ids: torch.Tensor) -> None:
        """Fill `chunk` from blocks; as many ids as a chunk has blocks, int64, on the device."""
        torch.index_select(self.pages, 1, block_ids, out=self.chunk)

    def scatter(self, block_ids: torch.Tensor, first_block: int) -> None:
        """Write blocks `first_block …` of `chunk` to the cache; ids as in `gather`."""
        blocks = self.chunk.narrow(1, first_block, block_ids.numel())
        self.pages.index_copy_(1, block_ids, blocks)


def stacks(layout: PageLayout, staging: torch.Tensor) -> tuple[Stack, ...]:
    """The layout's layers as few stacks as they allow, in payload order.

    staging: flat uint8 on the layout's device, at least a payload long; the chunks are views of it.
    """
    return tuple(_stack(layout, run, staging) for run in _even_runs(layout))


def _even_runs(layout: PageLayout) -> Iterator[range]:
    """Consecutive layers of one geometry, at equal distances, in one storage."""
    start, step_bytes = 0, 0
    for i in range(1, len(layout.layers) + 1):
        if i < len(layout.layers) and _alike(layout, start, i):
            distance = layout.layers[i].address - layout.layers[i - 1].address
            if distance > 0 and step_bytes in (0, distance):
                step_bytes = distance
                continue
        yield range(start, i)
        start, step_bytes = i, 0


def _alike(layout: PageLayout, i: int, k: int) -> bool:
    one, other = layout.layers[i], layout.layers[k]
    storages = [layout.caches[n].untyped_storage().data_ptr() for n in (i, k)]
    return storages[0] == storages[1] and _geometry(one) == _geometry(other)


def _geometry(layer: LayerPages) -> tuple[tuple[Dim, ...], int]:
    return layer.dims, layer.block_stride_bytes


def _stack(layout: PageLayout, run: Sequence[int], staging: torch.Tensor) -> Stack:
    layers = [layout.layers[i] for i in run]
    first = layers[0]
    storage = layout.caches[run[0]].untyped_storage()
    begin = first.address - storage.data_ptr()
    step_bytes = layers[1].address - first.address if len(layers) > 1 else first.block_stride_bytes
    *outer, last = first.dims
    strides = [step_bytes, first.block_stride_bytes, *(dim.stride_bytes for dim in outer)]
    word_bytes = gcd(8, storage.data_ptr(), begin, last.size, first.payload_offset, *strides)
    dtype = _WORDS[word_bytes]
    sizes = [*(dim.size for dim in outer), last.size // word_bytes]
    pages = torch.empty(0, dtype=dtype, device=layout.device).set_(
        storage,
        begin // word_bytes,
        (len(layers), layout.num_blocks, *sizes),
        (*(stride // word_bytes for stride in strides), 1),
    )
    shape = (len(layers), layout.blocks_per_chunk, *sizes)
    end = first.payload_offset + prod(shape) * word_bytes
    chunk = staging[first.payload_offset : end].view(dtype).view(shape)
    return Stack(pages, chunk)
