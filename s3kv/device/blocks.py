"""The hot tier of a `TieredStore`: whole blocks on a device, found by hash."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from s3kv.device.tensors import BlockTensors
from s3kv.host.policy import make_policy
from s3kv.host.slots import SlotTable
from s3kv.types import ChunkKey


class DeviceBlocks:
    """`count` blocks in one tensor on `device`; the least recently used one goes first.

    Used from one thread. Copies run on the device's current stream and are ordered with what the
    caller launches there.
    """

    def __init__(self, tensors: BlockTensors, count: int, device: torch.device) -> None:
        self._tensors = tensors
        self._slots = SlotTable(count, make_policy("lru", count))
        self._memory = torch.empty((count, tensors.payload_bytes), dtype=torch.uint8, device=device)

    def holds(self, key: ChunkKey) -> bool:
        return self._slots.lookup(key) is not None

    def put(self, key: ChunkKey, source: Mapping[str, torch.Tensor]) -> None:
        """Keep a copy of the block, in place of the least recently used one if need be."""
        if self._slots.lookup(key) is not None:
            return
        reservation = self._slots.reserve(key)
        assert reservation is not None, "no block is ever pinned or dirty here"
        slot = reservation.slot
        self._tensors.copy_out(source, self._memory[slot.number])
        self._slots.commit(slot, dirty=False)

    def get(self, key: ChunkKey, into: Mapping[str, torch.Tensor]) -> bool:
        """Copy the block to `into`. False, and nothing copied, when it is not here."""
        slot = self._slots.lookup(key)
        if slot is None:
            return False
        self._tensors.copy_in(self._memory[slot.number], into)
        self._slots.touch_chain([slot])
        return True
