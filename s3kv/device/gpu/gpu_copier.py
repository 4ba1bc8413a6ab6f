"""Copies for a KV cache in GPU memory.

The copy thread launches everything. The engine's thread records marks, fences and queries events.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress

import torch

from s3kv.device.gpu.copy_streams import BUFFERS, EventTicket, LoadLane, SaveLane, Staging
from s3kv.device.gpu.interface import Event, Gpu
from s3kv.device.layout import PageLayout
from s3kv.device.slot_payloads import ChunkPlaces
from s3kv.errors import UnsupportedError
from s3kv.messages import CopyPart


class GpuCopier:
    """The `Copier` for GPUs. Pins the slab, allocates staging, and takes over `places` even if the
    constructor raises. Raises `UnsupportedError` when there is no memory for staging."""

    def __init__(self, places: ChunkPlaces, gpu: Gpu) -> None:
        self._places = places
        self._gpu = gpu
        with ExitStack() as undo:
            undo.callback(places.close)
            self.pinned = gpu.pin(places.memory, places.pinned_bytes)
            undo.callback(gpu.unpin)
            out, back = _staging(places, gpu)
            self._out, self._in = SaveLane(gpu, out), LoadLane(gpu, back)
            undo.pop_all()

    def mark(self) -> Event:
        # Not from the pool: its last use is over once the last copy that uses it is launched.
        event = self._gpu.new_event()
        self._gpu.current_stream().record(event)
        return event

    def enter_thread(self) -> None:
        self._gpu.enter_thread()

    def copy_out(self, part: CopyPart, mark: Event) -> EventTicket:
        return self._out.copy(part, self._payload(self._places.locate_whole(part)), mark)

    def copy_in(self, part: CopyPart, mark: Event) -> EventTicket:
        return self._in.copy(part, self._payload(self._places.locate(part)), mark)

    def settle(self) -> None:
        try:
            self._out.settle()
        finally:
            self._in.settle()

    def close(self) -> None:
        if not self._places.layouts:
            return
        with suppress(RuntimeError):  # the device has failed, and no longer copies anything
            self.settle()
        self._gpu.unpin()
        del self._out, self._in  # their staging would keep the engine's cache alive
        self._places.close()

    def _payload(self, place: tuple[PageLayout, int]) -> torch.Tensor:
        layout, begin = place
        return self._places.memory[begin : begin + layout.payload_bytes]


def _staging(places: ChunkPlaces, gpu: Gpu) -> tuple[Staging, Staging]:
    """The staging of both directions."""
    try:
        return Staging(gpu, places.layouts), Staging(gpu, places.layouts)
    except RuntimeError as error:  # also of memory that cannot be pinned
        longest = max(layout.payload_bytes for layout in places.layouts.values())
        raise UnsupportedError(
            f"no memory for staging: copies need {2 * BUFFERS * longest} bytes on {places.device}. "
            "Leave more of it free (with vLLM, lower gpu_memory_utilization), or make chunks "
            f"shorter (a smaller chunk_tokens): {error}"
        ) from error
