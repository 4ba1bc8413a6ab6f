"""Places of chunks in the slab: the last check before raw addresses are used."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import pytest

from s3kv.device.slot_payloads import ChunkPlaces
from s3kv.messages import CopyPart
from tests.unit.device.caches import Shape, build

HEADER_BYTES = 4096
SLOT_BYTES = 2**16
LAYOUTS = {0: build(Shape("LBNHC")).layout()}


def chunk_places(slots: int = 3, slot_bytes: int = SLOT_BYTES) -> ChunkPlaces:
    slab = memoryview(mmap.mmap(-1, slots * SLOT_BYTES))
    return ChunkPlaces(dict(LAYOUTS), slab, slot_bytes, {0: HEADER_BYTES})


def test_a_payload_begins_behind_the_header_of_its_slot() -> None:
    places = chunk_places()
    found, begin = places.locate(CopyPart(0, 2, 0, (0,)))
    assert (found, begin) == (places.layouts[0], 2 * SLOT_BYTES + HEADER_BYTES)


def refused(group: int, slot: int, first_block: int, block_ids: Sequence[int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        chunk_places().locate(CopyPart(group, slot, first_block, tuple(block_ids)))


def test_what_would_touch_other_memory_is_refused() -> None:
    whole = chunk_places().layouts[0]
    refused(1, 0, 0, [0], "no such KV-cache group 1")
    refused(0, 3, 0, [0], "slot 3 of 3")
    refused(0, -1, 0, [0], "slot -1 of 3")
    refused(0, 0, 0, [], "not in the chunk")
    refused(0, 0, whole.blocks_per_chunk, [0], "not in the chunk")
    refused(0, 0, 0, [whole.num_blocks], f"exceed {whole.num_blocks} blocks")
    refused(0, 0, 0, [-1], "exceed")


def test_an_object_may_take_several_slots_and_must_end_in_the_slab() -> None:
    """Slots are pages where objects differ in length. Pinned pieces end where no object goes on."""
    places = chunk_places(slots=1, slot_bytes=HEADER_BYTES)
    last = (SLOT_BYTES - HEADER_BYTES - places.layouts[0].payload_bytes) // HEADER_BYTES
    _, begin = places.locate(CopyPart(0, last, 0, (0,)))
    assert begin == (last + 1) * HEADER_BYTES
    with pytest.raises(ValueError, match="too near the end of the slab"):
        places.locate(CopyPart(0, last + 1, 0, (0,)))
    pages = -(-(HEADER_BYTES + places.layouts[0].payload_bytes) // HEADER_BYTES)
    assert pages * HEADER_BYTES <= places.pinned_bytes < 2 * pages * HEADER_BYTES
    assert places.pinned_bytes & (places.pinned_bytes - 1) == 0
    assert chunk_places().pinned_bytes == SLOT_BYTES


def test_slabs_too_small_or_no_whole_number_of_slots_are_refused() -> None:
    slab = memoryview(bytearray(HEADER_BYTES))
    with pytest.raises(ValueError, match="does not hold a chunk of group 0"):
        ChunkPlaces(dict(LAYOUTS), slab, HEADER_BYTES, {0: HEADER_BYTES})
    with pytest.raises(ValueError, match="slots of 50000"):
        chunk_places(slot_bytes=50_000)
    with pytest.raises(ValueError, match="no KV-cache group"):
        ChunkPlaces({}, memoryview(bytearray(8)), 8, {})


def test_close_lets_go_of_the_slab() -> None:
    slab = mmap.mmap(-1, SLOT_BYTES)
    places = ChunkPlaces(dict(LAYOUTS), memoryview(slab), SLOT_BYTES, {0: HEADER_BYTES})
    places.close()
    places.close()
    slab.close()
