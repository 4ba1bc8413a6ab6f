"""Copies where the KV cache is in host memory: `memmove`, piece by piece, on the copy thread.

Why not torch: its copies of more than 32,768 elements run on OpenMP threads of their own, which
wait for each other at a barrier, on cores the engine is using; and torch can only be told to use
one thread for the whole process. Measured on two busy cores, chunks of 16 pages of 512 KiB:
`memmove` 12 GB/s whatever the number of OpenMP threads; with two of them `copy_` and `index_copy_`
0.5 to 1.5 GB/s. `ctypes` lets go of the GIL during each call, and costs 1.5 to 2.5 µs of it. Pages
of 64 KiB, the smallest that real models have with vLLM's 128-token CPU blocks, still go at 10 GB/s,
pages of 8 KiB at 4. There torch's `index_select` would be twice as fast, and is not worth it.
"""

from __future__ import annotations

import ctypes

from s3kv.device.paths import Choice
from s3kv.device.places import ChunkPlaces
from s3kv.messages import LoadPart


class FinishedTicket:
    """A copy that was over when it returned."""

    def done(self) -> bool:
        return True

    def fence(self) -> None:
        return


FINISHED = FinishedTicket()


class CpuCopier:
    """The engine's forward has ended when its hook calls us, so order of calls is all the order
    there is, and a fence is the wait for the copy itself.
    """

    pinned = False
    choices: tuple[Choice, ...] = ()

    def __init__(self, places: ChunkPlaces) -> None:
        self._places = places
        self._slab_address = places.memory.data_ptr()

    def mark(self) -> None:
        return None

    def enter_thread(self) -> None:
        return

    def copy_out(self, part: LoadPart, mark: None) -> FinishedTicket:
        layout, payload = self._places.locate_whole(part)
        payload += self._slab_address
        for address, offset, nbytes in layout.moves(part.block_ids, part.first_block):
            ctypes.memmove(payload + offset, address, nbytes)
        return FINISHED

    def copy_in(self, part: LoadPart, mark: None, *, is_last: bool) -> FinishedTicket:
        layout, payload = self._places.locate(part)
        payload += self._slab_address
        for address, offset, nbytes in layout.moves(part.block_ids, part.first_block):
            ctypes.memmove(address, payload + offset, nbytes)
        return FINISHED

    def settle(self) -> None:
        return

    def close(self) -> None:
        self._places.close()
