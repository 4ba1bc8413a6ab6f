"""Copies where the KV cache is in host memory: `memmove`, piece by piece, on the copy thread.

Why not torch: its copies of more than 32,768 elements run on OpenMP threads of their own, which
wait for each other at a barrier, on cores the engine is using; and torch can only be told to use
one thread for the whole process. Measured on two busy cores, chunks of 16 pages of 512 KiB:
`memmove` 12 GB/s whatever the number of OpenMP threads; with two of them `copy_` and `index_copy_`
0.5 to 1.5 GB/s. `ctypes` lets go of the GIL during each call, and costs 1.5 to 2.5 µs of it. Pages
of 64 KiB, the smallest that real models have with vLLM's 128-token CPU blocks, still go at 10 GB/s,
pages of 8 KiB at 4. There torch's `index_select` would be twice as fast, and is not worth it.

A request waits for a load, so a second thread takes half of it: 14 GB/s instead of 10 with pages of
512 KiB, 5.6 instead of 4 with pages of 8 KiB. For a save nobody waits, and the engine is computing.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from s3kv.device.layout import Move
from s3kv.device.paths import Choice
from s3kv.device.places import ChunkPlaces
from s3kv.host.processors import beside_the_model
from s3kv.messages import LoadPart

_SHARED_BYTES = 2**20
"""Of a part from which on it is halved: less is over before another thread has woken up."""


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
        self._second: ThreadPoolExecutor | None = None
        if len(beside_the_model()) > 1:
            self._second = ThreadPoolExecutor(1, thread_name_prefix="s3kv-loads")

    def mark(self) -> None:
        return None

    def enter_thread(self) -> None:
        os.sched_setaffinity(0, beside_the_model())  # of this thread, and of those it starts

    def copy_out(self, part: LoadPart, mark: None) -> FinishedTicket:
        layout, payload = self._places.locate_whole(part)
        payload += self._slab_address
        for address, offset, nbytes in layout.moves(part.block_ids, part.first_block):
            ctypes.memmove(payload + offset, address, nbytes)
        return FINISHED

    def copy_in(self, part: LoadPart, mark: None, *, is_last: bool) -> FinishedTicket:
        layout, payload = self._places.locate(part)
        payload += self._slab_address
        moves = layout.moves(part.block_ids, part.first_block)
        half_bytes = layout.payload_bytes * len(part.block_ids) // layout.blocks_per_chunk // 2
        if self._second is None or 2 * half_bytes < _SHARED_BYTES:
            _fill(moves, payload)
            return FINISHED
        half, rest = _split(moves, half_bytes)
        other = self._second.submit(_fill, half, payload)
        try:
            _fill(rest, payload)
        finally:
            other.result()
        return FINISHED

    def settle(self) -> None:
        return

    def close(self) -> None:
        if self._second is not None:
            self._second.shutdown()
        self._places.close()


def _split(moves: Iterator[Move], nbytes: int) -> tuple[list[Move], Iterable[Move]]:
    """The moves of the first `nbytes`, of which there are as many, and those of the rest."""
    first = []
    for move in moves:
        if move.nbytes >= nbytes:
            address, offset, length = move
            first.append(Move(address, offset, nbytes))
            rest = Move(address + nbytes, offset + nbytes, length - nbytes)
            return first, chain((rest,), moves)
        first.append(move)
        nbytes -= move.nbytes
    return first, ()


def _fill(moves: Iterable[Move], payload: int) -> None:
    for address, offset, nbytes in moves:
        ctypes.memmove(address, payload + offset, nbytes)
