"""Places of chunks in the slab, and the checks before a copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from s3kv.device.layout import PageLayout
from s3kv.messages import CopyPart


@dataclass(slots=True)
class ChunkPlaces:
    """The slab as the worker sees it, and the layouts of its slots.

    layouts: by the group number that the orders carry, all on one device.
    slab: the worker's mapping, writable bytes, a whole number of slots; slot `i` begins at
        `i * slot_bytes`. This object keeps a view until `close`, so the slab cannot be unmapped
        under a copy.
    slot_bytes: the distance between slots. An object that is longer takes several.
    header_bytes: by group, the offset of the group's part in the object; for the first group, this
        is the length of the header.

    Raises `ValueError` when the slab is too small for a group's chunk.
    """

    layouts: Mapping[int, PageLayout]
    slab: memoryview
    slot_bytes: int
    header_bytes: Mapping[int, int]
    memory: torch.Tensor = field(init=False, repr=False)
    """The slab as a flat uint8 tensor on the CPU."""

    def __post_init__(self) -> None:
        if not self.layouts:
            raise ValueError("no KV-cache group to copy")
        if len({layout.device for layout in self.layouts.values()}) > 1:
            raise ValueError("the KV-cache groups are on different devices")
        if self.slab.nbytes < self.slot_bytes or self.slab.nbytes % self.slot_bytes:
            raise ValueError(f"slab of {self.slab.nbytes} bytes, slots of {self.slot_bytes}")
        for group, layout in self.layouts.items():
            if self.header_bytes[group] + layout.payload_bytes > self.slab.nbytes:
                raise ValueError(
                    f"a slab of {self.slab.nbytes} bytes does not hold a chunk of group {group}: "
                    f"{self.header_bytes[group]} + {layout.payload_bytes}"
                )
        self.slab = memoryview(self.slab).cast("B")
        self.memory = torch.frombuffer(self.slab, dtype=torch.uint8)

    @property
    def device(self) -> torch.device:
        return next(iter(self.layouts.values())).device

    @property
    def pinned_bytes(self) -> int:
        """Length of the pieces in which the slab may be pinned: no object crosses their ends. An
        object of several slots begins at a multiple of the next power of two."""
        longest = max(self.header_bytes[g] + p.payload_bytes for g, p in self.layouts.items())
        return self.slot_bytes << (-(-longest // self.slot_bytes) - 1).bit_length()

    @property
    def num_slots(self) -> int:
        return self.slab.nbytes // self.slot_bytes

    def locate(self, part: CopyPart) -> tuple[PageLayout, int]:
        """The layout of the part's group, and the offset of the chunk's payload in the slab.

        This is the last check before raw addresses are used: raises `ValueError` for anything that
        would touch memory outside the slot or the cache, or that names an unknown group.
        """
        layout = self.layouts.get(part.group)
        if layout is None:
            raise ValueError(f"no such KV-cache group {part.group}")
        if not 0 <= part.slot < self.num_slots:
            raise ValueError(f"slot {part.slot} of {self.num_slots}")
        end_block = part.first_block + len(part.block_ids)
        if not 0 <= part.first_block < end_block <= layout.blocks_per_chunk:
            raise ValueError(f"blocks [{part.first_block}, {end_block}) are not in the chunk")
        if min(part.block_ids) < 0 or max(part.block_ids) >= layout.num_blocks:
            raise ValueError(f"block ids {part.block_ids} exceed {layout.num_blocks} blocks")
        begin = part.slot * self.slot_bytes + self.header_bytes[part.group]
        if begin + layout.payload_bytes > self.slab.nbytes:
            raise ValueError(f"slot {part.slot} is too near the end of the slab for {part.group}")
        return layout, begin

    def locate_whole(self, part: CopyPart) -> tuple[PageLayout, int]:
        """Locate a part that is to be saved. Raises `ValueError` as `locate` does, and for an
        incomplete chunk, which would be uploaded as if it were whole."""
        layout, begin = self.locate(part)
        if len(part.block_ids) != layout.blocks_per_chunk:
            raise ValueError(f"{len(part.block_ids)} of a chunk's {layout.blocks_per_chunk} blocks")
        return layout, begin

    def close(self) -> None:
        """Release the slab. No copy may be running. Idempotent."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.layouts = {}
        self.slab.release()
