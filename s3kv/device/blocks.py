"""The device tier of a `TieredStore`: hashes in the blocks of a pool, and the copies to and from
slots, beside what the caller computes.

What orders the two, without the host waiting:

    content of a block   written on the stream current at `put`; whoever acquires it waits for that
    a block's next use   written by a caller or a load, after what was launched before its releases
    a save               reads after what was launched before it, and pins the block until its end
    a load               writes a pinned block nobody else knows, and names it when it has ended
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import NamedTuple

import torch

from s3kv.device.caller import CallerStream, Mark
from s3kv.device.copies import BlockCopies
from s3kv.device.pools import BlockPools
from s3kv.host.blocks import BlockStatistics, BlockTable
from s3kv.messages import LoadPart
from s3kv.types import ChunkKey

GROUP = 0
"""Of the one layout, in the orders to `BlockCopies`."""


class _Save(NamedTuple):
    number: int
    on_end: Callable[[bool], None]


class _Load(NamedTuple):
    number: int
    key: ChunkKey
    on_end: Callable[[int | None], None]


class DeviceBlocks:
    """Used from one thread. A stream in an argument is the one the caller works on."""

    def __init__(
        self, pools: BlockPools, numbers: Iterable[int], copies: BlockCopies, opened: Mark
    ) -> None:
        """Take over `copies`, whose only layout is that of `pools`.

        numbers: the blocks that are ours to give. opened: after whatever the caller has launched
        that touches them. Raises `ValueError` for numbers that are not in the pools.
        """
        self._table = BlockTable(numbers)
        self._pools = pools
        self._copies = copies
        self._before_loads = CallerStream.new(pools.device)
        self._written: dict[int, Mark] = {}
        """By block: after the last write to it."""
        self._used: dict[int, list[Mark]] = {}
        """By block: after its uses up to each release."""
        self._opened = opened
        self._saves: dict[int, _Save] = {}
        self._loads: dict[str, _Load] = {}
        self._ids = count()

    @property
    def device(self) -> torch.device:
        return self._pools.device

    @property
    def is_copying(self) -> bool:
        return bool(self._saves or self._loads)

    def holds(self, key: ChunkKey) -> bool:
        return self._table.find(key) is not None

    def statistics(self) -> BlockStatistics:
        return self._table.statistics()

    # --- blocks ----------------------------------------------------------------------------

    def acquire(self, key: ChunkKey, stream: CallerStream) -> int | None:
        """The block with `key`, held once more; what `stream` launches next may read it."""
        number = self._table.find(key)
        if number is not None:
            self._table.hold(number)
            self.wait_written(number, stream)
        return number

    def wait_written(self, number: int, stream: CallerStream) -> None:
        """What `stream` launches next sees the content of this held block."""
        mark = self._written.get(number)
        if mark is not None:
            stream.wait([mark])

    def take(self, stream: CallerStream) -> int | None:
        """A block to be filled, held; what `stream` launches next may write to it."""
        number = self._table.take()
        if number is not None:
            stream.wait(self._uses(number))
        return number

    def name(self, number: int, key: ChunkKey, stream: CallerStream) -> bool:
        """As `BlockTable.name`, of content that `stream` has been given to write."""
        if self._table.key_of(number) == key:
            return True
        if not self._table.name(number, key):
            return False
        self._written[number] = stream.mark()
        return True

    def release(self, number: int, stream: CallerStream) -> None:
        """As `BlockTable.release`, after what `stream` has been given to do with it."""
        self._table.release(number)
        uses = [mark for mark in self._used.get(number, ()) if not mark.passed]
        self._used[number] = [*uses, stream.mark()]

    # --- bytes -----------------------------------------------------------------------------

    def write(self, number: int, source: Mapping[str, torch.Tensor]) -> None:
        """Fill a held block without a name, on the current stream."""
        self._pools.write(number, source)

    def read(self, number: int, into: Mapping[str, torch.Tensor]) -> None:
        """Copy a held block, on the current stream."""
        self._pools.read(number, into)

    def save(
        self,
        job_id: int,
        slot: int,
        number: int,
        stream: CallerStream,
        on_end: Callable[[bool], None],
    ) -> None:
        """Copy a held block to a slot. It may be released at once. on_end: called by `poll`."""
        self._table.pin(number)
        self._saves[job_id] = _Save(number, on_end)
        with stream:
            self._copies.save(job_id, GROUP, slot, (number,))

    def load(self, slot: int, key: ChunkKey, on_end: Callable[[int | None], None]) -> bool:
        """Copy a slot to a block. False when all are in use.

        on_end: called by `poll` with the block that holds `key` then, held; None when the copy has
        failed. It is another block where the caller has named one meanwhile.
        """
        number = self._table.take_pinned()
        if number is None:
            return False
        load_id = str(next(self._ids))
        self._loads[load_id] = _Load(number, key, on_end)
        self._before_loads.wait(self._uses(number))
        with self._before_loads:
            self._copies.load(load_id, [LoadPart(GROUP, slot, 0, (number,))])
        return True

    def poll(self) -> bool:
        """Tell what has ended. Does not block. Whether something is still under way."""
        if self.is_copying:
            ends = self._copies.poll()
            for job_id, ok, _ in ends.saved:
                save = self._saves.pop(job_id)
                self._table.unpin(save.number)
                save.on_end(ok)
            for load_id, ok in ends.loaded:
                load = self._loads.pop(load_id)
                holder = self._table.name_filled(load.number, load.key) if ok else None
                self._table.unpin(load.number)
                load.on_end(holder)
        return self.is_copying

    def close(self) -> None:
        """As `BlockCopies.close`, when nothing is under way. May block. Idempotent."""
        self._copies.close()

    # --- inside ----------------------------------------------------------------------------

    def _uses(self, number: int) -> list[Mark]:
        """What has to be over before this vacated block is written to."""
        marks = [self._opened, *self._used.pop(number, ())]
        written = self._written.pop(number, None)
        return marks if written is None else [*marks, written]
