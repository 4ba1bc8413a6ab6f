"""Copies where the KV cache is in GPU memory.

A page of a layer is small, and a chunk has hundreds of them, so they are not copied one by one:
a kernel gathers them into a staging buffer on the GPU, at its memory's speed, and one DMA takes
the whole payload over the bus; a load goes the same way back. The engine's blocks are free again
after the gather, long before the bus is done with them.

    save stream:  wait(mark) → gather → [read] → payload → slot      → [done]
    load stream:  wait(mark) → slot → payload → scatter              → [done]

Each stream has a staging buffer of its own, reused in stream order. Everything is launched from
the copy thread; the engine's thread only records marks, waits (on the device) and asks events.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from s3kv.device.layout import PageLayout
from s3kv.device.pinning import pin, unpin
from s3kv.device.places import ChunkPlaces
from s3kv.device.stacks import Stack, stacks
from s3kv.messages import LoadPart


@dataclass(frozen=True, slots=True)
class EventTicket:
    """`source_read` passes once the blocks may be overwritten, `finished` at the copy's end."""

    source_read: torch.cuda.Event
    finished: torch.cuda.Event
    device: torch.device

    def done(self) -> bool:
        return bool(self.finished.query())  # type: ignore[no-untyped-call]

    def fence(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.source_read)


class _Lane:
    """A stream, its staging buffer, and every group's stacks over that buffer."""

    def __init__(self, places: ChunkPlaces, priority: int) -> None:
        self.stream: torch.cuda.Stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]
            places.device, priority=priority
        )
        longest = max(layout.payload_bytes for layout in places.layouts.values())
        with torch.cuda.stream(self.stream):
            self.staging = torch.empty(longest, dtype=torch.uint8, device=places.device)
        self.stacks: dict[int, tuple[Stack, ...]] = {
            group: stacks(layout, self.staging) for group, layout in places.layouts.items()
        }

    def ids(self, block_ids: tuple[int, ...]) -> torch.Tensor:
        """On the device, in stream order. The pinned original belongs to torch's host allocator,
        which keeps it until the stream has passed.
        """
        host = torch.tensor(block_ids, dtype=torch.int64, pin_memory=True)
        return host.to(self.staging.device, non_blocking=True)


class CudaCopier:
    """The slab should be pinned (`pin`). Unpinned memory is right too: such a copy goes through
    the driver's bounce buffer, at a third of the speed or less, and holds the copy thread, not
    the engine's, until it is done.
    """

    def __init__(self, places: ChunkPlaces) -> None:
        self._places = places
        self._device = places.device
        with torch.cuda.device(self._device):
            # Zero is the lowest priority there is, and the engine's own. A request waits for a
            # load, nobody for a save.
            self._out = _Lane(places, priority=0)
            self._in = _Lane(places, priority=-1)
            self._registered = pin(places.memory, places.slot_bytes, self._device)
        self.pinned = sum(self._registered.values()) == places.memory.numel()

    def mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)

    def copy_out(self, part: LoadPart, mark: torch.cuda.Event) -> EventTicket:
        payload, staging = self._payloads(*self._places.locate_whole(part), self._out)
        with torch.inference_mode(), torch.cuda.stream(self._out.stream):
            self._out.stream.wait_event(mark)
            ids = self._out.ids(part.block_ids)
            for stack in self._out.stacks[part.group]:
                stack.gather(ids)
            source_read = self._out.stream.record_event()
            payload.copy_(staging, non_blocking=True)
            return EventTicket(source_read, self._out.stream.record_event(), self._device)

    def copy_in(self, part: LoadPart, mark: torch.cuda.Event) -> EventTicket:
        payload, staging = self._payloads(*self._places.locate(part), self._in)
        # vLLM allocates its caches in inference mode, and only there may they be written to.
        with torch.inference_mode(), torch.cuda.stream(self._in.stream):
            # Not only for fences: what the engine has launched may still use the previous content
            # of these blocks.
            self._in.stream.wait_event(mark)
            ids = self._in.ids(part.block_ids)
            # The whole payload even for a part of it: that is one copy instead of one per layer,
            # and parts are rare.
            staging.copy_(payload, non_blocking=True)
            for stack in self._in.stacks[part.group]:
                stack.scatter(ids, part.first_block)
            finished = self._in.stream.record_event()
            return EventTicket(finished, finished, self._device)

    def _payloads(
        self, layout: PageLayout, begin: int, lane: _Lane
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The payload in the slab, and in staging."""
        nbytes = layout.payload_bytes
        return self._places.memory.narrow(0, begin, nbytes), lane.staging.narrow(0, 0, nbytes)

    def settle(self) -> None:
        self._out.stream.synchronize()
        self._in.stream.synchronize()

    def close(self) -> None:
        if not self._places.layouts:
            return
        try:
            self.settle()
        finally:
            unpin(self._registered)
            # The views would keep the engine's cache alive.
            self._out.stacks.clear()
            self._in.stacks.clear()
            self._places.close()
