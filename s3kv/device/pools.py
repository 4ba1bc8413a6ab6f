"""A caller's pool of blocks: for every tensor of a block one that holds it for all blocks.

`BlockCopies` moves pages of views `[B, H, N, C]`, in the order they have in memory. A pool has any
rank, and an object holds the block in the order of its dimensions. The two agree where a block's
dimensions lie in memory in that order, padded or not; then the bytes of a pool can be seen as one
such view, or, where more than three dimensions of a block do not adjoin, as several.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product

import torch

from s3kv.device.layout import Dim, PageLayout, merge
from s3kv.device.tensors import BlockTensors

_PAGE_DIMENSIONS = 3


class BlockPools:
    """tensors: what a block consists of. pools: name to `[blocks, *shape]`, on one device.

    Raises `ValueError` for pools that do not hold such blocks, and `UnsupportedError` for memory
    that cannot be copied (on another kind of device, blocks that overlap, single bytes apart).
    """

    def __init__(self, tensors: BlockTensors, pools: Mapping[str, torch.Tensor]) -> None:
        counts = {len(pool) if pool.ndim else 0 for pool in pools.values()}
        if len(counts) != 1 or counts == {0}:
            raise ValueError(f"the pools have {sorted(counts)} blocks: allowed is one number")
        (self.count,) = counts
        tensors.check({name: pool[0] for name, pool in pools.items()})
        self._tensors = tensors
        self._pools = dict(pools)
        views: dict[str, torch.Tensor] = {}
        for spec in tensors.specs:
            views |= _page_views(spec.name, pools[spec.name])
        self.layout = PageLayout.of(views, self.count, tuple(views), 1)
        """Of chunks of one block; its payload is that of `tensors`."""
        if self.layout.payload_bytes != tensors.payload_bytes:
            raise ValueError("two of the pools are the same memory")

    @classmethod
    def new(cls, tensors: BlockTensors, count: int, device: torch.device) -> BlockPools:
        """Pools of our own."""
        return cls(tensors, tensors.empty(count, device))

    @property
    def device(self) -> torch.device:
        return self.layout.device

    def write(self, number: int, source: Mapping[str, torch.Tensor]) -> None:
        """Copy a block into the pool. Does not wait for it where both are on one GPU."""
        with torch.inference_mode():  # an engine's pools may have been made in it
            for name, tensor in source.items():
                self._pools[name][number].copy_(tensor, non_blocking=True)

    def read(self, number: int, into: Mapping[str, torch.Tensor]) -> None:
        """Copy a block out of the pool. Does not wait for it where both are on one GPU."""
        with torch.inference_mode():
            for name, tensor in into.items():
                tensor.copy_(self._pools[name][number], non_blocking=True)


def _page_views(name: str, pool: torch.Tensor) -> dict[str, torch.Tensor]:
    """The pool's bytes as views `[blocks, …, …, …]`, in the order of a block's payload."""
    item = pool.element_size()
    dims = merge(
        [
            *(Dim(pool.shape[d], pool.stride(d) * item) for d in range(1, pool.ndim)),
            Dim(item, 1),
        ]
    )
    if any(outer.stride_bytes < inner.stride_bytes for outer, inner in pairwise(dims)):
        raise ValueError(
            f"pool {name!r} has strides {tuple(pool.stride())}: the dimensions of a block have to "
            "follow each other as they do in memory. Give a permuted view, and `shapes` to match"
        )
    unrolled, page = dims[:-_PAGE_DIMENSIONS], dims[-_PAGE_DIMENSIONS:]
    page = (Dim(1, page[0].stride_bytes),) * (_PAGE_DIMENSIONS - len(page)) + page
    begin = pool.storage_offset() * item
    size = (len(pool), *(dim.size for dim in page))
    stride = (pool.stride(0) * item, *(dim.stride_bytes for dim in page))
    views = {}
    for index, offset in _offsets(unrolled):
        view = torch.empty(0, dtype=torch.uint8, device=pool.device)
        view.set_(pool.untyped_storage(), begin + offset, size, stride)
        views[name + index] = view
    return views


def _offsets(dims: Sequence[Dim]) -> Iterator[tuple[str, int]]:
    """How to tell the views apart, and where each begins, in bytes."""
    for position in product(*(range(dim.size) for dim in dims)):
        offset = sum(at * dim.stride_bytes for at, dim in zip(position, dims, strict=True))
        yield "".join(f"[{at}]" for at in position), offset
