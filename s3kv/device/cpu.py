"""Copies for a KV cache in host memory: `memmove`, piece by piece, on the copy thread.

Torch is the slower choice: it copies on OpenMP threads, which wait for each other on cores that the
engine uses. On two busy cores, with pages of 512 KiB, `memmove` reaches 12 GB/s, and torch's
`copy_` 0.5 to 1.5. `ctypes` releases the GIL during each call, and holds it for 1.5 to 2.5 µs.
Pages of 8 KiB reach 0.3 of the speed of one large `memmove`.

A request waits for a load, so a second thread takes half of it: 14 GB/s instead of 10 with pages of
512 KiB. A save is not urgent, and the engine is computing.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from s3kv.device.layout import PageLayout
from s3kv.device.slot_payloads import ChunkPlaces
from s3kv.host.placement import beside_the_model
from s3kv.messages import CopyPart

Move = tuple[int, int, int]
"""A contiguous copy: device address, offset in the payload, bytes."""
_SHARED_BYTES = 2**20
"""Smallest part that two threads share; a smaller one ends before the second thread wakes up."""


class FinishedTicket:
    """Ticket of a synchronous copy, which has already ended."""

    nbytes = 0
    seconds = 0.0

    def begun(self) -> bool:
        return True

    done = begun

    def fence(self) -> None:
        return


FINISHED = FinishedTicket()


class CpuCopier:
    """The `Copier` for CPUs. The engine's forward has ended when its hook calls us, so the order of
    calls is the only order, and a fence is the wait for the copy itself."""

    pinned = False

    def __init__(self, places: ChunkPlaces) -> None:
        self._places = places
        self._slab_address = places.memory.data_ptr()
        self._second: ThreadPoolExecutor | None = None
        if len(beside_the_model()) > 1:
            self._second = ThreadPoolExecutor(1, thread_name_prefix="s3kv-loads")

    def mark(self) -> None:
        return None

    def enter_thread(self) -> None:
        os.sched_setaffinity(0, beside_the_model())  # for this thread and those it starts

    def copy_out(self, part: CopyPart, mark: None) -> FinishedTicket:
        layout, payload = self._places.locate_whole(part)
        payload += self._slab_address
        for address, offset, nbytes in _moves(layout, part):
            ctypes.memmove(payload + offset, address, nbytes)
        return FINISHED

    def copy_in(self, part: CopyPart, mark: None) -> FinishedTicket:
        layout, payload = self._places.locate(part)
        payload += self._slab_address
        moves = _moves(layout, part)
        half_bytes = layout.block_bytes * len(part.block_ids) // 2
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


def _moves(layout: PageLayout, part: CopyPart) -> Iterator[Move]:
    """The copies of a part in payload order. Without numpy, which takes as long as a few copies."""
    at = part.first_block * layout.block_bytes
    for block in part.block_ids:
        for address, offset, nbytes, stride_bytes in layout.pieces:
            yield address + block * stride_bytes, at + offset, nbytes
        at += layout.block_bytes


def _split(moves: Iterator[Move], nbytes: int) -> tuple[list[Move], Iterable[Move]]:
    """The moves of the first `nbytes` bytes, and those of the rest. There are at least `nbytes`."""
    first: list[Move] = []
    for address, offset, length in moves:
        if length >= nbytes:
            first.append((address, offset, nbytes))
            rest = address + nbytes, offset + nbytes, length - nbytes
            return first, chain((rest,), moves)
        first.append((address, offset, length))
        nbytes -= length
    return first, ()


def _fill(moves: Iterable[Move], payload: int) -> None:
    for address, offset, nbytes in moves:
        ctypes.memmove(address, payload + offset, nbytes)
