"""Device tier of a `TieredStore`: the hashes in a pool's blocks, and copies between blocks and
slots, which run beside the caller's work.

Streams order the two, not the host:

    content of a block   is written on the stream current at `put`; an acquiring caller waits for it
    next use of a block  writes after the work launched before its releases
    save                 reads after the work launched before it; pins the block until its end
    load                 writes a pinned block without a name; names it at its end

`BlockCopies` moves pages of views `[B, H, N, C]`, in their order in memory. A pool may have any
rank, and an object holds a block in the order of its dimensions. The two orders agree if a block's
dimensions lie in memory in that order, padded or not. Then the bytes of a pool form one such view,
or several if more than three dimensions of a block do not adjoin (`BlockPools`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import count, pairwise, product

import torch

from s3kv.device.copies import BlockCopies
from s3kv.device.layout import Dim, PageLayout, merge
from s3kv.device.tensors import BlockTensors
from s3kv.library.block_table import BlockTable
from s3kv.library.caller_streams import CallerStream, Mark, has_passed, mark, new_stream, on, wait
from s3kv.messages import CopyPart
from s3kv.types import ChunkKey

GROUP = 0
"""Group number of the only layout, for `BlockCopies`."""
_PAGE_DIMENSIONS = 3


class BlockPools:
    """Pools of one store. tensors: descriptions of a block's tensors. pools: name to `[blocks,
    *shape]`, all on one device.

    Raises `ValueError` for pools that do not hold such blocks, and `UnsupportedError` for memory
    that cannot be copied (on another kind of device, blocks that overlap, single bytes apart).
    """

    def __init__(self, tensors: BlockTensors, pools: Mapping[str, torch.Tensor]) -> None:
        counts = {len(pool) if pool.ndim else 0 for pool in pools.values()}
        if len(counts) != 1 or counts == {0}:
            raise ValueError(f"the pools have {sorted(counts)} blocks: allowed is one number")
        (self.count,) = counts
        tensors.check({name: pool[0] for name, pool in pools.items()})
        views: dict[str, torch.Tensor] = {}
        for spec in tensors.specs:
            views |= _page_views(spec.name, pools[spec.name])
        self.layout = PageLayout.of(views, self.count, tuple(views), 1)
        """Layout of a chunk of one block; its payload is that of `tensors`."""
        if self.layout.payload_bytes != tensors.payload_bytes:
            raise ValueError("two of the pools share the same memory")

    @property
    def device(self) -> torch.device:
        return self.layout.device


class DeviceBlocks:
    """The device tier. Used from one thread. A `stream` argument is the caller's stream."""

    def __init__(
        self, pools: BlockPools, numbers: Iterable[int], copies: BlockCopies, opened: Mark
    ) -> None:
        """Take over `copies`, whose only layout is that of `pools`.

        numbers: blocks that this tier may hand out. opened: a mark behind the caller's launched
        work on them. Raises `ValueError` for no numbers, or for a repeated one.
        """
        self._table = BlockTable(numbers)
        self.pools = pools
        self._copies = copies
        self._before_loads = new_stream(pools.device)
        self._written: dict[int, Mark] = {}
        """For each block, a mark behind its last write."""
        self._used: dict[int, list[Mark]] = {}
        """For each block, one mark per release, behind the uses before it."""
        self._opened = opened
        self._saves: dict[int, tuple[int, Callable[[bool], None]]] = {}
        self._loads: dict[str, tuple[int, ChunkKey, Callable[[int | None], None]]] = {}
        """Blocks being copied, and what is called at the end."""
        self._ids = count()

    def holds(self, key: ChunkKey) -> bool:
        return self._table.find(key) is not None

    def acquire(self, key: ChunkKey, stream: CallerStream) -> int | None:
        """Hold the block with `key` once more; work launched next on `stream` may read it."""
        number = self._table.find(key)
        if number is not None:
            self._table.hold(number)
            self.wait_written(number, stream)
        return number

    def wait_written(self, number: int, stream: CallerStream) -> None:
        """Make work launched next on `stream` wait until this held block has been written."""
        wait(stream, [self._written.get(number)])

    def take(self, stream: CallerStream) -> int | None:
        """Hold a block to fill; work launched next on `stream` may write to it."""
        number = self._table.take()
        if number is not None:
            wait(stream, self._uses(number))
        return number

    def name(self, number: int, key: ChunkKey, stream: CallerStream) -> bool:
        """Name a block as `BlockTable.name` does. Its writes have been launched on `stream`."""
        is_new = self._table.key_of(number) != key
        is_named = self._table.name(number, key)
        if is_named and is_new:
            self._written[number] = mark(stream)
        return is_named

    def release(self, number: int, stream: CallerStream) -> None:
        """Release a block as `BlockTable.release` does; its next use waits for the work launched on
        `stream` so far."""
        self._table.release(number)
        uses = [use for use in self._used.get(number, ()) if not has_passed(use)]
        self._used[number] = [*uses, mark(stream)]

    def save(
        self,
        job_id: int,
        slot: int,
        number: int,
        stream: CallerStream,
        on_end: Callable[[bool], None],
    ) -> None:
        """Copy a held block, which may be released at once, to a slot. on_end: called by `poll`."""
        self._table.pin(number)
        self._saves[job_id] = number, on_end
        with on(stream):
            self._copies.save(job_id, GROUP, slot, (number,))

    def load(self, slot: int, key: ChunkKey, on_end: Callable[[int | None], None]) -> bool:
        """Copy a slot to a block. Returns False when all blocks are in use.

        on_end: called by `poll` with the block that then holds `key`, held once more, or with None
        if the copy failed. If the caller has named another block `key` meanwhile, it is that one.
        """
        number = self._table.take(pinned=True)
        if number is None:
            return False
        load_id = str(next(self._ids))
        self._loads[load_id] = number, key, on_end
        wait(self._before_loads, self._uses(number))
        with on(self._before_loads):
            self._copies.load(load_id, [CopyPart(GROUP, slot, 0, (number,))])
        return True

    def poll(self) -> bool:
        """Report ended copies, without blocking. Returns whether a copy is still under way."""
        if self._saves or self._loads:
            ends = self._copies.poll()
            for job_id, ok, _ in ends.saved:
                number, saved = self._saves.pop(job_id)
                self._table.unpin(number)
                saved(ok)
            for load_id, ok in ends.loaded:
                number, key, loaded = self._loads.pop(load_id)
                holder = self._table.name_filled(number, key) if ok else None
                self._table.unpin(number)
                loaded(holder)
        return bool(self._saves or self._loads)

    def close(self) -> None:
        """Close the copies (`BlockCopies.close`); none may be under way. May block. Idempotent."""
        self._copies.close()

    def _uses(self, number: int) -> list[Mark]:
        """Marks that have to pass before this vacated block is written."""
        return [self._opened, self._written.pop(number, None), *self._used.pop(number, ())]


def _page_views(name: str, pool: torch.Tensor) -> dict[str, torch.Tensor]:
    """The pool's bytes as views `[blocks, …, …, …]`, in the order of a block's payload."""
    item = pool.element_size()
    dims = merge(
        [*(Dim(pool.shape[d], pool.stride(d) * item) for d in range(1, pool.ndim)), Dim(item, 1)]
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
    for position in product(*(range(dim.size) for dim in unrolled)):
        offset = sum(at * dim.stride_bytes for at, dim in zip(position, unrolled, strict=True))
        view = torch.empty(0, dtype=torch.uint8, device=pool.device)
        view.set_(pool.untyped_storage(), begin + offset, size, stride)
        views[name + "".join(f"[{at}]" for at in position)] = view
    return views
