"""The contiguous pieces of any chunk, as arrays: what `PageLayout.moves` yields, all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from s3kv.device.layout import PageLayout

Array = NDArray[np.int64]


class Runs(NamedTuple):
    """Piece `i` is `sizes[i]` bytes at device address `addresses[i]`, and in the payload from
    `offsets[i]` on.
    """

    addresses: Array
    offsets: Array
    sizes: Array


class RunTable:
    """One layout's arrays, computed once; immutable, and safe in any thread.

    A row for each piece that a whole chunk has when none of its blocks are neighbours: where the
    piece is in block 0, how far the next block is, which of the chunk's blocks it belongs to, and
    its place in the payload.
    """

    def __init__(self, layout: PageLayout) -> None:
        bases, strides, owners, sizes = [], [], [], []
        for layer in layout.layers:
            offsets, lengths = np.array(layer.runs, dtype=np.int64).T
            count = len(lengths) * layout.blocks_per_chunk
            bases.append(np.tile(layer.address + offsets, layout.blocks_per_chunk))
            strides.append(np.full(count, layer.block_stride_bytes, dtype=np.int64))
            owners.append(np.repeat(np.arange(layout.blocks_per_chunk), len(lengths)))
            sizes.append(np.tile(lengths, layout.blocks_per_chunk))
        self._blocks_per_chunk = layout.blocks_per_chunk
        self._bases: Array = np.concatenate(bases)
        self._strides: Array = np.concatenate(strides)
        self._owners: Array = np.concatenate(owners)
        self._sizes: Array = np.concatenate(sizes)
        self._offsets: Array = np.cumsum(self._sizes) - self._sizes

    def runs(self, block_ids: Sequence[int], first_block: int) -> Runs:
        """Blocks `first_block …` of a chunk, in payload order. Pieces that are neighbours in
        memory and in the payload come as one.
        """
        ids = np.array(block_ids, dtype=np.int64)
        if len(block_ids) == self._blocks_per_chunk:
            addresses = self._bases + ids[self._owners] * self._strides
            return _merged(Runs(addresses, self._offsets, self._sizes))
        rows = np.flatnonzero(
            (self._owners >= first_block) & (self._owners < first_block + len(block_ids))
        )
        owners = ids[self._owners[rows] - first_block]
        addresses = self._bases[rows] + owners * self._strides[rows]
        return _merged(Runs(addresses, self._offsets[rows], self._sizes[rows]))


def _merged(runs: Runs) -> Runs:
    addresses, offsets, sizes = runs
    apart = addresses[1:] != addresses[:-1] + sizes[:-1]
    apart |= offsets[1:] != offsets[:-1] + sizes[:-1]
    if apart.all():
        return runs
    starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return Runs(addresses[starts], offsets[starts], np.add.reduceat(sizes, starts))
